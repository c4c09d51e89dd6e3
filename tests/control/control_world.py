"""A world around the pure core that answers in any order, with a ledger of its own, for tests of the invariants."""

from __future__ import annotations

from collections import Counter

from streamrl.base.types import DropReason, FinishReason, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.settings import ControlSettings
from streamrl.control.state import ControlState
from streamrl.recipe.scheduling import RoundKind, StalePolicy


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
        self.core = self.new_core()
        self.prompts_left = prompts
        self.next_prompt = 0
        self.running: dict[TrajectoryId, int] = {}
        self.stopped_at: dict[TrajectoryId, int] = {}
        self.held_for: int | None = None
        self.launched: list[do.LaunchGroup] = []
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

    def new_core(self) -> ControlState:
        """What decides."""
        return ControlState(self.settings)

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
                ahead = action.policy_version > self.live_version
                assert not ahead or self.held_for == action.policy_version, "sampled by a version that is not live"
                self.launched.append(action)
                for trajectory in action.ids:
                    assert trajectory not in self.issued, "identity used twice"
                    self.issued.add(trajectory)
                    self.running[trajectory] = action.policy_version
            case do.CancelGroup() | do.ForgetTrajectories():
                for trajectory in action.ids:
                    self.running.pop(trajectory, None)
                    self.stopped_at.pop(trajectory, None)
                    self.scored.discard(trajectory)
            case do.CutTrajectories():
                for trajectory in action.ids:
                    self.stopped_at[trajectory] = self.running.pop(trajectory)
            case do.ResumeTrajectories():
                for trajectory in action.ids:
                    self.running[trajectory] = self.stopped_at.pop(trajectory)
            case do.HoldEngines():
                assert self.to_step is not None, "engines held for a version that nobody makes"
                assert self.held_for is None and action.policy_version == self.trainer_version + 1
                assert self.to_evaluate is None, "an evaluation would wait for the step"
                assert not self.running, "what runs under the old weights is paused"
                self.held_for = action.policy_version
            case do.Explain():
                assert action.reason
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

    @property
    def sampled(self) -> list[TrajectoryId]:
        """Those that may end now: engines do not sample while they are held."""
        return sorted(t for t, version in self.running.items() if version <= self.live_version)

    # ---- what the world may do

    def begin(self) -> None:
        if self.settings.evaluate_at_start and self.start < self.settings.steps:
            self.falls_due(0)
        self.tell(on.RunBegan(policy_version=self.start, steps=self.settings.steps))

    def goes_on(self) -> bool:
        """Do the one thing that is due, at source, engines or trainer; False: only results can come."""
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
        else:
            return False
        return True

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
        late_result = trajectory in self.stopped_at  # it ended before it was stopped
        launched = self.stopped_at.pop(trajectory) if late_result else self.running.pop(trajectory)
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

    def fail(self, trajectory: TrajectoryId, policy: str = "") -> None:
        self.running.pop(trajectory)
        reason = DropReason.REWARD_FAILED
        self.tell(on.TrajectoryFailed(id=trajectory, reason=reason, message="planted", policy=policy))

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
        if self.held_for == self.live_version:
            self.held_for = None
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
            if self.goes_on():
                continue
            if self.sampled:
                trajectory = self.sampled[0]
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
        assert "wait for nothing" not in str(self.stopped)
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
