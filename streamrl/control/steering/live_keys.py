"""Keys of a recipe that may change while a run goes on, the field of ``ControlSettings`` that holds each, and for all
others the reason why not. One table: what it names is journalled, applied and resumed in one way (``changes.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.control.settings import ControlSettings

STEPS = "run.steps"
_TAIL = ("prompt_oversampling", "response_oversampling", "long_round_batches")
_SORTED = ("cohort_batches", "partial", "cut_tokens", "oversubscription")
_SIZING = (
    "kind", "sizes", "keeps", "straggler_ratio", "budget", "straggler", "tradeoff", "tightening", "discount",
    "optimism", "dwell", "calibration_steps", "shares",
)  # fmt: skip

LIVE: dict[str, str] = {
    STEPS: "steps",
    "training.learning_rate": "learning_rate",
    "sampling.temperature": "sampling.temperature",
    "sampling.max_tokens": "sampling.max_tokens",
    "rollout.rounds": "rounds",
    "rollout.max_staleness": "max_staleness",
    "rollout.dynamic_sampling": "dynamic_sampling",
    "rollout.presubmit": "presubmit",
    "reward_limits.max_failed_share": "max_failed_share",
    "reward_limits.window": "failure_window",
    "evaluation.every": "evaluate_every",
    "evaluation.at_end": "evaluate_at_end",
    "checkpoint.every": "checkpoint_every",
    "checkpoint.at_end": "checkpoint_at_end",
    **{f"tail_batching.{name}": f"tail_batching.{name}" for name in _TAIL},
    **{f"length_sorted.{name}": f"length_sorted.{name}" for name in _SORTED},
    **{f"group_sizing.{name}": f"group_sizing.{name}" for name in _SIZING},
}
"""Field of ``ControlSettings`` by key of the recipe."""

SAMPLED_AGAIN = frozenset({"rounds", "tail_batching", "length_sorted", "group_sizing", "max_staleness", "presubmit"})
"""Fields from which round policy and group sizer are made. Where one changes, groups under way are dropped and their
prompts sampled again."""

WHY_NOT = {
    "": "it is read when the processes of the run start",
    "rewards": "rewards change with `streamrl reward attach`, `replace` and `detach`",
    "rollout.prompts_per_batch": "slots, rows of the trainer and the learning rate were chosen for this batch",
    "rollout.group_size": "slots, rows of the trainer and the learning rate were chosen for this batch; group_sizing "
    "may change",
    "rollout.when_stale": "it is promised for the whole run, and `streamrl show` checks it",
    "rollout.policy": "the class of custom rounds is loaded at the start",
    "tail_batching": "the source of prompts and the tokens that engines keep of deferred ones are set up at the start",
    "length_sorted.single": "a cohort is drawn as single trajectories or as groups",
    "sampling": "a sample carries only its temperature to the trainer, which takes the rest of the distribution from "
    "the recipe",
    "evaluation": "scores of one run must be of the same prompts",
    "training": "ranks build the optimizer and their rows at the start; training.learning_rate may change",
    "run": "it is the identity of the run, or was read at the start; run.steps may change",
}
"""Reasons by key or section, the longest that fits; of all others the first."""


def why_not(key: str) -> str:
    """The reason why ``key``, which is none of ``LIVE``, stays as it is while a run goes on."""
    section = key.partition(".")[0]
    return WHY_NOT.get(key) or WHY_NOT.get(section) or WHY_NOT[""]


def with_values(settings: ControlSettings, values: Mapping[str, Any]) -> ControlSettings:
    """``settings`` with ``values`` by key of the recipe; the number of steps is in ``RunState``. Raises
    ``msgspec.ValidationError`` for a value of another kind."""
    table = msgspec.to_builtins(settings)
    for key, value in values.items():
        if key == STEPS:
            continue
        *outer, name = LIVE[key].split(".")
        target = table
        for part in outer:
            target = target[part]
        target[name] = value
    return msgspec.convert(table, ControlSettings)
