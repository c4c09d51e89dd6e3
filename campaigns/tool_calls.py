"""Neighbours of mistakes with tools: what they return, errors of this host, threads, observations of games, calls as
models write them, templates of families. Each row is a name, what comes out, and what is right."""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextvars
import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from enum import Enum, IntFlag
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional, Union

import anyio
import numpy as np

from campaigns.cases import Case, add_case_arguments
from streamrl.base.errors import StreamRLError
from streamrl.pretrained.turns.tool_calls import ToolCall, parse_turn
from streamrl.run.environments.chat import _messages
from streamrl.run.environments.tools import MachineError, ToolBox, ToolContext, ToolLimits

CONTEXT = ToolContext(trajectory="p/0", turn=0, seed=1)


# ---- what a tool returns ------------------------------------------------------------------------------------------


class Color(Enum):
    RED = "red"


class Rights(IntFlag):
    READ = 4


class Words(str):
    """A text of another class."""


class Pair(NamedTuple):
    left: int
    right: Decimal


@dataclass
class Point:
    x: np.float32
    of: Path


class Board:
    def __str__(self) -> str:
        return "x.o"


class Silent:
    def __str__(self) -> str:
        raise ValueError("no words")


LOOP: list[Any] = [1]
LOOP.append(LOOP)


def numbers() -> Iterator[int]:
    yield 1


def frame() -> Any:
    """A table of pandas."""
    import pandas

    return pandas.DataFrame({"name": ["Ann"], "age": [41]})


def model_of_pydantic() -> Any:
    """A model of pydantic."""
    import pydantic

    return pydantic.create_model("Row", age=int)(age=41)


RETURNED: dict[str, tuple[Callable[[], Any], Any]] = {
    "an enum": (lambda: Color.RED, "red"),
    "a flag": (lambda: Rights.READ, "4"),
    "a text of another class": (lambda: Words("a b"), "a b"),
    "a named tuple": (lambda: Pair(1, Decimal("0.10")), '[1,"0.10"]'),
    "a dataclass with NumPy and a path": (lambda: Point(np.float32(0.1), Path("/a")), '{"x":0.1,"of":"/a"}'),
    "an object with __str__": (Board, "x.o"),
    "an object in a list": (lambda: [Board(), 1], '["x.o",1]'),
    "an object whose __str__ raises": (Silent, "error: ValueError: no words"),
    "a list that has itself": (lambda: LOOP, "[1, [...]]"),
    "a date": (lambda: date(2026, 1, 2), "2026-01-02"),
    "a duration": (lambda: timedelta(minutes=2), "PT120S"),
    "a fraction": (lambda: Fraction(1, 3), "1/3"),
    "a counter": (lambda: collections.Counter("aab"), '{"a":2,"b":1}'),
    "a deque": (lambda: collections.deque([1, 2]), "deque([1, 2])"),
    "a set": (lambda: {7}, "[7]"),
    "keys of a dictionary": (lambda: {"a": 1}.keys(), "dict_keys(['a'])"),
    "keys that are bytes": (lambda: {b"a": 1}, "{b'a': 1}"),
    "keys that are None": (lambda: {None: 1}, "{None: 1}"),
    "a memory view": (lambda: memoryview(b"ab"), "ab"),
    "no bytes": (lambda: b"", ""),
    "bytes with a zero": (lambda: b"a\x00b", "a\x00b"),
    "bytes in Latin-1": (lambda: "é".encode("latin-1"), lambda text: text.startswith("error: bytes that are no UTF-8")),
    "bytes of a file name": (lambda: os.fsencode("a"), "a"),
    "a name with surrogates": (lambda: os.fsdecode(b"\xff"), "?"),
    "a large number": (lambda: 10**30, "1" + "0" * 30),
    "a number of 5,000 digits": (lambda: 10**5000, lambda text: text.startswith("error: ValueError")),
    "minus infinity in a dictionary": (lambda: {"a": -np.inf}, '{"a":-Infinity}'),
    "a NaN of NumPy": (lambda: np.float64("nan"), "nan"),
    "half precision": (lambda: np.float16(0.1), "0.1"),
    "an array of no dimension": (lambda: np.array(7), "7"),
    "an array of truths": (lambda: np.array([True, False]), "[true,false]"),
    "an array of objects": (lambda: np.array([Board(), None], dtype=object), '["x.o",null]'),
    "an array of dates": (lambda: np.array(["2026-01-02"], dtype="datetime64[D]"), '["2026-01-02"]'),
    "complex numbers": (lambda: np.array([1j]), '["1j"]'),
    "records": (lambda: np.array([(1, 0.5)], dtype=[("a", int), ("b", float)]), "[[1,0.5]]"),
    "an empty array": (lambda: np.zeros((0, 2)), "[]"),
    "a table of pandas": (frame, "  name  age\n0  Ann   41"),
    "a model of pydantic": (model_of_pydantic, "age=41"),
    "an exception that is returned": (lambda: OSError(2, "No such file"), "[Errno 2] No such file"),
    "a generator of another function": (numbers, lambda text: text.startswith("<generator object numbers")),
    "a struct of msgspec": (lambda: ToolLimits(1.0, 2), '{"seconds":1.0,"characters":2}'),
    "Python that is run": (lambda: subprocess.check_output([sys.executable, "-c", "print(6*7)"]), "42\n"),
    "its end with both outputs": (
        lambda: subprocess.run(["sh", "-c", "echo a; echo b >&2; exit 3"], capture_output=True, check=False),
        lambda text: "returncode=3" in text and "b'a\\n'" in text,
    ),
    "an awaitable of a plain function": (lambda: asyncio.sleep(0, "later"), "later"),
}


def told(function: Callable[[], Any]) -> str:
    """Return what the model is told, or the failure of the trajectory."""

    def call() -> Any:
        """Call it."""
        return function()

    async def run() -> str:
        async with ToolBox([call], ToolLimits(seconds=10)).open_for_episode() as tools:
            try:
                return (await tools.run(ToolCall("call", {}), CONTEXT)).text
            except MachineError as error:
                return f"failed: {error}"

    return anyio.run(run)


# ---- errors that are this host's, and those that are the tool's ----------------------------------------------------


def raise_(error: BaseException) -> None:
    raise error


def fork_without_processes() -> None:
    """As ``subprocess`` fails at pids.max."""
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def database_is_full() -> None:
    database = sqlite3.connect(":memory:")
    database.execute("pragma max_page_count = 2")
    database.execute("create table t (a)")
    database.execute("insert into t values (zeroblob(100000))")


def too_many_files() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        Path("/dev/null").read_bytes()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def in_a_group() -> None:
    raise ExceptionGroup("two", [ValueError("a"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])


def handled_memory() -> str:
    try:
        bytearray(1 << 62)
    except MemoryError:
        return "too large"
    return ""


def wrapped() -> None:
    try:
        Path("/dev/full").write_text("x" * 100_000)
    except OSError as error:
        raise RuntimeError("cannot save") from error


def cause_of_a_cause() -> None:
    try:
        wrapped()
    except RuntimeError as error:
        raise KeyError("state") from error


ERRORS: dict[str, tuple[Callable[[], Any], str]] = {
    "no process": (fork_without_processes, "failed"),
    "a full database": (database_is_full, "failed"),
    "no file descriptor": (too_many_files, "failed"),
    "no memory": (lambda: bytearray(1 << 62), "failed"),
    "no memory for NumPy": (lambda: np.zeros(1 << 45), "failed"),
    "an array that NumPy refuses": (lambda: np.zeros(1 << 60), "error: ValueError: array is too big"),
    "a full disk that the tool words itself": (wrapped, "failed"),
    "a full disk far behind": (cause_of_a_cause, "failed"),
    "a full disk in a group": (in_a_group, "failed"),
    "no memory that the tool handles": (handled_memory, "too large"),
    "a file that is not there": (lambda: Path("/no/such").read_text(), "error: FileNotFoundError"),
    "a file that may not be read": (partial(raise_, PermissionError(13, "no")), "error: PermissionError"),
    "a service that refuses": (partial(raise_, ConnectionRefusedError(111, "no")), "error: Connection"),
    "a service that is late": (partial(raise_, TimeoutError("late")), "error: TimeoutError: late"),
    "a number too large": (lambda: 10.0**400, "error: OverflowError"),
    "too deep": (lambda: (lambda f: f(f))(lambda f: f(f)), "error: RecursionError"),
    "an end of an iteration": (lambda: next(iter(())), "error: RuntimeError: StopIteration()"),
    "an exit": (sys.exit, "error: SystemExit"),
    "a signal handler": (lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL), "error: ValueError: signal only works"),
    "an assertion": (partial(raise_, AssertionError()), "error: AssertionError"),
    "a group of the tool's": (partial(raise_, ExceptionGroup("g", [ValueError()])), "error: ExceptionGroup"),
}


# ---- threads ---------------------------------------------------------------------------------------------------------

ASKED_BY: contextvars.ContextVar[str] = contextvars.ContextVar("asked_by", default="nobody")


class Local:
    """Keeps something for its thread, and asks with an event loop of its own."""

    def __init__(self) -> None:
        self.kept = threading.local()
        self.kept.value = "kept"

    def read(self) -> str:
        """Read."""
        return str(self.kept.value)

    def loops(self) -> str:
        """Ask."""
        return asyncio.run(asyncio.sleep(0, "looped"))

    def who(self) -> str:
        """Say."""
        return ASKED_BY.get()

    def function(self, function: str = "f", self_: str = "s") -> str:
        """Take names of parameters that others use, too."""
        return function + self_


class Mixed(Local):
    """Some of its methods are coroutines."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.get_running_loop()
        self.lock = asyncio.Lock()

    async def later(self) -> str:
        """Wait."""
        async with self.lock:
            return str(asyncio.get_running_loop() is self.loop)


def asked(kind: type, name: str, **arguments: Any) -> str:
    """Return what a method of a new object answers."""

    async def run() -> str:
        async with ToolBox([kind]).open_for_episode() as tools:
            ASKED_BY.set("somebody")
            return (await tools.run(ToolCall(name, arguments), CONTEXT)).text

    return anyio.run(run)


class Breaks:
    """Fails where its ``at`` says."""

    at = ""
    closed = 0

    def __init__(self) -> None:
        self._break("init")

    def reset(self) -> str:
        return self._break("reset")

    def close(self) -> None:
        type(self).closed += 1

    def look(self) -> str:
        """Look."""
        return self._break("look")

    def _break(self, place: str) -> str:
        if place == self.at:
            raise KeyError(place)
        return place


def broken(place: str) -> tuple[str, int]:
    """Return what is told or raised, and how often the object was closed."""
    kind = type("Breaks", (Breaks,), {"at": place})
    try:
        text = asked(kind, "look")
    except KeyError as error:
        text = f"raised {error}"
    return text, kind.closed  # type: ignore[attr-defined]


def threads_left() -> int:
    """Return how many threads more there are after 50 trajectories."""

    async def run() -> int:
        before = threading.active_count()
        for _ in range(50):
            async with ToolBox([Local, told_by_a_function]).open_for_episode() as tools:
                await tools.run(ToolCall("read", {}), CONTEXT)
                await tools.run(ToolCall("told_by_a_function", {}), CONTEXT)
        await anyio.sleep(0.2)
        return threading.active_count() - before

    return anyio.run(run)


def told_by_a_function() -> str:
    """Say."""
    return "said"


def beside() -> bool:
    """Return whether 40 objects that take 0.1 s to make, to reset and to ask are served beside each other."""

    class Slow:
        def __init__(self) -> None:
            time.sleep(0.1)

        def reset(self) -> None:
            time.sleep(0.1)

        def look(self) -> str:
            """Look."""
            time.sleep(0.1)
            return "a room"

    async def play(box: ToolBox) -> None:
        async with box.open_for_episode() as tools:
            await tools.run(ToolCall("look", {}), CONTEXT)

    async def run() -> bool:
        box = ToolBox([Slow])
        began = time.monotonic()
        async with anyio.create_task_group() as group:
            for _ in range(40):
                group.start_soon(play, box)
        return time.monotonic() - began < 6

    return anyio.run(run)


THREADS: list[Case] = [
    Case("a value of the thread that made it", partial(asked, Local, "read"), "kept"),
    Case("a loop of the tool's own", partial(asked, Local, "loops"), "looped"),
    Case("variables of the context", partial(asked, Local, "who"), "somebody"),
    Case("parameters with names of ours", partial(asked, Local, "function", function="a", self_="b"), "ab"),
    Case("a coroutine beside plain methods", partial(asked, Mixed, "later"), "True"),
    Case("a constructor that raises", partial(broken, "init"), ("raised 'init'", 0)),
    Case("a reset that raises", partial(broken, "reset"), ("raised 'reset'", 1)),
    Case("a call that raises", partial(broken, "look"), ("error: KeyError: 'look'", 1)),
    Case("threads that are left", threads_left, lambda count: count <= 0),
    Case("40 slow objects", beside, True),
]


# ---- what a game says ------------------------------------------------------------------------------------------------

OBSERVED: dict[str, tuple[Any, Any]] = {
    "a dataclass": (Point(np.float32(1), Path("/a")), '{"x":1.0,"of":"/a"}'),
    "an enum of words": (Color.RED, "red"),
    "a list of lists": ([[0, 1], [1, 0]], "[[0,1],[1,0]]"),
    "a list with None": ([None], "[null]"),
    "a text of another class": (Words("go"), "go"),
    "parts of Gymnasium's Dict": ({"at": np.array([0, 1]), "hit": np.bool(False)}, '{"at":[0,1],"hit":false}'),
    "a message without a role": ({"content": "go"}, '{"content":"go"}'),
    "a message beside a text": ([{"role": "user", "content": "a"}, "b"], '[{"role":"user","content":"a"},"b"]'),
    "an exception": (ValueError("lost"), "lost"),
    "nothing": (None, "refused: None is said to the model"),
    "bytes that are no text": (b"\xff", "refused: bytes that are no UTF-8 text"),
}


def said(observation: Any) -> str:
    """Return the text that the model reads."""
    try:
        return "|".join(str(message["content"]) for message in _messages(observation))
    except (TypeError, StreamRLError) as error:
        return f"refused: {error}"


# ---- calls -----------------------------------------------------------------------------------------------------------


def find(
    name: str = "",
    year: Optional[str] = None,  # noqa: UP045 (as people write it)
    size: Union[int, str] = 0,  # noqa: UP007
    level: Literal["1", "2"] = "1",
    count: Optional[int] = None,  # noqa: UP045
    exact: bool = False,
    tags: list[str] = [],  # noqa: B006
    of: Optional[ToolLimits] = None,  # noqa: UP045
    when: date | None = None,
    price: Decimal = Decimal(0),
    color: Color = Color.RED,
) -> str:
    """Find."""
    return f"{name!r} {year!r} {size!r} {level!r} {count!r} {exact!r} {tags!r} {of!r} {when!r} {price!r} {color!r}"


USUAL = ["''", "None", "0", "'1'", "None", "False", "[]", "None", "None", "Decimal('0')", "<Color.RED: 'red'>"]
PLACES = ["name", "year", "size", "level", "count", "exact", "tags", "of", "when", "price", "color"]
VALUES: list[tuple[str, str, str]] = [
    ("name", "2024", "'2024'"),
    ("name", "null", "'null'"),
    ("name", "007", "'007'"),
    ("name", "", "''"),
    ("name", "a\nb", "'a\\nb'"),
    ("name", '{"a": 1}', "'{\"a\": 1}'"),
    ("name", '"quoted"', "'\"quoted\"'"),
    ("year", "2024", "'2024'"),
    ("year", "false", "'false'"),
    ("year", "null", "None"),
    ("size", "12", "'12'"),
    ("level", "2", "'2'"),
    ("count", "3", "3"),
    ("count", "null", "None"),
    ("count", "None", "None"),
    ("count", "three", "error"),
    ("exact", "true", "True"),
    ("exact", "True", "True"),
    ("exact", "yes", "error"),
    ("tags", '["a", "b"]', "['a', 'b']"),
    ("tags", "a, b", "error"),
    ("of", '{"seconds": 2.5}', "ToolLimits(seconds=2.5, characters=8000)"),
    ("of", "null", "None"),
    ("when", "2026-01-02", "datetime.date(2026, 1, 2)"),
    ("price", "1.50", "Decimal('1.50')"),
    ("color", "red", "<Color.RED: 'red'>"),
]


def xml(name: str, value: str) -> str:
    """Return how the tool is called where the model writes one value without quotes."""
    box = ToolBox([find])
    text = f"<tool_call>\n<function=find>\n<parameter={name}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    turn = parse_turn(text, "qwen_xml", box.schemas)

    async def run() -> str:
        async with box.open_for_episode() as tools:
            return (await tools.run(turn.calls[0], CONTEXT)).text

    return anyio.run(run) if turn.calls else f"malformed: {turn.problem}"


def with_usual(name: str, shown: str) -> Any:
    """Return what is right where ``name`` alone has a value."""
    if shown == "error":
        return lambda text: text.startswith("error: find: ")
    return " ".join(shown if place == name else usual for place, usual in zip(PLACES, USUAL, strict=True))


WRITTEN: list[tuple[str, str, str]] = [
    ("hermes", '{"name": "find", "arguments": {"name": "a"}}', "called"),
    ("hermes", '{"name": "find"}', "called"),
    ("hermes", '{"name": "find", "arguments": {"name": "a"}, "id": 3}', "called"),
    ("hermes", '{"type": "function", "name": "find", "arguments": {}}', "called"),
    ("hermes", '{"type": "function", "function": {"name": "find", "arguments": {}}}', "malformed"),
    ("hermes", '{"name": "find", "parameters": {"name": "a"}}', "malformed"),
    ("hermes", '{"name": "find", "kwargs": {"name": "a"}}', "malformed"),
    ("hermes", '{"name": "find", "name_of_row": "a"}', "malformed"),
    ("hermes", '{"name": "find", "arguments": null}', "malformed"),
    ("hermes", '{"name": "find", "arguments": [1]}', "malformed"),
    ("hermes", '{"name": "find", "arguments": "{\\"name\\": \\"a\\"}"}', "malformed"),
    ("hermes", '{"name": 3, "arguments": {}}', "malformed"),
    ("hermes", '{"find": {"name": "a"}}', "malformed"),
    ("hermes", '[{"name": "find", "arguments": {}}]', "malformed"),
    ("hermes", '{"name": "find", "arguments": {"name": ' + "[" * 300 + "]" * 300 + "}}", "called"),
    ("llama_json", '{"name": "find", "parameters": {"name": "a"}}', "called"),
    ("llama_json", '{"name": "find", "arguments": {"name": "a"}}', "called"),
    ("llama_json", '{"type": "function", "name": "find", "parameters": {}}', "called"),
    ("llama_json", '{"name": "find", "args": {"name": "a"}}', "malformed"),
    ("llama_json", '{"name": "find", "parameters": {}, "arguments": {}}', "malformed"),
    ("llama_json", '{"name": "find"}', "called"),
    ("llama_json", '{"name": "Ann", "age": 41}', "answer"),
    ("llama_json", '{"parameters": {"name": "a"}}', "answer"),
    ("llama_json", '{"name": "find", "parameters": {}};', "malformed"),
    ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {}, "id": "abcdefghi"}]', "called"),
    ("mistral", '[TOOL_CALLS][{"name": "find", "input": {}}]', "malformed"),
    ("mistral", "[TOOL_CALLS]find[ARGS]{} and more", "malformed"),
    ("mistral", "[TOOL_CALLS][]", "malformed"),
]


def outcome(call_format: str, text: str) -> str:
    """Return what becomes of a turn."""
    if call_format == "hermes":
        text = f"<tool_call>\n{text}\n</tool_call>"
    turn = parse_turn(text, call_format, ToolBox([find]).schemas)
    if turn.calls:
        return "called"
    return "malformed" if turn.problem else "answer"


# ---- families --------------------------------------------------------------------------------------------------------

FORMATS = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5_think": "qwen_xml",
    "qwen3_6": "qwen_xml",
    "qwen3_8": "qwen_xml",
    "nemotron_3_nano": "qwen_xml",
    "nemotron_3_super": "qwen_xml",
    "nemotron_3_ultra": "qwen_xml",
    "llama3_1": "llama_json",
    "llama3_2": "llama_json",
    "glm4moe": "",
    "deepseekv3": "",
    "gptoss": "",
    "gemma4": "",
    "lfm2_2_5": "",
    "muse_glimmer": "",
    "phi3_5": "",
    "cohere2": "",
}
"""Formats of published templates, which the wheel of trl has; empty: none that streamrl reads itself."""


def format_of(template: str) -> str:
    """Return the format of a template, with a tokenizer of bytes."""
    import tokenizers
    import trl

    from streamrl.pretrained.tokenizer import load_tokenizer
    from streamrl.pretrained.turns.template_facts import format_of_template

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: place for place, character in enumerate(alphabet)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = tokenizers.decoders.ByteLevel()
    ends = ["<|im_end|>", "<|eot_id|>", "<|return|>", "<|call|>"]
    made.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ends])
    with tempfile.TemporaryDirectory() as folder:
        made.save(f"{folder}/tokenizer.json")
        source = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
        Path(folder, "chat_template.jinja").write_text(source.read_text())
        Path(folder, "tokenizer_config.json").write_text(json.dumps({"eos_token": ends[0], "bos_token": "<s>"}))
        Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257, 258, 259]}))
        return format_of_template(load_tokenizer(folder))[0]


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for name, (value, right) in RETURNED.items():
        yield Case(f"returned: {name}", partial(told, value), right)
    for name, (raising, begin) in ERRORS.items():
        yield Case(f"error: {name}", partial(told, raising), lambda text, begin=begin: text.startswith(begin))
    for case in THREADS:
        yield Case(f"thread: {case.name}", case.value, case.right)
    for name, (observation, right) in OBSERVED.items():
        right_text = (lambda text, right=right: text.startswith(right)) if right.startswith("refused") else right
        yield Case(f"observed: {name}", partial(said, observation), right_text)
    for parameter, text, shown in VALUES:
        yield Case(f"value: {parameter} = {text!r}", partial(xml, parameter, text), with_usual(parameter, shown))
    for call_format, text, right in WRITTEN:
        yield Case(f"written: {call_format} {text[:70]}", partial(outcome, call_format, text), right)
    for template, right in FORMATS.items():
        yield Case(f"family: {template}", partial(format_of, template), right)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_case_arguments(command, cases)
