"""Tools of a user: typed functions, or classes whose public methods are typed, sync or async. Their schemas come from
signatures and docstrings; arguments that a model wrote are checked by the same types before anything is called."""

from __future__ import annotations

import asyncio
import inspect
import numbers
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, get_type_hints

import anyio
import anyio.to_thread
import msgspec

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.pretrained.turns.tool_calls import ToolCall

CONTEXT = "context"
"""A parameter of this name gets the ``ToolContext``, and is not in the schema."""


class ToolContext(msgspec.Struct, frozen=True):
    """The caller of a tool: the trajectory, the turn from 0, and a seed that is the same on a resume."""

    trajectory: str
    turn: int
    seed: int


class ToolLimits(msgspec.Struct, frozen=True):
    """``seconds`` of a call, ``characters`` of its result."""

    seconds: float = 30.0
    characters: int = 8_000


class ToolEnd(StrEnum):
    """Ends of a call. All but ``DONE`` and ``TRUNCATED`` give the model a text that begins with ``error``."""

    DONE = "done"
    TRUNCATED = "truncated"
    UNKNOWN = "unknown"
    INVALID = "invalid"
    RAISED = "raised"
    TIMED_OUT = "timed_out"


class ToolResult(msgspec.Struct, frozen=True):
    """``text``: for the model; ``seconds``: that the call took."""

    text: str
    end: ToolEnd
    seconds: float = 0.0


class Tool(msgspec.Struct, frozen=True):
    """``arguments``: a struct of the parameters, made of their types (None: not checked here, all are given by name);
    ``call``: a function, or a method of the class ``owner``."""

    name: str
    schema: Mapping[str, Any]
    arguments: type[msgspec.Struct] | None
    call: Callable[..., Any]
    owner: type | None = None
    takes_context: bool = False
    keeps_state: bool = False


class ToolFailedError(StreamRLError):
    """Raised by a call that failed, with the text for the model."""


class ToolBox:
    """The tools of a run. ``schemas``: what a chat template is given. Raises ``RecipeError`` with every problem: a
    parameter without a type or with one that JSON has not, no docstring, a name twice."""

    def __init__(self, tools: Sequence[Any], limits: ToolLimits | None = None) -> None:
        self._limits = limits or ToolLimits()
        self._tools: dict[str, Tool] = {}
        problems: list[str] = []
        for given in tools:
            for name, function in _functions(given):
                try:
                    owner = given if inspect.isclass(given) else None
                    tool = given if isinstance(given, Tool) else _tool(name, function, owner)
                except (TypeError, NameError) as error:
                    problems.append(f"tool {name}: {error}")
                    continue
                if name in self._tools:
                    problems.append(f"tool {name}: two tools have this name: rename one")
                self._tools[name] = tool
        if problems:
            raise RecipeError(*problems)
        self.schemas: tuple[Mapping[str, Any], ...] = tuple(tool.schema for tool in self._tools.values())

    @asynccontextmanager
    async def opened(self, columns: Mapping[str, Any] | None = None, seed: int = 0) -> AsyncIterator[OpenTools]:
        """Make the classes, one instance of each, for one trajectory. Those that are context managers are entered, and
        left at the end whatever happens; of others ``close`` is called where there is one. ``reset`` is called with
        ``columns``, and may return a text for the model."""
        async with AsyncExitStack() as stack:
            made: dict[type, Any] = {}
            texts = []
            for owner in dict.fromkeys(tool.owner for tool in self._tools.values() if tool.owner is not None):
                made[owner] = instance = owner()
                if hasattr(instance, "__aenter__"):
                    await stack.enter_async_context(instance)
                elif hasattr(instance, "__enter__"):
                    stack.enter_context(instance)
                elif hasattr(instance, "close"):
                    stack.push_async_callback(call_user, instance.close)
                if hasattr(instance, "reset"):
                    texts.append(
                        await call_user(instance.reset, **TakenColumns(instance.reset).of(columns or {}, seed))
                    )
            yield OpenTools(self._tools, made, self._limits, "".join(text for text in texts if isinstance(text, str)))


class OpenTools:
    """The tools of one trajectory. ``opening``: what its classes said when they were reset."""

    def __init__(
        self, tools: Mapping[str, Tool], made: Mapping[type, Any], limits: ToolLimits, opening: str = ""
    ) -> None:
        self._tools = tools
        self._made = made
        self._limits = limits
        self.opening = opening

    def keeps_state(self, name: str) -> bool:
        """Return whether a tool is a method or a closure: then a call is made again when an episode begins again."""
        return name in self._tools and self._tools[name].keeps_state

    @property
    def reward(self) -> float | None:
        """The sum of the attributes ``reward`` of the classes; None: no class has one."""
        given = [getattr(one, "reward", None) for one in self._made.values()]
        found = [float(value) for value in given if isinstance(value, numbers.Real)]
        return sum(found) if found else None

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Run one call. A failure of the tool is a result; nothing is raised but cancellation."""
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools)
            return ToolResult(f"error: there is no tool {call.name!r}: call one of {known}", ToolEnd.UNKNOWN)
        named = call.arguments
        if tool.arguments is not None:
            try:
                given = msgspec.convert(call.arguments, tool.arguments)
            except msgspec.ValidationError as error:
                return ToolResult(f"error: {call.name}: {str(error).replace('`', '')}", ToolEnd.INVALID)
            named = {field: getattr(given, field) for field in tool.arguments.__struct_fields__}
        if tool.takes_context:
            named[CONTEXT] = context
        own = () if tool.owner is None else (self._made[tool.owner],)
        began = anyio.current_time()
        with anyio.move_on_after(limit_s := self._limits.seconds) as scope:
            text, end = await _answer(partial(tool.call, *own, **named))
        seconds = anyio.current_time() - began
        if scope.cancelled_caught:
            return ToolResult(f"error: {call.name} took more than {limit_s:g} s", ToolEnd.TIMED_OUT, seconds)
        text = text.encode("utf-8", "replace").decode()  # surrogates, as names of files may have, cannot be sent
        if len(text) > (most := self._limits.characters):
            text = f"{text[:most]} [{len(text) - most} characters more are left out]"
            end = ToolEnd.TRUNCATED if end is ToolEnd.DONE else end
        return ToolResult(text, end, seconds)


async def call_user(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call code of a user: a coroutine function in this loop, any other in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments, **named)
    value = await anyio.to_thread.run_sync(partial(function, *arguments, **named), abandon_on_cancel=True)
    return await value if isinstance(value, Awaitable) else value


class TakenColumns:
    """Columns of a row that a function takes. ``needed``: those that it cannot do without. ``seed`` is given where no
    column has the name: the same for all trajectories of a prompt."""

    def __init__(self, function: Callable[..., Any], skip: int = 0) -> None:
        """``skip``: so many parameters at the begin are given otherwise."""
        parameters = list(inspect.signature(function).parameters.values())[skip:]
        if wrong := next((one for one in parameters if one.kind is one.POSITIONAL_ONLY), None):
            raise RecipeError(f"parameter {wrong.name} is positional-only, and columns are given by name: remove the /")
        self._all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        named = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        self._names = {one.name for one in named}
        self.needed = tuple(one.name for one in named if one.default is one.empty and one.name != "seed")

    def of(self, columns: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Return the arguments of a call."""
        given = {"seed": seed} if "seed" in self._names else {}
        return given | {name: value for name, value in columns.items() if self._all or name in self._names}


async def _answer(call: Callable[[], Any]) -> tuple[str, ToolEnd]:
    try:
        value = await call_user(call)
        return value if isinstance(value, str) else msgspec.json.encode(value).decode(), ToolEnd.DONE
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return f"error: {type(error).__name__}: it cancelled itself", ToolEnd.RAISED
    except ToolFailedError as error:
        return f"error: {error}", ToolEnd.RAISED
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (code of a user)
        return f"error: {type(error).__name__}: {error}", ToolEnd.RAISED


def _functions(given: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Names and functions of a tool: itself, or public methods of a class."""
    if isinstance(given, Tool):
        return [(given.name, given.call)]
    if not inspect.isclass(given):
        return [(getattr(given, "__name__", repr(given)), given)]
    members = inspect.getmembers(given, inspect.isfunction)
    return [(name, method) for name, method in members if not name.startswith("_") and name not in {"reset", "close"}]


def _tool(name: str, function: Callable[..., Any], owner: type | None) -> Tool:
    """Raises ``TypeError`` with the remedy."""
    description, of_parameters = _docstring(function)
    if not description:
        raise TypeError("it has no docstring, which tells the model what it does: write one")
    if owner is not None and isinstance(inspect.getattr_static(owner, name), staticmethod):
        raise TypeError("it is a staticmethod: give it as a function, beside the class")
    hints = get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    parameters = list(inspect.signature(function).parameters.values())[owner is not None :]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"parameter {parameter.name}: a model gives arguments by name: write them one by one")
        if parameter.name == CONTEXT:
            continue
        if parameter.name not in hints:
            raise TypeError(f"parameter {parameter.name} has no type: annotate it, such as {parameter.name}: int")
        kind = hints[parameter.name]
        if text := of_parameters.get(parameter.name):
            kind = Annotated[kind, msgspec.Meta(description=text)]
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, kind, *default))
    arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    try:
        (shape,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise TypeError(f"a type that JSON has not: {error}") from None
    own = dict(components.pop(shape.get("$ref", "/").rpartition("/")[2], shape))
    own.pop("title", None)
    if components:
        own["$defs"] = components
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": own}}
    context = any(one.name == CONTEXT for one in parameters)
    keeps_state = owner is not None or inspect.ismethod(function) or bool(getattr(function, "__closure__", None))
    return Tool(name, schema, arguments, function, owner, context, keeps_state)


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Description and texts of parameters of a docstring in Google's style."""
    head, *sections = _SECTION.split(inspect.getdoc(function) or "")
    found: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title not in {"Args", "Arguments", "Parameters"}:
            continue
        name = ""
        for line in filter(str.strip, body.splitlines()):
            if match := _PARAMETER.match(line):
                name = match[1]
                found[match[1]] = match[2].strip()
            elif name:
                found[name] += f" {line.strip()}"
    return " ".join(head.split()), found
