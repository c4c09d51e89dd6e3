r"""``math``: the answer is the same mathematics, by math-verify (LaTeX and plain expressions, sympy behind it). Finds
the answer in a text: of several ``\boxed{}`` the library takes all from the first to the last for one, and a space
between thousands for a product, so ``10\,000`` would be 0."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from importlib import import_module
from typing import Any

from streamrl.recipe.fields import Positive
from streamrl.rewards.declared import BuiltinReward, Options, RewardCallable, declare

_BETWEEN = r"\\[,;:! ]|~"
_THOUSANDS, _SPACED_THOUSANDS = (
    re.compile(rf"(?<![\d.,])\d{{1,3}}(?:(?:{between})\d{{3}})+(?!\d)") for between in (_BETWEEN, f"{_BETWEEN}| ")
)
_NO_DIGIT = re.compile(r"\D")
_BOX = re.compile(r"\\boxed\s*\{")
_JOINED = re.compile(r"[\s,$]*(?:and|or)?[\s,$]*")
_LAST_STOP = re.compile(r"(?<=\d)\s*\.\s*$")
_AFTER_SIGNS = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_NUMBER_AFTER_SIGNS = re.compile(r"^[ \t]*####[ \t]*(\\?\$?-?\d[\d,./ \t]*+%?)$", re.MULTILINE)


class MathOptions(Options, frozen=True):
    r"""1 where the completion's last answer (``\boxed{}`` first, else a line ``#### 42``, else LaTeX in ``$``, else a
    plain number or expression) equals the dataset's, else 0; an answer that is none is 0 as well.

    ``column``: holds the answer: a number, LaTeX with or without ``$``, or a list of answers of which one must be met;
    also a whole solution that ends with ``#### 42`` (GSM8K) or has its answer in ``\boxed{}`` (MATH). ``boxed``: only
    what is in ``\boxed{}`` counts. ``digits``: decimal places to compare floats to. ``strict``: names of variables
    matter, and sets are no tuples."""

    column: str = "answer"
    boxed: bool = False
    digits: Positive = 6
    strict: bool = True


def _math(options: MathOptions) -> RewardCallable:
    library: Any = import_module("math_verify")
    # It warns about what is meant here: its own limits are alarms of the main thread, ours end the worker.
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    boxed_first = library.LatexExtractionConfig(boxed_match_priority=0)
    given = [boxed_first] if options.boxed else [boxed_first, library.ExprExtractionConfig()]

    @lru_cache(maxsize=1024)  # the samples of a group share it
    def read_expected(answer: str) -> Any:
        # LaTeX is looked for between dollars only; without them "x^2 + 1" would be the number 1.
        answer = (_AFTER_SIGNS.findall(answer) or [answer])[-1]
        answer = boxed_answer(answer) or plain_thousands(answer)
        marked = "$" in answer or "\\boxed" in answer
        for text in (answer,) if marked else (f"${answer}$", answer):
            found = library.parse(text, fallback_mode="no_fallback", parsing_timeout=None)
            if found:
                return found
        raise ValueError(f"the {options.column} {answer!r} of this prompt cannot be read as mathematics: correct it")

    def read_given(completion: str) -> Any:
        box = boxed_answer(completion)
        found = library.parse(box, given, fallback_mode="no_fallback", parsing_timeout=None) if box else []
        if found or options.boxed:
            return found
        signed = _NUMBER_AFTER_SIGNS.findall(completion)  # a number alone: other text there is a heading
        text = plain_thousands(signed[-1]) if signed else plain_latex_thousands(completion)
        return library.parse(text, given, fallback_mode="no_fallback", parsing_timeout=None)

    def math_reward(completion: str, **columns: Any) -> float:
        answers = columns[options.column]
        listed = answers if isinstance(answers, list) else [answers]
        if not listed:
            raise ValueError(f"the {options.column} of this prompt is an empty list: give one answer or more")
        expected = [read_expected(expected_text(answer, options.column)) for answer in listed]
        answer = read_given(completion)
        same = (
            library.verify(gold, answer, float_rounding=options.digits, strict=options.strict, timeout_seconds=None)
            for gold in expected
        )
        return float(bool(answer) and any(same))

    return declare(math_reward, columns=[options.column])


def boxed_answer(text: str) -> str:
    r"""The last ``\boxed{}`` that holds something, as one, with those before it that belong to the same answer
    (``and``, a comma, white space between); empty where there is none."""
    boxes = [box for box in _boxes(text) if text[box.start : box.stop].strip()]
    if not boxes:
        return ""
    first = len(boxes) - 1
    while first and _JOINED.fullmatch(text[boxes[first - 1].stop + 1 : text.rindex("\\boxed", 0, boxes[first].start)]):
        first -= 1
    contents = (_LAST_STOP.sub("", text[box.start : box.stop].strip()) for box in boxes[first:])
    return "\\boxed{" + ", ".join(plain_thousands(content) for content in contents) + "}"


def _boxes(text: str) -> Iterator[range]:
    """Yield the range of each box's content, boxes inside of others left out. A box that is not closed does not
    count."""
    at = 0
    while found := _BOX.search(text, at):
        depth = 1
        at = found.end()
        while at < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[at], 0) if text[at - 1] != "\\" else 0
            at += 1
        if depth:
            return
        yield range(found.end(), at - 1)


def plain_thousands(answer: str) -> str:
    r"""``10\,000`` and ``10 000`` as ``10000``, ``\$5`` as ``5``: for a text that is an answer and nothing else."""
    return _SPACED_THOUSANDS.sub(lambda found: _NO_DIGIT.sub("", found[0]), answer.replace("\\$", ""))


def plain_latex_thousands(text: str) -> str:
    r"""``10\,000`` as ``10000``, in any text."""
    return _THOUSANDS.sub(lambda found: _NO_DIGIT.sub("", found[0]), text)


def expected_text(answer: Any, column: str) -> str:
    """An answer of the dataset as text. Raises ``ValueError`` for what is none."""
    if answer is None or isinstance(answer, bool) or (isinstance(answer, float) and not math.isfinite(answer)):
        raise ValueError(f"the {column} {answer!r} of this prompt is no answer: correct it")
    if isinstance(answer, float):
        return format(Decimal(repr(answer)), "f")  # math-verify reads 1e-05 as E - 5
    return str(answer)


MATH = BuiltinReward("math", MathOptions, _math, needs={"math_verify": "rewards"})
