"""Count sizes and words of this repository, against limits (part of ``make lint``).

``python lint/house.py`` prints one line a count, with ``-v`` also each place, and exits 1 where a count is above its
limit. Lower a limit when its count falls; only an issue's budget raises one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL = ("base", "recipe", "control", "buffers", "comm", "engines", "learning", "rewards", "stages", "run")

# What a count may be, and what it shall become (docs/adr/0013-rooms.md).
LIMITS = {
    "lines of streamrl": (54_594, 42_000),
    "lines of the kernel": (21_365, 8_000),
    "lines of tests": (42_221, 32_000),
    "lines of campaigns": (6_729, 5_000),
    "files of streamrl": (360, 260),
    "files above 15 in a folder": (0, 0),
    "lines above 250 in a class": (0, 0),
    "lines above 80 in a function": (0, 0),
    "files in import circles": (0, 0),
    "keys of a recipe in view": (110, 110),
    "words of README": (800, 800),
    "banned words": (43, 0),
}
FILES_A_FOLDER, LINES_A_CLASS, LINES_A_FUNCTION = 15, 250, 80

# Words of an English of its own, each with the field's word. Patterns; whole words unless they say otherwise.
BANNED = {
    r"whoever|whatever (it|he|she|they)": "the noun that is meant",
    r"so and so (many|often)": "the number",
    r"what becomes of|what it comes to|is bought with": "say what is returned, or what it costs",
    r"los(er|ers)|lost race": "deferred prompts",
    r"(is|are|was|were|be|been) told": "on_event, notify, report",
    r"whole state": "snapshot",
    r"stands? still|stood still": "paused",
    r"stands? by|standby": "spare process",
    r"forgiv(e|es|en|eness)": "restart policy",
    r"aftermath|what remains": "leftovers, postmortem",
    r"shelf": "prompt store",
    r"engine seats?|seated": "engine slot",
    r"noise of": "seed",
    r"the shadow|its shadow": "baseline",
    r"folded|folding|folds": "cumulative delta",
    r"greet(s|ed|ing|ings)?|farewell": "hello, ready, goodbye",
    r"takes? (it |them )?back|took back|take out": "drain, readmit",
    r"begins? anew|begun anew|brought up": "restart, catch up",
    r"gets on\b": "makes progress",
    r"refs/[a-z-]+\.md": "the paper: the repository has no such file",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def tracked(pattern: str) -> list[Path]:
    """Files that git knows, and new ones that it does not ignore, by a glob of git's."""
    found = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in found.stdout.splitlines() if (path := ROOT / name).is_file()]


def lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def above(paths: list[Path], kinds: tuple[type[ast.AST], ...], limit: int) -> Iterator[tuple[str, int]]:
    """Classes or functions longer than ``limit`` lines: name with place, lines above it."""
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, kinds):
                length = (node.end_lineno or 0) - node.lineno + 1  # type: ignore[attr-defined]
                if length > limit:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", length - limit  # type: ignore[attr-defined]


def circles(paths: list[Path]) -> list[list[str]]:
    """Sets of modules that import each other at the top of the file (Tarjan's strongly connected components)."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    graph: dict[str, list[str]] = {}
    for name, path in modules.items():
        targets: list[str] = []
        for node in tree_of(path).body:
            if isinstance(node, ast.Import):
                targets += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        graph[name] = [target for target in targets if target in modules and target != name]
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            circle = [stack.pop()]
            while circle[-1] != name:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in index:
            visit(name)
    return found


def banned(paths: list[Path]) -> Iterator[str]:
    """Places of banned words, each with the field's word."""
    patterns = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), instead) for pattern, instead in BANNED.items()]
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for pattern, instead in patterns:
                if found := pattern.search(line):
                    yield f"{path.relative_to(ROOT)}:{number}: {found[0]!r}: {instead}"


def keys_in_view() -> int:
    """Keys of all sections of a recipe that ``explain`` shows."""
    sys.path.insert(0, str(ROOT))
    from streamrl.recipe.fields import paths_in_view
    from streamrl.recipe.sections import Recipe

    return len(list(paths_in_view(Recipe)))


def main() -> int:
    product, tests = tracked("streamrl/*.py"), tracked("tests/*.py")
    folders = Counter(path.parent for path in product)
    classes = list(above(product, (ast.ClassDef,), LINES_A_CLASS))
    functions = list(above(product, (ast.FunctionDef, ast.AsyncFunctionDef), LINES_A_FUNCTION))
    found_circles = circles(product)
    words = list(banned([*product, *tests, *tracked("*.md"), *tracked("examples/*.py")]))
    counts = {
        "lines of streamrl": lines(product),
        "lines of the kernel": lines([path for path in product if path.relative_to(ROOT).parts[1] in KERNEL]),
        "lines of tests": lines(tests),
        "lines of campaigns": lines(tracked("campaigns/*.py")),
        "files of streamrl": len(product),
        "files above 15 in a folder": sum(max(0, count - FILES_A_FOLDER) for count in folders.values()),
        "lines above 250 in a class": sum(extra for _, extra in classes),
        "lines above 80 in a function": sum(extra for _, extra in functions),
        "files in import circles": sum(map(len, found_circles)),
        "keys of a recipe in view": keys_in_view(),
        "words of README": len((ROOT / "README.md").read_text().split()),
        "banned words": len(words),
    }
    details = {
        "files above 15 in a folder": [f"{folder.relative_to(ROOT)}: {n}" for folder, n in folders.items() if n > 15],
        "lines above 250 in a class": [f"{name}: {extra} above" for name, extra in classes],
        "lines above 80 in a function": [f"{name}: {extra} above" for name, extra in functions],
        "files in import circles": [" <-> ".join(circle) for circle in found_circles],
        "banned words": words,
    }
    failed = False
    for name, count in counts.items():
        limit, goal = LIMITS[name]
        print(f"house: {name}: {count:,} (limit {limit:,}, goal {goal:,})")
        if count > limit or "-v" in sys.argv:
            failed |= count > limit
            print("\n".join(f"house:   {line}" for line in details.get(name, ())))
    if lines(tests) >= lines(product):
        failed = True
        print("house: the tests are larger than the product")
    if failed:
        print(
            "house: a count is above its limit: delete, merge, or use a library; limits are not raised", file=sys.stderr
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
