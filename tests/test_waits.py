"""Every place that may wait for ever is in docs/waits.md, with what ends it: a limit, a watcher, the stall watch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "streamrl"
PAGE = ROOT / "docs" / "waits.md"
# Virtual time has no deadlines; what runs inside of a user's own function has the time limit of its call.
ELSEWHERE = ("simulate/", "engines/simulated_", "rewards/builtin/")
WAITING = {"wait", "receive", "acquire", "get", "join"}
LIMITS = {"move_on_after", "fail_after", "timeout", "timeout_at", "wait_for"}


def unlimited_waits(path: Path) -> Iterator[str]:
    """Qualified names of functions in ``path`` with a wait for another part that no limit around it ends."""

    def visit(node: ast.AST, inside: str, limited: bool) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            name, bound = inside, limited
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name, bound = f"{inside}.{child.name}".lstrip("."), False
            elif isinstance(child, ast.With | ast.AsyncWith):
                bound = limited or any(called(item.context_expr) in LIMITS for item in child.items)
            elif isinstance(child, ast.Await) and not limited and waits(child.value):
                yield inside
            yield from visit(child, name, bound)

    yield from visit(ast.parse(path.read_text()), "", limited=False)


def waits(awaited: ast.expr) -> bool:
    """A method that waits for somebody else, without a time limit of its own; or a future."""
    if isinstance(awaited, ast.Call):
        return isinstance(awaited.func, ast.Attribute) and awaited.func.attr in WAITING and not awaited.args
    return isinstance(awaited, ast.Name | ast.Attribute)


def called(expression: ast.expr) -> str:
    if not isinstance(expression, ast.Call):
        return ""
    function = expression.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def found() -> set[str]:
    paths = sorted(PACKAGE.rglob("*.py"))
    named = [(path.relative_to(PACKAGE).as_posix(), path) for path in paths]
    return {
        f"{name} {function}"
        for name, path in named
        if not name.startswith(ELSEWHERE)
        for function in unlimited_waits(path)
    }


def listed() -> dict[str, str]:
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {place: ends.strip() for place, ends in rows}


def test_every_wait_without_a_limit_is_listed_with_what_ends_it() -> None:
    places, known = found(), listed()
    assert len(places) > 20, "the search finds nothing any more"
    missing = sorted(places - known.keys())
    assert not missing, "these may wait for ever: give each a limit, or a row in docs/waits.md:\n" + "\n".join(missing)
    gone = sorted(known.keys() - places)
    assert not gone, "docs/waits.md lists what waits no more:\n" + "\n".join(gone)
    assert all(known.values())


def test_the_search_tells_limited_waits_from_others(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "class A:\n"
        "    async def bare(self):\n        await self.event.wait()\n"
        "    async def future(self):\n        return await self.answer\n"
        "    async def limited(self):\n        with anyio.fail_after(3):\n            await self.event.wait()\n"
        "    async def within(self):\n        await asyncio.wait_for(self.event.wait(), 3)\n"
        "    async def called(self):\n        await self.work()\n"
        "    async def hidden(self):\n"
        "        with anyio.fail_after(3):\n"
        "            async def inner():\n                await stream.receive()\n"
    )
    assert list(unlimited_waits(path)) == ["A.bare", "A.future", "A.hidden.inner"]
