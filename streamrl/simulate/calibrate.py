"""A cluster model from what a real run measured, part by part.

What a recorded run cannot tell stays at what the model says by itself: KV capacity where no preemption was seen,
attention over the context (small engines), cores that trainer and engines share.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from streamrl.base.errors import StreamRLError
from streamrl.observe.report.trajectory_trace import RecordedRun, StepLine
from streamrl.recipe.sections import Recipe
from streamrl.simulate.cluster import ClusterModel, Engines
from streamrl.simulate.engine_fit import StepFit, fit_arrivals, fit_step, step_samples
from streamrl.simulate.engines import EngineModel
from streamrl.simulate.length_fit import fit_lengths
from streamrl.simulate.recording import life_times
from streamrl.simulate.stages import PushModel, RewardModel
from streamrl.simulate.trainer_fit import fit_trainer

FEWEST_COMPLETIONS = 64
FEWEST_STEPS = 3
ROW_PARTS = 4
"""An idle trainer streams once such a part of a row of ``micro_batch_tokens`` waits (``TorchTrainer.idle_work``)."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """``model``, and how well it explains what it was fitted to: medians of the absolute relative error.

    ``step_error``: decode steps; ``life_error``: seconds from launch to last token.
    """

    model: ClusterModel
    step_error: float
    life_error: float
    completions: int
    steps: int


def calibrate(run: RecordedRun, recipe: Recipe | None = None) -> Fit:
    """Fit every part to ``run``. Its ``recipe`` knows how many requests an engine runs at most (without it: as many as
    the run's capacity says) and for how many tokens an idle trainer waits (without it: for none).

    Raises ``StreamRLError`` where the run is too short to fit anything.
    """
    lives = life_times(run)
    if len(lives.begins) < FEWEST_COMPLETIONS or len(run.steps) < FEWEST_STEPS:
        raise StreamRLError(
            f"run {run.header.run_id} recorded {len(lives.begins)} whole completions and {len(run.steps)} steps; a "
            f"calibration needs {FEWEST_COMPLETIONS} and {FEWEST_STEPS}: record a longer run"
        )
    trainer = fit_trainer(run, recipe.training.micro_batch_tokens // ROW_PARTS if recipe else 0)
    step = fit_step(step_samples(run, trainer.spans))
    arrival, presubmitted, life_error = fit_arrivals(lives, step, run.steps[0].time_s)
    prompt_tokens = round(float(np.mean([line.prompt_tokens for line in run.trajectories])))
    header = run.header
    model = ClusterModel(
        engine=_engine(run, step, arrival, presubmitted, recipe.engines.max_num_seqs if recipe else 0),
        trainer=msgspec.structs.replace(trainer.model, rollout_slowdown=step.slowdown),
        lengths=fit_lengths(run),
        # Not the run's capacity: another recipe's batches are measured against their own.
        engines=Engines(count=header.engines, prompt_tokens=prompt_tokens),
        reward=_reward(run),
        push=_push(run.steps[1:]),
    )
    return Fit(
        model=model, step_error=step.error, life_error=life_error, completions=len(lives.begins), steps=len(run.steps)
    )


def _engine(run: RecordedRun, step: StepFit, arrival: float, presubmitted: float, max_num_seqs: int) -> EngineModel:
    header = run.header
    return EngineModel(
        base_s=step.base_s,
        per_running_s=step.per_running_s,
        per_root_running_s=step.per_root_running_s,
        max_num_seqs=max_num_seqs or max(math.ceil(header.capacity / header.engines), 1),
        kv_tokens=header.kv_tokens // header.engines if any(line.preemptions for line in run.engines) else 0,
        # The front end takes one request after the other, and decoding waits for it.
        arrival_s=arrival,
        admission_s=arrival,
        presubmitted_s=presubmitted,
    )


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
