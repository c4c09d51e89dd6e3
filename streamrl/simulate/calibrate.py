"""Fit of a fleet model to a recorded run: ``calibrate``.

``streamrl calibrate``, ``streamrl simulate`` and ``streamrl what-if`` call it in their command, and the adviser in its
process beside a run. The file has three parts: engines with everything around them (the fits of decode steps and
arrivals are in ``engine_fit``), the trainer, and the lengths of completions. Parameters that a record does not
determine keep the values of the model, and ``Fit.assumed`` names them: KV capacity where no preemption was recorded,
attention over the context, the costs of moving a request and of changing engines."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from math import ceil, inf, sqrt
from statistics import NormalDist

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict, replace
from numpy.typing import NDArray

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Texts
from streamrl.engines.step_cost import StepCost
from streamrl.engines.vllm.visible_gpus import installed_device
from streamrl.observe.report.trajectory_trace import RecordedRun, StepLine
from streamrl.recipe.sections import Recipe
from streamrl.simulate.engine_fit import (
    FEWEST_SAMPLES,
    StepFit,
    fit_arrivals,
    fit_step,
    scale_step,
    step_samples,
    unbiased_fit,
)
from streamrl.simulate.engines import EngineModel
from streamrl.simulate.fleet import DEMO, FleetModel
from streamrl.simulate.lengths import LengthModel, recorded_rows
from streamrl.simulate.recording import life_times, steps_alone, trained_groups
from streamrl.simulate.stages import EnvironmentModel, PushModel, RewardModel, TrainerClock, TrainerModel

FEWEST_COMPLETIONS = 64
FEWEST_STEPS = 3
ROW_PARTS = 4
"""An idle trainer starts once this part of a row of ``micro_batch_tokens`` waits (``TorchTrainer.idle_work``)."""


class Fit(Struct, frozen=True, kw_only=True):
    """A fitted ``model``, and medians of its absolute relative errors on the record.

    ``step_error``: error of decode steps;
    ``life_error``: error of the seconds from launch to last token;
    ``completions``, ``steps``: size of the record;
    ``assumed``: constants that the record does not determine, such as ``engine.kv_tokens``."""

    model: FleetModel
    step_error: float
    life_error: float
    completions: int
    steps: int
    assumed: Texts = ()


NEVER_FITTED = {
    "engine": ("per_context_token_s", "admission_per_running_s", "rejected_per_token"),
    "engines": ("migration_s", "parallel_scaling", "weight_tokens", "switch_s"),
    "trainer": ("streaming_speed",),
    "reward": ("concurrency", "rollout_slowdown"),
    "push": ("abort_barrier_s",),
}


def calibrate(run: RecordedRun, recipe: Recipe | None = None, *, prior: StepCost | None = None) -> Fit:
    """Fit a model to ``run``. The ``recipe`` of the run has the largest number of requests on an engine (without it:
    the capacity of the run) and the tokens for which an idle trainer waits (without it: none). With a ``prior`` one
    step suffices: where samples of decode steps are few, the prior is scaled to them.

    Raises ``StreamRLError`` where the record is too short."""
    lives = life_times(run)
    fewest_steps = FEWEST_STEPS if prior is None else 1
    if len(lives.begins) < FEWEST_COMPLETIONS or len(run.steps) < fewest_steps:
        raise StreamRLError(
            f"run {run.header.run_id} recorded {len(lives.begins)} whole completions and {len(run.steps)} steps; a "
            f"calibration needs {FEWEST_COMPLETIONS} and {fewest_steps}: record a longer run"
        )
    row_tokens = recipe.training.row_tokens(installed_device(), run.header.parameters) if recipe else 0
    trainer, training_spans = fit_trainer(run, row_tokens // ROW_PARTS)
    step = _decode_step(run, training_spans, prior)
    arrival, presubmitted, life_error, assumed = fit_arrivals(lives, step, run.steps[0].time_s)
    if len({line.samples for line in _warm_steps(run)}) == 1:
        assumed += ("trainer.sequence_s",)
    environment = _environment(run)
    prompt_tokens = round(float(np.mean([line.prompt_tokens for line in run.trajectories])))
    warm = [line for line in run.engines if line.time_s > run.steps[0].time_s]
    prefill_s = sum(line.prefill_s for line in warm)
    prefill_tokens_s = 0.0
    if prefill_s:
        prefill_tokens_s = sum(line.prefilled_tokens for line in warm) / prefill_s
        # The fitted time of an arrival has that of its prefill, which the model computes from its tokens.
        turns = len(lives.begins) / len(run.trajectories)
        arrival_tokens = prompt_tokens / run.header.group_size / turns + environment.appended_tokens
        arrival = max(arrival - arrival_tokens / prefill_tokens_s, 0.0)
        presubmitted = max(presubmitted - arrival_tokens / prefill_tokens_s, 0.0)
    else:
        assumed += ("engine.prefill_tokens_s",)
    if not any(line.preemptions for line in run.engines):
        assumed += ("engine.kv_tokens",)
    if not any(line.to_engines_s for line in run.steps):
        assumed += ("push.to_ranks_s", "push.to_engines_s")
    model = FleetModel(
        engine=_engine(
            run, step, arrival, presubmitted, prefill_tokens_s, recipe.engines.max_num_seqs if recipe else 0
        ),
        trainer=replace(trainer, rollout_slowdown=step.slowdown),
        lengths=fit_lengths(run),
        environment=environment,
        # Without the capacity of this run: other recipes are measured against the capacity of their own batches.
        engines=replace(
            DEMO.engines,
            count=run.header.engines,
            prompt_tokens=prompt_tokens,
            tensor_parallel_size=recipe.engines.tensor_parallel_size if recipe else 1,
        ),
        reward=_reward(run),
        push=_push(steps_alone(_warm_steps(run), recipe)),
    )
    return Fit(
        model=model,
        step_error=step.error,
        life_error=life_error,
        completions=len(lives.begins),
        steps=len(run.steps),
        assumed=(*assumed, *(f"{part}.{name}" for part, names in NEVER_FITTED.items() for name in names)),
    )


def _warm_steps(run: RecordedRun) -> tuple[StepLine, ...]:
    """Steps without the first one, which warms up; a single step counts itself."""
    return run.steps[1:] or run.steps


# ---- engines, environment, rewards, push -----------------------------------------------------------


def _decode_step(run: RecordedRun, training: list[tuple[float, float]], prior: StepCost | None) -> StepFit:
    if prior is None:
        return fit_step(step_samples(run, training))
    samples = step_samples(run, training, fewest=1)
    if len(samples.seconds) < FEWEST_SAMPLES:
        return scale_step(samples, prior)
    return fit_step(samples)


def _engine(
    run: RecordedRun, step: StepFit, arrival: float, presubmitted: float, prefill_tokens_s: float, max_num_seqs: int
) -> EngineModel:
    header = run.header
    return EngineModel(
        **asdict(step.cost),
        max_num_seqs=max_num_seqs or max(ceil(header.capacity / header.engines), 1),
        kv_tokens=header.kv_tokens // header.engines if any(line.preemptions for line in run.engines) else 0,
        prefill_tokens_s=prefill_tokens_s,
        # The front end takes one request at a time, and decoding waits for it.
        arrival_s=arrival,
        admission_s=arrival,
        presubmitted_s=presubmitted,
    )


def _environment(run: RecordedRun) -> EnvironmentModel:
    """Means of a turn; zeros for a run without an environment."""
    turns = np.array([turn for line in run.trajectories for turn in line.turns] or [(0, 0.0, 0, 0.0)])
    appended, seconds, tokens, _ = (turns.sum(axis=0) / max(np.count_nonzero(turns[:, 2]), 1)).tolist()
    return EnvironmentModel(turn_tokens=tokens, appended_tokens=round(appended), seconds=seconds)


def _push(steps: Sequence[StepLine]) -> PushModel:
    """Mean time of a step outside of rollout and training, by kind of round, so that the total time is kept."""
    by_kind: dict[str, list[float]] = {}
    for line in steps:
        outside_s = line.step_s - line.rollout_s - line.training_s - line.to_engines_s
        by_kind.setdefault(line.round_kind, []).append(max(outside_s, 0.0))
    means = {kind: float(np.mean(seconds)) for kind, seconds in by_kind.items()}
    shortest = min(means.values())
    pause_s = min(float(np.median([line.paused_s for line in steps])), shortest)
    extra_s = {kind: seconds - shortest for kind, seconds in means.items() if seconds > shortest}
    return PushModel(
        seconds=shortest,
        pause_s=pause_s,
        kind_s=extra_s,
        to_ranks_s=float(np.mean([line.to_ranks_s for line in steps])),
        to_engines_s=float(np.mean([line.to_engines_s for line in steps])),
    )


def _reward(run: RecordedRun) -> RewardModel:
    seconds = np.array([line.reward_s for line in run.trajectories if line.reward_s > 0])
    rewards = [line.reward for line in run.trajectories if line.reward is not None]
    solved = float(np.mean([reward > 0.5 for reward in rewards])) if rewards else 0.5
    if not len(seconds):
        return RewardModel(solved=solved)
    logs = np.log(seconds)
    low, middle, high = np.quantile(logs, [0.25, 0.5, 0.75])
    return RewardModel(median_s=float(np.exp(middle)), sigma=float(high - low) / 1.349, solved=solved)


# ---- the trainer ---------------------------------------------------------------------------------

STREAMS_BELOW = 0.75
"""Time of training after the full batch over the time of forward and backward, below which a run has streamed groups to
the trainer."""


def fit_trainer(run: RecordedRun, streaming_tokens: int) -> tuple[TrainerModel, list[tuple[float, float]]]:
    """(model of the trainer, spans in seconds since the run began in which it worked while the rollout went on).

    The costs of a token and of a sequence, and a constant, are fitted to the work of steps. The time to close a batch
    is the time after the full batch that the work left at this moment does not explain. ``streaming_tokens``:
    ``TrainerModel.streaming_tokens``."""
    steps = _warm_steps(run)
    work_s = np.array([line.forward_backward_s or line.training_s for line in steps])
    after_full_s = np.array([line.training_s - line.to_ranks_s for line in steps])
    # The constant is the last column: where all steps have as many samples, it looks the same as the cost of samples.
    columns = np.array([(line.trained_tokens, line.samples, 1.0) for line in steps], dtype=float)
    token_s, sequence_s, constant_s = unbiased_fit(columns, work_s, np.ones(len(steps))).tolist()
    model = TrainerModel(token_s=token_s, sequence_s=sequence_s)
    if float(np.median(after_full_s)) >= STREAMS_BELOW * float(np.median(work_s)):
        closing_s = max(float(np.mean(after_full_s - work_s)), 0.0) + constant_s
        return replace(model, optimizer_s=closing_s), []
    model = replace(model, streaming_speed=1.0, streaming_tokens=streaming_tokens)
    spans, remaining_s = _replay_training(run, model)
    closing_s = max(float(np.mean(after_full_s - np.array(remaining_s[-len(steps) :]))), float(after_full_s.min()))
    return replace(model, optimizer_s=closing_s), spans


def _replay_training(run: RecordedRun, model: TrainerModel) -> tuple[list[tuple[float, float]], list[float]]:
    """(spans in which a trainer with ``model`` works on the recorded groups, the seconds of work of each step that
    remain when its batch is full)."""
    clock = TrainerClock(model)
    spans: list[tuple[float, float]] = []
    remaining_s: list[float] = []
    groups = trained_groups(run)
    trained_s = [group.trained_s for group in groups]
    first = 0
    for step in run.steps:
        last = bisect_left(trained_s, step.time_s)
        full_s = step.time_s - step.step_s + step.rollout_s
        for group in sorted(groups[first:last], key=lambda group: group.scored_s):
            now = min(group.scored_s, full_s)
            clock.take(now, group.samples, group.tokens)
            _extend(spans, now, clock.idle_at)
        closed_s = clock.close(full_s, engines_idle=True)
        _extend(spans, full_s, closed_s, final=True)
        remaining_s.append(closed_s - full_s)
        first = last
    return spans, remaining_s


def _extend(spans: list[tuple[float, float]], begins: float, ends: float, *, final: bool = False) -> None:
    """Add a span, or extend the last one where it reaches ``begins``. ``final``: whether ``ends`` replaces the end of
    the last span, which was only a forecast."""
    if not spans or spans[-1][1] < begins:
        if ends > begins:
            spans.append((begins, ends))
        return
    last_begins, last_ends = spans[-1]
    spans[-1] = (last_begins, ends if final else max(ends, last_ends))


# ---- lengths of completions ----------------------------------------------------------------------

Floats = NDArray[np.float64]
MOST_PARTS = 3
NARROWEST = 0.05
"""Smallest standard deviation of logarithms in a part of the mixture, so that equal lengths are no part of their
own."""

_ITERATIONS = 200
_NORMAL = NormalDist()


def fit_lengths(run: RecordedRun) -> LengthModel:
    """Fit a mixture of log-normals below the cap, a mass at the cap, and the correlation of two completions of a
    prompt. The Bayesian information criterion chooses the number of parts, since classes of prompts differ in
    length."""
    cap = run.header.max_tokens
    rows = [[min(length, cap) for length, _ in row] for row in recorded_rows(run)]
    lengths = np.array([length for row in rows for length in row], dtype=float)
    below = lengths < cap
    logs = np.log(lengths[below]) if below.any() else np.log(lengths)
    mixtures = (_mixture(logs, parts) for parts in range(1, MOST_PARTS + 1))
    _, (weights, mus, sigmas) = min(mixtures)
    correlation = _correlation(rows)
    share = float(np.mean(~below))
    return LengthModel(cap=cap, weights=weights, mus=mus, sigmas=sigmas, cap_share=share, correlation=correlation)


def _mixture(logs: Floats, parts: int) -> tuple[float, list[tuple[float, ...]]]:
    """(Bayesian information criterion, [weights, means, deviations]) of a mixture of ``parts`` normals, by ascending
    mean. Fitted by expectation maximisation, which starts with parts of equal weight."""
    mus = np.quantile(logs, (np.arange(parts) + 0.5) / parts)
    sigmas = np.full(parts, max(float(logs.std()) / parts, NARROWEST))
    weights = np.full(parts, 1 / parts)
    last_likelihood = -inf
    for _ in range(_ITERATIONS):
        densities = weights * np.exp(-0.5 * ((logs[:, None] - mus) / sigmas) ** 2) / (sigmas * sqrt(2 * math.pi))
        total = np.maximum(densities.sum(axis=1), 1e-300)
        likelihood = float(np.log(total).sum())
        if likelihood - last_likelihood < 1e-6 * len(logs):
            break
        last_likelihood = likelihood
        shares = densities / total[:, None]
        counts = np.maximum(shares.sum(axis=0), 1e-9)
        weights = counts / counts.sum()
        mus = (shares * logs[:, None]).sum(axis=0) / counts
        spread = (shares * (logs[:, None] - mus) ** 2).sum(axis=0) / counts
        sigmas = np.maximum(np.sqrt(spread), NARROWEST)
    order = np.argsort(mus)
    criterion = (3 * parts - 1) * math.log(len(logs)) - 2 * likelihood
    return criterion, [tuple(values[order].tolist()) for values in (weights, mus, sigmas)]


def _correlation(rows: Sequence[Sequence[int]]) -> float:
    """Correlation of the normal scores of two completions of a prompt, as ``LengthModel`` defines it: the intraclass
    correlation by a one-way analysis of variance."""
    groups = [row for row in rows if len(row) > 1]
    if len(groups) < 2:
        return 0.0
    scores = _normal_scores(np.array([length for row in groups for length in row], dtype=float))
    sizes = np.array([len(row) for row in groups])
    parts = np.split(scores, np.cumsum(sizes)[:-1])
    means = np.array([part.mean() for part in parts])
    within = sum(float(((part - mean) ** 2).sum()) for part, mean in zip(parts, means, strict=True))
    within /= max(float(sizes.sum()) - len(groups), 1.0)
    between = float((sizes * (means - scores.mean()) ** 2).sum()) / (len(groups) - 1)
    size = (float(sizes.sum()) - float((sizes**2).sum() / sizes.sum())) / (len(groups) - 1)
    variance = max((between - within) / size, 0.0)
    return min(variance / max(variance + within, 1e-12), 0.99)


def _normal_scores(values: Floats) -> Floats:
    """Standard normal value at the rank of each value; equal values have the mean of their ranks."""
    ascending = np.sort(values)
    ranks = (np.searchsorted(ascending, values, "left") + np.searchsorted(ascending, values, "right")) / 2
    return np.array([_NORMAL.inv_cdf(share) for share in (ranks / len(values)).clip(1e-6, 1 - 1e-6).tolist()])
