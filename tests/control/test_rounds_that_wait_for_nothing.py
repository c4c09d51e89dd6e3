"""A policy of the user's that answers nonsense ends the run with a reason; it never waits for ever."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from control_world import World, control_settings

from streamrl.control import state as control_state
from streamrl.control.rounds.policy import Candidate, Launch, RoundView, Source
from streamrl.control.rounds.synchronous import SynchronousRounds
from streamrl.control.settings import ControlSettings


class LaunchesNoGroups(SynchronousRounds):
    """Its last answer in a round is a launch of 0 groups."""

    def launch(self, view: RoundView) -> Launch | None:
        if not view.at_barrier:
            return None
        groups = view.seats // view.group_size - view.untrained
        return Launch(groups=groups, source=Source.FRESH, size=view.group_size, round_kind="plain")


class HasOneSlot(SynchronousRounds):
    def slots(self) -> int:
        return 1


class LetsNobodyJoin(SynchronousRounds):
    def may_join(self, view: RoundView, candidate: Candidate) -> bool:
        return False


@pytest.fixture(autouse=True)
def no_endless_loop() -> Iterator[None]:
    """``handle`` is synchronous: a loop without an end is only stopped from outside."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def world_of(policy: type[SynchronousRounds], monkeypatch: pytest.MonkeyPatch) -> World:
    def made(settings: ControlSettings) -> SynchronousRounds:
        return policy(settings)

    monkeypatch.setattr(control_state, "make_round_policy", made)
    return World(control_settings(policy=f"rounds.py:{policy.__name__}"))


def test_a_launch_of_no_groups_means_nothing_now(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(LaunchesNoGroups, monkeypatch)
    world.begin()
    world.run_to_end()
    assert world.finished == "finished"


@pytest.mark.parametrize("policy", [HasOneSlot, LetsNobodyJoin])
def test_rounds_that_wait_for_nothing_end_the_run(
    policy: type[SynchronousRounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(policy, monkeypatch)
    world.begin()
    world.run_to_end()
    assert world.stopped is not None and f"rounds.py:{policy.__name__}" in world.stopped
