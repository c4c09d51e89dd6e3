r"""The reward ``math``: 1 where math-verify finds the answer mathematically equal to the dataset's. Listed in
``catalog``.

math-verify reads LaTeX and plain expressions with sympy. The functions below find the answer in the text first, because
the library reads several ``\boxed{}`` as one answer from the first to the last, and a space between thousands as a
product, so ``10\,000`` would be 0."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from typing import Any

from streamrl.recipe.field_types import Positive
from streamrl.rewards.declared import BuiltinReward, Options, RewardCallable, declare

_LATEX_SPACE = r"\\[,;:! ]|~"
_THOUSANDS, _SPACED_THOUSANDS = (
    re.compile(rf"(?<![\d.,])\d{{1,3}}(?:(?:{separator})\d{{3}})+(?!\d)")
    for separator in (_LATEX_SPACE, f"{_LATEX_SPACE}| ")
)
_NO_DIGIT = re.compile(r"\D")
_BOX = re.compile(r"\\boxed\s*\{")
_JOINED = re.compile(r"[\s,$]*(?:and|or)?[\s,$]*")
_LAST_STOP = re.compile(r"(?<=\d)\s*\.\s*$")
_AFTER_SIGNS = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_NUMBER_AFTER_SIGNS = re.compile(r"^[ \t]*####[ \t]*(\\?\$?-?\d[\d,./ \t]*+%?)$", re.MULTILINE)


class MathOptions(Options, frozen=True):
    r"""1 where the completion's last answer (``\boxed{}`` first, else a line ``#### 42``, else LaTeX in ``$``, else a
    plain number or expression) equals the dataset's, else 0; a completion without an answer is 0.

    ``column``: dataset column with the answer: a number, LaTeX with or without ``$``, a list of answers of which one
    must be met, or a whole solution that ends with ``#### 42`` (GSM8K) or has its answer in ``\boxed{}`` (MATH).
    ``boxed``: only the content of ``\boxed{}`` counts. ``digits``: decimal places to which floats are compared.
    ``strict``: names of variables matter, and a set does not equal a tuple."""

    column: str = "answer"
    boxed: bool = False
    digits: Positive = 6
    strict: bool = True


def _math(options: MathOptions) -> RewardCallable:
    library: Any = import_module("math_verify")
    # math-verify warns that its own time limits are off. They are alarms of the main thread; the time limits of the
    # reward end its process instead.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    boxed_first = library.LatexExtractionConfig(boxed_match_priority=0)
    extraction = [boxed_first] if options.boxed else [boxed_first, library.ExprExtractionConfig()]

    @lru_cache(maxsize=1024)  # the samples of a group share the expected answer
    def read_expected(answer: str) -> Any:
        after_signs = _AFTER_SIGNS.findall(answer)
        if after_signs:
            answer = after_signs[-1]
        answer = boxed_answer(answer) or plain_thousands(answer)
        texts = [answer]
        if "$" not in answer and "\\boxed" not in answer:
            # math-verify finds LaTeX between dollars only; without them "x^2 + 1" would be the number 1.
            texts = [f"${answer}$", answer]
        for text in texts:
            expressions = library.parse(text, fallback_mode="no_fallback", parsing_timeout=None)
            if expressions:
                return expressions
        raise ValueError(f"the {options.column} {answer!r} of this prompt cannot be read as mathematics: correct it")

    def read_completion(completion: str) -> Any:
        expressions = []
        box = boxed_answer(completion)
        if box:
            expressions = library.parse(box, extraction, fallback_mode="no_fallback", parsing_timeout=None)
        if expressions or options.boxed:
            return expressions
        numbers = _NUMBER_AFTER_SIGNS.findall(completion)  # only numbers: "#### text" is a heading
        text = plain_thousands(numbers[-1]) if numbers else plain_latex_thousands(completion)
        return library.parse(text, extraction, fallback_mode="no_fallback", parsing_timeout=None)

    def math_reward(completion: str, **columns: Any) -> float:
        answers = columns[options.column]
        answer_list = answers if isinstance(answers, list) else [answers]
        if not answer_list:
            raise ValueError(f"the {options.column} of this prompt is an empty list: give one answer or more")
        expected = [read_expected(expected_text(answer, options.column)) for answer in answer_list]
        answer = read_completion(completion)
        verdicts = (
            library.verify(gold, answer, float_rounding=options.digits, strict=options.strict, timeout_seconds=None)
            for gold in expected
        )
        return float(bool(answer) and any(verdicts))

    return declare(math_reward, columns=[options.column])


def boxed_answer(text: str) -> str:
    r"""The last ``\boxed{}`` with content, joined into one with the boxes before it that belong to the same answer
    (between them only ``and``, a comma or white space); empty: the text has no box with content."""
    boxes = [box for box in _boxes(text) if text[box.start : box.stop].strip()]
    if not boxes:
        return ""
    first = len(boxes) - 1
    while first:
        end_of_previous = boxes[first - 1].stop + 1
        begin = text.rindex("\\boxed", 0, boxes[first].start)
        if not _JOINED.fullmatch(text[end_of_previous:begin]):
            break
        first -= 1
    contents = (_LAST_STOP.sub("", text[box.start : box.stop].strip()) for box in boxes[first:])
    return "\\boxed{" + ", ".join(plain_thousands(content) for content in contents) + "}"


def _boxes(text: str) -> Iterator[range]:
    """Yield the range of each box's content, without boxes inside of others. A box that is not closed does not
    count."""
    position = 0
    while match := _BOX.search(text, position):
        depth = 1
        position = match.end()
        while position < len(text) and depth:
            if text[position - 1] != "\\":  # an escaped brace is no brace
                depth += {"{": 1, "}": -1}.get(text[position], 0)
            position += 1
        if depth:
            return
        yield range(match.end(), position - 1)


def plain_thousands(answer: str) -> str:
    r"""``answer`` with ``10\,000`` and ``10 000`` as ``10000``, and ``\$5`` as ``5``. For a text that is an answer and
    nothing else."""
    return _SPACED_THOUSANDS.sub(_digits_of, answer.replace("\\$", ""))


def plain_latex_thousands(text: str) -> str:
    r"""``text`` with ``10\,000`` as ``10000``. For any text."""
    return _THOUSANDS.sub(_digits_of, text)


def _digits_of(match: re.Match[str]) -> str:
    return _NO_DIGIT.sub("", match[0])


def expected_text(answer: Any, column: str) -> str:
    """An answer of the dataset as text. Raises ``ValueError`` for a value that is no answer."""
    if answer is None or isinstance(answer, bool) or (isinstance(answer, float) and not math.isfinite(answer)):
        raise ValueError(f"the {column} {answer!r} of this prompt is no answer: correct it")
    if isinstance(answer, float):
        return format(Decimal(repr(answer)), "f")  # math-verify reads 1e-05 as E - 5
    return str(answer)


MATH = BuiltinReward("math", MathOptions, _math, needs={"math_verify": "rewards"})
