"""Engines freed late in a round, and sets of engines, in virtual time: nothing is lost, and what it is worth."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from builders.recipe import small_recipe

from streamrl.recipe.scheduling import RoundKind, TailBatching
from streamrl.recipe.sections import Engines, EngineShape, ReleaseKind
from streamrl.recipe.topology import PreparedSet
from streamrl.simulate.engine_changes import EnginePlan, engine_plan, scaled_engine
from streamrl.simulate.fleet import PRESETS, FleetModel
from streamrl.simulate.lengths import ModelledLengths
from streamrl.simulate.report import SimulationReport
from streamrl.simulate.simulation import Simulation, simulate
from streamrl.simulate.stages import TrainerClock, TrainerModel
from tests.simulate.worlds import TINY, control_settings, with_part

STEPS = 14
DRAIN = EnginePlan(release=ReleaseKind.DRAIN)
TAIL = {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": TailBatching(response_oversampling=1.25)}
# Training on the engines' own devices, and not for free.
SHARED = with_part(with_part(TINY, "engines", count=4), "trainer", token_s=2e-4, streaming_speed=0.0)


def accounted(model: FleetModel, plan: EnginePlan, **chosen: Any) -> SimulationReport:
    settings = msgspec.structs.replace(control_settings(batch_groups=16, group_size=8, **chosen), steps=STEPS)
    simulation = Simulation(settings, model, ModelledLengths(model.lengths), engines=plan)
    report = simulation.run()
    assert simulation.core.state.accounting().trained == STEPS * 16 * 8
    assert report.staleness_max == 0
    assert not any(engine.running or engine.waiting for engine in simulation.rollout.engines)
    return report


@pytest.mark.parametrize("rounds", [{}, TAIL], ids=["synchronous", "short and long"])
def test_freed_engines_are_time_for_training_and_nothing_is_lost(rounds: dict[str, Any]) -> None:
    never, drain = (accounted(SHARED, plan, **rounds) for plan in (EnginePlan(), DRAIN))
    assert drain.reasons["engines_freed"] >= STEPS // 2 and "engines_freed" not in never.reasons
    assert drain.trained == never.trained or rounds, "where nothing races the same completions are trained"
    assert drain.step_s_mean < 0.98 * never.step_s_mean


def test_what_a_move_takes_is_paid() -> None:
    def step_s(plan: EnginePlan, **costs: float) -> float:
        return accounted(with_part(SHARED, "engines", **costs), plan).step_s_mean

    free = step_s(DRAIN)
    assert step_s(DRAIN, migration_s=0.5) > free


def test_the_trainer_has_the_share_of_the_freed_engines() -> None:
    clock = TrainerClock(TrainerModel(token_s=1.0))
    clock.take(0.0, 1, 10)
    clock.advance(100.0)
    assert clock.worked_s == 0.0, "all devices decode"
    clock.free(100.0, 0.5)
    clock.advance(104.0)
    assert clock.worked_s == 2.0
    assert clock.close(104.0, engines_idle=True) == 112.0, "and at the close all of them train"
    clock.take(112.0, 1, 10)
    clock.advance(120.0)
    assert clock.worked_s == 10.0, "in the next round they decode again"
    own = TrainerClock(TrainerModel(token_s=1.0, streaming_speed=0.5))
    own.take(0.0, 1, 10)
    own.free(0.0, 0.5)
    own.advance(4.0)
    assert own.worked_s == 3.0


@pytest.mark.long
def test_the_reference_gain_of_freeing_half_is_met() -> None:
    """The reference gain of freeing half of the engines is met. On RollPacker's math task, by a model in closed form, a
    synchronous round with streaming is 1.17 times as fast."""
    chosen = control_settings(batch_groups=128, group_size=8)
    never, drain = (
        simulate(chosen, PRESETS["rollpacker-14b-16k"], 5, warm_up=1, engines=plan) for plan in (EnginePlan(), DRAIN)
    )
    assert drain.reasons["engines_freed"] == 5
    assert 1.10 < never.step_s_mean / drain.step_s_mean < 1.25
    assert drain.kinds[0].rollout_s < 1.08 * never.kinds[0].rollout_s, "the others are slowed down a little"


# ---- sets of engines -----------------------------------------------------------------------------------

TIGHT = with_part(with_part(SHARED, "engines", count=4, weight_tokens=1500.0, switch_s=0.5), "engine", kv_tokens=900)
WIDE = PreparedSet(count=4, tensor_parallel_size=1, kv_tokens=900, max_num_seqs=256)
DEEP = PreparedSet(count=2, tensor_parallel_size=2, kv_tokens=3300, max_num_seqs=512)
BOTH = EnginePlan(sets=(WIDE, DEEP))


def test_a_preempting_load_goes_to_the_roomier_set() -> None:
    """A load that preempts goes to the set with more room, and stays there."""
    alone, both = accounted(TIGHT, EnginePlan()), accounted(TIGHT, BOTH)
    assert both.reasons["engine_set"] == 1
    assert alone.preemptions > 50 and both.preemptions < 0.8 * alone.preemptions, "four rounds are waited for a sign"
    assert both.goodput > alone.goodput


def test_a_fitting_load_goes_to_the_faster_set() -> None:
    """A load with room goes where steps are faster, and an expensive switch is not made."""
    roomy = with_part(TIGHT, "engine", kv_tokens=200_000)
    sets = tuple(msgspec.structs.replace(one, kv_tokens=200_000) for one in (WIDE, DEEP))
    alone, both = accounted(roomy, EnginePlan()), accounted(roomy, EnginePlan(sets=sets))
    assert (both.reasons["engine_set"], both.preemptions) == (1, 0)
    assert both.goodput > alone.goodput, "its tail takes fewer seconds a token"
    dear = with_part(TIGHT, "engines", switch_s=10_000.0)
    assert "engine_set" not in accounted(dear, BOTH).reasons


def test_engines_of_either_set_are_freed() -> None:
    model = with_part(SHARED, "engine", kv_tokens=2_000)
    own = PreparedSet(count=4, tensor_parallel_size=1, kv_tokens=2_000, max_num_seqs=64)
    other = PreparedSet(count=2, tensor_parallel_size=2, kv_tokens=5_000, max_num_seqs=128)
    report = accounted(model, EnginePlan(release=ReleaseKind.DRAIN, sets=(own, other)))
    assert report.reasons["engine_set"] >= 1 and report.reasons["engines_freed"] > 5


def test_each_kind_of_round_may_have_its_set() -> None:
    pinned = EnginePlan(
        sets=(msgspec.structs.replace(WIDE, rounds=("short",)), msgspec.structs.replace(DEEP, rounds=("long",)))
    )
    report = accounted(TIGHT, pinned, **TAIL)
    long_rounds = next(kind.steps for kind in report.kinds if kind.round_kind == "long")
    assert report.reasons["engine_set"] in (2 * long_rounds - 1, 2 * long_rounds)


def test_an_engine_of_another_set_is_scaled_by_its_workers() -> None:
    engine = scaled_engine(TIGHT, DEEP)
    assert engine.base_s == pytest.approx(TIGHT.engine.base_s / 1.6)
    assert (engine.kv_tokens, engine.max_num_seqs) == (3300, 512)
    same = msgspec.structs.replace(WIDE, max_num_seqs=TIGHT.engine.max_num_seqs)
    assert scaled_engine(TIGHT, same) == TIGHT.engine
    staged = EngineShape(count=2, args={"pipeline_parallel_size": 2})
    recipe = small_recipe(engines=Engines(count=4, sets=(staged,)))
    assert engine_plan(recipe, TIGHT).sets[1].kv_tokens == 3300, "as much as of DEEP: stages are workers, too"
