"""Tools of a user: schemas from signatures, arguments that a model wrote, results, and tools that misbehave."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import anyio
import numpy as np
import pytest

from streamrl.base.errors import RecipeError
from streamrl.pretrained.turns.tool_calls import ToolCall
from streamrl.run.environments import tools as tools_module
from streamrl.run.environments.tools import MachineError, ToolBox, ToolContext, ToolEnd, ToolLimits

CONTEXT = ToolContext(trajectory="p/0", turn=2, seed=7)


def add(a: int, b: int, way: Literal["exact", "rough"] = "exact") -> int:
    """Add two integers.

    Args:
        a: The first one,
            or its name.
        b (int): The second one.
        way: How well.
            Default: exact.

    Returns:
        Their sum.
    """
    return a + b


class Empty:
    """No tool."""

    def _add(self, a: int) -> int:
        return a


class Constructed:
    """A tool with another constructor."""

    @classmethod
    def make(cls) -> Constructed:
        """Make one."""
        return cls()


async def who(context: ToolContext, tags: list[str]) -> dict[str, Any]:
    """Say who calls."""
    return {"of": context.trajectory, "turn": context.turn, "tags": tags}


def big() -> str:
    """Return much."""
    return "x" * 10_000_000


def raises() -> None:
    """Fail."""
    raise KeyError("no such row")


def hangs() -> None:
    """Never return."""
    time.sleep(2)


async def hangs_too() -> None:
    """Never return."""
    await anyio.sleep_forever()


RETURNED: list[tuple[Any, str]] = [
    ("text", "text"),
    (b"hello world\n", "hello world\n"),
    (bytearray(b"caf\xc3\xa9"), "café"),
    (memoryview(b"ab"), "ab"),
    (b"\xff\xd8", "error: bytes that are no UTF-8 text were returned: return a text"),
    ({"out": b"\xff"}, "error: bytes that are no UTF-8 text were returned: return a text"),
    ({"out": b"hello", "code": 0}, '{"out":"hello","code":0}'),
    (7, "7"),
    (True, "true"),
    (None, "null"),
    (2**70, "1180591620717411303424"),
    (float("inf"), "inf"),
    ([1.5, float("nan")], "[1.5,NaN]"),
    (np.int64(7), "7"),
    (np.float32(0.1), "0.1"),
    (np.bool(True), "true"),
    (np.arange(3), "[0,1,2]"),
    (np.array([[0.1, 2]], dtype="float32"), "[[0.1,2.0]]"),
    (np.array(["a"]), '["a"]'),
    (np.str_("word"), "word"),
    (np.datetime64("2026-01-02"), "2026-01-02"),
    ({"count": np.int64(2), "mean": np.float64(0.5)}, '{"count":2,"mean":0.5}'),
    ({1: "one"}, '{"1":"one"}'),
    ({(0, 1): "x"}, "{(0, 1): 'x'}"),
    (Decimal("1.50"), "1.50"),
    (datetime(2026, 1, 2, 3, 4, 5), "2026-01-02T03:04:05"),
    (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (Path("/a/b"), "/a/b"),
    (range(3), "range(0, 3)"),
    (complex(1, 2), "(1+2j)"),
    (ToolLimits(1.0, 2), '{"seconds":1.0,"characters":2}'),
    ({"at": Path("/a"), "of": [Decimal("0.5")]}, '{"at":"/a","of":["0.5"]}'),
    (ValueError("of a value"), "of a value"),
    ({"é": "\ud800"}, '{"é":"?"}'),
]


@pytest.mark.parametrize("made_in", ["thread", "loop"])
@pytest.mark.parametrize(("value", "text"), RETURNED, ids=[text for _, text in RETURNED])
async def test_what_a_tool_returns_is_said_as_it_prints(value: Any, text: str, made_in: str) -> None:
    def give() -> Any:
        """Give."""
        return value

    async def give_later() -> Any:
        """Give."""
        return value

    tool = give if made_in == "thread" else give_later
    async with ToolBox([tool]).open_for_episode() as tools:
        assert (await tools.run(ToolCall(tool.__name__, {}), CONTEXT)).text == text


def without_memory() -> None:
    bytearray(1 << 62)


def without_disk() -> None:
    Path("/dev/full").write_text("x" * 100_000)


def without_a_process() -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def without_descriptors() -> None:
    try:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "data.csv")
    except OSError as error:
        raise RuntimeError("the data cannot be read") from error


def without_files_in_a_group() -> None:
    raise ExceptionGroup("two", [ValueError("a"), OSError(errno.ENFILE, os.strerror(errno.ENFILE))])


def without_a_thread() -> None:
    usual = threading.stack_size(1 << 47)  # all addresses that a process has
    try:
        threading.Thread(target=print).start()
    finally:
        threading.stack_size(usual)


MACHINE = {
    without_memory: "MemoryError",
    without_disk: "No space left on device",
    without_a_process: "temporarily unavailable",
    without_descriptors: "the data cannot be read",
    without_files_in_a_group: "2 sub-exceptions",
    without_a_thread: "can't start new thread",
}


@pytest.mark.parametrize("tool", MACHINE)
async def test_an_error_of_the_machine_is_no_answer(tool: Callable[[], None]) -> None:
    tool.__doc__ = "Try."
    async with ToolBox([tool]).open_for_episode() as tools:
        with pytest.raises(MachineError, match=f"could not run the tool {tool.__name__}: .*{MACHINE[tool]}"):
            await tools.run(ToolCall(tool.__name__, {}), CONTEXT)


async def test_a_thread_that_cannot_start_is_no_answer() -> None:
    async with ToolBox([add]).open_for_episode() as tools:
        usual = threading.stack_size(1 << 47)
        try:
            with pytest.raises(MachineError, match="can't start new thread"):
                await tools.run(ToolCall("add", {"a": 1, "b": 2}), CONTEXT)
        finally:
            threading.stack_size(usual)


async def test_calls_that_do_not_return_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further calls are refused while too many do not return, and made again when some have."""
    monkeypatch.setattr(tools_module, "_MOST_HUNG", 2)
    returns = threading.Event()

    def hang() -> None:
        """Hang."""
        returns.wait()

    async with ToolBox([hang, add], ToolLimits(seconds=0.1)).open_for_episode() as tools:
        for _ in range(2):
            assert (await tools.run(ToolCall("hang", {}), CONTEXT)).end is ToolEnd.TIMED_OUT
        with pytest.raises(MachineError, match="calls of user code do not return"):
            await tools.run(ToolCall("add", {"a": 1, "b": 2}), CONTEXT)
        returns.set()
        with anyio.fail_after(10):
            while tools_module._hung:
                await anyio.sleep(0.01)
        assert (await tools.run(ToolCall("add", {"a": 1, "b": 2}), CONTEXT)).text == "3"


class Rows:
    """A database that belongs to the thread that made it, as each of its methods checks."""

    closed: list[str] = []

    def __init__(self) -> None:
        self.database = sqlite3.connect(":memory:")

    def __enter__(self) -> None:
        self.database.execute("create table people (name text)")

    def __exit__(self, *_: object) -> None:
        self.closed.append(str(self.database.execute("select name from people").fetchall()))
        self.database.close()

    def reset(self, name: str) -> bytes:
        self.database.execute("insert into people values (?)", [name])
        return b" There is one."

    def ask(self, query: str) -> list[Any]:
        """Ask."""
        return self.database.execute(query).fetchall()

    def stops(self) -> str:
        """Stop an iteration."""
        return next(iter(()))


async def test_an_object_of_a_class_has_one_thread() -> None:
    Rows.closed.clear()
    async with ToolBox([Rows]).open_for_episode({"name": "Ann"}) as tools:
        assert tools.reset_text == " There is one."
        texts = [
            (await tools.run(ToolCall(name, arguments), CONTEXT)).text
            for name, arguments in (("ask", {"query": "select name from people"}), ("stops", {}))
        ]
    assert texts == ['[["Ann"]]', "error: RuntimeError: StopIteration()"]
    assert Rows.closed == ["[('Ann',)]"]


class Slow:
    """It takes its time."""

    def __init__(self) -> None:
        time.sleep(0.2)

    def __enter__(self) -> None:
        time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        time.sleep(0.2)

    def look(self, function: str = "", seconds: float = 0.0) -> str:
        """Look."""
        time.sleep(seconds)
        return f"a {function or 'room'}"


async def test_many_objects_are_made_beside_each_other() -> None:
    async def play() -> None:
        async with ToolBox([Slow]).open_for_episode() as tools:
            assert (await tools.run(ToolCall("look", {"function": "cave"}), CONTEXT)).text == "a cave"

    began = time.monotonic()
    async with anyio.create_task_group() as group:
        for _ in range(24):
            group.start_soon(play)
    assert time.monotonic() - began < 24 * 0.6 / 2


async def test_a_call_that_takes_too_long_keeps_its_thread() -> None:
    async with ToolBox([Slow], ToolLimits(seconds=0.3)).open_for_episode() as tools:
        assert (await tools.run(ToolCall("look", {"seconds": 5.0}), CONTEXT)).end is ToolEnd.TIMED_OUT
        began = time.monotonic()
        assert (await tools.run(ToolCall("look", {}), CONTEXT)).text == "a room"
        assert time.monotonic() - began < 4.0
    assert time.monotonic() - began < 4.0


class NeedsLoop:
    """A client of a service."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    async def ask(self) -> str:
        """Ask."""
        return str(self.loop is asyncio.get_running_loop())


async def test_an_object_with_coroutines_is_made_in_the_event_loop() -> None:
    async with ToolBox([NeedsLoop]).open_for_episode() as tools:
        assert (await tools.run(ToolCall("ask", {}), CONTEXT)).text == "True"


class Counter:
    """A tool with a state, of one trajectory."""

    log: list[str] = []

    def __init__(self) -> None:
        self.count = 0

    async def __aenter__(self) -> Counter:
        self.log.append("opened")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.log.append(f"closed at {self.count}")

    def more(self, by: int = 1) -> str:
        """Count."""
        self.count += by
        return str(self.count)

    def reset(self) -> None: ...

    def _hidden(self) -> None: ...


def test_schemas_are_made_of_signatures_and_docstrings() -> None:
    schema, of_who, more = ToolBox([add, who, Counter]).schemas
    assert schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The first one, or its name."},
                    "b": {"type": "integer", "description": "The second one."},
                    "way": {"enum": ["exact", "rough"], "description": "How well. Default: exact.", "default": "exact"},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    }
    assert list(of_who["function"]["parameters"]["properties"]) == ["tags"], "the context is ours"
    assert more["function"]["name"] == "more"


CALLS = [
    ("add", {"a": 2, "b": 3}, "5", ToolEnd.DONE),
    ("add", {"a": 2, "b": "3"}, "error: add: Expected int, got str - at $.b", ToolEnd.INVALID),
    ("add", {"a": 2}, "error: add: Object missing required field b", ToolEnd.INVALID),
    ("add", {"a": 2, "b": 3, "c": 4}, "error: add: Object contains unknown field c", ToolEnd.INVALID),
    ("add", {"a": 2, "b": 3, "way": "other"}, "error: add: Invalid enum value 'other' - at $.way", ToolEnd.INVALID),
    ("sub", {}, "error: there is no tool 'sub': call one of add, who, big", ToolEnd.UNKNOWN),
    ("who", {"tags": ["x"]}, '{"of":"p/0","turn":2,"tags":["x"]}', ToolEnd.DONE),
    ("big", {}, "x" * 50 + " [9999950 characters more are left out]", ToolEnd.TRUNCATED),
    ("raises", {}, "error: KeyError: 'no such row'", ToolEnd.RAISED),
    ("hangs", {}, "error: hangs took more than 0.2 s", ToolEnd.TIMED_OUT),
    ("hangs_too", {}, "error: hangs_too took more than 0.2 s", ToolEnd.TIMED_OUT),
]


@pytest.mark.parametrize(("name", "arguments", "text", "end"), CALLS)
async def test_a_call_has_a_result_whatever_the_tool_does(
    name: str, arguments: dict[str, Any], text: str, end: ToolEnd
) -> None:
    box = ToolBox([add, who, big, raises, hangs, hangs_too], ToolLimits(seconds=0.2, characters=50))
    async with box.open_for_episode() as tools:
        result = await tools.run(ToolCall(name, arguments), CONTEXT)
    assert result.end is end
    assert result.text[: len(text)] == text


async def test_a_tool_class_is_closed_with_its_trajectory() -> None:
    """A class is made for a trajectory, and closed whatever happens."""
    Counter.log.clear()
    box = ToolBox([Counter])
    with pytest.raises(ZeroDivisionError):
        async with box.open_for_episode() as one, box.open_for_episode() as other:
            for tools, by, count in ((one, 1, "1"), (other, 5, "5"), (one, 2, "3")):
                assert (await tools.run(ToolCall("more", {"by": by}), CONTEXT)).text == count
            raise ZeroDivisionError
    assert Counter.log == ["opened", "opened", "closed at 5", "closed at 3"]


def test_what_cannot_be_a_tool_is_refused_before_the_run() -> None:
    def untyped(a, b: int): ...  # type: ignore[no-untyped-def]

    def many(*names: str) -> None:
        """Take many."""

    def unsaid(a: int) -> None: ...

    def strange(a: complex) -> None:
        """Take a number."""

    def lines() -> Iterator[str]:
        """Read."""
        yield "one"

    async def pages() -> AsyncIterator[str]:
        """Read."""
        yield "one"

    untyped.__doc__ = "Add."
    with pytest.raises(RecipeError) as refused:
        ToolBox([untyped, many, unsaid, strange, add, add, lines, pages, Empty, Constructed])
    said = dict(problem.split(": ", 1) for problem in refused.value.problems)
    assert said["tool untyped"] == "parameter a has no type: annotate it, such as a: int"
    assert "by name" in said["tool many"]
    assert "no docstring" in said["tool unsaid"]
    assert "JSON has not" in said["tool strange"]
    assert said["tool Empty"] == "the class has no public method: write one for each tool"
    assert said["tool make"].startswith("it is no method of an instance")
    assert said["tool lines"] == said["tool pages"] == "it yields: return the whole result"
    assert said["tool add"] == "two tools have this name: rename one"
