"""The rewards ``exact``, ``regex`` and ``format``, which compare the text of a completion: 1 or 0. Listed in
``catalog``.

A pattern that backtracks without end holds the interpreter: then the time limit of the reward ends its process."""

from __future__ import annotations

import re
from typing import Any

from streamrl.base.types import Texts
from streamrl.rewards.declared import BadOption, BuiltinReward, Options, RewardCallable, compiled, declare, last_match


class ExactOptions(Options, frozen=True):
    """1 where the answer of the completion equals the dataset's.

    ``column``: dataset column with the answer, or with a list of answers of which one must be met. ``extract``: a
    regular expression; the answer of the completion is its last match (the first group, if the expression has one), and
    no match is 0; empty: the whole completion. ``ignore_case``: upper and lower case are equal; ``ignore_spaces``: runs
    of white space count as one space, white space at the ends does not count."""

    column: str = "answer"
    extract: str = ""
    ignore_case: bool = False
    ignore_spaces: bool = True


def _exact(options: ExactOptions) -> RewardCallable:
    extract = compiled("extract", options.extract) if options.extract else None

    def normal(text: object) -> str:
        result = str(text)
        if options.ignore_spaces:
            result = " ".join(result.split())
        return result.casefold() if options.ignore_case else result

    def exact(completion: str, **columns: Any) -> float:
        answer = completion if extract is None else last_match(extract, completion)
        expected = columns[options.column]
        allowed = expected if isinstance(expected, list) else [expected]
        return float(answer is not None and normal(answer) in {normal(value) for value in allowed})

    return declare(exact, columns=[options.column])


class RegexOptions(Options, frozen=True):
    """1 where a regular expression matches in the completion (``.`` also matches a line end).

    ``pattern``: the expression, or ``column``: dataset column with the expression of each prompt. ``whole``: the whole
    completion must match. ``absent``: 1 where the expression does *not* match."""

    pattern: str = ""
    column: str = ""
    whole: bool = False
    absent: bool = False


def _regex(options: RegexOptions) -> RewardCallable:
    if bool(options.pattern) == bool(options.column):
        raise BadOption('"pattern": give either it or "column"')
    fixed_pattern = compiled("pattern", options.pattern) if options.pattern else None

    def regex(completion: str, **columns: Any) -> float:
        pattern = fixed_pattern or re.compile(columns[options.column], re.DOTALL)
        match = pattern.fullmatch(completion) if options.whole else pattern.search(completion)
        return float((match is None) == options.absent)

    return declare(regex, columns=filter(None, [options.column]))


class FormatOptions(Options, frozen=True):
    """1 where the completion is exactly these blocks, each once, in this order, with nothing but white space between:
    ``tags = ["think", "answer"]`` requires ``<think>...</think> <answer>...</answer>``.

    ``opened``: the prompt ends with the first opening tag, so the completion begins inside of the first block."""

    tags: Texts
    opened: bool = False


def _format(options: FormatOptions) -> RewardCallable:
    if not options.tags or not all(re.fullmatch(r"[\w|.-]+", tag) for tag in options.tags):
        raise BadOption('"tags": give names such as ["think", "answer"], without < and >')
    if len(set(options.tags)) < len(options.tags):
        raise BadOption('"tags": each name once')
    marks = [mark for tag in options.tags for mark in (f"<{tag}>", f"</{tag}>")]
    any_mark = re.compile("|".join(map(re.escape, marks)))
    expected_marks = marks[1:] if options.opened else marks

    def format_(completion: str) -> float:
        matches = list(any_mark.finditer(completion))
        if [match.group() for match in matches] != expected_marks:
            return 0.0
        # Text outside of blocks: before the first opening tag, between a closing and the next opening tag, and after
        # the last closing tag.
        outside = []
        if not options.opened:
            outside.append(completion[: matches[0].start()])
            del matches[0]
        closings = matches[0::2]
        openings = matches[1::2]
        ends = [*(opening.start() for opening in openings), len(completion)]
        outside += [completion[closing.end() : end] for closing, end in zip(closings, ends, strict=True)]
        return float(not any(text.strip() for text in outside))

    return declare(format_)


EXACT = BuiltinReward("exact", ExactOptions, _exact)
REGEX = BuiltinReward("regex", RegexOptions, _regex)
FORMAT = BuiltinReward("format", FormatOptions, _format)
