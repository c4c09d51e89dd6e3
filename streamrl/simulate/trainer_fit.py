"""The cost of training from what a run recorded, and when its trainer must have worked beside the rollout."""

from __future__ import annotations

from bisect import bisect_left

import msgspec
import numpy as np

from streamrl.observe.report.trajectory_trace import RecordedRun, StepLine
from streamrl.simulate.least_squares import unbiased_fit
from streamrl.simulate.recording import TrainedGroup, trained_groups
from streamrl.simulate.stages import TrainerClock, TrainerModel

STREAMS_BELOW = 0.75
"""Of forward and backward: what is left to do when the batch is full, where groups are streamed."""


class TrainerFit(msgspec.Struct, frozen=True, kw_only=True):
    """``model``, and the ``spans`` (seconds since the run began) in which it trained while groups were still sampled;
    ascending, and none where nothing is streamed."""

    model: TrainerModel
    spans: list[tuple[float, float]]


def fit_trainer(run: RecordedRun, streaming_tokens: int = 0) -> TrainerFit:
    """A token and a sequence by what whole steps took; closing a batch by what was left beyond the groups that were
    still to be trained when it was full. ``streaming_tokens``: see ``TrainerModel``."""
    steps = run.steps[1:]  # the first one warms up
    worked = np.array([line.forward_backward_s or line.training_s for line in steps])
    after = np.array([line.training_s for line in steps])
    columns = np.array([(line.trained_tokens, line.samples) for line in steps], dtype=float)
    token_s, sequence_s = unbiased_fit(columns, worked, np.ones(len(steps))).tolist()
    model = TrainerModel(token_s=token_s, sequence_s=sequence_s)
    if float(np.median(after)) >= STREAMS_BELOW * float(np.median(worked)):
        closing = max(float(np.median(after - worked)), 0.0)
        return TrainerFit(model=msgspec.structs.replace(model, optimizer_s=closing), spans=[])
    model = msgspec.structs.replace(model, streaming_speed=1.0, streaming_tokens=streaming_tokens)
    spans, left = _replayed(run, model)
    closing = max(float(np.median(after - np.array(left[1:]))), float(after.min()))
    return TrainerFit(model=msgspec.structs.replace(model, optimizer_s=closing), spans=spans)


def _replayed(run: RecordedRun, model: TrainerModel) -> tuple[list[tuple[float, float]], list[float]]:
    """When ``model`` would have trained the groups as they came, and what of each step was left when it was full."""
    clock = TrainerClock(model, 1)
    spans: list[tuple[float, float]] = []
    left: list[float] = []
    groups = trained_groups(run)
    trained_s = [group.trained_s for group in groups]
    first = 0
    for step in run.steps:
        last = bisect_left(trained_s, step.time_s)
        full_s = _full_s(step)
        for group in sorted(groups[first:last], key=_scored_s):
            now = min(group.scored_s, full_s)
            clock.take(now, group.samples, group.tokens)
            _extend(spans, now, clock.idle_at)
        closed_s = clock.close(full_s, engines_idle=True)
        _extend(spans, full_s, closed_s, cut=True)
        left.append(closed_s - full_s)
        first = last
    return spans, left


def _full_s(step: StepLine) -> float:
    return step.time_s - step.step_s + step.rollout_s


def _scored_s(group: TrainedGroup) -> float:
    return group.scored_s


def _extend(spans: list[tuple[float, float]], begins: float, ends: float, *, cut: bool = False) -> None:
    """Add a span; ``cut``: from ``begins`` on it is known, and what was foreseen no longer holds."""
    if spans and spans[-1][1] >= begins:
        spans[-1] = (spans[-1][0], ends if cut else max(ends, spans[-1][1]))
    elif ends > begins:
        spans.append((begins, ends))
