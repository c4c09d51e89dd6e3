"""Forms of the judge's questions: about a completion, about each criterion of a rubric, about each step, and about
siblings beside each other. Each is a coroutine function of the form of a reward."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar

from streamrl.base.concurrent_calls import all_of
from streamrl.base.types import JsonMapping, JsonObject
from streamrl.rewards.declared import RewardCallable
from streamrl.rewards.judge.comparison import orders_of, pairs_of, read_ranking, values_of_pairs

T = TypeVar("T")
Reader = Callable[[str], T]
"""Reads an answer of the judge. Raises ``ValueError`` for an answer without a value."""

Ask = Callable[[Reader[Any], Mapping[str, Any]], Awaitable[Any]]
"""Asks the question with these fields, and returns what the reader reads in the answer."""


class SiblingComparison(StrEnum):
    """Way in which siblings are compared. ``none``: each is judged alone. ``pairs``: two at a time, in both orders.
    ``ranking``: all at once, in several orders."""

    NONE = "none"
    PAIRS = "pairs"
    RANKING = "ranking"


SINGLE_QUESTION = """\
Rate the answer to the task below from 0 (useless or wrong) to 10 (correct and complete).

<task>
{prompt}
</task>

<answer>
{completion}
</answer>

Think briefly. Then end with a line of the form "Score: N"."""

CRITERION_QUESTION = """\
Does the answer to the task below meet this criterion?

<criterion>
{criterion}
</criterion>

<task>
{prompt}
</task>

<answer>
{completion}
</answer>

Think briefly. Then end with one word: yes or no."""

STEP_QUESTION = """\
Is the next step of an answer to the task below right, given the steps before it?

<task>
{prompt}
</task>

<before>
{before}
</before>

<step>
{step}
</step>

Think briefly. Then end with one word: yes or no."""

PAIR_QUESTION = """\
Which of two answers to the task below is better?
{rubric}
<task>
{prompt}
</task>

<first>
{first}
</first>

<second>
{second}
</second>

Their order is random, and length alone is no merit. Think briefly. Then end with one word: first, second or tie."""

RANKING_QUESTION = """\
Rank the numbered answers to the task below from the best to the worst.
{rubric}
<task>
{prompt}
</task>

{completions}

Their order is random, and length alone is no merit. Think briefly. Then end with a line such as "Ranking: 2 > 1 = 3",
with every number once and = between answers of equal merit."""

YES_OR_NO = {"yes": 1.0, "no": 0.0}
FIRST_OR_SECOND = {"first": 1.0, "second": 0.0, "tie": 0.5}


def criteria_of(rubric: Any) -> list[tuple[str, float]]:
    """(criterion, weight) of each criterion in a column of a row: a text with a criterion a line, or a list of texts or
    of mappings with ``criterion`` (or ``description``) and ``weight`` (or ``points``). Raises ``ValueError`` for a
    rubric of another form, and one without a positive weight."""
    entries = []
    if isinstance(rubric, list):
        entries = rubric
    elif isinstance(rubric, str):
        entries = [line.strip().lstrip("-*").strip() for line in rubric.splitlines() if line.strip()]
    criteria = []
    for entry in entries:
        fields = entry if isinstance(entry, Mapping) else {"criterion": entry}
        text = fields.get("criterion", fields.get("description"))
        weight = fields.get("weight", fields.get("points", 1.0))
        if isinstance(text, str) and isinstance(weight, (int, float)):
            criteria.append((text, float(weight)))
    if len(criteria) < len(entries) or not any(weight > 0 for _, weight in criteria):
        raise ValueError(
            f"the rubric {rubric!r:.80} is no list of criteria: write a text with a criterion a line, or a list of "
            'texts or of {"criterion": "...", "weight": 1.0}, one weight above 0 at least'
        )
    return criteria


def rubric_text(rubric: Any) -> str:
    """The criteria of a rubric as a list, for a question about all of them; empty: there is no rubric."""
    if rubric is None:
        return ""
    criteria = "\n".join(f"- {text} (weight {weight:g})" for text, weight in criteria_of(rubric))
    return f"\n<criteria>\n{criteria}\n</criteria>\n"


def about_completion(ask: Ask, read: Reader[float]) -> RewardCallable:
    """A score of each completion alone."""

    async def judge(completion: str, **columns: Any) -> Any:
        return await ask(read, {"completion": completion, **columns})

    return judge


def about_criteria(ask: Ask, read: Reader[float], rubric: str) -> RewardCallable:
    """Weighted share of the criteria of the row that a completion meets, 0 to 1 (Rubrics as Rewards, arXiv 2507.17746,
    equation 1). A criterion of negative weight is a fault: meeting it lowers the share, to 0 at least."""

    async def judge(completion: str, **columns: Any) -> Any:
        criteria = criteria_of(columns[rubric])
        fields = {"completion": completion, **columns}
        values = await all_of([partial(ask, read, {**fields, "criterion": text}) for text, _ in criteria])
        best = sum(weight for _, weight in criteria if weight > 0)
        total = sum(weight * value for (_, weight), value in zip(criteria, values, strict=True))
        return min(1.0, max(0.0, total / best))

    return judge


def about_steps(ask: Ask, read: Reader[float], separator: re.Pattern[str]) -> RewardCallable:
    """A number for each step of a completion, as spans: for a reward with ``credit = "steps"``."""

    async def judge(completion: str, **columns: Any) -> Any:
        ends = [match.end() for match in separator.finditer(completion)]
        spans = [(start, end) for start, end in pairwise([0, *ends, len(completion)]) if completion[start:end].strip()]
        fields = [{"before": completion[:start], "step": completion[start:end], **columns} for start, end in spans]
        values = await all_of([partial(ask, read, {"completion": completion, **step}) for step in fields])
        return [(start, end, value) for (start, end), value in zip(spans, values, strict=True)]

    return judge


def about_pairs(ask: Ask, read: Reader[float], opponents: int) -> RewardCallable:
    """Share of its comparisons that each sibling wins. Equal completions are a tie, about which nothing is asked; one
    without siblings has no value."""

    async def judge(completions: Sequence[str], **columns: Any) -> Any:
        count = len(completions)
        fields = _of_group(columns)
        if count < 2:
            return [None] * count
        shares = dict.fromkeys(pairs_of(count, opponents), 0.5)
        unequal = [pair for pair in shares if completions[pair[0]] != completions[pair[1]]]
        questions = [
            partial(ask, read, {"first": completions[first], "second": completions[second], **fields})
            for first, second in unequal
        ]
        shares.update(zip(unequal, await all_of(questions), strict=True))
        return values_of_pairs(count, shares)

    return judge


def about_ranking(ask: Ask, orders: int) -> RewardCallable:
    """Mean value of each sibling in rankings of all of them. Equal completions are shown once."""

    async def judge(completions: Sequence[str], **columns: Any) -> Any:
        fields = _of_group(columns)
        texts = list(dict.fromkeys(completions))
        if len(completions) < 2:
            return [None] * len(completions)
        if len(texts) == 1:
            return [0.5] * len(completions)
        all_orders = orders_of(len(texts), orders)
        questions = [
            partial(ask, partial(read_ranking, order=order), {"completions": _numbered(texts, order), **fields})
            for order in all_orders
        ]
        rankings = await all_of(questions)
        values = {text: fmean(ranking[place] for ranking in rankings) for place, text in enumerate(texts)}
        return [values[text] for text in completions]

    return judge


def _numbered(texts: Sequence[str], order: Sequence[int]) -> str:
    return "\n\n".join(
        f"<answer {number}>\n{texts[place]}\n</answer {number}>" for number, place in enumerate(order, 1)
    )


def _of_group(columns: JsonMapping) -> JsonObject:
    """The columns of a call about a group, which has them once for each sibling, and the text of the prompt."""
    fields = {name: values[0] for name, values in columns.items()}
    prompt = fields.pop("prompts", "")
    if not isinstance(prompt, str):
        prompt = "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
    return {**fields, "prompt": prompt}
