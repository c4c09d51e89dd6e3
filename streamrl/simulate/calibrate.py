"""A cluster model from what a real run measured: least squares with constants that are never negative.

What a recorded run cannot tell stays at what the model says by itself: KV capacity where no preemption was seen,
attention over the context (small engines), cores that trainer and engines share.
"""

from __future__ import annotations

import math
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.control.trajectory_trace import RecordedRun, StepLine
from streamrl.errors import StreamRLError
from streamrl.simulate.cluster import ClusterModel, Engines
from streamrl.simulate.engines import EngineModel
from streamrl.simulate.lengths import LengthModel
from streamrl.simulate.recording import life_times
from streamrl.simulate.stages import PushModel, RewardModel, TrainerModel

Floats = NDArray[np.float64]
FEWEST_COMPLETIONS = 64
FEWEST_SAMPLES = 12
FEWEST_STEPS = 3
STREAMS_BELOW = 0.75  # of forward and backward: what is left to do when the batch is full, where groups are streamed


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """``model``, and how well it explains what it was fitted to: medians of the absolute relative error.

    ``step_error``: decode steps; ``life_error``: seconds from launch to last token.
    """

    model: ClusterModel
    step_error: float
    life_error: float
    completions: int
    steps: int


def non_negative_least_squares(columns: Floats, target: Floats) -> Floats:
    """The non-negative ``x`` [n] of least ``|columns x - target|``: exact for few columns, by trying each support.

    ``columns``: [m, n]; ``target``: [m].
    """
    count = columns.shape[1]
    best, least = np.zeros(count), float(target @ target)
    for size in range(1, count + 1):
        for support in combinations(range(count), size):
            chosen = columns[:, support]
            solution, *_ = np.linalg.lstsq(chosen, target, rcond=None)
            if (solution < 0).any():
                continue
            left = target - chosen @ solution
            error = float(left @ left)
            if error < least * (1 - 1e-9):
                best, least = np.zeros(count), error
                best[list(support)] = solution
    return best


def calibrate(run: RecordedRun, *, max_running: int = 0) -> Fit:
    """Fit every part to ``run``. ``max_running``: requests that one engine runs (0: what the run's capacity says).

    Raises ``StreamRLError`` where the run is too short to fit anything.
    """
    lives = life_times(run)
    if len(lives.seconds) < FEWEST_COMPLETIONS or len(run.steps) < FEWEST_STEPS:
        raise StreamRLError(
            f"run {run.header.run_id} recorded {len(lives.seconds)} whole completions and {len(run.steps)} steps; a "
            f"calibration needs {FEWEST_COMPLETIONS} and {FEWEST_STEPS}: record a longer run"
        )
    base, per_running, step_error = _decode_step(run)
    decoding = lives.tokens * (base + per_running * lives.running)
    # What decoding does not explain, each request that came meanwhile held up. Short completions tell it best: they
    # wait for a burst to arrive, and hardly decode.
    short = lives.tokens <= np.quantile(lives.tokens, 0.25)
    arrival = max(float(np.median(((lives.seconds - decoding) / lives.arrivals)[short])), 0.0)
    explained = decoding + arrival * lives.arrivals
    header = run.header
    engine = EngineModel(
        base_s=base,
        per_running_s=per_running,
        max_running=max_running or max(math.ceil(header.capacity / header.engines), 1),
        kv_tokens=header.kv_tokens // header.engines if any(line.preemptions for line in run.engines) else 0,
        # The front end takes one request after the other, and decoding waits for it.
        arrival_s=arrival,
        admission_s=arrival,
        presubmitted_s=0.0,
    )
    prompt_tokens = round(float(np.mean([line.prompt_tokens for line in run.trajectories])))
    model = ClusterModel(
        engine=engine,
        trainer=_trainer(run.steps),
        lengths=fit_lengths(run),
        engines=Engines(count=header.engines, prompt_tokens=prompt_tokens, capacity=header.capacity),
        reward=_reward(run),
        push=_push(run.steps),
    )
    error = float(np.median(np.abs(explained / lives.seconds - 1)))
    return Fit(
        model=model, step_error=step_error, life_error=error, completions=len(lives.seconds), steps=len(run.steps)
    )


def _decode_step(run: RecordedRun) -> tuple[float, float, float]:
    """(base_s, per_running_s, median relative error) from the samples of the engines."""
    samples = [line for line in run.engines if line.token_s > 0 and line.mean_running > 0]
    if len(samples) < FEWEST_SAMPLES:
        raise StreamRLError(
            f"run {run.header.run_id} has {len(samples)} samples of decode steps; a calibration needs "
            f"{FEWEST_SAMPLES}: record a longer run, on engines that report their steps"
        )
    running = np.array([line.mean_running for line in samples]) / run.header.engines
    seconds = np.array([line.token_s for line in samples])
    kept = seconds <= 4 * np.median(seconds)  # the first steps of an engine, and those that another process delayed
    columns = np.stack([np.ones(kept.sum()), running[kept]], axis=1)
    # Relative errors count: a step of few requests matters as much as one of many.
    base, per_running = non_negative_least_squares(columns / seconds[kept][:, None], np.ones(kept.sum())).tolist()
    error = float(np.median(np.abs((base + per_running * running[kept]) / seconds[kept] - 1)))
    return base, per_running, error


def _trainer(steps: tuple[StepLine, ...]) -> TrainerModel:
    tokens = np.array([line.trained_tokens for line in steps], dtype=float)
    worked = np.array([line.forward_backward_s or line.training_s for line in steps])
    after = np.array([line.training_s for line in steps])
    token_s = float(np.median(worked / np.maximum(tokens, 1)))
    streams = float(np.median(after)) < STREAMS_BELOW * float(np.median(worked))
    # Where it streams, the last group's share is still to be done when the batch is full: the least that was seen.
    optimizer_s = float(np.quantile(after, 0.1)) if streams else max(float(np.median(after - worked)), 0.0)
    return TrainerModel(token_s=token_s, optimizer_s=optimizer_s, streaming_speed=1.0 if streams else 0.0)


def _push(steps: tuple[StepLine, ...]) -> PushModel:
    seconds = float(np.median([line.push_s for line in steps]))
    paused = min(float(np.median([line.paused_s for line in steps])), seconds)
    other = float(np.median([max(s.step_s - s.rollout_s - s.training_s - s.push_s, 0.0) for s in steps]))
    return PushModel(seconds=seconds + other, pause_s=paused)


def _reward(run: RecordedRun) -> RewardModel:
    seconds = np.array([line.reward_s for line in run.trajectories if line.reward_s > 0])
    rewards = [line.reward for line in run.trajectories if line.reward is not None]
    solved = float(np.mean([reward > 0.5 for reward in rewards])) if rewards else 0.5
    if not len(seconds):
        return RewardModel(solved=solved)
    logs = np.log(seconds)
    low, middle, high = np.quantile(logs, [0.25, 0.5, 0.75])
    return RewardModel(median_s=float(np.exp(middle)), sigma=float(high - low) / 1.349, solved=solved)


def fit_lengths(run: RecordedRun) -> LengthModel:
    """A log-normal with a mass at the cap and a correlation within prompts, from completions that ended by themselves
    or at the limit. Of a run that raced, the long ones are missing: calibrate on a synchronous one."""
    by_group: dict[int, list[float]] = {}
    cap = run.header.max_tokens
    for line in run.trajectories:
        if line.finish_reason and line.tokens:
            by_group.setdefault(line.group, []).append(math.log(min(line.tokens, cap)))
    logs = np.concatenate([np.array(values) for values in by_group.values()])
    below = math.log(cap) - 1e-9
    low, middle, high = np.quantile(logs, [0.25, 0.5, 0.75])
    sigma = max((middle - low) / 0.6745 if high >= below else (high - low) / 1.349, 0.05)
    return LengthModel(
        cap=cap,
        weights=(1.0,),
        mus=(float(middle),),
        sigmas=(float(sigma),),
        cap_share=float(np.mean(logs >= below)),
        correlation=_correlation([values for values in by_group.values() if len(values) > 1]),
    )


def _correlation(groups: list[list[float]]) -> float:
    """Intraclass correlation of the logarithms: one way analysis of variance."""
    if len(groups) < 2:
        return 0.0
    sizes = np.array([len(values) for values in groups], dtype=float)
    means = np.array([np.mean(values) for values in groups])
    within = sum(float(np.sum((np.array(v) - m) ** 2)) for v, m in zip(groups, means, strict=True))
    within /= max(float(sizes.sum()) - len(groups), 1.0)
    grand = float((sizes * means).sum() / sizes.sum())
    between = float((sizes * (means - grand) ** 2).sum()) / (len(groups) - 1)
    size = (float(sizes.sum()) - float((sizes**2).sum() / sizes.sum())) / (len(groups) - 1)
    variance = max((between - within) / size, 0.0)
    return min(variance / max(variance + within, 1e-12), 0.99)
