"""``math``: the answer is the same mathematics, by math-verify (LaTeX and plain expressions, sympy behind it)."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib import import_module
from typing import Any

from streamrl.recipe.fields import Positive
from streamrl.rewards.builtin.declared import BuiltinReward, Options, RewardCallable, declare
from streamrl.rewards.builtin.math_text import boxed_answer, expected_text, plain_latex_thousands, plain_thousands


class MathOptions(Options, frozen=True):
    r"""1 where the completion's last answer (``\boxed{}`` first, else LaTeX in ``$``, else a plain number or
    expression) equals the dataset's, else 0; an answer that is none is 0 as well.

    ``column``: holds the answer: a number, LaTeX with or without ``$`` or ``\boxed{}``, or a list of answers of which
    one must be met. ``boxed``: only what is in ``\boxed{}`` counts. ``digits``: decimal places to compare floats to.
    ``strict``: names of variables matter, and sets are no tuples.
    """

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
        text = plain_latex_thousands(completion)
        return library.parse(text, given, fallback_mode="no_fallback", parsing_timeout=None)

    def math(completion: str, **columns: Any) -> float:
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

    return declare(math, columns=[options.column])


MATH = BuiltinReward("math", MathOptions, _math, needs={"math_verify": "rewards"})
