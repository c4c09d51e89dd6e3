"""Record of a real run for the calibration and the replay, and the same run in virtual time beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.base.errors import StreamRLError
from streamrl.control.settings import control_settings
from streamrl.engines.step_cost import StepCost
from streamrl.observe.report.trajectory_trace import TRAINED, RecordedRun, StepLine, TrajectoryLine, read_trace
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.simulate.cluster import ClusterModel
from streamrl.simulate.lengths import RecordedLengths
from streamrl.simulate.report import SimulationReport, StepRow
from streamrl.simulate.simulation import simulate_recipe

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
TRACE_FILE = "trace.jsonl"


def load_recording(path: Path) -> RecordedRun:
    """The trace of a run directory, or a trace file. Raises ``StreamRLError`` where there is none, or a damaged one."""
    file = path / TRACE_FILE if path.is_dir() else path
    if not file.is_file():
        raise StreamRLError(f"{path} has no {TRACE_FILE}: give the directory of a run that recorded one")
    return read_trace(file)


class LifeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Completions, or turns, that ran from launch to end under one version, one row each; seconds since the run began.

    ``begins``: launch, or when the version that sampled it went live where it waited for that in a paused engine
    (``presubmitted``); ``ends``: last token; ``arrivals``: requests that began on its engine from its begin to its end,
    itself included; ``arrival_s``: seconds from launch to end, for each request launched for its version until then.
    From ``times[k]`` to ``times[k + 1]`` ``in_flight[k]`` requests were open on an engine, those that were stopped too.
    """

    begins: Floats
    ends: Floats
    tokens: Floats
    arrivals: Floats
    arrival_s: Floats
    presubmitted: Flags
    times: Floats
    in_flight: Floats

    @property
    def seconds(self) -> Floats:
        """Seconds from begin to last token."""
        return self.ends - self.begins

    def decoding_s(self, cost: StepCost) -> Floats:
        """Seconds that its tokens take where decode steps have that ``cost``, at the loads it met."""
        step_s = np.array([cost.step_s(running) for running in np.maximum(self.in_flight, 1.0).tolist()])
        made = np.concatenate([[0.0], np.cumsum(np.diff(self.times) / step_s[:-1])])  # steps until each of the times
        steps = np.interp(self.ends, self.times, made) - np.interp(self.begins, self.times, made)
        taken: Floats = self.tokens * self.seconds / np.maximum(steps, 1e-12)
        return taken


def life_times(run: RecordedRun) -> LifeTimes:
    """Spans from the launch to the end of every recorded trajectory; those that were stopped count as load only."""
    lines = [one for line in run.trajectories if line.rollout_s > 0 for one in _completions(line)]
    live = {line.policy_version: line.time_s for line in run.steps}
    launched = np.array([line.launched_s for line in lines])
    ends = launched + np.array([line.rollout_s for line in lines])
    went_live = np.array([live.get(line.oldest_version, 0.0) for line in lines])
    presubmitted = (went_live > launched) & (went_live < ends)
    begins = np.where(presubmitted, went_live, launched)
    times = np.concatenate([begins, ends])
    order = np.argsort(times, kind="stable")
    changes = np.concatenate([np.ones(len(lines)), -np.ones(len(lines))])[order]
    engines = run.header.engines
    whole = np.array([_whole(line) for line in lines], dtype=bool)
    starts = np.sort(begins)
    arrivals = np.searchsorted(starts, ends, side="right") - np.searchsorted(starts, begins, side="left")
    keys = np.array([(line.oldest_version, line.group, line.sample) for line in lines]).reshape(-1, 3)
    versions, groups, samples = keys.T
    in_order = np.lexsort((samples, groups, launched, versions))
    places = np.empty(len(lines))
    places[in_order] = np.arange(1, len(lines) + 1) - np.searchsorted(versions[in_order], versions[in_order])
    return LifeTimes(
        begins=begins[whole],
        ends=ends[whole],
        tokens=np.array([line.tokens for line in lines], dtype=float)[whole],
        arrivals=arrivals[whole] / engines,
        arrival_s=((ends - launched) * engines / places)[whole],
        presubmitted=presubmitted[whole],
        times=times[order],
        in_flight=np.cumsum(changes) / engines,
    )


def _completions(line: TrajectoryLine) -> list[TrajectoryLine]:
    """Return the turns of ``line`` as lines of their own; where it has none, itself."""
    found = []
    now = line.launched_s
    for _, environment_s, tokens, sampling_s in line.turns:
        now += environment_s
        found.append(msgspec.structs.replace(line, launched_s=now, rollout_s=sampling_s, tokens=tokens))
        now += sampling_s
    return found[:-1] or [line]


def _whole(line: TrajectoryLine) -> bool:
    return bool(line.finish_reason) and line.tokens > 0 and line.oldest_version == line.newest_version


class TrainedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was trained. ``scored_s``: when the last of its rewards was known; ``trained_s``: when the optimizer
    had stepped on it."""

    scored_s: float
    trained_s: float
    tokens: int
    samples: int


def trained_groups(run: RecordedRun) -> list[TrainedGroup]:
    """List the groups in the order of the batches that they were trained in."""
    by_group: dict[int, list[TrajectoryLine]] = {}
    for line in run.trajectories:
        if line.outcome == TRAINED:
            by_group.setdefault(line.group, []).append(line)
    groups = [
        TrainedGroup(
            scored_s=max(line.launched_s + line.rollout_s + line.reward_s for line in lines),
            trained_s=max(line.ended_s for line in lines),
            tokens=sum(line.tokens for line in lines),
            samples=len(lines),
        )
        for lines in by_group.values()
    ]
    return sorted(groups, key=lambda group: group.trained_s)


LARGE_MISMATCH = 0.1
"""Beyond it the user is warned, and forecasts of forms that the run never had cannot be known."""
MOST_WARM_UP = 5


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded run beside its own ``recipe``, simulated on the lengths that it recorded. ``goodput``: trained tokens
    a second, recorded and simulated; ``recorded``, ``simulated``: mean seconds of a step by kind of round, "": of all.
    ``evaluated``: steps that the comparison leaves out, since an evaluation ran beside them."""

    recipe: Recipe
    goodput: tuple[float, float]
    recorded: dict[str, float]
    simulated: dict[str, float]
    evaluated: int = 0

    @property
    def mismatch(self) -> float:
        """Goodput as simulated over that as recorded, less one."""
        return self.goodput[1] / self.goodput[0] - 1

    def slower(self, report: SimulationReport) -> float:
        """The factor for the seconds of ``report``: for each kind of rounds the seconds of the record over those of its
        simulation; for kinds that the record does not have, those of all steps."""
        spent = {kind.round_kind: kind.steps * kind.step_s for kind in report.kinds}
        return sum(seconds * self._ratio(kind) for kind, seconds in spent.items()) / sum(spent.values())

    def _ratio(self, kind: str) -> float:
        known = kind if kind in self.recorded and kind in self.simulated else ""
        return self.recorded[known] / self.simulated[known]

    def unknown(self, report: SimulationReport, recipe: Recipe) -> str:
        """Return why the times of ``recipe``, simulated in ``report``, cannot be known; empty: they can."""
        if recipe.on_policy != self.recipe.on_policy:
            was = "on-policy" if self.recipe.on_policy else "off-policy"
            return (
                f"cannot know: the recorded run trained {was}, with other work of the trainer beside the engines': "
                "record a few steps of it"
            )
        kinds = [kind.round_kind for kind in report.kinds if kind.steps]
        new = _form(recipe, kinds) - _form(self.recipe, self.recorded)
        if not new or abs(self.mismatch) <= LARGE_MISMATCH:
            return ""
        return (
            f"cannot know: the simulation of the recorded run is off by {self.mismatch:+.0%}, and had no "
            f"{', '.join(sorted(new))}: record a few steps of it"
        )

    def notes(self) -> list[str]:
        """Goodput and steps as recorded and as simulated, and a warning where they are far apart."""
        kinds = [kind for kind in self.recorded if kind and kind in self.simulated]
        steps = ", ".join(f"{kind} {self.recorded[kind]:.3g} / {self.simulated[kind]:.3g}" for kind in kinds)
        text = (
            f"the recorded recipe, as recorded / as simulated: {self.goodput[0]:.0f} / {self.goodput[1]:.0f} trained "
            f"tokens a second ({self.mismatch:+.1%}); seconds of a step, by which forecasts are scaled: {steps}"
        )
        text += f"; left out: {self.evaluated} steps beside an evaluation" if self.evaluated else ""
        warning = "WARNING: something took time that is not simulated: what is said of other rounds is weak"
        return [text, warning] if abs(self.mismatch) > LARGE_MISMATCH else [text]


def agreement(run: RecordedRun, recipe: Recipe, model: ClusterModel, seed: int = 0) -> Agreement:
    """Simulate the ``recipe`` that recorded ``run`` for as many steps, with its prompts in their order. Raises
    ``StreamRLError`` where that cannot be done."""
    warm_up = min(MOST_WARM_UP, len(run.steps) // 4)
    steps = run.steps[warm_up:]
    lengths = RecordedLengths(run, resample=False, seed=seed)
    report = simulate_recipe(recipe, model, len(steps), lengths, seed=seed, warm_up=warm_up)
    alone = steps_alone(steps, recipe)
    # From the last one: a report has only so many steps.
    rows = dict(zip((line.policy_version for line in reversed(steps)), reversed(report.recent), strict=False))
    both = [line for line in alone if line.policy_version in rows]
    goodput, recorded = _figures(both)
    of_simulation, simulated = _figures([rows[line.policy_version] for line in both])
    evaluated = len(steps) - len(alone)
    figures = (goodput, of_simulation)
    return Agreement(recipe=recipe, goodput=figures, recorded=recorded, simulated=simulated, evaluated=evaluated)


def steps_alone(steps: Sequence[StepLine], recipe: Recipe | None) -> list[StepLine]:
    """Steps without an evaluation beside them. One begins when a version goes live, and the next version waits for it.
    The simulator does not model it. All steps of a kind of rounds are returned where each of them has an evaluation."""
    every = control_settings(recipe).evaluate_every if recipe else 0
    beside = {line.policy_version for line in steps if every and (line.policy_version - 1) % every == 0}
    kinds = {line.round_kind for line in steps if line.policy_version not in beside}
    return [line for line in steps if line.policy_version not in beside or line.round_kind not in kinds]


def _figures(steps: Sequence[StepLine | StepRow]) -> tuple[float, dict[str, float]]:
    """Trained tokens a second, and mean seconds of a step by kind of round, "": of all."""
    seconds: dict[str, list[float]] = {}
    for step in steps:
        seconds.setdefault(step.round_kind, []).append(step.step_s)
    seconds[""] = [step.step_s for step in steps]
    goodput = sum(step.trained_tokens for step in steps) / sum(seconds[""])
    return goodput, {kind: fmean(each) for kind, each in seconds.items()}


def _form(recipe: Recipe, kinds: Iterable[str]) -> set[str]:
    """Features that only a run with them tells about: kinds of rounds, and what happens between and late in them."""
    has = {
        "submission in advance": recipe.rollout.presubmit,
        "engines freed": recipe.engines.release is not ReleaseKind.NEVER,
        "sets of engines": bool(recipe.engines.sets),
    }
    return {f"{kind} rounds" for kind in kinds} | {name for name, is_so in has.items() if is_so}
