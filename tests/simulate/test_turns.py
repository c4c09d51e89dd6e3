"""Environments in virtual time: turns one after the other, without a slot of an engine between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders.recipe import small_recipe
from msgspec.structs import replace
from oracle.control_walks import COMPOSITIONS
from oracle.trace_header import trace_header

from streamrl.base.types import TurnTimes
from streamrl.cli.main import main
from streamrl.observe.report.trajectory_trace import RecordedRun, TrajectoryLine, TrajectoryTrace
from streamrl.recipe.environment import Environment
from streamrl.recipe.scheduling import AdmissionKind, RoundKind
from streamrl.simulate.calibrate import calibrate
from streamrl.simulate.lengths import ModelledLengths, RecipeLengths, RecordedLengths
from streamrl.simulate.recording import agreement
from streamrl.simulate.report import SimulationReport
from streamrl.simulate.simulation import Simulation, simulate_recipe
from streamrl.simulate.stages import EnvironmentModel, TrainerModel
from tests.simulate.recorder import Recorder
from tests.simulate.test_calibrate import TRUTH
from tests.simulate.test_what_if import write_recipe
from tests.simulate.worlds import TINY, control_settings, with_part

RECIPE = small_recipe(environment=Environment(tools=("tools.py:add",), max_turns=8))
RECIPE = replace(RECIPE, rollout=replace(RECIPE.rollout, prompts_per_batch=16, group_size=8))
TURNS: tuple[TurnTimes, ...] = ((20, 0.5, 100, 0.1), (40, 2.0, 60, 0.1), (10, 1.0, 30, 0.1), (0, 0.25, 0, 0.0))


def replayed(engine: dict[str, object], *, factor: float = 1.0, max_turns: int = 8) -> SimulationReport:
    """One step on a group of two trajectories that recorded ``TURNS``."""
    line = TrajectoryLine(
        prompt_id="p", group=0, sample=0, attempt=0, prompt_tokens=0, tokens=190, finish_reason="stop",
        outcome="trained", round_kind="synchronous", launched_s=0.0, ended_s=9.0, rollout_s=4.05, turns=TURNS,
    )  # fmt: skip
    run = RecordedRun(
        header=trace_header(max_tokens=999), trajectories=(line, replace(line, sample=1)), steps=(), engines=()
    )
    rollout = replace(RECIPE.rollout, prompts_per_batch=1, group_size=2)
    recipe = replace(RECIPE, rollout=rollout, environment=replace(RECIPE.environment, max_turns=max_turns))
    model = with_part(with_part(TINY, "engine", per_running_s=0.0, **engine), "environment", factor=factor)
    model = replace(model, engines=replace(model.engines, count=1, prompt_tokens=0), trainer=TrainerModel(token_s=0.0))
    return simulate_recipe(recipe, model, 1, RecordedLengths(run, resample=False))


@pytest.mark.parametrize(
    ("engine", "environment_s", "sampling_s", "more"),
    [
        ({}, 3.75, 0.19, {}),
        ({}, 1.875, 0.19, {"factor": 0.5}),
        ({}, 2.75, 0.16, {"max_turns": 2}),
        # Prefilled: 20, 40 and 10 tokens that were appended; without a cache the contexts of 20, 160 and 230.
        ({"prefill_tokens_s": 1000.0}, 3.75, 0.19 + 2 * 0.07, {}),
        ({"prefill_tokens_s": 1000.0, "prefix_cache": False}, 3.75, 0.19 + 2 * 0.41, {}),
    ],
)
def test_a_recorded_trajectory_is_replayed_turn_by_turn(
    engine: dict[str, object], environment_s: float, sampling_s: float, more: dict[str, float]
) -> None:
    report = replayed(engine, **more)
    assert report.environment_s == pytest.approx(environment_s)
    assert report.sampling_s == pytest.approx(sampling_s), "nothing is decoded for it in its environment"
    assert report.recent[0].rollout_s == pytest.approx(environment_s + sampling_s)
    assert report.trained.mean == (160 if "max_turns" in more else 190)
    assert report.rollout_bubble == pytest.approx(1 - sampling_s / (environment_s + sampling_s)), "they hold no slot"


def test_admission_by_kv_keeps_contexts_that_slots_evict() -> None:
    """Engines whose KV caches hold a third of the contexts: fewer are preempted, and a trajectory takes less
    time."""
    engine = {"kv_tokens": 6000, "prefill_tokens_s": 20_000.0, "max_num_seqs": 64}
    model = with_part(with_part(TINY, "engine", **engine), "engines", count=1, prompt_tokens=50)
    model = replace(model, environment=EnvironmentModel(turn_tokens=8, appended_tokens=60, seconds=0.05))
    rollout = replace(RECIPE.rollout, rounds=RoundKind.CONTINUOUS, max_staleness=5, prompts_per_batch=8, group_size=2)
    reports = {}
    for admission in AdmissionKind:
        recipe = replace(RECIPE, rollout=replace(rollout, admission=admission))
        reports[admission] = simulate_recipe(recipe, model, 40, ModelledLengths(TINY.lengths, 3), warm_up=4)
    slots, kv = reports.values()
    assert kv.goodput > 1.2 * slots.goodput, (kv.goodput, slots.goodput)
    assert kv.preemptions < slots.preemptions / 2, (kv.preemptions, slots.preemptions)
    assert kv.trained.mean == pytest.approx(slots.trained.mean, rel=0.1)


ROUNDS = ("continuous at 3", "race on both axes", "deferred prompts resumed", "partial", "sorted, oversubscribed")


@pytest.mark.parametrize("rounds", ROUNDS)
def test_rounds_pause_and_cancel_waiting_trajectories(rounds: str) -> None:
    """Rounds pause and cancel trajectories in their environments."""
    settings = control_settings(batch_groups=4, group_size=4, seed=3, **COMPOSITIONS[rounds])
    environment = EnvironmentModel(turn_tokens=8, appended_tokens=5, seconds=0.05)
    lengths = RecipeLengths(RECIPE, environment, ModelledLengths(TINY.lengths, 3))
    simulation = Simulation(replace(settings, steps=30), replace(TINY, environment=environment), lengths)

    away = {0}

    def check(version: int) -> None:
        away.add(getattr(simulation.core.rules.policy, "_in_environments", 0))
        rollout, paused = simulation.rollout, simulation.core.state.buffer.paused
        assert {one.request_id for one in rollout._router} <= {str(one) for one in rollout.requests}, "cancelled"
        running = [request.id.group_id for engine in rollout.engines for request in engine.running]
        assert not set(running) & set(paused)

    report = simulation.run(progress=check)
    assert report.finished and report.steps == 30 and report.environment_s > 0.05
    assert (max(away) > 0) is settings.reads_environment, "of what waits for its environment"


@pytest.mark.long
def test_a_run_with_turns_gives_its_constants_and_times_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = replace(TRUTH, environment=EnvironmentModel(turn_tokens=20, appended_tokens=12, seconds=0.3))
    run = Recorder(truth, 12, recipe=RECIPE).recorded()
    fit = calibrate(run, RECIPE)
    assert fit.model.environment.seconds == pytest.approx(0.3, rel=0.1)
    assert fit.model.environment.appended_tokens == 12 and 20 < fit.model.environment.turn_tokens < 30
    assert fit.model.engine.arrival_s == pytest.approx(truth.engine.arrival_s, rel=0.25)
    assert abs(agreement(run, RECIPE, fit.model).mismatch) < 0.03
    write_recipe(tmp_path, 16, '[environment]\ntools = ["tools.py:add"]\nmax_turns = 8')
    trace = TrajectoryTrace(tmp_path / "trace.jsonl", run.header)
    for line in (*run.trajectories, *run.steps, *run.engines):
        trace.append(line)
    trace.close()
    reports = []
    for factor in ("1", "0.5"):
        command = ["simulate", str(tmp_path), "--trace", str(tmp_path), "--steps", "8", "--json"]
        assert main([*command, "--environment-factor", factor]) == 0
        reports.append(json.loads(capsys.readouterr().out)[0]["report"])
    assert reports[1]["environment_s"] == pytest.approx(reports[0]["environment_s"] / 2)
    assert reports[1]["goodput"] > 1.2 * reports[0]["goodput"]
