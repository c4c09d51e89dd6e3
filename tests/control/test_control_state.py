"""The invariants of design section 5 on the pure core, against a world that answers in any order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.config.recipe import RoundKind, StalePolicy
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.state import ControlSettings, ControlState
from streamrl.types import DropReason, FinishReason, TrajectoryId


def control_settings(**changes: object) -> ControlSettings:
    defaults: dict[str, object] = {
        "steps": 3,
        "batch_groups": 2,
        "group_size": 2,
        "rounds": RoundKind.SYNCHRONOUS,
        "max_staleness": 0,
        "when_stale": StalePolicy.WAIT,
        "dynamic_sampling": False,
        "max_failed_share": 1.0,
        "failure_window": 8,
    }
    return ControlSettings(**{**defaults, **changes})  # type: ignore[arg-type]


class World:
    """Engines, rewards and trainer as sets of things that may happen next; and an independent ledger."""

    def __init__(self, chosen: ControlSettings, prompts: int | None = None, start: int = 0) -> None:
        self.settings = chosen
        self.core = ControlState(chosen)
        self.prompts_left = prompts
        self.next_prompt = 0
        self.running: dict[TrajectoryId, int] = {}
        self.issued: set[TrajectoryId] = set()
        self.ended: Counter[TrajectoryId] = Counter()
        self.oldest: dict[TrajectoryId, int] = {}
        self.scored: set[TrajectoryId] = set()
        self.batches: dict[int, list[tuple[TrajectoryId, ...]]] = {}
        self.to_step: do.StepOptimizer | None = None
        self.to_publish: int | None = None
        self.to_evaluate: tuple[int, int] | None = None
        self.due: set[tuple[int, int]] = set()
        self.evaluated: list[tuple[int, int]] = []
        self.drained = False
        self.to_save: int | None = None
        self.saved: list[int] = []
        self.draw: int | None = None
        self.start = self.trainer_version = self.live_version = start
        self.finished: str | None = None
        self.stopped: str | None = None
        self.staleness: list[int] = []
        self.trained: Counter[TrajectoryId] = Counter()

    def tell(self, event: on.ControlEvent) -> None:
        self.drained = self.drained or isinstance(event, on.StopRequested)
        for action in self.core.handle(event):
            self.obey(action)

    def obey(self, action: do.ControlAction) -> None:
        match action:
            case do.DrawPrompts():
                assert self.draw is None
                self.draw = action.count
            case do.LaunchGroup():
                assert action.group_id >= self.start * self.settings.batch_groups
                for trajectory in action.ids:
                    assert trajectory not in self.issued, "identity used twice"
                    self.issued.add(trajectory)
                    self.running[trajectory] = self.live_version
            case do.CancelGroup() | do.ForgetTrajectories():
                for trajectory in action.ids:
                    self.running.pop(trajectory, None)
                    self.scored.discard(trajectory)
            case do.TrainGroupNow():
                assert self.to_step is None, "group handed to a closed batch"
                assert set(action.ids) <= self.scored, "untrained reward"
                self.batches.setdefault(action.batch_id, []).append(action.ids)
            case do.StepOptimizer():
                assert self.to_step is None
                assert self.to_save is None, "the trainer leaves the version that is being saved"
                assert (action.batch_id, action.policy_version) == (self.trainer_version, self.trainer_version + 1)
                self.to_step = action
            case do.PublishWeights():
                assert self.to_publish is None, "two pushes at once"
                assert self.to_evaluate is None, "weights change under an evaluation"
                self.to_publish = action.policy_version
            case do.Evaluate():
                assert self.to_publish is None, "weights change under an evaluation"
                assert self.to_evaluate is None, "two evaluations at once"
                assert action.policy_version == self.live_version and not self.drained
                self.to_evaluate = (action.policy_version, action.limit)
            case do.CancelEvaluation():
                assert self.drained and self.to_evaluate is not None and action.policy_version == self.to_evaluate[0]
                self.due.discard(self.to_evaluate)  # dropped, in so many words
            case do.WriteCheckpoint():
                assert self.to_save is None and action.policy_version == self.trainer_version
                self.to_save = action.policy_version
            case do.StopRun():
                self.stopped = action.message
            case do.FinishRun():
                self.finished = action.reason

    # ---- what the world may do

    def begin(self) -> None:
        if self.settings.evaluate_at_start and self.start < self.settings.steps:
            self.falls_due(0)
        self.tell(on.RunBegan(policy_version=self.start))

    def answer_draw(self) -> None:
        assert self.draw is not None
        count = self.draw if self.prompts_left is None else min(self.draw, self.prompts_left)
        exhausted = count < self.draw
        if self.prompts_left is not None:
            self.prompts_left -= count
        names = tuple(f"p{self.next_prompt + i}" for i in range(count))
        self.next_prompt += count
        self.draw = None
        self.tell(on.PromptsDrawn(prompt_ids=names, exhausted=exhausted))

    def score(self, trajectory: TrajectoryId, reward: float, tokens: int, late: int = 0) -> None:
        launched = self.running.pop(trajectory)
        oldest = min(launched + late, self.live_version)  # queued in a pause: first token under newer weights
        self.oldest[trajectory] = oldest
        self.scored.add(trajectory)
        self.tell(
            on.TrajectoryScored(
                id=trajectory,
                reward=reward,
                tokens=tokens,
                finish_reason=FinishReason.STOP,
                oldest_version=oldest,
                newest_version=self.live_version,
            )
        )

    def fail(self, trajectory: TrajectoryId) -> None:
        self.running.pop(trajectory)
        self.tell(on.TrajectoryFailed(id=trajectory, reason=DropReason.REWARD_FAILED, message="planted"))

    def step(self) -> None:
        order = self.to_step
        assert order is not None
        groups = self.batches.pop(order.batch_id)
        assert len(groups) == order.groups and sum(map(len, groups)) == order.samples
        for trajectory in [i for ids in groups for i in ids]:
            self.staleness.append(self.trainer_version - self.oldest[trajectory])
            self.trained[trajectory] += 1
            self.scored.discard(trajectory)
        self.to_step = None
        self.trainer_version = order.policy_version
        self.tell(on.BatchTrained(batch_id=order.batch_id, policy_version=order.policy_version))

    def go_live(self) -> None:
        assert self.to_publish is not None
        self.live_version, self.to_publish = self.to_publish, None
        every, at_end = self.settings.evaluate_every, self.settings.evaluate_at_end
        if every and self.live_version % every == 0 and not (at_end and self.live_version == self.settings.steps):
            self.falls_due(self.settings.evaluate_limit)
        self.tell(on.WeightsLive(policy_version=self.live_version))

    def falls_due(self, limit: int) -> None:
        if not self.drained:
            self.due.add((self.live_version, limit))

    def evaluate(self) -> None:
        assert self.to_evaluate is not None
        done, self.to_evaluate = self.to_evaluate, None
        assert done[0] == self.live_version, "the figure belongs to another version"
        self.evaluated.append(done)
        self.tell(on.EvaluationDone(policy_version=done[0]))

    def save(self) -> None:
        assert self.to_save == self.trainer_version, "the checkpoint holds another version"
        self.saved.append(self.trainer_version)
        self.to_save = None
        self.tell(on.CheckpointDone(policy_version=self.trainer_version))

    def run_to_end(self, limit: int = 4000) -> None:
        """Whatever is possible happens, oldest first: the run must end."""
        for _ in range(limit):
            if self.finished is not None or self.stopped is not None:
                return
            if self.draw is not None:
                self.answer_draw()
            elif self.to_publish is not None:
                self.go_live()
            elif self.to_evaluate is not None:
                self.evaluate()
            elif self.to_save is not None:
                self.save()
            elif self.to_step is not None:
                self.step()
            elif self.running:
                trajectory = next(iter(self.running))
                self.score(trajectory, reward=float(trajectory.sample), tokens=3)
            else:
                raise AssertionError(f"nothing can happen and the run has not ended: {self.core.accounting()}")
        raise AssertionError("the run does not end")

    def check(self) -> None:
        accounting = self.core.accounting()
        assert accounting.balanced, accounting
        assert accounting.issued == len(self.issued)
        assert accounting.trained == sum(self.trained.values())
        assert all(count == 1 for count in self.trained.values()), "trained twice"
        assert all(s <= self.settings.max_staleness for s in self.staleness), self.staleness
        if self.settings.when_stale is StalePolicy.WAIT:
            assert "stale" not in accounting.dropped, "WAIT bounds staleness by construction and wastes nothing"
        unreleased = self.core.slots.in_use
        assert 0 <= unreleased <= self.core.slots.capacity
        assert accounting.in_flight <= unreleased
        assert self.live_version <= self.trainer_version

    def check_end(self) -> None:
        self.check()
        if self.finished is None:
            return
        assert self.core.accounting().in_flight == 0
        assert self.live_version == self.trainer_version
        if self.settings.evaluate_at_end and self.start < self.settings.steps:
            self.falls_due(0)
        missed = self.due - set(self.evaluated)
        assert not missed, f"neither done nor dropped: {missed}"
        assert len(set(self.evaluated)) == len(self.evaluated), "evaluated twice"
        assert len(set(self.saved)) == len(self.saved), "saved twice"
        if self.settings.checkpoint_at_end and self.start < self.settings.steps:
            assert self.saved[-1] == self.trainer_version


class ControlMachine(RuleBasedStateMachine):
    """Random worlds: any interleaving of scores, failures, steps, pushes, evaluations and stops."""

    @initialize(
        rounds=st.sampled_from(list(RoundKind)),
        staleness=st.integers(1, 3),
        when_stale=st.sampled_from(list(StalePolicy)),
        dynamic=st.booleans(),
        groups=st.integers(1, 3),
        size=st.integers(1, 3),
        steps=st.integers(1, 5),
        every=st.integers(0, 2),
        at_end=st.booleans(),
        prompts=st.none() | st.integers(0, 25),
        start=st.sampled_from([0, 0, 1, 4]),
    )
    def start(
        self,
        rounds: RoundKind,
        staleness: int,
        when_stale: StalePolicy,
        dynamic: bool,
        groups: int,
        size: int,
        steps: int,
        every: int,
        at_end: bool,
        prompts: int | None,
        start: int,
    ) -> None:
        self.world = World(
            control_settings(
                rounds=rounds,
                max_staleness=staleness if rounds is RoundKind.CONTINUOUS else 0,
                when_stale=when_stale,
                dynamic_sampling=dynamic and size > 1,
                batch_groups=groups,
                group_size=size,
                steps=steps,
                evaluate_every=every,
                evaluate_limit=3 * int(at_end),
                evaluate_at_start=bool(every),
                evaluate_at_end=at_end,
                checkpoint_every=every,
                checkpoint_at_end=at_end,
            ),
            prompts,
            start,
        )
        self.world.begin()

    @precondition(lambda self: self.world.draw is not None)
    @rule()
    def draw(self) -> None:
        self.world.answer_draw()

    @precondition(lambda self: self.world.running)
    @rule(choice=st.randoms(use_true_random=False), reward=st.sampled_from([0.0, 1.0]), late=st.integers(0, 2))
    def score(self, choice: object, reward: float, late: int) -> None:
        trajectory = choice.choice(sorted(self.world.running))  # type: ignore[attr-defined]
        self.world.score(trajectory, reward, tokens=5, late=late)

    @precondition(lambda self: self.world.running)
    @rule(choice=st.randoms(use_true_random=False))
    def fail(self, choice: object) -> None:
        self.world.fail(choice.choice(sorted(self.world.running)))  # type: ignore[attr-defined]

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


@pytest.mark.parametrize("rounds", list(RoundKind))
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
