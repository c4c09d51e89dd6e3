"""Reading of the code in a completion and of the test cases in a dataset column, and comparison of outputs. Pure.

``reward`` calls it in the process of the reward, outside of the sandbox. Accepted forms of the column, also as a string
of JSON:

    [{"input": "3 4", "output": "7"}, ...]               a program: stdin and stdout
    {"inputs": [...], "outputs": [...]}                   the same (APPS, TACO); with "fn_name": calls of a function
    ["assert add(3, 4) == 7", ...]                        snippets, each a case (MBPP)
    "def check(candidate): assert candidate(3, 4) == 7"   one snippet (HumanEval; with the column ``entry_point``)"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from streamrl.base.types import JsonMapping
from streamrl.rewards.sandbox.values import near

Comparison = Literal["exact", "lines", "tokens"]

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*([A-Za-z0-9_+.-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_INPUT_NAMES = ("input", "stdin")
_OUTPUT_NAMES = ("output", "stdout", "expected_output")


class ProgramCase(Struct, frozen=True):
    """The code as a program. ``stdin``: input; ``stdout``: expected output."""

    stdin: str
    stdout: str


class SnippetCase(Struct, frozen=True):
    """A snippet of Python that calls functions of the code, and raises where a result is wrong."""

    test: str
    setup: str = ""
    entry_point: str = ""


class CallCase(Struct, frozen=True):
    """A call of a function, or of a method of ``Solution``, and its expected result."""

    function: str
    arguments: list[Any]
    expected: Any
    tolerance: float | None = None
    setup: str = ""


Case = ProgramCase | SnippetCase | CallCase


def extract_code(completion: str, *, whole_completion: bool = False) -> str | None:
    """The last fenced block that is marked as Python, else the last block without a mark; None: the completion has
    neither. A block that never closes ends with the completion (which may have reached its limit).
    ``whole_completion``: the code is the completion as it is."""
    if whole_completion:
        return completion
    blocks = _blocks(completion)
    for languages in (_PYTHON, ("",)):
        codes = [code for language, code in blocks if language in languages]
        if codes:
            return codes[-1]
    return None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block, without the indentation that its fence has (CommonMark)."""
    blocks = []
    fence = ""
    language = ""
    indent = 0
    content: list[str] = []
    for line in text.splitlines(keepends=True):
        if fence:
            stripped = line.strip()
            if len(stripped) >= len(fence) and stripped == fence[0] * len(stripped):
                blocks.append((language, "".join(content)))
                fence = ""
            else:
                content.append(line[:indent].lstrip(" \t") + line[indent:])
        elif opening := _FENCE.match(line):
            indent = len(opening.group(1))
            fence = opening.group(2)
            language = opening.group(3).lower()
            content = []
    if fence:  # the last block is not closed
        blocks.append((language, "".join(content)))
    return blocks


def read_cases(
    tests: Any, *, entry_point: str = "", setup: str = "", tolerance: float | None = None
) -> tuple[Case, ...]:
    """The cases of a column; empty: the column has no tests. Raises ``ValueError`` for a column of another form.
    ``tolerance``: allowed difference of numbers that a function returns (``fn_name``)."""
    try:
        return _cases(tests, entry_point, setup, tolerance)
    except RecursionError:
        raise ValueError("tests are nested without end: give a list of cases, a mapping, or a string") from None


def _cases(tests: Any, entry_point: str, setup: str, tolerance: float | None) -> tuple[Case, ...]:
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        tests = _result(tests)
    if isinstance(tests, str):
        if not tests.strip():
            return ()
        return (_snippet(tests, entry_point, setup),)
    if isinstance(tests, Mapping):
        return _paired(tests, setup, tolerance)
    if not isinstance(tests, Sequence):
        raise ValueError(f"tests are a {type(tests).__name__}: give a list of cases, a mapping, or a string")
    return tuple(_one_case(test, entry_point, setup) for test in tests)


def same_output(output: str, expected: str, comparison: Comparison, tolerance: float | None = None) -> bool:
    """Return whether an output is the expected one.

    ``comparison``: ``exact``; ``lines`` ignores white space at the ends of lines and empty lines at the end; ``tokens``
    ignores all differences of white space. ``tolerance``: allowed difference of numbers, absolute or relative to the
    expected number; not used by ``exact``."""
    if comparison == "exact":
        return output == expected
    if comparison == "tokens":
        return _same_words(output.split(), expected.split(), tolerance)
    lines = _stripped_lines(output)
    expected_lines = _stripped_lines(expected)
    if len(lines) != len(expected_lines):
        return False
    if tolerance is None:
        return lines == expected_lines
    return all(
        _same_words(line.split(), expected_line.split(), tolerance)
        for line, expected_line in zip(lines, expected_lines, strict=True)
    )


def _stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_words(words: list[str], expected: list[str], tolerance: float | None) -> bool:
    if len(words) != len(expected):
        return False
    return all(
        word == expected_word or _near(word, expected_word, tolerance)
        for word, expected_word in zip(words, expected, strict=True)
    )


def _near(word: str, expected: str, tolerance: float | None) -> bool:
    if tolerance is None:
        return False
    try:
        return near(float(word), float(expected), tolerance)
    except ValueError:
        return False


def _one_case(test: Any, entry_point: str, setup: str) -> Case:
    if isinstance(test, str):
        return _snippet(test, entry_point, setup)
    if isinstance(test, Mapping):
        stdin = next((test[name] for name in _INPUT_NAMES if name in test), "")
        stdout = next((test[name] for name in _OUTPUT_NAMES if name in test), None)
        if stdout is not None:
            return ProgramCase(_text(stdin), _text(stdout))
    raise ValueError(f'a test is {test!r:.80}: give a string with Python, or a mapping with "input" and "output"')


def _paired(tests: JsonMapping, setup: str, tolerance: float | None) -> tuple[Case, ...]:
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
        raise ValueError('tests are a mapping without "inputs" and "outputs" of equal length')
    function = tests.get("fn_name") or ""
    pairs = zip(inputs, outputs, strict=True)
    if not function:
        return tuple(ProgramCase(_text(stdin), _text(stdout)) for stdin, stdout in pairs)
    return tuple(_call_case(function, arguments, output, setup, tolerance) for arguments, output in pairs)


def _call_case(function: str, arguments: Any, output: Any, setup: str, tolerance: float | None) -> CallCase:
    """One call. An output is JSON text only where the input is a string; otherwise the output "12" is a string
    (APPS)."""
    expected = _result(output) if isinstance(arguments, str) else output
    return CallCase(function, _arguments(arguments), expected, tolerance, setup)


def _arguments(value: Any) -> list[Any]:
    """Arguments of a call from a list, or from a string with a line of JSON for each argument (LiveCodeBench)."""
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
    """Input or output of a program as text. Some datasets have lists of lines."""
    if isinstance(value, str):
        return value
    return "\n".join(map(_text, value)) if isinstance(value, Sequence) else json.dumps(value)
