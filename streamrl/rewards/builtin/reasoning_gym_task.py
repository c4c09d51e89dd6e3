"""The reward ``reasoning_gym``: the verifier of the task that made the prompt (prompts of ``reasoning_gym:TASK``).
Listed in ``catalog``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from msgspec import json

from streamrl.base.types import JsonMapping
from streamrl.recipe.problems import nearest
from streamrl.rewards.declared import BadOption, BuiltinReward, Options, RewardCallable, compiled, declare, last_match

_COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})


class ReasoningGymOptions(Options, frozen=True):
    """The task's score, from 0 to 1, of the answer in the completion.

    ``task``: name of the task; empty: the prompt's column ``task``. ``extract``: a regular expression whose last match
    (the first group, if the expression has one) is the answer, and no match is 0; empty: the whole completion."""

    task: str = ""
    extract: str = r"<answer>\s*(.*?)\s*</answer>"


def _reasoning_gym(options: ReasoningGymOptions) -> RewardCallable:
    factory: Any = import_module("reasoning_gym.factory")
    if options.task and options.task not in factory.DATASETS:
        raise BadOption(f'"task" = "{options.task}" is no task of reasoning-gym {_hint(factory, options.task)}')
    extract = compiled("extract", options.extract) if options.extract else None

    @lru_cache(maxsize=256)
    def verifier(task: str, settings: bytes) -> Any:
        if task not in factory.DATASETS:
            raise ValueError(f'the task "{task}" of this prompt is none of reasoning-gym: correct the column')
        return factory.create_dataset(task, **json.decode(settings))

    def reasoning_gym(completion: str, **columns: Any) -> float:
        task = options.task or columns.get("task")
        if not task:
            raise ValueError('the prompt has no column "task": set the option "task", or add the column')
        answer = completion.strip() if extract is None else last_match(extract, completion)
        if answer is None:
            return 0.0
        settings: JsonMapping = columns.get("task_options") or {}
        dataset = verifier(task, json.encode(settings, order="deterministic"))
        entry = {
            "question": columns.get("question") or columns.get("prompt") or "",
            "answer": columns["answer"],
            "metadata": _tuples(columns["metadata"]) if task in _COMPARES_TUPLES else columns["metadata"],
        }
        return float(dataset.score_answer(answer=answer, entry=entry))

    columns = ["answer", "metadata"]
    if not options.task:
        columns.append("task")
    return declare(reasoning_gym, columns=columns, optional=["question", "task_options"], provided=["prompt"])


def _tuples(value: Any) -> Any:
    """``value`` with tuples in place of lists: columns of a dataset have no tuples."""
    if isinstance(value, Mapping):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _hint(factory: Any, unknown_task: str) -> str:
    nearest_task = nearest(unknown_task, factory.DATASETS)
    if nearest_task:
        return f'(did you mean "{nearest_task}"?)'
    return f"(it has {len(factory.DATASETS)}, such as chain_sum)"


REASONING_GYM = BuiltinReward(
    "reasoning_gym", ReasoningGymOptions, _reasoning_gym, needs={"reasoning_gym": "reasoning-gym"}
)
