"""Deterministic runs: in whatever order answers come, the same is launched, joined and trained, in the same order."""

from __future__ import annotations

from functools import partial
from random import Random

import msgspec
import pytest
from oracle.control_walks import ON_POLICY, CrashWorld, random_settings
from oracle.control_world import control_settings

from streamrl.base.seeds import derive_seed
from streamrl.base.types import FinishReason, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import ControlSettings
from streamrl.recipe.rewards import FailurePolicy
from streamrl.recipe.scheduling import RoundKind, TailBatching

DECISIONS = (do.LaunchGroup, do.TrainGroupNow, do.StepOptimizer, do.PublishWeights, do.DrawPrompts, do.Evaluate)


class AnyOrder(CrashWorld):
    """Everything that was ordered answers sooner or later; what a trajectory comes to is a function of its seed."""

    def ends(self, trajectory: TrajectoryId) -> None:
        noise = self.of_group[trajectory.group_id].seed_base
        draw = Random(derive_seed(trajectory.prompt_id, noise, trajectory.sample))
        tokens = draw.choice([1, 2, 3, 5, 8, 8, 20, 60])
        if draw.random() < 0.03:
            self.fail(trajectory, draw.choice([FailurePolicy.DROP_SAMPLE, FailurePolicy.DROP_GROUP]))
        else:
            self.score(trajectory, draw.choice([0.0, 1.0]), tokens, truncated=tokens == 60)

    def _other_steps(self, random: Random) -> int:
        return 0

    def run(self, random: Random, crashes: float) -> list[do.ControlAction]:
        self.begin()
        while not self.over_now:
            if random.random() < crashes:
                self.crash(random)
            late = [t for t in sorted(self.returning) if random.random() < 0.5]
            ends = [partial(self.ends, trajectory) for trajectory in (*self.sampled, *late)]
            random.choice([*ends, *(answer for _, answer in self.due_answers())])()
        self.check_end()
        return [action for action in self.answers if isinstance(action, DECISIONS)]


def runs(settings: ControlSettings, seed: int, times: int, crashes: float = 0.0) -> list[list[do.ControlAction]]:
    return [AnyOrder(settings, 100 + 30 * seed).run(Random(100 * seed + turn), crashes) for turn in range(times)]


@pytest.mark.parametrize(("composition", "sizing"), ON_POLICY)
def test_the_order_of_arrival_decides_nothing(composition: str, sizing: str) -> None:
    steps = 0
    for seed in range(2):
        drawn = random_settings(composition, sizing, Random(seed))
        settings = msgspec.structs.replace(drawn, deterministic=True, steps=6, failure_window=8, max_failed_share=0.6)
        first, *others = runs(settings, seed, 3) + runs(settings, seed, 1, crashes=0.02)
        steps += sum(isinstance(action, do.StepOptimizer) for action in first)
        for other in others:
            assert other == first
    assert steps, "nothing was trained"


def test_without_it_a_race_is_won_by_who_arrives_first() -> None:
    settings = msgspec.structs.replace(random_settings("wide race", "fixed", Random(1)), steps=6, batch_groups=3)
    first, *others = runs(settings, 1, 4)
    assert any(other != first for other in others), "the test of the order would see nothing"


def test_the_shortest_win_a_race_in_any_order_of_arrival() -> None:
    """The shortest trajectories win a race in any order of arrival, and none wins before all have ended."""
    settings = control_settings(
        rounds=RoundKind.TAIL_BATCHING,
        tail_batching=TailBatching(prompt_oversampling=2.0),
        group_size=1,
        deterministic=True,
    )
    control = make_control(settings)
    tokens = {0: 9, 1: 4, 2: 7, 3: 4}
    for event in (on.RunBegan(), on.PromptsDrawn(prompt_ids=("p0", "p1", "p2", "p3"))):
        control.handle(event)
    for group in (0, 3, 2):
        assert control.handle(whole(group, tokens[group])) == []
    assert control.handle(whole(3, 60)) == [], "told twice"
    actions = control.handle(whole(1, tokens[1]))
    assert [a.group_id for a in actions if isinstance(a, do.TrainGroupNow)] == [1, 3]
    assert [a.ids[0].group_id for a in actions if isinstance(a, do.Drop) and a.abort] == [0, 2]
    assert control.state.accounting().in_flight == 2


def whole(group: int, tokens: int) -> on.TrajectoryScored:
    return on.TrajectoryScored(
        id=TrajectoryId(prompt_id=f"p{group}", group_id=group, sample=0),
        reward=1.0,
        tokens=tokens,
        finish_reason=FinishReason.STOP,
        oldest_version=0,
        newest_version=0,
    )


def test_rounds_that_are_not_on_policy_are_refused() -> None:
    with pytest.raises(ValueError, match="continuous at staleness 1"):
        make_control(control_settings(rounds=RoundKind.CONTINUOUS, max_staleness=1, deterministic=True))


def test_times_that_are_measured_are_told_to_no_policy() -> None:
    for deterministic, told in ((False, 2), (True, 0)):
        control = make_control(control_settings(deterministic=deterministic))
        seen: list[object] = []
        control.rules.policy.observe = seen.append  # type: ignore[method-assign]
        control.handle(on.RunBegan())
        control.handle(on.RoundTimed(policy_version=1, rollout_s=1.0, training_s=1.0, push_s=1.0))
        control.handle(on.EnginesMeasured(running=3.0, waiting=0, token_s=0.1, kv_usage=0.1, preemptions=0))
        assert len(seen) == told


def test_results_that_wait_are_not_requested_again() -> None:
    """Results that have arrived and do not count yet are not requested again."""
    settings = control_settings(deterministic=True, batch_groups=1, group_size=1, checkpoint_every=1)
    control = make_control(settings)
    for event in (
        on.RunBegan(),
        on.PromptsDrawn(prompt_ids=("p0",)),
        whole(0, 3),
        on.BatchTrained(batch_id=0, policy_version=1),
        on.WeightsLive(policy_version=1),
    ):
        control.handle(event)
    draws, saves = do.DrawPrompts(count=1), do.WriteCheckpoint(policy_version=1)
    assert control.unanswered_orders() == [saves, draws]
    assert control.handle(on.CheckpointDone(policy_version=1)) == [], "prompts come first"
    assert control.unanswered_orders() == [draws]
