"""``exact``, ``regex``, ``format``: rewards that look at the text of a completion. 1 or 0. A pattern that backtracks
for ever holds the interpreter: the time limit of the reward ends its worker process."""

from __future__ import annotations

import re
from typing import Any

from streamrl.rewards.declared import BadOption, BuiltinReward, Options, RewardCallable, compiled, declare, last_match


class ExactOptions(Options, frozen=True):
    """1 where the answer of the completion equals the dataset's.

    ``column``: holds the answer, or a list of answers of which one must be met. ``extract``: a regular expression; the
    answer of the completion is its last match (the first group, where there is one), and no match is 0; empty: the
    whole completion. ``ignore_case``; ``ignore_spaces``: runs of white space count as one, those at the ends as none.
    """

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
    """1 where a regular expression is found in the completion (``.`` also matches a line end).

    Give ``pattern``, or ``column``: the dataset column that holds the pattern of each prompt. ``whole``: the whole
    completion must match. ``absent``: 1 where the expression is *not* found."""

    pattern: str = ""
    column: str = ""
    whole: bool = False
    absent: bool = False


def _regex(options: RegexOptions) -> RewardCallable:
    if bool(options.pattern) == bool(options.column):
        raise BadOption('"pattern": give either it or "column"')
    fixed = compiled("pattern", options.pattern) if options.pattern else None

    def regex(completion: str, **columns: Any) -> float:
        pattern = fixed or re.compile(columns[options.column], re.DOTALL)
        found = pattern.fullmatch(completion) if options.whole else pattern.search(completion)
        return float((found is None) == options.absent)

    return declare(regex, columns=[options.column] if options.column else [])


class FormatOptions(Options, frozen=True):
    """1 where the completion is exactly these blocks, each once, in this order, with nothing but white space between:
    ``tags = ["think", "answer"]`` asks for ``<think>...</think> <answer>...</answer>``.

    ``opened``: the prompt already wrote the first opening tag, so the completion begins inside of the first block."""

    tags: tuple[str, ...]
    opened: bool = False


def _format(options: FormatOptions) -> RewardCallable:
    if not options.tags or not all(re.fullmatch(r"[\w|.-]+", tag) for tag in options.tags):
        raise BadOption('"tags": give names such as ["think", "answer"], without < and >')
    if len(set(options.tags)) < len(options.tags):
        raise BadOption('"tags": each name once')
    marks = [mark for tag in options.tags for mark in (f"<{tag}>", f"</{tag}>")]
    any_mark = re.compile("|".join(map(re.escape, marks)))
    wanted = marks[1:] if options.opened else marks

    def format_(completion: str) -> float:
        found = list(any_mark.finditer(completion))
        if [mark.group() for mark in found] != wanted:
            return 0.0
        # Outside of a block: before the first mark, between a closing and an opening one, after the last.
        outside = [] if options.opened else [completion[: found[0].start()]]
        closings = found[0::2] if options.opened else found[1::2]
        openings = found[1::2] if options.opened else found[2::2]
        ends = [*(mark.start() for mark in openings), len(completion)]
        outside += [completion[closing.end() : end] for closing, end in zip(closings, ends, strict=True)]
        return float(not any(part.strip() for part in outside))

    return declare(format_)


EXACT = BuiltinReward("exact", ExactOptions, _exact)
REGEX = BuiltinReward("regex", RegexOptions, _regex)
FORMAT = BuiltinReward("format", FormatOptions, _format)
