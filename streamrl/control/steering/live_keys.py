"""Keys of a recipe that may change during a run, each with its field of ``ControlSettings``, and for all other keys the
reason why they may not.

The controller checks changes by these tables (``launch.steering``), ``changes.py`` applies them in control, and the
controller of a resumed run takes over the changed values. Every key in ``LIVE`` is journalled, applied and resumed in
the same way."""

from __future__ import annotations

import msgspec

from streamrl.base.types import JsonMapping, TextsByName
from streamrl.control.settings import ControlSettings

STEPS = "run.steps"
_TAIL = ("prompt_oversampling", "response_oversampling", "long_round_batches")
_SORTED = ("cohort_batches", "partial", "cut_tokens", "oversubscription")
_SIZING = (
    "kind", "sizes", "keeps", "straggler_ratio", "budget", "straggler", "tradeoff", "tightening", "discount",
    "optimism", "dwell", "calibration_steps", "shares",
)  # fmt: skip

LIVE: TextsByName = {
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
"""Fields from which round policy and group sizer are made. After a change of one, groups under way are dropped and
their prompts are sampled again."""

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
"""Reasons by key or section; the reason of "" holds for all other keys."""


def why_not(key: str) -> str:
    """Reason why ``key``, which is not in ``LIVE``, may not change during a run."""
    section = key.partition(".")[0]
    return WHY_NOT.get(key) or WHY_NOT.get(section) or WHY_NOT[""]


def with_values(settings: ControlSettings, values: JsonMapping) -> ControlSettings:
    """``settings`` with ``values``, new values by recipe key. ``run.steps`` is skipped: ``RunState`` has it. Raises
    ``msgspec.ValidationError`` for a value of a wrong type."""
    fields = msgspec.to_builtins(settings)
    for key, value in values.items():
        if key == STEPS:
            continue
        *sections, name = LIVE[key].split(".")
        section = fields
        for section_name in sections:
            section = section[section_name]
        section[name] = value
    return msgspec.convert(fields, ControlSettings)
