"""The cost of a decode step and of a request's arrival, from what a run recorded of its engines.

Decode steps: ``a + c b + d sqrt(b)`` of b running requests, by non-negative least squares with weights that keep the
total time. Least squares of relative errors would not: the time of an interval is noisy, short ones would count most,
and the fit would come out below the mean (by a fifth, on shared cores). The root is what a front end and small matrix
products on CPU need: 1, 16 and 128 requests took 3.2, 5.4 and 12.0 ms there, and no line fits those."""

from __future__ import annotations

from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.base.errors import StreamRLError
from streamrl.engines.step_cost import StepCost
from streamrl.observe.report.trajectory_trace import RecordedRun
from streamrl.simulate.recording import LifeTimes

Floats = NDArray[np.float64]
FEWEST_SAMPLES = 12
PRESUBMITTED_SHARE = 0.2
"""Cost of a request that waits in a paused engine over that of one that arrives, where a run had no such requests: 0.2
against 1 ms were measured on the demo model."""

ALMOST_NONE = 0.02
"""Share of completions that may end sooner than requests can have arrived: their times are noisy."""

_ROUNDS = 12
_SURE = 2.0  # standard errors: a slowdown that is smaller may be none
_MOST_SLOWDOWN = 1.0


class StepFit(msgspec.Struct, frozen=True, kw_only=True):
    """The ``cost`` of a decode step, which takes ``slowdown`` times as long while the trainer works beside it.
    ``error``: median of the absolute relative error."""

    cost: StepCost
    slowdown: float
    error: float


class StepSamples(msgspec.Struct, frozen=True, kw_only=True):
    """One row an interval: mean ``seconds`` of its decode steps, their number (``weights``), the mean number of
    requests in them on an engine, and the share of the interval in which the trainer worked."""

    seconds: Floats
    weights: Floats
    running: Floats
    training: Floats


def step_samples(run: RecordedRun, training: list[tuple[float, float]]) -> StepSamples:
    """Collect what the engines reported after the first optimizer step, which warms up. ``training``: spans in which
    the trainer worked. Raises ``StreamRLError`` where too little was reported."""
    warm_s = run.steps[0].time_s if run.steps else 0.0
    rows = []
    before_s = 0.0
    for line in run.engines:
        if line.token_s > 0 and line.mean_running > 0:
            # Lines without their tokens count as one step.
            steps = max(line.generated_tokens / line.mean_running, 1.0)
            rows.append((before_s, line.time_s, line.token_s, steps, line.mean_running / run.header.engines))
        before_s = line.time_s
    warm = [row for row in rows if row[0] >= warm_s]
    if len(warm) >= FEWEST_SAMPLES:
        rows = warm
    if len(rows) < FEWEST_SAMPLES:
        raise StreamRLError(
            f"run {run.header.run_id} has {len(rows)} samples of decode steps; a calibration needs {FEWEST_SAMPLES}: "
            "record a longer run, on engines that report their steps"
        )
    begins, ends, seconds, weights, running = np.array(rows).T
    share = _covered(np.array(training), begins, ends)
    return StepSamples(seconds=seconds, weights=weights, running=running, training=share)


def fit_step(samples: StepSamples) -> StepFit:
    """Constants of a decode step, and what training beside it adds where that is beyond doubt."""
    running = samples.running
    ones = np.ones(len(samples.running))
    columns = np.stack([ones, running, np.sqrt(running)], axis=1)
    slowdown = 0.0
    for _ in range(_ROUNDS):
        alone = unbiased_fit(columns, samples.seconds / (1 + slowdown * samples.training), samples.weights)
        expected = columns @ alone
        found = _slowdown(samples.seconds / expected, samples.training, samples.weights)
        if abs(found - slowdown) < 1e-4:
            break
        slowdown = found
    whole = expected * (1 + slowdown * samples.training)
    base, per_running, per_root = alone.tolist()
    return StepFit(
        cost=StepCost(base_s=base, per_running_s=per_running, per_root_running_s=per_root),
        slowdown=1 + slowdown,
        error=float(np.median(np.abs(whole / samples.seconds - 1))),
    )


def _slowdown(ratio: Floats, training: Floats, weights: Floats) -> float:
    """Growth of ``ratio`` (observed over expected) from no training to training all the time, relative to the former; 0
    where it may be chance."""
    mean = float(np.average(training, weights=weights))
    centred = training - mean
    spread = float(weights @ centred**2)
    if spread < 1e-9 * float(weights.sum()):
        return 0.0
    level = float(np.average(ratio, weights=weights))
    slope = float((weights * centred) @ (ratio - level)) / spread
    left = ratio - level - slope * centred
    error = float(np.sqrt((weights**2 * centred**2) @ left**2)) / spread
    return min(slope / max(level - slope * mean, 1e-9), _MOST_SLOWDOWN) if slope > _SURE * error else 0.0


def fit_arrivals(lives: LifeTimes, step: StepFit, warm_s: float) -> tuple[float, float, float, tuple[str, ...]]:
    """(seconds of an arrival, of one that waited in a paused engine, median relative error of the life times, which of
    the two was assumed).

    Time that decoding does not explain is shared by the requests that came meanwhile. Short completions tell it best:
    they wait for a burst to arrive, and hardly decode. ``warm_s``: what began before that does not count."""
    decoding = lives.decoding_s(step.cost)
    waited = (lives.seconds - decoding) / lives.arrivals
    short = (lives.tokens <= np.quantile(lives.tokens, 0.25)) & (lives.begins >= warm_s)
    plain = short & ~lives.presubmitted
    paused = short & lives.presubmitted
    arrival = max(float(np.median(waited[plain])), 0.0) if plain.sum() >= FEWEST_SAMPLES else None
    presubmitted = max(float(np.median(waited[paused])), 0.0) if paused.sum() >= FEWEST_SAMPLES else None
    known = {"engine.arrival_s": arrival, "engine.presubmitted_s": presubmitted}
    assumed = tuple(name for name, seconds in known.items() if seconds is None)
    if arrival is None:
        # None ends before those in front of it have arrived.
        least = float(np.quantile(lives.arrival_s[paused], ALMOST_NONE)) if paused.any() else 0.0
        arrival = min((presubmitted or 0.0) / PRESUBMITTED_SHARE, least)
    if presubmitted is None:
        presubmitted = PRESUBMITTED_SHARE * arrival
    explained = decoding + lives.arrivals * np.where(lives.presubmitted, presubmitted, arrival)
    return arrival, presubmitted, float(np.median(np.abs(explained / lives.seconds - 1))), assumed


def _covered(spans: Floats, begins: Floats, ends: Floats) -> Floats:
    """Share of each interval that ascending, disjoint ``spans`` [n, 2] cover."""
    if not len(spans):
        return np.zeros(len(begins))
    edges = spans.reshape(-1)
    covered = np.concatenate([[0.0], np.cumsum(np.tile([1.0, 0.0], len(spans))[:-1] * np.diff(edges))])
    share: Floats = (np.interp(ends, edges, covered) - np.interp(begins, edges, covered)) / (ends - begins)
    return share


_REWEIGHTED = 12


def non_negative_least_squares(columns: Floats, target: Floats) -> Floats:
    """The non-negative ``x`` [n] of least ``|columns x - target|``: exact for few columns, by trying each support.
    ``columns``: [m, n]; ``target``: [m]."""
    count = columns.shape[1]
    best = np.zeros(count)
    least = float(target @ target)
    for size in range(1, count + 1):
        for support in combinations(range(count), size):
            chosen = columns[:, support]
            solution, *_ = np.linalg.lstsq(chosen, target, rcond=None)
            if (solution < 0).any():
                continue
            left = target - chosen @ solution
            error = float(left @ left)
            if error < least * (1 - 1e-9):
                best = np.zeros(count)
                least = error
                best[list(support)] = solution
    return best


def unbiased_fit(columns: Floats, target: Floats, weights: Floats) -> Floats:
    """Non-negative ``x`` [n] with ``columns x`` near ``target`` where the error of a row grows with its *expected*
    value (quasi-likelihood): every row counts relatively, and the sum is kept all the same.

    ``columns``: [m, n]; ``target``, ``weights``: [m]."""
    expected = np.full(len(target), np.average(target, weights=weights))
    found = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTED):
        scale = np.sqrt(weights) / expected
        found = non_negative_least_squares(columns * scale[:, None], target * scale)
        expected = np.maximum(columns @ found, 1e-3 * expected)
    return found
