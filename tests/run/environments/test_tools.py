"""Tools of a user: schemas from signatures, arguments that a model wrote, results, and tools that misbehave."""

from __future__ import annotations

import time
from typing import Any, Literal

import anyio
import pytest

from streamrl.base.errors import RecipeError
from streamrl.pretrained.turns.tool_calls import ToolCall
from streamrl.run.environments.tools import ToolBox, ToolContext, ToolEnd, ToolLimits

CONTEXT = ToolContext(trajectory="p/0", turn=2, seed=7)


def add(a: int, b: int, way: Literal["exact", "rough"] = "exact") -> int:
    """Add two integers.

    Args:
        a: The first one,
            or its name.
        b (int): The second one.
        way: How well.

    Returns:
        Their sum.
    """
    return a + b


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


def odd() -> object:
    """Return what JSON has not."""
    return object()


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
                    "way": {"enum": ["exact", "rough"], "description": "How well.", "default": "exact"},
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
    ("odd", {}, "error: TypeError: Encoding objects of type object ", ToolEnd.RAISED),
    ("hangs", {}, "error: hangs took more than 0.2 s", ToolEnd.TIMED_OUT),
    ("hangs_too", {}, "error: hangs_too took more than 0.2 s", ToolEnd.TIMED_OUT),
]


@pytest.mark.parametrize(("name", "arguments", "text", "end"), CALLS)
async def test_a_call_has_a_result_whatever_the_tool_does(
    name: str, arguments: dict[str, Any], text: str, end: ToolEnd
) -> None:
    box = ToolBox([add, who, big, raises, hangs, hangs_too, odd], ToolLimits(seconds=0.2, characters=50))
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

    untyped.__doc__ = "Add."
    with pytest.raises(RecipeError) as refused:
        ToolBox([untyped, many, unsaid, strange, add, add])
    said = dict(problem.split(": ", 1) for problem in refused.value.problems)
    assert said["tool untyped"] == "parameter a has no type: annotate it, such as a: int"
    assert "by name" in said["tool many"]
    assert "no docstring" in said["tool unsaid"]
    assert "JSON has not" in said["tool strange"]
    assert said["tool add"] == "two tools have this name: rename one"
