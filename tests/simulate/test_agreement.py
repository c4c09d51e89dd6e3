"""How well a recorded run is simulated, and what that makes of forecasts."""

from __future__ import annotations

import pytest
from builders.recipe import small_recipe
from msgspec.structs import replace

from streamrl.observe.report.trajectory_trace import RecordedRun
from streamrl.recipe.scheduling import RoundKind, TailBatching
from streamrl.recipe.sections import GpuSharing, Recipe, ReleaseKind
from streamrl.simulate.calibrate import calibrate
from streamrl.simulate.lengths import ModelledLengths
from streamrl.simulate.recording import Agreement, agreement
from streamrl.simulate.report import SimulationReport
from streamrl.simulate.simulation import simulate
from tests.simulate.recorder import Recorder
from tests.simulate.test_calibrate import RACE, TRUTH
from tests.simulate.worlds import control_settings


def recipe_of(rounds: RoundKind = RoundKind.SYNCHRONOUS, **rollout: object) -> Recipe:
    recipe = small_recipe()
    tail = TailBatching(prompt_oversampling=1.25)
    chosen = replace(recipe.rollout, prompts_per_batch=16, group_size=8, rounds=rounds, **rollout)
    return replace(recipe, rollout=chosen, tail_batching=tail)


def stretched(run: RecordedRun, factor: float, kind: str = "") -> RecordedRun:
    """``run`` where rollouts (of a kind) take ``factor`` times as long as all that was seen of engines explains."""
    steps, late = [], 0.0
    for line in run.steps:
        more = line.rollout_s * (factor - 1) if kind in ("", line.round_kind) else 0.0
        late += more
        steps.append(
            replace(line, time_s=line.time_s + late, step_s=line.step_s + more, rollout_s=line.rollout_s + more)
        )
    return replace(run, steps=tuple(steps))


def report_of(**settings: object) -> SimulationReport:
    chosen = control_settings(batch_groups=16, group_size=8, **settings)
    return simulate(chosen, TRUTH, 12, lengths=ModelledLengths(TRUTH.lengths, 9))


@pytest.fixture(scope="module")
def synchronous() -> RecordedRun:
    return Recorder(TRUTH, 16).recorded()


def agreed(run: RecordedRun, recipe: Recipe, fitted: RecordedRun | None = None) -> Agreement:
    return agreement(run, recipe, calibrate(fitted or run, recipe).model)


@pytest.mark.long
def test_a_well_simulated_run_leaves_forecasts_unchanged(synchronous: RecordedRun) -> None:
    """A run that is simulated well leaves forecasts as they are."""
    told = agreed(synchronous, recipe_of())
    assert abs(told.mismatch) < 0.03
    assert told.slower(report_of(**RACE)) == pytest.approx(1.0, abs=0.03)
    assert told.unknown(report_of(**RACE), recipe_of(RoundKind.TAIL_BATCHING, presubmit=True)) == ""
    stale = recipe_of(RoundKind.CONTINUOUS, max_staleness=2)
    beside = told.unknown(report_of(rounds=RoundKind.CONTINUOUS, max_staleness=2), stale)
    assert "cannot know: the recorded run trained on-policy" in beside, "how fast training is then, no fit can tell"
    turns = replace(recipe_of(), engines=replace(recipe_of().engines, gpu_sharing=GpuSharing.IN_TURNS))
    assert "had engines and trainer side by side" in told.unknown(report_of(), turns), "beside it each is slower"
    assert len(told.notes()) == 1 and "as recorded / as simulated" in told.notes()[0]


def test_errors_scale_forecasts_of_similar_rounds_only(synchronous: RecordedRun) -> None:
    """The error of a simulation scales forecasts; other forms of rounds cannot be known."""
    told = agreed(stretched(synchronous, 1.5), recipe_of(), fitted=synchronous)
    assert told.mismatch > 0.2 and "WARNING" in told.notes()[-1]
    report = report_of()
    assert told.slower(report) == pytest.approx(told.recorded["synchronous"] / told.simulated["synchronous"])
    assert told.slower(report) == pytest.approx(1 + told.mismatch, rel=0.02)
    assert told.unknown(report, recipe_of()) == "", "the same form was recorded"
    race = told.unknown(report_of(**RACE), recipe_of(RoundKind.TAIL_BATCHING, presubmit=True))
    assert "cannot know" in race and "long rounds, short rounds, submission in advance" in race
    freed = replace(recipe_of(), engines=replace(recipe_of().engines, count=2, release=ReleaseKind.DRAIN))
    assert "had no engines freed" in told.unknown(report, freed)


@pytest.mark.long
def test_each_kind_of_round_is_scaled_by_its_own_seconds() -> None:
    run = Recorder(TRUTH, 20, **RACE).recorded()
    recipe = recipe_of(RoundKind.TAIL_BATCHING, presubmit=True)
    told = agreed(stretched(run, 2.0, "long"), recipe, fitted=run)
    ratios = {kind: told.recorded[kind] / told.simulated[kind] for kind in ("short", "long")}
    assert ratios["short"] == pytest.approx(1.0, abs=0.1) and ratios["long"] > 1.5
    race = report_of(**RACE)
    spent = {kind.round_kind: kind.steps * kind.step_s for kind in race.kinds}
    expected = sum(spent[kind] * ratios[kind] for kind in spent) / sum(spent.values())
    assert told.slower(race) == pytest.approx(expected)
    assert ratios["short"] < told.slower(race) < ratios["long"]
    assert told.slower(report_of()) == pytest.approx(told.recorded[""] / told.simulated[""]), "by all, as of a new kind"


def test_fixed_costs_and_constant_training_are_fitted(synchronous: RecordedRun) -> None:
    """The fixed cost of each kind of round and the constant part of training are fitted."""

    def changed(line: object, number: int) -> object:
        samples = 64 if number % 2 else 128
        worked = 1e-4 * line.trained_tokens + 1e-3 * samples + 0.05
        later = 0.25 if number % 3 == 0 else 0.0
        step_s = line.rollout_s + worked + line.push_s + later
        kind = "long" if later else "short"
        return replace(
            line, samples=samples, round_kind=kind, forward_backward_s=worked, training_s=worked, step_s=step_s
        )

    steps = tuple(changed(line, number) for number, line in enumerate(synchronous.steps))
    fit = calibrate(replace(synchronous, steps=steps))
    assert "trainer.sequence_s" in calibrate(synchronous).assumed, "where every step has as many samples"
    assert not {"trainer.sequence_s", "engine.base_s", "engine.arrival_s", "push.seconds"} & set(fit.assumed)
    trainer, push = fit.model.trainer, fit.model.push
    assert (trainer.token_s, trainer.sequence_s, trainer.optimizer_s) == pytest.approx((1e-4, 1e-3, 0.05), rel=1e-3)
    assert push.kind_s == {"long": pytest.approx(0.25)}


def test_prefills_are_fitted_apart_from_arrivals(synchronous: RecordedRun) -> None:
    """Where engines counted prefills, their tokens take time at a rate, and arrivals take what is left."""
    without = calibrate(synchronous)
    assert "engine.prefill_tokens_s" in without.assumed and without.model.engine.prefill_tokens_s == 0
    arrival_s = without.model.engine.arrival_s
    assert arrival_s > 0
    tokens = synchronous.trajectories[0].prompt_tokens / synchronous.header.group_size  # siblings share a prompt
    share_s = 0.4 * arrival_s * 500 / tokens
    lines = [replace(line, prefilled_tokens=500, prefill_s=share_s) for line in synchronous.engines]
    lines[0] = replace(lines[0], prefill_s=1000.0)  # it warms up
    fit = calibrate(replace(synchronous, engines=tuple(lines)))
    assert "engine.prefill_tokens_s" not in fit.assumed
    assert fit.model.engine.prefill_tokens_s == pytest.approx(500 / share_s)
    assert fit.model.engine.arrival_s == pytest.approx(0.6 * arrival_s)
    presubmitted_s = without.model.engine.presubmitted_s
    assert fit.model.engine.presubmitted_s == pytest.approx(max(presubmitted_s - 0.4 * arrival_s, 0.0))
    assert fit.model.engine.admission_s == fit.model.engine.arrival_s
