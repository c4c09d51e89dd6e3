"""Record of a real run: its life times and groups for ``calibrate``, and its comparison with a simulation of the same
recipe (``agreement``). ``streamrl calibrate``, ``simulate`` and ``what-if`` and the adviser call it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from streamrl.base.errors import InputError
from streamrl.control.settings import control_settings
from streamrl.engines.step_cost import StepCost
from streamrl.observe.report.trajectory_trace import TRAINED, RecordedRun, StepLine, TrajectoryLine, read_trace
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.simulate.fleet import FleetModel
from streamrl.simulate.lengths import RecordedLengths
from streamrl.simulate.report import SimulationReport, StepRow
from streamrl.simulate.simulation import simulate_recipe

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
TRACE_FILE = "trace.jsonl"
ALL_KINDS = ""
"""Name for the steps of all kinds of rounds in ``Agreement``."""


def load_recording(path: Path) -> RecordedRun:
    """Read the trace of a run directory, or a trace file. Raises ``StreamRLError`` for a missing or damaged trace."""
    file = path / TRACE_FILE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{path} has no {TRACE_FILE}: give the directory of a run that recorded one")
    return read_trace(file)


class LifeTimes(Struct, frozen=True, kw_only=True):
    """Completions, or turns, that ran from launch to end under one version, one row each. Times are seconds since the
    run began.

    ``begins``: time of the launch, or for requests that waited in a paused engine (``presubmitted``) the time at which
      their version went live;
    ``ends``: time of the last token;
    ``tokens``: sampled tokens;
    ``arrivals``: requests that began on the same engine from its begin to its end, itself included;
    ``arrival_s``: seconds from launch to end for each request that an engine got for the same version up to it;
    ``times``, ``in_flight``: load of an engine: from ``times[k]`` to ``times[k + 1]`` it had ``in_flight[k]`` requests,
      stopped ones included."""

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
        """Seconds that the tokens of each completion take with decode steps of ``cost``, at the loads during its
        life."""
        step_s = np.array([cost.step_s(running) for running in np.maximum(self.in_flight, 1.0).tolist()])
        steps_until = np.concatenate([[0.0], np.cumsum(np.diff(self.times) / step_s[:-1])])  # for each of ``times``
        steps = np.interp(self.ends, self.times, steps_until) - np.interp(self.begins, self.times, steps_until)
        seconds: Floats = self.tokens * self.seconds / np.maximum(steps, 1e-12)
        return seconds


def life_times(run: RecordedRun) -> LifeTimes:
    """Life times of all recorded completions. Stopped trajectories count as load only."""
    lines = [completion for line in run.trajectories if line.rollout_s > 0 for completion in _completions(line)]
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
    complete = np.array([_is_complete(line) for line in lines], dtype=bool)
    starts = np.sort(begins)
    arrivals = np.searchsorted(starts, ends, side="right") - np.searchsorted(starts, begins, side="left")
    keys = np.array([(line.oldest_version, line.group, line.sample) for line in lines]).reshape(-1, 3)
    versions, groups, samples = keys.T
    in_order = np.lexsort((samples, groups, launched, versions))
    places = np.empty(len(lines))
    places[in_order] = np.arange(1, len(lines) + 1) - np.searchsorted(versions[in_order], versions[in_order])
    return LifeTimes(
        begins=begins[complete],
        ends=ends[complete],
        tokens=np.array([line.tokens for line in lines], dtype=float)[complete],
        arrivals=arrivals[complete] / engines,
        arrival_s=((ends - launched) * engines / places)[complete],
        presubmitted=presubmitted[complete],
        times=times[order],
        in_flight=np.cumsum(changes) / engines,
    )


def _completions(line: TrajectoryLine) -> list[TrajectoryLine]:
    """One line for each turn of ``line``; ``line`` itself where it has no turns."""
    turns = []
    now = line.launched_s
    for _, environment_s, tokens, sampling_s in line.turns:
        now += environment_s
        turns.append(replace(line, launched_s=now, rollout_s=sampling_s, tokens=tokens))
        now += sampling_s
    return turns[:-1] or [line]  # the last entry has no tokens (``TurnTimes``)


def _is_complete(line: TrajectoryLine) -> bool:
    return bool(line.finish_reason) and line.tokens > 0 and line.oldest_version == line.newest_version


class TrainedGroup(Struct, frozen=True, kw_only=True):
    """A group that was trained. ``scored_s``: time at which its last reward was known; ``trained_s``: time at which the
    optimizer had stepped on it; ``tokens``, ``samples``: number of its tokens and trajectories."""

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
"""Mismatch above which the user is warned, and above which forecasts are refused for recipes with features that the
recorded run did not have."""
MOST_WARM_UP = 5


class Agreement(Struct, frozen=True, kw_only=True):
    """Comparison of a recorded run with a simulation of its own recipe on the recorded lengths.

    ``recipe``: recipe of the run;
    ``goodput``: (recorded, simulated) trained tokens a second;
    ``recorded``, ``simulated``: mean seconds of a step by kind of round, with the mean of all steps under the empty
      name;
    ``evaluated``: number of steps that the comparison leaves out, since an evaluation ran during them."""

    recipe: Recipe
    goodput: tuple[float, float]
    recorded: dict[str, float]
    simulated: dict[str, float]
    evaluated: int = 0

    @property
    def mismatch(self) -> float:
        """Simulated goodput over the recorded one, less one."""
        recorded, simulated = self.goodput
        return simulated / recorded - 1

    def slower(self, report: SimulationReport) -> float:
        """Factor for the seconds of ``report``. For each kind of round it is the recorded over the simulated seconds of
        a step; for kinds that the record does not have, those of all steps."""
        seconds_of_kind = {kind.round_kind: kind.steps * kind.step_s for kind in report.kinds}
        scaled = sum(seconds * self._ratio(kind) for kind, seconds in seconds_of_kind.items())
        return scaled / sum(seconds_of_kind.values())

    def _ratio(self, kind: str) -> float:
        if kind not in self.recorded or kind not in self.simulated:
            kind = ALL_KINDS
        return self.recorded[kind] / self.simulated[kind]

    def unknown(self, report: SimulationReport, recipe: Recipe) -> str:
        """Message that the record says too little about the times of ``recipe``, which was simulated in ``report``;
        empty where it says enough."""
        if recipe.on_policy != self.recipe.on_policy:
            policy = "on-policy" if self.recipe.on_policy else "off-policy"
            return (
                f"cannot know: the recorded run trained {policy}, with other work of the trainer beside the engines': "
                "record a few steps of it"
            )
        if recipe.in_turns != self.recipe.in_turns:
            sharing = "in turns" if self.recipe.in_turns else "side by side"
            return (
                f"cannot know: the recorded run had engines and trainer {sharing}, and each is faster where the other "
                "does not work beside it: record a few steps of it"
            )
        kinds = [kind.round_kind for kind in report.kinds if kind.steps]
        new_features = _features(recipe, kinds) - _features(self.recipe, self.recorded)
        if not new_features or abs(self.mismatch) <= LARGE_MISMATCH:
            return ""
        return (
            f"cannot know: the simulation of the recorded run is off by {self.mismatch:+.0%}, and had no "
            f"{', '.join(sorted(new_features))}: record a few steps of it"
        )

    def notes(self) -> list[str]:
        """Messages with the recorded and simulated goodput and steps, and a warning where they are far apart."""
        kinds = [kind for kind in self.recorded if kind != ALL_KINDS and kind in self.simulated]
        steps = ", ".join(f"{kind} {self.recorded[kind]:.3g} / {self.simulated[kind]:.3g}" for kind in kinds)
        text = (
            f"the recorded recipe, as recorded / as simulated: {self.goodput[0]:.0f} / {self.goodput[1]:.0f} trained "
            f"tokens a second ({self.mismatch:+.1%}); seconds of a step, by which forecasts are scaled: {steps}"
        )
        if self.evaluated:
            text += f"; left out: {self.evaluated} steps beside an evaluation"
        messages = [text]
        if abs(self.mismatch) > LARGE_MISMATCH:
            messages.append("WARNING: something took time that is not simulated: what is said of other rounds is weak")
        return messages


def agreement(run: RecordedRun, recipe: Recipe, model: FleetModel, seed: int = 0) -> Agreement:
    """Simulate the ``recipe`` of ``run`` for as many steps, with the recorded prompts in their order. Raises
    ``StreamRLError`` where the simulation fails."""
    warm_up = min(MOST_WARM_UP, len(run.steps) // 4)
    steps = run.steps[warm_up:]
    lengths = RecordedLengths(run, resample=False, seed=seed)
    report = simulate_recipe(recipe, model, len(steps), lengths, seed=seed, warm_up=warm_up)
    alone = steps_alone(steps, recipe)
    # Both sequences from their ends: a report has a limited number of steps.
    rows = dict(zip((line.policy_version for line in reversed(steps)), reversed(report.recent), strict=False))
    compared = [line for line in alone if line.policy_version in rows]
    recorded_goodput, recorded = _goodput_and_steps(compared)
    simulated_goodput, simulated = _goodput_and_steps([rows[line.policy_version] for line in compared])
    return Agreement(
        recipe=recipe,
        goodput=(recorded_goodput, simulated_goodput),
        recorded=recorded,
        simulated=simulated,
        evaluated=len(steps) - len(alone),
    )


def steps_alone(steps: Sequence[StepLine], recipe: Recipe | None) -> list[StepLine]:
    """Steps without an evaluation during them. An evaluation begins when a version goes live, and the push of the next
    version waits for it, which the simulator does not model. Where all steps of a kind of round have an evaluation,
    they are returned nevertheless."""
    every = control_settings(recipe).evaluate_every if recipe else 0
    with_evaluation = {line.policy_version for line in steps if every and (line.policy_version - 1) % every == 0}
    kinds = {line.round_kind for line in steps if line.policy_version not in with_evaluation}
    return [line for line in steps if line.policy_version not in with_evaluation or line.round_kind not in kinds]


def _goodput_and_steps(steps: Sequence[StepLine | StepRow]) -> tuple[float, dict[str, float]]:
    """(trained tokens a second, mean seconds of a step by kind of round and of all steps)."""
    seconds: dict[str, list[float]] = {}
    for step in steps:
        seconds.setdefault(step.round_kind, []).append(step.step_s)
    seconds[ALL_KINDS] = [step.step_s for step in steps]
    goodput = sum(step.trained_tokens for step in steps) / sum(seconds[ALL_KINDS])
    return goodput, {kind: fmean(step_s) for kind, step_s in seconds.items()}


def _features(recipe: Recipe, kinds: Iterable[str]) -> set[str]:
    """Features whose times only a run with them can show: kinds of rounds, and changes of engines and submissions."""
    features = {f"{kind} rounds" for kind in kinds}
    if recipe.rollout.presubmit:
        features.add("submission in advance")
    if recipe.engines.release is not ReleaseKind.NEVER:
        features.add("engines freed")
    if recipe.engines.sets:
        features.add("sets of engines")
    return features
