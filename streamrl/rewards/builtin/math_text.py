r"""What of a text is the answer, before math-verify reads it.

Of several ``\boxed{}`` the library takes all from the first to the last for one, and a space between thousands for a
product: ``10\,000`` would be 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

_BETWEEN = r"\\[,;:! ]|~"
_THOUSANDS, _SPACED_THOUSANDS = (
    re.compile(rf"(?<![\d.,])\d{{1,3}}(?:(?:{between})\d{{3}})+(?!\d)") for between in (_BETWEEN, f"{_BETWEEN}| ")
)
_NO_DIGIT = re.compile(r"\D")
_BOX = re.compile(r"\\boxed\s*\{")
_JOINED = re.compile(r"[\s,$]*(?:and|or)?[\s,$]*")
_LAST_STOP = re.compile(r"(?<=\d)\s*\.\s*$")


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
    """Where each content begins and ends, those inside of others left out. One that is not closed is none."""
    at = 0
    while found := _BOX.search(text, at):
        depth, at = 1, found.end()
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
