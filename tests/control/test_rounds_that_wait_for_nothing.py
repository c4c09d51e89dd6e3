"""A policy of the user's that answers nonsense ends the run with a reason; it never waits for ever."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator

import pytest
from oracle.control_world import World, control_settings

from streamrl.control.machine import Control
from streamrl.control.plain_rounds import SynchronousRounds
from streamrl.control.round_policy import Candidate, FixedSize, Launch, RoundView, Source
from streamrl.control.run_state import Snapshot
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import DeferredPrompts, RoundKind, TailBatching


class LaunchesNoGroups(SynchronousRounds):
    """Its last answer in a round is a launch of 0 groups."""

    def launch(self, view: RoundView) -> Launch | None:
        if not view.at_barrier:
            return None
        groups = view.missing // view.group_size - view.untrained
        return Launch(groups=groups, source=Source.FRESH, size=view.group_size, round_kind="plain")


class HasOneSlot(SynchronousRounds):
    def slots(self) -> int:
        return 1


class LetsNobodyJoin(SynchronousRounds):
    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        return False


POLICIES = {policy.__name__: policy for policy in (LaunchesNoGroups, HasOneSlot, LetsNobodyJoin)}


@pytest.fixture(autouse=True)
def no_endless_loop() -> Iterator[None]:
    """``handle`` is synchronous: a loop without an end is only stopped from outside."""
    signal.alarm(20)
    yield
    signal.alarm(0)


class PolicyOfTheUser(World):
    def control(self, settings: ControlSettings, snapshot: Snapshot | None) -> Control:
        policy = POLICIES[settings.policy.partition(":")[2]](settings)
        return Control(settings, policy, FixedSize(settings.group_size), snapshot)


def world_of(policy: type[SynchronousRounds]) -> World:
    return PolicyOfTheUser(control_settings(policy=f"rounds.py:{policy.__name__}"))


def test_a_launch_of_no_groups_means_nothing_now() -> None:
    world = world_of(LaunchesNoGroups)
    world.begin()
    world.run_to_end()
    assert world.finished == "finished"


def test_parked_groups_resume_before_younger_ones() -> None:
    """Parked groups that fall due are resumed before younger ones. One whose last results came after it was parked
    joins a batch by itself; the places of others are then taken."""
    settings = control_settings(
        rounds=RoundKind.TAIL_BATCHING,
        batch_groups=8,
        group_size=1,
        steps=14,
        max_staleness=4,
        tail_batching=TailBatching(prompt_oversampling=3.0, deferred_prompts=DeferredPrompts.RESUME),
    )
    for number in range(20):
        chance, world = random.Random(number), World(settings)
        world.begin()
        while world.finished is None and world.stopped is None:
            late = sorted(world.paused)
            if late and chance.random() < 0.25:
                world.score(chance.choice(late), float(chance.random() < 0.5), 3)
            elif not world.goes_on():
                assert world.sampled, f"seed {number}: {len(world.state.buffer.paused)} groups are paused for ever"
                world.score(chance.choice(world.sampled), float(chance.random() < 0.5), 3)
        world.check_end()
        assert world.finished == "finished"


def test_long_rounds_may_drop_more_groups() -> None:
    """A long round of several batches may drop as many times more groups. Twenty batches of dropped groups end a run; a
    batch that is as large as four may drop four times as many."""
    settings = control_settings(
        rounds=RoundKind.TAIL_BATCHING,
        batch_groups=2,
        group_size=2,
        steps=8,
        dynamic_sampling=True,
        tail_batching=TailBatching(prompt_oversampling=2.0, long_round_batches=4),
    )
    for limit, end in ((150, "finished"), (1000, None)):
        world, dropped = World(settings), 0
        world.begin()
        while world.finished is None and world.stopped is None:
            if not world.goes_on():
                first = world.sampled[0]
                says_nothing = world.state.round_kind == "long" and dropped < limit
                for sample in [t for t in world.sampled if t.group_id == first.group_id]:
                    world.score(sample, 0.0 if says_nothing else float(sample.sample), 3)
                dropped += says_nothing
        assert world.finished == end, world.stopped
    assert dropped == 20 * 4 * 2 + 1


@pytest.mark.parametrize("policy", [HasOneSlot, LetsNobodyJoin])
def test_rounds_that_wait_for_nothing_end_the_run(policy: type[SynchronousRounds]) -> None:
    world = world_of(policy)
    world.begin()
    world.run_to_end()
    assert world.stopped is not None and f"rounds.py:{policy.__name__}" in world.stopped
