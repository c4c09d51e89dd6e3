"""One run of a comparison: trains a recipe until a number of samples, and returns its figures. Called by ``compare`` in
the command's own process, which is the supervisor of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from streamrl.base.errors import StreamRLError
from streamrl.base.run_events import EvaluationFinished, RunWarning, StepFinished
from streamrl.base.types import FinishReason, Texts
from streamrl.cli.compare.run_figures import WARM_UP_STEPS, RunFigures, samples_of
from streamrl.control.policies.sagc import straggler_rate
from streamrl.launch.control_protocol import ControlRefused, SteerRun
from streamrl.launch.control_socket import ask_run
from streamrl.launch.pipeline import Pipeline
from streamrl.observe.report.trajectory_trace import TRAINED, read_trace
from streamrl.observe.run_files.run_reader import RunFiles
from streamrl.recipe.sections import Recipe

METRICS = (
    "time/step_s", "time/wait_eval_s", "perf/samples_s", "perf/train_tok_s", "util/rollout_bubble_ratio",
    "util/free_slot_ratio",
)  # fmt: skip
"""Metrics of a step that a comparison keeps."""

ANSWER_LIMIT_S = 60.0
SPARE_STEPS = 8
"""Steps to spare while the run is evaluated: at its last step it would end without the evaluation."""


class ComparedRun(RunFigures, frozen=True, kw_only=True):
    """The run of ``system`` with the seed of ``repeat`` (from 1), in ``directory``. ``stragglers``: share of trained
    groups that straggled (NaN: none is large enough to tell). ``warnings``: alarms of the run."""

    system: str
    repeat: int
    directory: str
    stragglers: float
    warnings: Texts = ()


def measured_recipe(recipe: Recipe, samples: int, repeat: int, name: str, directory: Path) -> Recipe:
    """Return ``recipe`` as a comparison runs it: with its own name and the seed of the repeat, without evaluations
    beside its steps, and long enough for ``samples`` at the smallest group size."""
    run = recipe.run
    fewest = min(groups * size for groups, size in recipe.batch_shapes)
    steps = WARM_UP_STEPS + math.ceil(samples / fewest) + SPARE_STEPS
    seed = run.seed + repeat - 1
    evaluation = replace(recipe.evaluation, at_start=False, at_end=False, every=0, limit=0)
    return replace(
        recipe,
        run=replace(run, name=f"{name}-{repeat}", directory=str(directory), seed=seed, steps=steps),
        training=replace(recipe.training, epochs=0.0),
        evaluation=evaluation,
        checkpoint=replace(recipe.checkpoint, every=0, keep_best=0, at_end=False),
    )


async def measure_run(
    recipe: Recipe, samples: int, system: str, repeat: int, progress: Callable[[float], None]
) -> ComparedRun:
    """Train until ``samples`` are trained after the warm-up, then evaluate and drain. ``progress``: callback with the
    share that is trained. Raises ``ProcessDied`` where the run breaks, ``StreamRLError`` where it ends too early."""
    steps = []
    warnings = []
    trained = 0.0
    last_measured_step = 0
    accuracy = math.nan
    async with Pipeline(recipe) as pipeline:
        async for event in pipeline.events():
            if isinstance(event, RunWarning):
                warnings.append(f"step {event.step}: {event.message}")
            if isinstance(event, EvaluationFinished) and last_measured_step:
                accuracy = next((value for name, value in event.metrics.items() if "/avg@" in name), math.nan)
                pipeline.drain()
            if not isinstance(event, StepFinished):
                continue
            steps.append({name: event.metrics[name] for name in METRICS if name in event.metrics})
            if len(steps) > WARM_UP_STEPS:
                trained += samples_of(event.metrics)
            progress(min(trained / samples, 1.0))
            if round(trained) >= samples and not last_measured_step:
                last_measured_step = len(steps)
                if recipe.evaluation.sets:
                    await _order_evaluation(pipeline.run_directory)
                else:
                    pipeline.drain()
    if not last_measured_step:
        raise StreamRLError(
            f"{pipeline.run_directory} ended after {trained:.0f} of {samples} samples: give more prompts"
        )
    return ComparedRun(
        steps=steps,
        cool_down=len(steps) - last_measured_step,
        accuracy=accuracy,
        system=system,
        repeat=repeat,
        directory=str(pipeline.run_directory),
        stragglers=_stragglers(pipeline.run_directory, recipe),
        warnings=tuple(warnings),
    )


def _stragglers(run: Path, recipe: Recipe) -> float:
    lengths: dict[int, list[float]] = {}
    for line in read_trace(RunFiles(run).trace).trajectories:
        if line.outcome == TRAINED:
            truncated = line.finish_reason == FinishReason.LENGTH
            lengths.setdefault(line.group, []).append(math.inf if truncated else line.tokens)
    rate = straggler_rate([np.array([group]) for group in lengths.values()], recipe.group_sizing.straggler_ratio)
    return math.nan if rate is None else rate


async def _order_evaluation(run: Path) -> None:
    """Have a running run evaluate its live version on all held-out prompts."""
    answer = await ask_run(run, SteerRun(order="evaluate"), ANSWER_LIMIT_S)
    if isinstance(answer, ControlRefused):
        raise StreamRLError(f"{run} was not evaluated: {'; '.join(answer.problems)}")
