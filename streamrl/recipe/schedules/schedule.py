"""Learning rate of each version, by the names and options of transformers' schedules. Trainer ranks compute it at every
step; the dry run shows it.

The factor of ``training.learning_rate`` depends on the version alone and has no state, so a resumed run, or one whose
rate is changed while it goes on, has the same rates. Version 1 is step 0 of transformers. The first rate of the warm-up
is 1 / warmup_steps, not 0; after the warm-up the values are those of transformers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from streamrl.base.types import JsonObject
from streamrl.recipe.sections import Recipe, Training


class Place(NamedTuple):
    """Position of a step after the warm-up. ``step``: number of the step, from 0; ``warmup``: steps of the warm-up;
    ``steps``: steps of warm-up and schedule together."""

    step: int
    warmup: int
    steps: int

    def progress(self, ahead: int = 0) -> float:
        """Return the finished share of the steps after the warm-up, at ``ahead`` steps later; at most 1."""
        return min(1.0, (self.step - self.warmup + ahead) / max(1, self.steps - self.warmup))


def _wave(cycles: float, progress: float, lowest: float = 0.0) -> float:
    """A cosine from 1 to ``lowest`` and back, ``cycles`` times."""
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)) * (1.0 - lowest) + lowest)


def _stable(
    place: Place, *, num_decay_steps: float = 0.0, min_lr_ratio: float = 0.0, decay_type: str = "cosine"
) -> float:
    """1 until the decay at the end (warmup_stable_decay)."""
    decay = num_decay_steps or max(1, (place.steps - place.warmup) // 10)
    progress = min(1.0, max(0.0, (place.step - place.steps + decay) / decay))
    if decay_type == "cosine":
        return _wave(0.5, progress, min_lr_ratio)
    decayed = progress if decay_type == "linear" else math.sqrt(progress)
    return (1.0 - decayed) * (1.0 - min_lr_ratio) + min_lr_ratio


def _cosine_with_restarts(place: Place, *, num_cycles: float = 1.0) -> float:
    progress = place.progress()
    if progress >= 1:
        return 0.0
    return _wave(0.5, num_cycles * progress % 1.0)


def _inverse_sqrt(place: Place, *, timescale: float = 0.0) -> float:
    scale = timescale or place.warmup or 10_000
    return 1.0 / math.sqrt(1.0 + (place.step - place.warmup) / scale)


SCHEDULES: Mapping[str, Callable[..., float]] = {
    "constant": lambda at: 1.0,
    "constant_with_warmup": lambda at: 1.0,
    "linear": lambda at: 1.0 - at.progress(),
    "cosine": lambda at, *, num_cycles=0.5: _wave(num_cycles, at.progress()),
    "cosine_with_restarts": _cosine_with_restarts,
    "cosine_with_min_lr": lambda at, *, min_lr_rate=0.1, num_cycles=0.5: _wave(num_cycles, at.progress(), min_lr_rate),
    "cosine_warmup_with_min_lr": lambda at, *, min_lr_rate=0.1, num_cycles=0.5: _wave(
        num_cycles, at.progress(ahead=1), min_lr_rate
    ),
    "polynomial": lambda at, *, power=1.0, min_lr_rate=0.0: float(
        (1.0 - min_lr_rate) * (1.0 - at.progress()) ** power + min_lr_rate
    ),
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _stable,
}
"""Functions that return the share of the learning rate at a ``Place``; keyword arguments are options of the
schedule."""
WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on the number of steps."""


def options_of(schedule: str) -> JsonObject:
    """Return the options of a schedule with their defaults."""
    parameters = inspect.signature(SCHEDULES[schedule]).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def rate_factor(training: Training, version: int, steps: int) -> float:
    """Return the factor of ``training.learning_rate`` for the step that makes ``version`` (from 1) in a run of
    ``steps``."""
    if version <= training.warmup_steps:
        return version / training.warmup_steps
    place = Place(version - 1, training.warmup_steps, training.schedule_steps or steps)
    return SCHEDULES[training.schedule](place, **training.schedule_options)


def changed_rate_notices(before: Recipe, after: Recipe) -> list[str]:
    """Return a sentence about the change of the learning rates by another ``run.steps``; empty: they do not change."""
    training = after.training
    steps = (before.run.steps, after.run.steps)
    if training.schedule in WITHOUT_END or training.schedule_steps or steps[0] == steps[1]:
        return []
    old, new = (training.learning_rate * rate_factor(training, min(steps), end) for end in steps)
    cause = f'training.schedule = "{training.schedule}" ends with step {steps[1]} now and ended with step {steps[0]}'
    example = f"that of step {min(steps)} from {old:.3g} to {new:.3g}"
    return [f"{cause}: rates of the next steps change with it, such as {example}"]
