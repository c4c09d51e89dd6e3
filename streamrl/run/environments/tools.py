"""Tools that a user writes: typed functions, or classes whose public methods are typed, sync or async.

Schemas come from signatures and docstrings, and arguments that a model wrote are checked by the same types before a
call. ``environment_forms.py`` makes one ``ToolBox`` when an environment worker starts (and in the dry run);
``chat.py`` opens it for each trajectory, in the process of the environment worker."""

from __future__ import annotations

import asyncio
import errno
import inspect
import json
import numbers
import os
import re
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import copy_context
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, get_type_hints
from weakref import WeakSet

import anyio
import msgspec
import numpy as np

from streamrl.base.dedicated_thread import DedicatedThread
from streamrl.base.errors import UNENCODABLE, RecipeError, StreamRLError, leaves
from streamrl.base.types import AnyFunction, JsonMapping, JsonObject, TextMapping, TextsByName
from streamrl.pretrained.turns.tool_calls import ToolCall

CONTEXT = "context"
"""A parameter of this name gets the ``ToolContext``, and is not in the schema."""


class ToolContext(msgspec.Struct, frozen=True):
    """The caller of a tool: the trajectory, the turn from 0, and the seed of the trajectory, which is the same when the
    episode begins again."""

    trajectory: str
    turn: int
    seed: int


class ToolLimits(msgspec.Struct, frozen=True):
    """Limits of one call: seconds that it may take, and characters of its result."""

    seconds: float = 30.0
    characters: int = 8_000


class ToolEnd(StrEnum):
    """Outcomes of a call. Except with ``DONE`` and ``TRUNCATED``, the model gets a text that begins with ``error``."""

    DONE = "done"
    TRUNCATED = "truncated"
    UNKNOWN = "unknown"
    INVALID = "invalid"
    RAISED = "raised"
    TIMED_OUT = "timed_out"


class ToolResult(msgspec.Struct, frozen=True):
    """The end of a call. ``text``: result or error for the model; ``seconds``: duration of the call."""

    text: str
    end: ToolEnd
    seconds: float = 0.0


class Tool(msgspec.Struct, frozen=True):
    """A function that a model may call.

    ``schema``: JSON schema of the function, as chat templates take it;
    ``arguments``: struct type that checks the arguments (None: ``call`` does, as a tool of an MCP server);
    ``call``: function, or method of ``owner``;
    ``owner``: class of which each trajectory has an instance;
    ``takes_context``: whether ``call`` has a parameter for the ``ToolContext``;
    ``keeps_state``: whether a call may change what later calls return."""

    name: str
    schema: JsonMapping
    arguments: type[msgspec.Struct] | None
    call: AnyFunction
    owner: type | None = None
    takes_context: bool = False
    keeps_state: bool = False


class ToolFailedError(StreamRLError):
    """A failure of a call; the message goes to the model."""


class MachineError(StreamRLError):
    """A failure of a call that is not the tool's: this host had no thread, memory, file descriptor or disk for it, or
    the server of the tool has ended. The trajectory fails, and the model is not told."""


class ToolBox:
    """The tools of a run. ``schemas``: JSON schemas for chat templates. Raises ``RecipeError`` with every problem: a
    parameter without a type or with a type that JSON does not have, a missing docstring, a name twice."""

    def __init__(self, tools: Sequence[Any], limits: ToolLimits | None = None) -> None:
        self._limits = limits or ToolLimits()
        self._tools: dict[str, Tool] = {}
        problems = []
        for source in tools:
            functions = _functions(source)
            if not functions:
                problems.append(f"tool {source.__name__}: the class has no public method: write one for each tool")
            for name, function in functions:
                try:
                    owner = source if inspect.isclass(source) else None
                    tool = source if isinstance(source, Tool) else _tool(name, function, owner)
                except (TypeError, NameError) as error:
                    problems.append(f"tool {name}: {error}")
                    continue
                if name in self._tools:
                    problems.append(f"tool {name}: two tools have this name: rename one")
                self._tools[name] = tool
        if problems:
            raise RecipeError(*problems)
        self.schemas = tuple(tool.schema for tool in self._tools.values())

    @asynccontextmanager
    async def open_for_episode(self, columns: JsonMapping | None = None, seed: int = 0) -> AsyncIterator[OpenTools]:
        """Open the tools for one trajectory, with an instance of each class. An instance that is a context manager is
        entered, and exited at the end of the block; otherwise its ``close`` is called there, if it has one. Its
        ``reset`` is called with ``columns``, and may return a text for the model.

        ``columns``: columns of the prompt's row; ``seed``: seed of the prompt, the same for all its trajectories."""
        async with AsyncExitStack() as stack:
            instances = {}
            reset_texts = []
            thread = UserThread()
            stack.callback(thread.close)
            for owner in dict.fromkeys(filter(None, [tool.owner for tool in self._tools.values()])):
                instance = await thread.call(owner)
                instances[owner] = instance
                if hasattr(instance, "__aenter__"):
                    await stack.enter_async_context(instance)
                elif hasattr(instance, "__enter__"):
                    await thread.call(instance.__enter__)
                    stack.push_async_exit(partial(thread.call, instance.__exit__))
                elif hasattr(instance, "close"):
                    stack.push_async_callback(thread.call, instance.close)
                if hasattr(instance, "reset"):
                    arguments = ColumnParameters(instance.reset).arguments(columns or {}, seed)
                    value = await thread.call(instance.reset, **arguments)
                    if value is not None:
                        reset_texts.append(text_of(value))
            yield OpenTools(self._tools, instances, self._limits, thread, "".join(reset_texts))


class OpenTools(msgspec.Struct):
    """The tools of one trajectory. ``thread``: thread in which they run, where they are no coroutines; ``reset_text``:
    texts that the ``reset`` methods of the classes returned."""

    tools: Mapping[str, Tool]
    instances: Mapping[type, Any]
    limits: ToolLimits
    thread: UserThread
    reset_text: str

    def keeps_state(self, name: str) -> bool:
        """Return whether a tool keeps state: its calls are made again when an episode begins again."""
        return name in self.tools and self.tools[name].keeps_state

    @property
    def reward(self) -> float | None:
        """Sum of the attributes ``reward`` of all instances; None: no instance has a reward."""
        attributes = [getattr(instance, "reward", None) for instance in self.instances.values()]
        rewards = [float(reward) for reward in attributes if isinstance(reward, numbers.Real)]
        return sum(rewards) if rewards else None

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Run one call. A failure of the tool is a result, too. Raises ``MachineError``."""
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolResult(
                f"error: there is no tool {call.name!r}: call one of {', '.join(self.tools)}", ToolEnd.UNKNOWN
            )
        arguments = call.arguments
        if tool.arguments is not None:
            try:
                arguments = msgspec.structs.asdict(msgspec.convert(call.arguments, tool.arguments))
            except msgspec.ValidationError as error:
                return ToolResult(f"error: {call.name}: {str(error).replace('`', '')}", ToolEnd.INVALID)
        if tool.takes_context:
            arguments[CONTEXT] = context
        owner = [instance for kind, instance in self.instances.items() if kind is tool.owner]
        limit_s = self.limits.seconds
        began = anyio.current_time()
        with anyio.move_on_after(limit_s) as scope:
            text, end = await _result(tool.name, self.thread.call(tool.call, *owner, **arguments))
        if not self.instances:  # no object needs the thread
            self.thread.close()
        seconds = anyio.current_time() - began
        if scope.cancelled_caught:
            return ToolResult(f"error: {call.name} took more than {limit_s:g} s", ToolEnd.TIMED_OUT, seconds)
        text = text.encode("utf-8", "replace").decode()  # surrogates, as names of files may have, cannot be sent
        limit = self.limits.characters
        if len(text) > limit:
            text = f"{text[:limit]} [{len(text) - limit} characters more are left out]"
            if end is ToolEnd.DONE:
                end = ToolEnd.TRUNCATED
        return ToolResult(text, end, seconds)


class UserThread:
    """A thread of user code, from its first call on. What belongs to the thread that made it, such as a database of
    sqlite3, works as in a program of one thread."""

    def __init__(self) -> None:
        self._thread = DedicatedThread("user code")

    async def call(self, function: AnyFunction, /, *arguments: Any, **named: Any) -> Any:
        """Call a user's function: a coroutine function and a class that has some in the event loop, any other function
        in the thread. A call that is cancelled keeps the thread until it returns; later calls get another one, until
        too many are kept."""
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **named)
        if inspect.isclass(function) and inspect.getmembers(function, inspect.iscoroutinefunction):
            return function(*arguments, **named)
        if len(_hung) >= _MOST_HUNG:
            raise RuntimeError(_HANGS)
        try:
            value = await self._thread.call(partial(copy_context().run, function, *arguments, **named))
        except asyncio.CancelledError:
            _hung.add(self._thread)
            self.close()
            raise
        return await value if isinstance(value, Awaitable) else value

    def close(self) -> None:
        """Let the thread end after its calls."""
        self._thread.close()
        self._thread = DedicatedThread("user code")


def text_of(value: Any) -> str:
    """Return a value of user code as text for the model: a text as it is, bytes as UTF-8, anything else as JSON, where
    what JSON has not stands as its author would print it. Raises ``ToolFailedError``."""
    if isinstance(value, memoryview):
        value = bytes(value)
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes, bytearray), str_keys=True, enc_hook=_plain)
        if isinstance(plain, str | float | bytes | bytearray):
            return str(_plain(plain))  # JSON has no infinite numbers
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":"), default=_plain)
    except UnicodeDecodeError:
        raise ToolFailedError("bytes that are no UTF-8 text were returned: return a text") from None
    except UNENCODABLE:  # such as an object that has itself, or a key that is no text
        return str(value)


def _plain(value: Any) -> Any:
    """Return a value that JSON does not have as one that it has."""
    if isinstance(value, bytes | bytearray):
        return value.decode()
    if isinstance(value, np.ndarray | np.number | np.bool):
        # 0.1 in 32 bits has further digits in 64.
        return (value.astype(str).astype(float) if value.dtype.kind == "f" else value).tolist()
    return str(value)


class ColumnParameters:
    """Parameters of a user's function that are columns of a row. A parameter ``seed`` gets the seed of the prompt where
    no column has this name. ``required``: names of columns for which the function has no default."""

    def __init__(self, function: AnyFunction, *, skip: int = 0) -> None:
        """``skip``: number of leading parameters that are not columns, such as ``self``."""
        parameters = list(inspect.signature(function).parameters.values())[skip:]
        named = []
        self._takes_all = False
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise RecipeError(
                    f"parameter {parameter.name} is positional-only, and columns are given by name: remove the /"
                )
            if parameter.kind is parameter.VAR_KEYWORD:
                self._takes_all = True
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                named.append(parameter)
        self._names = {parameter.name for parameter in named}
        self.required = tuple(
            parameter.name for parameter in named if parameter.default is parameter.empty and parameter.name != "seed"
        )

    def arguments(self, columns: JsonMapping, seed: int) -> JsonObject:
        """Return the arguments of a call."""
        values = {"seed": seed, **columns}
        return {
            name: value
            for name, value in values.items()
            if name in self._names or (self._takes_all and name in columns)
        }


_MOST_HUNG = 32  # threads; each keeps memory
_HANGS = f"{_MOST_HUNG} calls of user code do not return: give what they wait for a time limit"
_hung = WeakSet[DedicatedThread]()
"""Threads whose call was cancelled and has not returned."""
NOTHING_LEFT_IN_PROCESS = (*map(os.strerror, (errno.EMFILE, errno.ENOMEM)), "can't start new thread", _HANGS)
"""Texts of errors that say that this process has no file descriptor, memory or thread left."""
_NOTHING_LEFT = (
    *NOTHING_LEFT_IN_PROCESS,
    *map(os.strerror, (errno.EAGAIN, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)),
    "database or disk is full",
)
"""Texts of errors that say that this host has nothing left."""


async def _result(name: str, value: Awaitable[Any]) -> tuple[str, ToolEnd]:
    """Wait for the value that a tool returns. Return the text for the model and how the call ended."""
    try:
        return text_of(await value), ToolEnd.DONE
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the time of the call is over, or the episode has ended
            raise
        return f"error: {type(error).__name__}: it cancelled itself", ToolEnd.RAISED
    except ToolFailedError as error:
        return f"error: {error}", ToolEnd.RAISED
    except MachineError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
        if has_nothing_left(error):
            raise MachineError(f"this host could not run the tool {name}: {text}") from error
        return f"error: {text}", ToolEnd.RAISED


def has_nothing_left(error: BaseException, texts: Sequence[str] = _NOTHING_LEFT) -> bool:
    """Return whether an error, one of its group, or one that led to it, has one of ``texts`` or says that there is no
    memory left."""
    for leaf in leaves(error):
        if isinstance(leaf, MemoryError) or (getattr(leaf, "strerror", None) or str(leaf)) in texts:
            return True
    cause = error.__cause__ or error.__context__
    return cause is not None and has_nothing_left(cause, texts)


def _functions(source: Any) -> list[tuple[str, AnyFunction]]:
    """Return names and functions of a tool, a function, or the public methods of a class: empty for one without."""
    if isinstance(source, Tool):
        return [(source.name, source.call)]
    if not inspect.isclass(source):
        return [(getattr(source, "__name__", repr(source)), source)]
    members = inspect.getmembers(source, lambda member: inspect.isfunction(member) or inspect.ismethod(member))
    return [(name, method) for name, method in members if not name.startswith("_") and name not in {"reset", "close"}]


def _tool(name: str, function: AnyFunction, owner: type | None) -> Tool:
    """Make a tool of a function. Raises ``TypeError`` with the remedy."""
    parameters = list(inspect.signature(function).parameters.values())
    description, parameter_texts = _docstring(function, {parameter.name for parameter in parameters})
    if not description:
        raise TypeError("it has no docstring, which tells the model what it does: write one")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError("it yields: return the whole result")
    if owner is not None and isinstance(inspect.getattr_static(owner, name), staticmethod | classmethod):
        raise TypeError("it is no method of an instance: remove its decorator, or begin its name with _")
    hints = get_type_hints(function, include_extras=True)
    if owner is not None:  # self
        parameters = parameters[1:]
    arguments = _argument_struct(name, parameters, hints, parameter_texts)
    takes_context = any(parameter.name == CONTEXT for parameter in parameters)
    # A method and a closure can reach objects that later calls use, too.
    keeps_state = owner is not None or inspect.ismethod(function) or bool(getattr(function, "__closure__", None))
    schema = {"name": name, "description": description, "parameters": _parameter_schema(arguments)}
    return Tool(name, {"type": "function", "function": schema}, arguments, function, owner, takes_context, keeps_state)


def _argument_struct(
    name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any], texts: TextMapping
) -> type[msgspec.Struct]:
    """Make a struct type with a field for each parameter. Raises ``TypeError`` with the remedy."""
    fields = []
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"parameter {parameter.name}: a model gives arguments by name: write them one by one")
        if parameter.name == CONTEXT:
            continue
        if parameter.name not in hints:
            raise TypeError(f"parameter {parameter.name} has no type: annotate it, such as {parameter.name}: int")
        hint = hints[parameter.name]
        hint = Annotated[hint, msgspec.Meta(description=texts.get(parameter.name))]
        default = msgspec.NODEFAULT if parameter.default is parameter.empty else parameter.default
        fields.append((parameter.name, hint, default))
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def _parameter_schema(arguments: type[msgspec.Struct]) -> JsonObject:
    """Return the JSON schema of a struct type, with all types that it refers to in ``$defs``. Raises ``TypeError``."""
    try:
        (shape,), components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    except TypeError as error:
        raise TypeError(f"a type that JSON has not: {error}") from None
    # Where msgspec has put the struct itself among the components, ``shape`` is a reference to it.
    component = shape.get("$ref", "/").rpartition("/")[2]
    schema = dict(components.pop(component, shape))
    schema.pop("title", None)
    if components:
        schema["$defs"] = components
    return schema


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)
_PARAMETER = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def _docstring(function: AnyFunction, parameters: Collection[str]) -> tuple[str, TextsByName]:
    """Return the description in a docstring of Google's style, and the texts of ``parameters`` by name. A line such as
    ``Default: 5`` names no parameter, and belongs to the text of the one before it."""
    head, *sections = _SECTION.split(inspect.getdoc(function) or "")
    parameter_texts = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title not in {"Args", "Arguments", "Parameters"}:
            continue
        name = ""
        for line in filter(str.strip, body.splitlines()):
            match = _PARAMETER.match(line)
            if match and match[1] in parameters:
                name = match[1]
                parameter_texts[name] = match[2].strip()
            elif name:  # the text of the parameter goes on
                parameter_texts[name] += f" {line.strip()}"
    return " ".join(head.split()), parameter_texts
