"""Admission by KV caches: which groups are paused and resumed, and how many trajectories may be in flight. The walks
(``oracle.control_walks``) have it as a composition of their own."""

from __future__ import annotations

import pytest
from oracle.control_walks import COMPOSITIONS
from oracle.control_world import World, control_settings

from streamrl.control import actions as do
from streamrl.control.admission import admission_limit

SETTINGS = control_settings(**{**COMPOSITIONS["continuous, by KV"], "batch_groups": 4, "group_size": 2, "steps": 50})
CONTEXTS = {group: 100 * (1 + group % 5) for group in range(12)}


@pytest.fixture
def world() -> World:
    """A run whose 12 groups of two are in flight, with contexts of 100 to 500 tokens, 3,300 together."""
    world = World(SETTINGS)
    world.begin()
    while world.goes_on():
        pass
    assert sorted(world.state.buffer.untrained) == list(CONTEXTS)
    return world


def paused(world: World) -> list[int]:
    return sorted(world.state.buffer.paused)


def measure(world: World, usage: float, preemptions: int = 0) -> list[do.ControlAction]:
    """Measure ``usage``, after measurements whose smoothed usage is the same."""
    world.state.admission.usage = usage
    actions = world.tell(world.measured(kv_usage=usage, contexts=CONTEXTS, preemptions=preemptions))
    world.check()
    return actions


def test_a_burst_pauses_nothing(world: World) -> None:
    for usage in (0.7, 1.0, 0.2, 1.0, 0.5):
        assert not world.tell(world.measured(kv_usage=usage, contexts=CONTEXTS))
    assert not paused(world)


def test_full_caches_pause_the_shortest_contexts(world: World) -> None:
    """0.95 of the caches are 3,300 tokens: down to 0.8, groups of 520 leave, the youngest of equal ones first."""
    assert not measure(world, usage=0.85), "between the marks nothing changes"
    [order] = measure(world, usage=0.95)
    assert isinstance(order, do.PauseTrajectories) and len(order.ids) == 10
    assert paused(world) == [0, 5, 6, 10, 11]
    assert world.state.admission.limit == 14 == admission_limit(world.state, world.core.rules)


def test_preemptions_count_as_full_caches(world: World) -> None:
    measure(world, usage=0.85, preemptions=1)
    assert not paused(world)
    measure(world, usage=0.88, preemptions=1)
    assert paused(world) == [0, 5, 10, 11]


def test_what_fits_is_resumed_and_nothing_is_launched_before(world: World) -> None:
    measure(world, usage=0.95)
    limit = world.state.admission.limit
    while len(paused(world)) == 5:
        measure(world, usage=0.79)  # room for 0.01 of the caches: for no group
        assert paused(world) == [0, 5, 6, 10, 11]
        world.score(world.sampled[0], reward=0.0, tokens=3)
        assert world.state.buffer.untrained.keys() <= CONTEXTS.keys(), "paused groups come first"
    assert paused(world) == [5, 6, 10, 11], "the oldest goes on, where nothing runs any more"
    measure(world, usage=0.1)
    assert not paused(world) and world.state.admission.limit >= limit


def test_the_limit_grows_once_as_many_have_ended(world: World) -> None:
    measure(world, usage=0.95)
    measure(world, usage=0.0)
    limits = [world.state.admission.limit]
    for _ in range(200):
        if world.sampled:
            world.score(world.sampled[0], reward=0.0, tokens=3)
        while world.goes_on():
            pass
        measure(world, usage=0.1)
        if world.state.admission.limit != limits[-1]:
            limits.append(world.state.admission.limit)
    assert limits == sorted(limits) and limits[-1] == world.core.rules.slots, "up to what staleness allows"


def test_full_caches_of_an_evaluation_change_nothing(world: World) -> None:
    """Nothing of the training runs, or an evaluation runs beside it: the limit stays that of the training."""
    measure(world, usage=0.95)
    limit = world.state.admission.limit
    world.state.pending.evaluation = do.Evaluate(policy_version=0, limit=0)
    world.tell(world.measured(kv_usage=1.0, contexts=CONTEXTS, preemptions=3))
    assert world.state.admission.limit == limit and world.state.admission.usage < 0.9


def test_what_a_group_needs_is_known_where_little_runs(world: World) -> None:
    """By what its tokens took when the caches were full: the smoothed usage of many is not that of the last few."""
    measure(world, usage=0.95)
    waiting = paused(world)
    while len(world.state.running_groups) > 1:
        world.score(world.sampled[0], reward=0.0, tokens=3)
    assert paused(world) == waiting
    measure(world, usage=0.55)
    assert not paused(world), "700 tokens are 0.2 of the caches"
