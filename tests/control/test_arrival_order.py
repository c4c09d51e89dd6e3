"""Deterministic runs: in whatever order answers come, the same is launched, joined and trained, in the same order."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from oracle.control_walks import ON_POLICY, random_settings
from oracle.control_world import control_settings, through_bytes

from streamrl.base.seeds import derive_seed
from streamrl.base.types import DropReason, FinishReason, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import ControlSettings
from streamrl.recipe.rewards import FailurePolicy
from streamrl.recipe.scheduling import RoundKind, TailBatching

DECISIONS = (do.LaunchGroup, do.TrainGroupNow, do.StepOptimizer, do.PublishWeights, do.DrawPrompts, do.Evaluate)


class AnyOrder:
    """Everything that was ordered answers sooner or later; what a trajectory comes to is a function of its seed."""

    def __init__(self, settings: ControlSettings, prompts: int, random: Random) -> None:
        self.settings = settings
        self.random = random
        self.prompts = prompts
        self.control = make_control(settings)
        self.drawn = 0
        self.live = 0
        self.pending: list[tuple[int, on.ControlEvent | TrajectoryId]] = []  # not before this version is live
        self.seed_base: dict[int, int] = {}
        self.told: list[on.ControlEvent] = []
        self.decisions: list[do.ControlAction] = []
        self.ended: str = ""

    def outcome(self, trajectory: TrajectoryId) -> on.ControlEvent:
        draw = Random(derive_seed(trajectory.prompt_id, self.seed_base[trajectory.group_id], trajectory.sample))
        tokens = draw.choice([1, 2, 3, 5, 8, 8, 20, 60])
        if draw.random() < 0.03:
            policy = draw.choice([FailurePolicy.DROP_SAMPLE, FailurePolicy.DROP_GROUP])
            return on.TrajectoryFailed(
                id=trajectory, reason=DropReason.REWARD_FAILED, tokens=tokens, policy=str(policy)
            )
        return on.TrajectoryScored(
            id=trajectory,
            reward=draw.choice([0.0, 1.0]),
            tokens=tokens,
            finish_reason=FinishReason.LENGTH if tokens == 60 else FinishReason.STOP,
            oldest_version=self.live,
            newest_version=self.live,
        )

    def obey(self, action: do.ControlAction) -> None:
        match action:
            case do.LaunchGroup():
                self.seed_base[action.group_id] = action.seed_base
                self.pending += [(action.policy_version, i) for i in action.ids]
            case do.Drop() if action.abort:
                gone = {i for i in action.ids if self.random.random() < 0.5}  # of the others a late result comes
                self.pending = [p for p in self.pending if p[1] not in gone]
            case do.DrawPrompts():
                count = min(action.count, self.prompts - self.drawn)
                numbers = range(self.drawn, self.drawn + count)
                self.drawn += count
                answer = on.PromptsDrawn(
                    prompt_ids=tuple(f"p{n}" for n in numbers),
                    exhausted=count < action.count,
                    prompt_tokens=tuple(10 + n % 7 for n in numbers),
                )
                self.pending.append((0, answer))
            case do.StepOptimizer():
                answer = on.BatchTrained(batch_id=action.batch_id, policy_version=action.policy_version)
                self.pending.append((0, answer))
            case do.PublishWeights():
                self.pending.append((0, on.WeightsLive(policy_version=action.policy_version)))
            case do.Evaluate():
                self.pending.append((0, on.EvaluationDone(policy_version=action.policy_version)))
            case do.WriteCheckpoint():
                self.pending.append((0, on.CheckpointDone(policy_version=action.policy_version)))
            case do.End():
                self.ended = action.reason

    def tell(self, event: on.ControlEvent) -> None:
        self.told.append(event)
        actions = self.control.handle(event)
        self.decisions += [action for action in actions if isinstance(action, DECISIONS)]
        for action in actions:
            self.obey(action)

    def crash(self) -> None:
        """Nothing is left but what was reported."""
        replayed = make_control(self.settings)
        for event in self.told:
            replayed.handle(event)
        self.control = make_control(self.settings, through_bytes(replayed.snapshot()))
        self.pending, self.drawn = [], self.control.state.prompts.drawn
        for action in self.control.orders_again():
            self.obey(action)

    def run(self, crashes: float) -> list[do.ControlAction]:
        self.tell(on.RunBegan())
        for _ in range(20_000):
            if self.ended:
                return self.decisions
            if self.random.random() < crashes:
                self.crash()
            ready = [p for p in self.pending if p[0] <= self.live]
            chosen = self.random.choice(ready)
            self.pending.remove(chosen)
            event = chosen[1]
            if isinstance(event, TrajectoryId):  # one that runs
                event = self.outcome(event)
            if isinstance(event, on.WeightsLive):
                self.live = event.policy_version
            self.tell(event)
        raise AssertionError("the run does not end")


def runs(settings: ControlSettings, seed: int, times: int, crashes: float = 0.0) -> list[list[do.ControlAction]]:
    return [AnyOrder(settings, 100 + 30 * seed, Random(100 * seed + turn)).run(crashes) for turn in range(times)]


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


def test_the_shortest_win_a_race_in_any_order_of_arrival_and_none_before_all_have_ended() -> None:
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


def test_what_was_answered_and_does_not_count_yet_is_not_asked_for_again() -> None:
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
    assert control.orders_again() == [saves, draws]
    assert control.handle(on.CheckpointDone(policy_version=1)) == [], "prompts come first"
    assert control.orders_again() == [draws]
