"""Pure: the code of a completion, the test cases of a dataset column, and whether an output is the expected one.

Accepted forms of the column (a string that is JSON of one of them too):

    [{"input": "3 4", "output": "7"}, ...]               a program: stdin and stdout
    {"inputs": [...], "outputs": [...]}                   the same (APPS, TACO); with "fn_name": calls of a function
    ["assert add(3, 4) == 7", ...]                        snippets, each a case (MBPP)
    "def check(candidate): assert candidate(3, 4) == 7"   one snippet (HumanEval; with the column ``entry_point``)"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from streamrl.rewards.sandbox.values import near

Comparison = Literal["exact", "lines", "tokens"]

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([A-Za-z0-9_+.-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_INPUT_NAMES = ("input", "stdin")
_OUTPUT_NAMES = ("output", "stdout", "expected_output")


class ProgramCase(msgspec.Struct, frozen=True):
    """The code as a program: what it reads, and what it has to write."""

    stdin: str
    stdout: str


class SnippetCase(msgspec.Struct, frozen=True):
    """Python that calls what the code defines, and raises where that is wrong."""

    test: str
    setup: str = ""
    entry_point: str = ""


class CallCase(msgspec.Struct, frozen=True):
    """A call of a function, or of a method of ``Solution``, and what it has to give."""

    function: str
    arguments: list[Any]
    expected: Any
    tolerance: float | None = None
    setup: str = ""


Case = ProgramCase | SnippetCase | CallCase


def extract_code(completion: str, *, whole: bool = False) -> str | None:
    """The last fenced block that is marked as Python, else the last without a mark; None where there is neither. A
    block that never closes ends with the completion (it may have been cut). ``whole``: the completion as it is."""
    if whole:
        return completion
    blocks = _blocks(completion)
    for names in (_PYTHON, ("",)):
        found = [text for name, text in blocks if name in names]
        if found:
            return found[-1]
    return None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block, without the indentation that its fence has (CommonMark)."""
    blocks: list[tuple[str, str]] = []
    fence = ""
    name = ""
    indent = 0
    content: list[str] = []
    for line in text.splitlines(keepends=True):
        if fence:
            bare = line.strip()
            if len(bare) >= len(fence) and bare == fence[0] * len(bare):
                blocks.append((name, "".join(content)))
                fence = ""
            else:
                content.append(line[:indent].lstrip(" \t") + line[indent:])
        elif opened := _FENCE.match(line):
            indent = len(opened.group(1))
            fence = opened.group(2)
            name = opened.group(3).lower()
            content = []
    return [*blocks, (name, "".join(content))] if fence else blocks


def read_cases(
    tests: Any, *, entry_point: str = "", setup: str = "", tolerance: float | None = None
) -> tuple[Case, ...]:
    """The cases of a column. Raises ``ValueError`` that says what is wrong with it; no tests: an empty tuple.
    ``tolerance``: by how much numbers that a function returns may differ (``fn_name``)."""
    try:
        return _cases(tests, entry_point, setup, tolerance)
    except RecursionError:
        raise ValueError("tests are nested without end: give a list of cases, a mapping, or a string") from None


def _cases(tests: Any, entry_point: str, setup: str, tolerance: float | None) -> tuple[Case, ...]:
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        tests = _result(tests)
    if isinstance(tests, str):
        return (_snippet(tests, entry_point, setup),) if tests.strip() else ()
    if isinstance(tests, Mapping):
        return _paired(tests, setup, tolerance)
    if not isinstance(tests, Sequence):
        raise ValueError(f"tests are a {type(tests).__name__}: give a list of cases, a mapping, or a string")
    return tuple(_one_case(test, entry_point, setup) for test in tests)


def same_output(given: str, expected: str, comparison: Comparison, tolerance: float | None = None) -> bool:
    """Return whether an output is the expected one. ``lines``: but for white space at the ends of lines and empty lines
    at the end; ``tokens``: but for all white space. ``tolerance``: numbers may differ by that much, absolutely or
    relative to the expected one; ``exact`` knows none."""
    if comparison == "exact":
        return given == expected
    if comparison == "tokens":
        return _same_words(given.split(), expected.split(), tolerance)
    ours, theirs = (([line.rstrip() for line in text.rstrip().split("\n")]) for text in (given, expected))
    if len(ours) != len(theirs):
        return False
    if tolerance is None:
        return ours == theirs
    return all(_same_words(a.split(), b.split(), tolerance) for a, b in zip(ours, theirs, strict=True))


def _same_words(given: list[str], expected: list[str], tolerance: float | None) -> bool:
    if len(given) != len(expected):
        return False
    return all(a == b or _near(a, b, tolerance) for a, b in zip(given, expected, strict=True))


def _near(given: str, expected: str, tolerance: float | None) -> bool:
    if tolerance is None:
        return False
    try:
        return near(float(given), float(expected), tolerance)
    except ValueError:
        return False


def _one_case(test: Any, entry_point: str, setup: str) -> Case:
    if isinstance(test, str):
        return _snippet(test, entry_point, setup)
    if isinstance(test, Mapping):
        given = next((test[name] for name in _INPUT_NAMES if name in test), "")
        expected = next((test[name] for name in _OUTPUT_NAMES if name in test), None)
        if expected is not None:
            return ProgramCase(_text(given), _text(expected))
    raise ValueError(f'a test is {test!r:.80}: give a string with Python, or a mapping with "input" and "output"')


def _paired(tests: Mapping[str, Any], setup: str, tolerance: float | None) -> tuple[Case, ...]:
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError('tests are a mapping without "inputs" and "outputs" of equal length')
    name = tests.get("fn_name") or ""
    if not name:
        return tuple(ProgramCase(_text(a), _text(b)) for a, b in zip(inputs, outputs, strict=True))
    return tuple(_called(name, a, b, setup, tolerance) for a, b in zip(inputs, outputs, strict=True))


def _called(name: str, given: Any, output: Any, setup: str, tolerance: float | None) -> CallCase:
    """One call. An output is JSON text only where the input is: "12" is a string else (APPS)."""
    expected = _result(output) if isinstance(given, str) else output
    return CallCase(name, _arguments(given), expected, tolerance, setup)


def _arguments(value: Any) -> list[Any]:
    """A list of arguments, or JSON of each in a line of its own (LiveCodeBench)."""
    if not isinstance(value, str):
        return list(value) if isinstance(value, Sequence) else [value]
    return [_result(line) for line in value.splitlines()]


def _result(value: Any) -> Any:
    """Decode a string that is JSON; return anything else as it is."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _snippet(test: str, entry_point: str, setup: str) -> SnippetCase:
    if (
        entry_point
        and re.search(r"^def check\(", test, re.MULTILINE)
        and not re.search(r"^check\(", test, re.MULTILINE)
    ):
        test = f"{test}\ncheck({entry_point})\n"
    return SnippetCase(test, setup, entry_point)


def _text(value: Any) -> str:
    """stdin and stdout as text; datasets have them as lists of lines too."""
    if isinstance(value, str):
        return value
    return "\n".join(map(_text, value)) if isinstance(value, Sequence) else json.dumps(value)
