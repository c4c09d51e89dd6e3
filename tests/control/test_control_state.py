"""The invariants of design section 5 on the pure core, against a world that answers in any order."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_world import World, control_settings
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.base.stage_messages import Scored
from streamrl.base.types import (
    FinishReason,
    Prompt,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
    float_array,
    token_array,
)
from streamrl.control import events as on
from streamrl.control.settings import control_settings as settings_of
from streamrl.recipe.load import load_recipe
from streamrl.recipe.scheduling import DeferredPrompts, LengthSorted, RoundKind, StalePolicy, TailBatching
from streamrl.run.outcome_events import event_of

DEMO = Path(__file__).resolve().parents[2] / "examples" / "sort" / "recipe.toml"
ROUNDS: dict[str, dict[str, object]] = {
    "synchronous": {},
    "continuous": {"rounds": RoundKind.CONTINUOUS, "max_staleness": 1},
    "continuous at 3": {"rounds": RoundKind.CONTINUOUS, "max_staleness": 3},
    "tail batching": {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": TailBatching(prompt_oversampling=1.5)},
    "both axes": {
        "rounds": RoundKind.TAIL_BATCHING,
        "tail_batching": TailBatching(response_oversampling=1.5, deferred_prompts=DeferredPrompts.REGENERATE),
    },
    "losers resumed": {
        "rounds": RoundKind.TAIL_BATCHING,
        "tail_batching": TailBatching(prompt_oversampling=1.5, deferred_prompts=DeferredPrompts.RESUME),
        "max_staleness": 9,
    },
    "elastic": {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": TailBatching(long_round_batches=2)},
    "sorted": {"rounds": RoundKind.LENGTH_SORTED, "length_sorted": LengthSorted(cohort_batches=2)},
    "sorted, limited": {
        "rounds": RoundKind.LENGTH_SORTED,
        "length_sorted": LengthSorted(cohort_batches=3, oversubscription=1.5, cut_tokens=12),
    },
    "sorted, single": {
        "rounds": RoundKind.LENGTH_SORTED,
        "length_sorted": LengthSorted(cohort_batches=2, single=True),
    },
    "partial": {
        "rounds": RoundKind.LENGTH_SORTED,
        "length_sorted": LengthSorted(cohort_batches=3, partial=True),
        "max_staleness": 2,
    },
}


class ControlMachine(RuleBasedStateMachine):
    """Random worlds: any policy, any interleaving of scores, failures, late results, steps, pushes and stops."""

    @initialize(
        rounds=st.sampled_from(list(ROUNDS)),
        when_stale=st.sampled_from(list(StalePolicy)),
        dynamic=st.booleans(),
        presubmit=st.booleans(),
        groups=st.integers(1, 4),
        size=st.integers(1, 3),
        steps=st.integers(1, 5),
        every=st.integers(0, 2),
        at_end=st.booleans(),
        prompts=st.none() | st.integers(0, 25),
        start=st.sampled_from([0, 0, 1, 4]),
    )
    def start(
        self,
        rounds: str,
        when_stale: StalePolicy,
        dynamic: bool,
        presubmit: bool,
        groups: int,
        size: int,
        steps: int,
        every: int,
        at_end: bool,
        prompts: int | None,
        start: int,
    ) -> None:
        chosen: dict[str, object] = {
            "when_stale": when_stale,
            "dynamic_sampling": dynamic and size > 1,
            "presubmit": presubmit,
            "batch_groups": groups,
            "group_size": size,
            "steps": steps,
            "evaluate_every": every,
            "evaluate_limit": 3 * int(at_end),
            "evaluate_at_start": bool(every),
            "evaluate_at_end": at_end,
            "checkpoint_every": every,
            "checkpoint_at_end": at_end,
        }
        self.world = World(control_settings(**chosen, **ROUNDS[rounds]), prompts, start)
        self.world.begin()

    @precondition(lambda self: self.world.draw is not None)
    @rule()
    def draw(self) -> None:
        self.world.answer_draw()

    @precondition(lambda self: self.world.sampled)
    @rule(choice=st.randoms(use_true_random=False), reward=st.sampled_from([0.0, 1.0]), late=st.integers(0, 2))
    def score(self, choice: object, reward: float, late: int) -> None:
        trajectory = choice.choice(self.world.sampled)  # type: ignore[attr-defined]
        self.world.score(trajectory, reward, tokens=5, late=late)

    @precondition(lambda self: self.world.stopped_at)
    @rule(choice=st.randoms(use_true_random=False))
    def score_what_ended_before_it_was_stopped(self, choice: object) -> None:
        self.world.score(choice.choice(sorted(self.world.stopped_at)), 1.0, tokens=5)  # type: ignore[attr-defined]

    @precondition(lambda self: self.world.sampled)
    @rule(choice=st.randoms(use_true_random=False), policy=st.sampled_from(["", "", "drop_group"]))
    def fail(self, choice: object, policy: str) -> None:
        self.world.fail(choice.choice(self.world.sampled), policy)  # type: ignore[attr-defined]

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
            self.world.run_to_end()
            self.world.check_end()


ControlMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestControlMachine = pytest.mark.timeout(300)(ControlMachine.TestCase)


def test_a_synchronous_run_trains_each_trajectory_on_policy() -> None:
    world = World(control_settings())
    world.begin()
    world.run_to_end()
    assert world.finished == "finished"
    assert world.core.accounting() == world.core.accounting()
    assert (world.core.accounting().issued, world.core.accounting().trained) == (12, 12)
    assert set(world.staleness) == {0}


def test_a_continuous_run_keeps_every_slot_busy_and_uses_its_staleness() -> None:
    world = World(control_settings(rounds=RoundKind.CONTINUOUS, max_staleness=1, steps=6))
    world.begin()
    world.answer_draw()
    assert len(world.running) == 8  # (1 + 1) batches of 2 groups of 2
    world.run_to_end()
    assert world.finished == "finished"
    assert max(world.staleness) == 1


def test_groups_that_go_on_leave_room_for_others_at_once() -> None:
    cohort = LengthSorted(cohort_batches=4, partial=True, oversubscription=2.0)
    rounds = {"rounds": RoundKind.LENGTH_SORTED, "length_sorted": cohort, "max_staleness": 3}
    world = World(control_settings(steps=9, batch_groups=8, group_size=1, **rounds))
    world.begin()
    world.answer_draw()
    while world.live_version < 1:
        if world.to_publish is not None:
            world.go_live()
        elif world.to_step is not None:
            world.step()
        else:
            world.score(world.sampled[0], 1.0, 3)
    assert len(world.running) == 16, "as many as before, though half of them go on"


def test_a_straggler_is_waited_for_before_it_would_be_too_old() -> None:
    world = World(control_settings(rounds=RoundKind.CONTINUOUS, max_staleness=1, steps=6, group_size=1, batch_groups=1))
    world.begin()
    world.answer_draw()
    straggler, *others = sorted(world.running)
    for trajectory in others:
        world.score(trajectory, 1.0, 1)
    world.step()  # version 1 came from the quick one: the straggler may be one version old
    world.go_live()
    world.answer_draw()
    quick = next(t for t in world.running if t != straggler)
    world.score(quick, 1.0, 1)
    assert world.to_step is None, "the last seat that the straggler can still take was given away"
    world.score(straggler, 1.0, 1)
    assert world.to_step is not None
    world.step()
    assert max(world.staleness) == 1


@pytest.mark.parametrize("when_stale", [StalePolicy.DROP, StalePolicy.REGENERATE])
def test_a_straggler_is_dropped_or_drawn_again_when_the_recipe_says_so(when_stale: StalePolicy) -> None:
    world = World(
        control_settings(
            rounds=RoundKind.CONTINUOUS, max_staleness=1, steps=6, group_size=1, batch_groups=1, when_stale=when_stale
        )
    )
    world.begin()
    world.answer_draw()
    straggler = min(world.running)
    for _ in range(2):
        world.score(next(t for t in world.running if t != straggler), 1.0, 1)
        world.step()
        world.go_live()
        if world.draw is not None:
            world.answer_draw()
    assert straggler not in world.running
    assert world.core.accounting().dropped == {"stale": 1}
    again = [t for t in world.issued if t.prompt_id == straggler.prompt_id and t.attempt == 1]
    assert len(again) == (1 if when_stale is StalePolicy.REGENERATE else 0)
    world.run_to_end()


def test_dynamic_sampling_refills_groups_without_signal() -> None:
    world = World(control_settings(dynamic_sampling=True, steps=1))
    world.begin()
    world.answer_draw()
    first = sorted(world.running)[:2]
    for trajectory in first:
        world.score(trajectory, 1.0, 1)
    assert world.draw == 1, "the dropped group is refilled inside the round"
    world.run_to_end()
    assert world.core.accounting().dropped == {"zero_variance": 2}
    assert world.core.accounting().trained == 4


def test_groups_that_never_have_signal_end_the_run_with_a_reason() -> None:
    world = World(control_settings(dynamic_sampling=True, steps=1))
    world.begin()
    while world.stopped is None:
        if world.draw is not None:
            world.answer_draw()
        world.score(next(iter(world.running)), 0.0, 1)
    assert "zero_variance" in world.stopped and "dynamic_sampling = false" in world.stopped


def test_too_many_failed_rewards_stop_the_run_with_the_last_message() -> None:
    world = World(control_settings(max_failed_share=0.25, failure_window=4, batch_groups=4))
    world.begin()
    world.answer_draw()
    for trajectory in sorted(world.running)[:2]:
        world.score(trajectory, 1.0, 1)
    for trajectory in sorted(world.running)[:2]:
        world.fail(trajectory)
    assert world.stopped is not None
    assert "2 of the last 4" in world.stopped and "planted" in world.stopped


def test_a_run_whose_rewards_all_fail_does_not_wait_until_its_window_is_full() -> None:
    world = World(control_settings(max_failed_share=0.25, failure_window=8, batch_groups=8))
    world.begin()
    world.answer_draw()
    for trajectory in sorted(world.running)[:3]:
        assert world.stopped is None
        world.fail(trajectory)
    assert "3 of the last 3" in str(world.stopped)


def test_a_failed_reward_takes_its_group_along_or_ends_the_run_where_the_recipe_says_so() -> None:
    world = World(control_settings(steps=1, group_size=3))
    world.begin()
    world.answer_draw()
    a, b, *_ = sorted(world.running)
    world.score(a, 1.0, 3)
    world.fail(b, "drop_group")
    assert world.core.accounting().dropped == {"reward_failed": 3}
    world.run_to_end()
    assert world.trained[a] == 0
    assert world.finished == "finished"
    world = World(control_settings(steps=1))
    world.begin()
    world.answer_draw()
    world.fail(min(world.running), "stop")
    assert "planted" in str(world.stopped)


@pytest.mark.parametrize("stops", ["policy", "share"])
def test_a_run_that_a_failed_reward_ended_goes_on_as_if_it_had_not(stops: str) -> None:
    limits = {"max_failed_share": 0.0, "failure_window": 1} if stops == "share" else {}
    world = World(control_settings(steps=1, batch_groups=1, group_size=2, **limits))
    world.begin()
    world.answer_draw()
    a, b = sorted(world.running)
    world.score(a, 1.0, 1)
    world.fail(b, "stop" if stops == "policy" else "")
    assert "planted" in str(world.stopped)
    assert world.core.accounting().dropped == {"reward_failed": 2}
    world.core.handle(on.RunContinued())
    assert not world.batches, "one that is left alone has no baseline"


def test_a_failed_reward_shrinks_its_group_and_never_becomes_a_number() -> None:
    world = World(control_settings(group_size=3, batch_groups=1, steps=1))
    world.begin()
    world.answer_draw()
    a, b, c = sorted(world.running)
    world.fail(b)
    world.score(a, 1.0, 1)
    world.score(c, 0.0, 1)
    assert world.batches == {0: [(a, c)]}
    world.run_to_end()
    assert world.core.accounting().dropped == {"reward_failed": 1}


def test_slots_of_failed_members_do_not_become_a_group_that_no_batch_can_take_in_time() -> None:
    world = World(control_settings(rounds=RoundKind.CONTINUOUS, max_staleness=1, group_size=3, steps=6))
    world.begin()
    world.answer_draw()
    assert len({t.group_id for t in world.running}) == 4
    for group_id in (0, 1, 2):
        world.fail(next(t for t in sorted(world.running) if t.group_id == group_id))
    assert world.draw is None, "three failures of three groups are not room for a fifth one"
    world.run_to_end()
    world.check_end()
    assert world.core.accounting().dropped["reward_failed"] == 3
    assert world.core.slots.in_use == 0


def test_a_group_with_one_survivor_has_no_baseline_and_is_refilled() -> None:
    world = World(control_settings(group_size=2, batch_groups=1, steps=1))
    world.begin()
    world.answer_draw()
    a, b = sorted(world.running)
    world.fail(a)
    world.score(b, 1.0, 1)
    assert world.draw == 1
    world.run_to_end()
    assert world.core.accounting().dropped == {"reward_failed": 2}


def test_a_lone_survivor_is_trained_where_the_objective_compares_no_siblings() -> None:
    world = World(control_settings(batch_groups=1, group_size=3, steps=1, compares_siblings=False))
    world.begin()
    world.answer_draw()
    for trajectory in list(world.running)[:2]:
        world.fail(trajectory)
    (survivor,) = world.running
    world.score(survivor, 1.0, 5)
    assert world.core.accounting().dropped == {"reward_failed": 2}
    world.step()
    assert world.trained[survivor] == 1


@pytest.mark.parametrize(("algorithm", "compares"), [("grpo", True), ("reinforce_plus_plus", False), ("ppo", False)])
def test_the_objective_says_whether_siblings_are_compared(algorithm: str, compares: bool) -> None:
    recipe = load_recipe(DEMO, [f"objective.algorithm={algorithm!r}"])
    assert settings_of(recipe).compares_siblings is compares


def score_apart(world: World, trajectory: TrajectoryId, rewards: dict[str, float]) -> None:
    """A sample whose rewards are compared with its siblings' each alone; one of weight 0 is among them."""
    sample = Trajectory(
        id=trajectory,
        prompt=Prompt(prompt_id=trajectory.prompt_id, token_ids=token_array([1])),
        segments=(Segment(token_ids=token_array([2]), trained=True, behavior_logprobs=float_array([-1.0])),),
        finish_reason=FinishReason.STOP,
    )
    separate = {name: (1.0, value) for name, value in rewards.items()} | {"nothing": (0.0, float(trajectory.sample))}
    scored = ScoredTrajectory(trajectory=sample, reward=sum(rewards.values()), separate_rewards=separate)
    world.running.pop(trajectory)
    world.scored.add(trajectory)
    world.tell(event_of(Scored(outcome=scored)))


def test_dynamic_sampling_keeps_groups_whose_rewards_differ_where_each_is_compared_alone() -> None:
    """Right and long, wrong and short: totals are equal, and both rewards say something."""
    world = World(control_settings(dynamic_sampling=True, batch_groups=1, steps=1))
    world.begin()
    world.answer_draw()
    first, second = world.running
    score_apart(world, first, {"right": 1.0, "short": 0.0})
    score_apart(world, second, {"right": 0.0, "short": 1.0})
    assert world.core.accounting().dropped == {}
    assert world.to_step is not None

    world = World(control_settings(dynamic_sampling=True, batch_groups=1, steps=1))
    world.begin()
    world.answer_draw()
    first, second = world.running
    score_apart(world, first, {"right": 1.0})
    score_apart(world, second, {"right": 1.0, "rare": 1.0})  # nobody to compare its second reward with
    assert world.core.accounting().dropped == {"zero_variance": 2}


def test_an_exhausted_source_trains_the_smaller_last_batch_and_ends() -> None:
    world = World(control_settings(steps=9), prompts=3)
    world.begin()
    world.run_to_end()
    assert world.finished == "prompts exhausted"
    assert world.core.accounting().trained == 6


def test_a_stop_lets_the_closed_batch_go_live_and_drops_the_rest() -> None:
    world = World(control_settings(rounds=RoundKind.CONTINUOUS, max_staleness=1, checkpoint_at_end=True))
    world.begin()
    world.answer_draw()
    for trajectory in sorted(world.running)[:4]:
        world.score(trajectory, 1.0, 1)
    assert world.to_step is not None
    world.tell(on.StopRequested(reason="interrupted"))
    assert not world.running
    world.step()
    world.go_live()
    world.save()
    assert world.finished == "interrupted"
    assert world.core.accounting().dropped == {"drained": 4}


@pytest.mark.parametrize("rounds", [RoundKind.SYNCHRONOUS, RoundKind.CONTINUOUS])
def test_the_next_batch_is_sampled_and_trained_under_an_evaluation_and_only_the_push_waits(rounds: RoundKind) -> None:
    staleness = 0 if rounds is RoundKind.SYNCHRONOUS else 1
    world = World(
        control_settings(rounds=rounds, max_staleness=staleness, evaluate_every=1, evaluate_at_start=True, steps=2)
    )
    world.begin()
    for version in (0, 1):
        assert world.to_evaluate == (version, 0)
        while world.draw is not None:
            world.answer_draw()
        while world.to_step is None:
            world.score(min(world.running), 1.0, 1)
        world.step()
        assert world.to_evaluate == (version, 0) and world.to_publish is None
        world.evaluate()
        assert world.to_publish == version + 1
        world.go_live()
    world.run_to_end()
    world.check_end()
    assert world.evaluated == [(0, 0), (1, 0), (2, 0)]


def test_a_drain_drops_the_evaluation_that_runs_and_orders_no_other() -> None:
    world = World(control_settings(evaluate_at_start=True, evaluate_at_end=True))
    world.begin()
    world.tell(on.StopRequested(reason="drained"))
    world.tell(on.StopRequested(reason="again"))
    assert world.due == set()
    assert world.finished is None, "trajectories of the evaluation may still run"
    world.evaluate()
    assert world.finished == "drained"
    world.check_end()


def test_a_run_goes_on_from_the_version_of_its_checkpoint() -> None:
    world = World(control_settings(steps=6, evaluate_at_start=True), start=4)
    world.begin()
    assert world.to_evaluate == (4, 0)
    world.run_to_end()
    world.check_end()
    assert (world.finished, world.trainer_version, world.core.accounting().trained) == ("finished", 6, 8)
    assert {t.group_id for t in world.trained} == {8, 9, 10, 11}


def test_a_checkpoint_of_the_last_step_leaves_nothing_to_train() -> None:
    world = World(
        control_settings(steps=3, evaluate_at_start=True, evaluate_at_end=True, checkpoint_at_end=True), start=3
    )
    world.begin()
    assert world.finished is not None
    assert "step 3 already" in world.finished and "run.steps" in world.finished
    assert not world.issued and world.to_evaluate is None and world.to_save is None


def test_a_batch_that_is_complete_waits_for_the_checkpoint_of_the_version_before_it() -> None:
    world = World(
        control_settings(rounds=RoundKind.CONTINUOUS, max_staleness=1, checkpoint_every=1, batch_groups=1, group_size=1)
    )
    world.begin()
    world.answer_draw()
    first, second = sorted(world.running)
    world.score(first, 1.0, 1)
    world.step()
    world.score(second, 1.0, 1)
    world.go_live()
    assert (world.to_save, world.to_step) == (1, None)
    world.save()
    assert world.to_step is not None


def test_a_late_result_of_a_cancelled_trajectory_changes_nothing() -> None:
    world = World(control_settings())
    world.begin()
    world.answer_draw()
    late = min(world.running)
    world.tell(on.StopRequested(reason="interrupted"))
    before = world.core.accounting()
    world.core.finished = False
    world.core.handle(
        on.TrajectoryScored(
            id=late, reward=1.0, tokens=1, finish_reason=FinishReason.STOP, oldest_version=0, newest_version=0
        )
    )
    assert world.core.accounting() == before
