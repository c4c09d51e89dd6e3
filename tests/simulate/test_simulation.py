"""The real control core in virtual time: the invariants hold, and the times are those of the references."""

from __future__ import annotations

import gc
import statistics
from typing import Any

import msgspec
import pytest

from streamrl.base.errors import StreamRLError
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.settings import ControlSettings
from streamrl.engines.resumption import ROUNDS_KEPT
from streamrl.recipe.scheduling import DeferredPrompts, LengthSorted, RoundKind, StalePolicy, TailBatching
from streamrl.simulate.fleet import DEMO, HEAVY, FleetEngines
from streamrl.simulate.lengths import ModelledLengths
from streamrl.simulate.simulation import Simulation, simulate
from streamrl.simulate.stages import RewardModel
from tests.simulate.worlds import TINY, control_settings, with_part

POLICIES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "presubmitted": {"presubmit": True},
    "short and long": {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": TailBatching(response_oversampling=1.25)},
    "deferred prompts resumed": {
        "rounds": RoundKind.TAIL_BATCHING,
        "tail_batching": TailBatching(deferred_prompts=DeferredPrompts.RESUME),
        "max_staleness": 8,
    },
    "sorted": {"rounds": RoundKind.LENGTH_SORTED, "length_sorted": LengthSorted(cohort_batches=3)},
    "partial": {
        "rounds": RoundKind.LENGTH_SORTED,
        "length_sorted": LengthSorted(cohort_batches=3, partial=True),
        "max_staleness": 2,
    },
    "partial in turns": {
        "rounds": RoundKind.LENGTH_SORTED,
        "length_sorted": LengthSorted(cohort_batches=3, partial=True),
        "max_staleness": 2,
        "in_turns": True,
    },
    "continuous": {"rounds": RoundKind.CONTINUOUS, "max_staleness": 2},
    "continuous, dropping": {
        "rounds": RoundKind.CONTINUOUS,
        "max_staleness": 1,
        "when_stale": StalePolicy.REGENERATE,
        "dynamic_sampling": True,
    },
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_accounts_for_all_within_its_staleness(name: str) -> None:
    """Every policy ends with all trajectories accounted for, and within its staleness."""
    chosen = control_settings(**POLICIES[name])
    model = with_part(TINY, "reward", median_s=0.01, sigma=1.0, concurrency=3)
    model = with_part(model, "push", seconds=0.02, pause_s=0.01)
    simulation = Simulation(msgspec.structs.replace(chosen, steps=30), model, ModelledLengths(model.lengths))
    report = simulation.run()
    accounting = simulation.core.state.accounting()
    assert report.finished == "finished" and report.steps == 30
    assert report.trajectories == accounting.trained
    assert report.staleness_max <= chosen.max_staleness
    assert report.generated_tokens >= report.trained_tokens * (1 - 1e-9)
    assert 0 <= report.rollout_bubble < 1 and report.goodput > 0
    assert not any(engine.running for engine in simulation.rollout.engines)
    assert not simulation.rollout.requests, "what ended is forgotten"


def test_a_run_repeats_exactly_and_another_seed_differs() -> None:
    chosen = control_settings(**POLICIES["short and long"])
    first, second, other = (simulate(chosen, TINY, 12, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first.seconds != other.seconds


@pytest.mark.parametrize(("prompts", "model_s", "measured_s"), [(8, 0.86, 0.91), (16, 1.23, 1.09), (32, 1.87, 1.87)])
def test_synchronous_rollouts_take_the_reference_time(prompts: int, model_s: float, measured_s: float) -> None:
    """Synchronous rollouts of the demo take the time that the reference says. A model in closed form, and what was
    measured on this machine."""
    report = simulate(control_settings(batch_groups=prompts, group_size=8), DEMO, 16)
    assert report.kinds[0].rollout_s == pytest.approx(model_s, rel=0.06)
    assert report.kinds[0].rollout_s == pytest.approx(measured_s, rel=0.15)


def test_tail_batching_of_the_demo_takes_what_the_reference_says() -> None:
    """A model in closed form, 8x8: short 0.57, long 1.17; generated/trained 1.61; length 0.81."""
    racing = TailBatching(response_oversampling=1.25, deferred_prompts=DeferredPrompts.REGENERATE)
    chosen = control_settings(batch_groups=8, group_size=8, rounds=RoundKind.TAIL_BATCHING, tail_batching=racing)
    report = simulate(chosen, DEMO, 50, warm_up=5)
    kinds = {kind.round_kind: kind for kind in report.kinds}
    assert (kinds["short"].steps, kinds["long"].steps) == (40, 10)
    assert kinds["short"].rollout_s == pytest.approx(0.57, rel=0.08)
    assert kinds["long"].rollout_s == pytest.approx(1.17, rel=0.08)
    assert report.generated_tokens / report.trained_tokens == pytest.approx(1.61, rel=0.08)
    assert report.length_ratio == pytest.approx(0.81, abs=0.06)
    assert report.wait_max == 4


def test_replayed_prompts_keep_their_length() -> None:
    """A replayed prompt keeps its length, and a regenerated one becomes shorter. Selection cancels over the cycle when
    deferred prompts keep their seed."""
    ratio = {}
    for deferred in (DeferredPrompts.REPLAY, DeferredPrompts.REGENERATE):
        racing = TailBatching(deferred_prompts=deferred)
        chosen = control_settings(batch_groups=8, group_size=8, rounds=RoundKind.TAIL_BATCHING, tail_batching=racing)
        ratio[deferred] = simulate(chosen, HEAVY, 30).length_ratio
    assert ratio[DeferredPrompts.REPLAY] == pytest.approx(1.0, abs=1e-9), (
        "whole cycles: each draw is trained exactly once"
    )
    assert ratio[DeferredPrompts.REGENERATE] < 0.96


def test_verified_prompts_equal_replayed_ones_and_take_less_time() -> None:
    """Nothing is generated twice at d = 0, a little at d = 0.001."""
    report = {}
    for deferred, rejected in (
        (DeferredPrompts.REPLAY, 0.0),
        (DeferredPrompts.VERIFY, 0.0),
        (DeferredPrompts.VERIFY, 0.001),
    ):
        racing = TailBatching(deferred_prompts=deferred)
        chosen = control_settings(batch_groups=16, group_size=8, rounds=RoundKind.TAIL_BATCHING, tail_batching=racing)
        report[deferred, rejected] = simulate(chosen, with_part(HEAVY, "engine", rejected_per_token=rejected), 30)
    replayed, at_once, verified = report.values()
    assert replayed.trained == at_once.trained == verified.trained, "the same trajectories"
    assert (
        at_once.generated_tokens / at_once.trained_tokens
        < 1.03
        < 1.1
        < replayed.generated_tokens / replayed.trained_tokens
    )
    assert at_once.generated_tokens < verified.generated_tokens < replayed.generated_tokens
    assert replayed.goodput < verified.goodput <= at_once.goodput


def test_tokens_of_dropped_prompts_are_not_kept_for_ever() -> None:
    """Tokens of deferred prompts that never run again are not kept for ever. Responses that come too late for their
    prompt, which won."""
    racing = TailBatching(prompt_oversampling=1.0, response_oversampling=1.5, deferred_prompts=DeferredPrompts.VERIFY)
    chosen = control_settings(steps=150, rounds=RoundKind.TAIL_BATCHING, tail_batching=racing)
    simulation = Simulation(chosen, TINY, ModelledLengths(TINY.lengths))
    simulation.run()
    assert simulation.rollout.deferred is not None
    assert 0 < len(simulation.rollout.deferred.tokens) <= ROUNDS_KEPT * 4 * 6


def test_partial_mode_wastes_nothing_and_trains_every_draw() -> None:
    chosen = control_settings(batch_groups=8, group_size=8, **POLICIES["partial"])
    report = simulate(chosen, DEMO, 24)
    assert report.length_ratio == pytest.approx(1.0, abs=1e-9)
    assert report.generated_tokens == pytest.approx(report.trained_tokens)
    assert report.staleness_max > 0


def test_presubmission_hides_the_arrivals() -> None:
    """What reaches the paused engines before the weights are live costs 0.2 ms a request instead of 1 ms and more. The
    step of the demo leaves time for 50 of 256 requests, a push of 0.3 s for all: then the gain is that of the reference
    (a model in closed form, demo 32x8: 1.40 over 1.07)."""
    gain = {}
    for push_s in (0.03, 0.3):
        model = with_part(DEMO, "push", seconds=push_s)
        plain, ahead = (
            simulate(control_settings(batch_groups=32, group_size=8, presubmit=presubmit), model, 8, warm_up=1)
            for presubmit in (False, True)
        )
        gain[push_s] = plain.kinds[0].rollout_s / ahead.kinds[0].rollout_s
        assert ahead.staleness_max == 0
    assert 1.05 < gain[0.03] < 1.3
    assert gain[0.3] == pytest.approx(1.40 / 1.07, rel=0.1)


def test_turns_overlap_nothing_and_cost_two_switches() -> None:
    """In turns a step takes its rollout, its training without streaming, its push, and both switches."""
    model = with_part(TINY, "trainer", token_s=2e-4, streaming_speed=0.5, rollout_slowdown=1.5)
    model = with_part(model, "push", seconds=0.02, pause_s=0.01, to_ranks_s=0.3, to_engines_s=0.7)
    (beside,), (free,), (turns,) = (
        simulate(control_settings(in_turns=in_turns), switched, 1, warm_up=1).recent
        for in_turns, switched in (
            (False, model),
            (True, with_part(model, "push", to_ranks_s=0.0, to_engines_s=0.0)),
            (True, model),
        )
    )
    assert free.training_s > beside.training_s and free.rollout_s < beside.rollout_s
    assert turns.rollout_s == pytest.approx(free.rollout_s)
    assert turns.training_s == pytest.approx(free.training_s + 0.3)
    assert turns.push_s == pytest.approx(free.push_s + 0.7) and free.push_s == pytest.approx(0.02)


def test_paused_engines_wait_for_live_weights() -> None:
    """Nothing runs in paused engines before their weights are live. How long a push by itself pauses the engines does
    not matter where control holds them anyway."""
    rollouts = [
        simulate(
            control_settings(presubmit=True), with_part(TINY, "push", seconds=0.2, pause_s=pause_s), 6, warm_up=1
        ).recent
        for pause_s in (0.0, 0.2)
    ]
    assert [row.rollout_s for row in rollouts[0]] == pytest.approx([row.rollout_s for row in rollouts[1]])
    assert all(row.free_slots > 0.2 for row in rollouts[0])


def test_streaming_hides_training_and_shared_cores_cost() -> None:
    """Streaming hides training, and shared cores slow the rollout."""
    slow = with_part(TINY, "trainer", token_s=2e-4)
    at_close, beside, shared = (
        simulate(control_settings(), with_part(slow, "trainer", **changes), 20)
        for changes in ({}, {"streaming_speed": 1.0}, {"streaming_speed": 1.0, "rollout_slowdown": 2.0})
    )
    training = [report.recent[5].training_s for report in (at_close, beside)]
    assert training[0] == pytest.approx(0.01 + 2e-4 * at_close.recent[5].trained_tokens)
    assert training[1] < 0.7 * training[0]
    assert at_close.kinds[0].rollout_s == pytest.approx(beside.kinds[0].rollout_s)
    assert beside.kinds[0].rollout_s * 1.02 < shared.kinds[0].rollout_s < beside.kinds[0].rollout_s * 2


def test_a_reward_queue_delays_the_step() -> None:
    free = simulate(control_settings(), with_part(TINY, "reward", median_s=0.05), 10)
    queued = simulate(control_settings(), with_part(TINY, "reward", median_s=0.05, concurrency=1), 10)
    assert free.step_s_mean < queued.step_s_mean
    assert queued.kinds[0].rollout_s >= 16 * 0.05


def test_a_run_that_control_stops_says_why() -> None:
    hopeless = msgspec.structs.replace(TINY, reward=RewardModel(solved=0.0, spread=0.0))
    with pytest.raises(StreamRLError, match=r"control stopped the simulated run at version 0.*dynamic_sampling"):
        simulate(control_settings(dynamic_sampling=True), hopeless, 3)


def test_requests_spread_over_many_engines() -> None:
    model = msgspec.structs.replace(TINY, engines=FleetEngines(count=16))
    simulation = Simulation(control_settings(batch_groups=64, steps=1), model, ModelledLengths(model.lengths))
    simulation.run()
    generated = [engine.generated for engine in simulation.rollout.engines]
    assert min(generated) > 0.5 * sum(generated) / 16


def trained_groups(simulation: Simulation) -> list[list[list[int]]]:
    """Of each batch: the lengths of every group, as control hands them to the trainer."""
    batches: dict[int, list[list[int]]] = {}
    handle = simulation.core.handle

    def watched(event: on.ControlEvent) -> list[do.ControlAction]:
        actions = handle(event)
        for action in actions:
            if isinstance(action, do.TrainGroupNow):
                group = simulation.core.state.buffer.find(action.group_id)
                lengths = [member.tokens for member in group.members.values()]
                batches.setdefault(action.batch_id, []).append(lengths)
        return actions

    simulation.core.handle = watched  # type: ignore[method-assign]
    simulation.run()
    return [batches[number] for number in sorted(batches)]


def test_a_step_counts_the_groups_of_its_own_batch() -> None:
    """In continuous rounds those of the next one join while it is pushed."""
    chosen = control_settings(steps=60, **POLICIES["continuous"])
    model = with_part(TINY, "push", seconds=0.1)
    simulation = Simulation(chosen, model, ModelledLengths(model.lengths))
    batches = trained_groups(simulation)
    rows = list(simulation.ledger.report("", simulation.core.state.accounting()).recent)
    assert [row.groups for row in rows] == [len(batch) for batch in batches] == [4] * 60
    assert [row.longest for row in rows] == [max(map(max, batch)) for batch in batches]
    assert [row.trained_tokens for row in rows] == [sum(map(sum, batch)) for batch in batches]
    rate = [sum(max(group) >= min(2 * statistics.median(group), 400) for group in batch) / 4 for batch in batches]
    report = simulation.ledger.report("", simulation.core.state.accounting())
    assert report.straggler_rate == pytest.approx(statistics.mean(rate))


@pytest.mark.long
def test_bubbles_are_measured_against_a_batch() -> None:
    """Bubbles are measured against a batch, whatever the rounds have in flight. As ``launch.sampling.capacity`` does; a
    capacity that the fleet names is taken as it is."""
    named = msgspec.structs.replace(TINY, engines=FleetEngines(count=2, prompt_tokens=10, capacity=20))
    for name, policy in POLICIES.items():
        assert simulate(control_settings(**policy), TINY, 2).capacity == 4 * 4, name
        assert simulate(control_settings(**policy), named, 2).capacity == 20, name
    assert simulate(control_settings(batch_groups=64), TINY, 2).capacity == 2 * 64, "no more than the engines run"


@pytest.mark.long
@pytest.mark.parametrize("name", ["short and long", "continuous"])
def test_memory_does_not_grow_with_steps(name: str) -> None:
    alive: dict[int, int] = {}

    def count(version: int) -> None:
        if version in (200, 400):
            gc.collect()
            alive[version] = len(gc.get_objects())

    chosen: ControlSettings = control_settings(batch_groups=2, group_size=2, **POLICIES[name])
    simulate(chosen, TINY, 401, progress=count)
    assert alive[400] - alive[200] < 130, alive
