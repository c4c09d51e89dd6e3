"""Learning rate of each version, by the names and the options of transformers' schedules.

A factor of ``training.learning_rate`` that depends on the version alone, without a scheduler that has a state: a run
that is resumed, or whose rate is changed while it goes on, has the rates that it would have had. Version 1 is step 0 of
transformers. Behind the warm-up, whose first rate is 1 / warmup_steps and not 0, values are those of transformers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from streamrl.recipe.sections import Recipe, Training


class Place(NamedTuple):
    """A step behind the warm-up. ``step``: counted from 0; ``warmup``, ``steps``: of the warm-up, and of both."""

    step: int
    warmup: int
    steps: int

    def progress(self, ahead: int = 0) -> float:
        """Share of the steps behind the warm-up that was made, ``ahead`` steps later; 1 at their end and after it."""
        return min(1.0, (self.step - self.warmup + ahead) / max(1, self.steps - self.warmup))


def _wave(cycles: float, progress: float, least: float = 0.0) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)) * (1.0 - least) + least)


def _stable(
    place: Place, *, num_decay_steps: float = 0.0, min_lr_ratio: float = 0.0, decay_type: str = "cosine"
) -> float:
    decay = num_decay_steps or max(1, (place.steps - place.warmup) // 10)
    progress = min(1.0, max(0.0, (place.step - place.steps + decay) / decay))
    if decay_type == "cosine":
        return _wave(0.5, progress, min_lr_ratio)
    return (1.0 - (progress if decay_type == "linear" else math.sqrt(progress))) * (1.0 - min_lr_ratio) + min_lr_ratio


SCHEDULES: Mapping[str, Callable[..., float]] = {
    "constant": lambda at: 1.0,
    "constant_with_warmup": lambda at: 1.0,
    "linear": lambda at: 1.0 - at.progress(),
    "cosine": lambda at, *, num_cycles=0.5: _wave(num_cycles, at.progress()),
    "cosine_with_restarts": lambda at, *, num_cycles=1.0: (
        _wave(0.5, num_cycles * at.progress() % 1.0) if at.progress() < 1 else 0.0
    ),
    "cosine_with_min_lr": lambda at, *, min_lr_rate=0.1, num_cycles=0.5: _wave(num_cycles, at.progress(), min_lr_rate),
    "cosine_warmup_with_min_lr": lambda at, *, min_lr_rate=0.1, num_cycles=0.5: _wave(
        num_cycles, at.progress(ahead=1), min_lr_rate
    ),
    "polynomial": lambda at, *, power=1.0, min_lr_rate=0.0: float(
        (1.0 - min_lr_rate) * (1.0 - at.progress()) ** power + min_lr_rate
    ),
    "inverse_sqrt": lambda at, *, timescale=0.0: (
        1.0 / math.sqrt(1.0 + (at.step - at.warmup) / (timescale or at.warmup or 10_000))
    ),
    "warmup_stable_decay": _stable,
}
"""Shares of the learning rate at a ``Place``; options of a schedule are its keyword arguments."""
WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on the number of steps."""


def options_of(schedule: str) -> dict[str, Any]:
    """Options of a schedule with their defaults."""
    parameters = inspect.signature(SCHEDULES[schedule]).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def rate_factor(training: Training, version: int, steps: int) -> float:
    """Share of ``training.learning_rate`` of the step that makes ``version`` (from 1) in a run of ``steps``."""
    if version <= training.warmup_steps:
        return version / training.warmup_steps
    place = Place(version - 1, training.warmup_steps, training.schedule_steps or steps)
    return SCHEDULES[training.schedule](place, **training.schedule_options)


def horizon_notices(before: Recipe, after: Recipe) -> list[str]:
    """Say in one sentence what another ``run.steps`` does to the learning rates of a run; nothing where they stay."""
    training = after.training
    steps = (before.run.steps, after.run.steps)
    if training.schedule in WITHOUT_END or training.schedule_steps or steps[0] == steps[1]:
        return []
    old, new = (training.learning_rate * rate_factor(training, min(steps), end) for end in steps)
    now = f'training.schedule = "{training.schedule}" ends with step {steps[1]} now and ended with step {steps[0]}'
    return [
        f"{now}: rates of the next steps change with it, such as that of step {min(steps)} from {old:.3g} to {new:.3g}"
    ]
