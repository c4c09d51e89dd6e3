"""Fits of the cost of a decode step and of a request's arrival to the record of a run. ``calibrate`` calls them.

A decode step with b running requests takes ``a + c b + d sqrt(b)``, fitted by non-negative least squares with weights
that keep the total time. Least squares of relative errors do not keep it: times of intervals are noisy, short intervals
would count most, and the fit would be below the mean (by a fifth, on shared cores). The root stands for the front end
and for small matrix products on CPU: 1, 16 and 128 requests took 3.2, 5.4 and 12.0 ms, which no line fits."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Texts
from streamrl.engines.step_cost import StepCost
from streamrl.observe.report.trajectory_trace import RecordedRun
from streamrl.simulate.recording import LifeTimes

Floats = NDArray[np.float64]
FEWEST_SAMPLES = 12
PRESUBMITTED_SHARE = 0.2
"""Cost of a request that waits in a paused engine over the cost of one that arrives at a running engine, for runs that
recorded only one of the two. The demo model took 0.2 and 1 ms."""

ALMOST_NONE = 0.02
"""Share of completions that may seem to end before all earlier requests have arrived, since their times are noisy."""

_ITERATIONS = 12
_SURE = 2.0  # standard errors: a smaller slowdown may be chance
_MOST_SLOWDOWN = 1.0


class StepFit(Struct, frozen=True, kw_only=True):
    """Fit of a decode step. ``cost``: cost without training; ``slowdown``: factor of its time while the trainer
    works; ``error``: median of the absolute relative error."""

    cost: StepCost
    slowdown: float
    error: float


class StepSamples(Struct, frozen=True, kw_only=True):
    """Samples of decode steps, one row for each interval of the record.

    ``seconds``: mean seconds of a step;
    ``weights``: number of steps;
    ``running``: mean number of requests on an engine in a step;
    ``training``: share of the interval in which the trainer worked."""

    seconds: Floats
    weights: Floats
    running: Floats
    training: Floats


def step_samples(run: RecordedRun, training: list[tuple[float, float]], fewest: int = FEWEST_SAMPLES) -> StepSamples:
    """Collect the reports of the engines after the first optimizer step, which warms up. ``training``: spans in which
    the trainer worked. Raises ``StreamRLError`` where there are fewer reports than ``fewest``."""
    warm_s = run.steps[0].time_s if run.steps else 0.0
    rows = []
    last_s = 0.0
    for line in run.engines:
        if line.token_s > 0 and line.mean_running > 0:
            # A line without generated tokens counts as one step.
            steps = max(line.generated_tokens / line.mean_running, 1.0)
            rows.append((last_s, line.time_s, line.token_s, steps, line.mean_running / run.header.engines))
        last_s = line.time_s
    warm_rows = [row for row in rows if row[0] >= warm_s]
    if len(warm_rows) >= FEWEST_SAMPLES:
        rows = warm_rows
    if len(rows) < fewest:
        raise StreamRLError(
            f"run {run.header.run_id} has {len(rows)} samples of decode steps; a calibration needs {fewest}: "
            "record a longer run, on engines that report their steps"
        )
    begins, ends, seconds, weights, running = np.array(rows).T
    share = _covered(np.array(training), begins, ends)
    return StepSamples(seconds=seconds, weights=weights, running=running, training=share)


def scale_step(samples: StepSamples, prior: StepCost) -> StepFit:
    """Scale ``prior`` to samples that are too few for ``fit_step``. The slowdown by training is not fitted."""
    expected_s = np.array([prior.step_s(running) for running in samples.running.tolist()])
    ratio = samples.seconds / expected_s
    scale = float(np.median(ratio))
    cost = StepCost(
        base_s=scale * prior.base_s,
        per_running_s=scale * prior.per_running_s,
        per_root_running_s=scale * prior.per_root_running_s,
    )
    return StepFit(cost=cost, slowdown=1.0, error=float(np.median(np.abs(scale / ratio - 1))))


def fit_step(samples: StepSamples) -> StepFit:
    """Fit the constants of a decode step, and its slowdown by training where this is significant."""
    running = samples.running
    ones = np.ones(len(samples.running))
    columns = np.stack([ones, running, np.sqrt(running)], axis=1)
    slowdown = 0.0  # share by which training lengthens a step
    for _ in range(_ITERATIONS):
        constants = unbiased_fit(columns, samples.seconds / (1 + slowdown * samples.training), samples.weights)
        without_training_s = columns @ constants
        next_slowdown = _slowdown(samples.seconds / without_training_s, samples.training, samples.weights)
        if abs(next_slowdown - slowdown) < 1e-4:
            break
        slowdown = next_slowdown
    expected_s = without_training_s * (1 + slowdown * samples.training)
    base, per_running, per_root = constants.tolist()
    return StepFit(
        cost=StepCost(base_s=base, per_running_s=per_running, per_root_running_s=per_root),
        slowdown=1 + slowdown,
        error=float(np.median(np.abs(expected_s / samples.seconds - 1))),
    )


def _slowdown(ratio: Floats, training: Floats, weights: Floats) -> float:
    """Relative growth of ``ratio`` (observed over expected) from intervals without training to intervals of training
    alone; 0 where it may be chance."""
    mean = float(np.average(training, weights=weights))
    centred = training - mean
    spread = float(weights @ centred**2)
    if spread < 1e-9 * float(weights.sum()):
        return 0.0
    level = float(np.average(ratio, weights=weights))
    slope = float((weights * centred) @ (ratio - level)) / spread
    residuals = ratio - level - slope * centred
    error = float(np.sqrt((weights**2 * centred**2) @ residuals**2)) / spread
    if not slope > _SURE * error:  # also where one of them is not a number
        return 0.0
    return min(slope / max(level - slope * mean, 1e-9), _MOST_SLOWDOWN)


def fit_arrivals(lives: LifeTimes, step: StepFit, warm_s: float) -> tuple[float, float, float, Texts]:
    """(seconds of an arrival at a running engine, seconds of a request that waited in a paused engine, median relative
    error of the life times, names of assumed constants).

    The requests that arrive during the life of a completion share its time outside of decoding. Short completions show
    this time best: they wait for a burst of arrivals, and hardly decode. ``warm_s``: end of the warm-up; completions
    that began before it do not count."""
    decoding_s = lives.decoding_s(step.cost)
    wait_s = (lives.seconds - decoding_s) / lives.arrivals
    short = (lives.tokens <= np.quantile(lives.tokens, 0.25)) & (lives.begins >= warm_s)
    paused = short & lives.presubmitted
    arrival = _median_wait(wait_s[short & ~lives.presubmitted])
    presubmitted = _median_wait(wait_s[paused])
    constants = {"engine.arrival_s": arrival, "engine.presubmitted_s": presubmitted}
    assumed = tuple(name for name, seconds in constants.items() if seconds is None)
    if arrival is None:
        # No completion ends before all earlier requests have arrived, so the shortest lives limit an arrival.
        limit = float(np.quantile(lives.arrival_s[paused], ALMOST_NONE)) if paused.any() else 0.0
        arrival = min((presubmitted or 0.0) / PRESUBMITTED_SHARE, limit)
    if presubmitted is None:
        presubmitted = PRESUBMITTED_SHARE * arrival
    expected_s = decoding_s + lives.arrivals * np.where(lives.presubmitted, presubmitted, arrival)
    return arrival, presubmitted, float(np.median(np.abs(expected_s / lives.seconds - 1))), assumed


def _median_wait(wait_s: Floats) -> float | None:
    """Median of ``wait_s``, at least 0; None for too few samples."""
    return max(float(np.median(wait_s)), 0.0) if len(wait_s) >= FEWEST_SAMPLES else None


def _covered(spans: Floats, begins: Floats, ends: Floats) -> Floats:
    """Share of each interval that ascending, disjoint ``spans`` [n, 2] cover."""
    if not len(spans):
        return np.zeros(len(begins))
    edges = spans.reshape(-1)
    covered = np.concatenate([[0.0], np.cumsum(np.tile([1.0, 0.0], len(spans))[:-1] * np.diff(edges))])
    share: Floats = (np.interp(ends, edges, covered) - np.interp(begins, edges, covered)) / (ends - begins)
    return share


_REWEIGHTINGS = 12


def non_negative_least_squares(columns: Floats, target: Floats) -> Floats:
    """Non-negative ``x`` [n] with the smallest ``|columns x - target|``. Exact, for few columns: each support is tried.
    ``columns``: [m, n]; ``target``: [m]."""
    count = columns.shape[1]
    best = np.zeros(count)
    best_error = float(target @ target)
    for size in range(1, count + 1):
        for support in combinations(range(count), size):
            supported = columns[:, support]
            solution, *_ = np.linalg.lstsq(supported, target, rcond=None)
            if (solution < 0).any():
                continue
            residuals = target - supported @ solution
            error = float(residuals @ residuals)
            if error < best_error * (1 - 1e-9):
                best = np.zeros(count)
                best_error = error
                best[list(support)] = solution
    return best


def unbiased_fit(columns: Floats, target: Floats, weights: Floats) -> Floats:
    """Non-negative ``x`` [n] with ``columns x`` near ``target``, where the error of a row grows with its *expected*
    value (quasi-likelihood). Relative errors count for each row, and yet the sum of ``target`` is kept.

    ``columns``: [m, n]; ``target``, ``weights``: [m]."""
    expected = np.full(len(target), np.average(target, weights=weights))
    solution = np.zeros(columns.shape[1])
    for _ in range(_REWEIGHTINGS):
        scale = np.sqrt(weights) / expected
        solution = non_negative_least_squares(columns * scale[:, None], target * scale)
        expected = np.maximum(columns @ solution, 1e-3 * expected)
    return solution
