"""Invariants 1, 2 and 6 of the design for every round policy, alone and with group sizes that vary.

Accounting: every trajectory, group and prompt ends once, with a reason, and nothing else changes when a late result
comes. Staleness: never above the bound, 0 where rounds are on-policy. Failure: whatever fails, is late, is cut, held,
drained or exhausted, the run ends. ``campaigns/control/random_runs.py`` does the same for as long as one likes.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_world import COMBINATIONS, PolicyWorld, random_run, random_settings

from streamrl.control import events as on


@pytest.mark.parametrize(("composition", "sizing"), COMBINATIONS)
def test_random_runs_end_with_everything_accounted_for(composition: str, sizing: str) -> None:
    events = sum(len(random_run(Random(seed), composition, sizing).log) for seed in range(5))
    assert events > 50, "the runs were too short to mean anything"


class PolicyMachine(RuleBasedStateMachine):
    """Any combination, any interleaving; what fails is shrunk to the fewest events."""

    @initialize(
        combination=st.sampled_from(COMBINATIONS),
        choices=st.randoms(use_true_random=False),
        prompts=st.none() | st.integers(0, 60),
        start=st.sampled_from([0, 0, 1, 4]),
    )
    def begin(self, combination: tuple[str, str], choices: Random, prompts: int | None, start: int) -> None:
        self.world = PolicyWorld(random_settings(*combination, choices), prompts, start)
        self.world.begin()

    @precondition(lambda self: self.world.draw is not None)
    @rule()
    def draw(self) -> None:
        self.world.answer_draw()

    @precondition(lambda self: self.world.sampled)
    @rule(choices=st.randoms(use_true_random=False), times=st.integers(1, 6))
    def score(self, choices: Random, times: int) -> None:
        for _ in range(times):
            if self.world.sampled:
                self.world.score_any(choices, self.world.sampled)
                self.world.check()

    @precondition(lambda self: self.world.sampled)
    @rule(choices=st.randoms(use_true_random=False))
    def fail(self, choices: Random) -> None:
        self.world.fail(choices.choice(self.world.sampled))

    @precondition(lambda self: self.world.sampled)
    @rule(choices=st.randoms(use_true_random=False))
    def lose_an_engine(self, choices: Random) -> None:
        self.world.lose_an_engine(choices)

    @precondition(lambda self: self.world.stopped_at)
    @rule(choices=st.randoms(use_true_random=False), fails=st.booleans())
    def end_before_it_was_stopped(self, choices: Random, fails: bool) -> None:
        stopped = sorted(self.world.stopped_at)
        if fails:
            self.world.fail(choices.choice(stopped))
        else:
            self.world.score_any(choices, stopped)

    @precondition(lambda self: self.world.stopped_at)
    @rule(choices=st.randoms(use_true_random=False))
    def cut_arrives(self, choices: Random) -> None:
        self.world.cut_arrives(choices)

    @precondition(lambda self: self.world.returning)
    @rule(choices=st.randoms(use_true_random=False))
    def late_result(self, choices: Random) -> None:
        self.world.late_result(choices)

    @rule(choices=st.randoms(use_true_random=False))
    def measure(self, choices: Random) -> None:
        self.world.measure(choices)

    @precondition(lambda self: self.world.to_step is not None)
    @rule()
    def step(self) -> None:
        self.world.step()

    @precondition(lambda self: self.world.to_publish is not None)
    @rule()
    def go_live(self) -> None:
        self.world.go_live()

    @precondition(lambda self: self.world.to_evaluate is not None)
    @rule()
    def evaluate(self) -> None:
        self.world.evaluate()

    @precondition(lambda self: self.world.to_save is not None)
    @rule()
    def save(self) -> None:
        self.world.save()

    @precondition(lambda self: self.world.checkpoint is not None)
    @rule()
    def kill_and_resume(self) -> None:
        self.world = self.world.killed_and_resumed()
        self.world.begin()

    @rule(never=st.integers(0, 30))
    def stop(self, never: int) -> None:
        if never == 30:
            self.world.tell(on.StopRequested(reason="drained"))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_to_end(20000)
            self.world.check_end()


PolicyMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPolicyMachine = pytest.mark.timeout(300)(PolicyMachine.TestCase)
