"""Summary of a run from its journal: its last steps, and the state of control after the last event. Pure.

``streamrl show`` calls ``summarize`` in the process of the command; the run may be running."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from msgspec import Struct

from streamrl.base.errors import StreamRLError
from streamrl.base.types import TrajectoryId
from streamrl.buffers.rollout_buffer import Accounting, Group
from streamrl.comm.wire import Buffer
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.check import violations
from streamrl.control.machine import Control
from streamrl.control.run_state import RunState, Snapshot
from streamrl.run.journal.records import JournalBase, JournalCodec, JournalDecision, JournalEvent
from streamrl.run.wait_reason import ShellView, WaitReason, wait_reason

NEWEST_DECISIONS = 5


class StepSummary(Struct, kw_only=True):
    """An optimizer step.

    ``groups``, ``samples``, ``trained_tokens``: size of the batch;
    ``reward``: mean reward of the batch (None: the journal has no rewards of it);
    ``time_s``: seconds from the start of the run until the version was live on the engines;
    ``seconds``: seconds since the previous step's version was live (None: the journal does not have that step);
    ``dropped``: number of trajectories dropped since then, by reason."""

    step: int
    round_kind: str
    groups: int
    samples: int
    trained_tokens: int
    reward: float | None
    time_s: float = 0.0
    seconds: float | None = None
    dropped: dict[str, int] = {}


class GroupSummary(Struct, kw_only=True):
    """A group that has not ended. ``launched_s``: seconds from the start of the run to its launch; a group that was
    launched before the journal's base has the time of the base."""

    group_id: int
    prompt_id: str
    attempt: int
    stage: str
    launched_s: float
    launch_version: int
    oldest_version: int


class RunSummary(Struct, kw_only=True):
    """Summary of a run.

    ``events``: number of events since the start of the run;
    ``time_s``: time of the last event, in seconds since the start of the run, like all times here;
    ``wanted_steps``: number of steps that the run is to make;
    ``batch``, ``prompts``: descriptions of the open batch and of the prompts;
    ``pending``: version by the work that is being done with it, such as ``push``;
    ``waits_for``, ``waits_since_s``: wait reason, and the time since which it holds;
    ``ending``: reason for which training ends, or has ended (None: it goes on);
    ``finished``: whether the run has ended; ``failed``: whether it has ended with an error;
    ``steps``: steps since the journal's base, oldest first;
    ``groups``: groups that have not ended;
    ``decisions``: newest decisions of control with time, subject and reason;
    ``violations``: invariants that do not hold after the last event (``streamrl.control.check``), which is a bug."""

    events: int
    time_s: float
    wanted_steps: int
    trainer_version: int
    live_version: int
    accounting: Accounting
    batch: str
    prompts: str
    pending: dict[str, int]
    waits_for: WaitReason
    waits_since_s: float
    ending: str | None
    finished: bool
    failed: bool = False
    steps: list[StepSummary]
    groups: list[GroupSummary]
    decisions: list[tuple[float, str, str]]
    violations: list[str] = []


class _Replay:
    """Control during the replay of events, and notes of its actions."""

    def __init__(self, base: JournalBase, restore: Callable[[Snapshot], Control]) -> None:
        self.control = restore(base.control)
        self.events = base.events
        self.time_s = base.elapsed_s
        self.steps: list[StepSummary] = []
        self.decisions: deque[tuple[float, str, str]] = deque(maxlen=NEWEST_DECISIONS)
        self.launched_s = {group.group_id: self.time_s for group in self.state.buffer.groups()}
        self.waits_for = wait_reason(self.state, ShellView())
        self.waits_since_s = self.time_s
        self._rewards: dict[TrajectoryId, float] = {}
        self._batch: list[float] = []
        self._steps_not_live: dict[int, StepSummary] = {}  # by policy version
        self._live_s: float | None = None  # time at which the newest version went live
        self._dropped = Counter(self.state.accounting().dropped)

    @property
    def state(self) -> RunState:
        """State of control."""
        return self.control.state

    def handle(self, event: on.ControlEvent, time_s: float) -> None:
        """Let control handle the next event, and note its actions."""
        self.events += 1
        self.time_s = time_s
        if isinstance(event, on.TrajectoryScored):
            self._rewards[event.id] = event.reward
        for action in self.control.handle(event):
            self._note(action)
        if isinstance(event, on.WeightsLive):
            step = self._steps_not_live.pop(event.policy_version, None)
            if step is not None:
                self._complete_step(step)
        reason = wait_reason(self.state, ShellView(sampling=len(self.state.buffer.untrained)))
        if reason is not self.waits_for:
            self.waits_for = reason
            self.waits_since_s = time_s

    def _note(self, action: do.ControlAction) -> None:
        match action:
            case do.LaunchGroup():
                self.launched_s[action.group_id] = self.time_s
            case do.Decision():
                self.decisions.append((self.time_s, action.subject, action.reason))
            case do.TrainGroupNow():
                for trajectory in action.ids:
                    if trajectory in self._rewards:
                        self._batch.append(self._rewards.pop(trajectory))
            case do.StepOptimizer():
                self._steps_not_live[action.policy_version] = StepSummary(
                    step=action.policy_version,
                    round_kind=action.round_kind,
                    groups=action.groups,
                    samples=action.samples,
                    trained_tokens=action.trained_tokens,
                    reward=sum(self._batch) / len(self._batch) if self._batch else None,
                )
                self._batch = []

    def _complete_step(self, step: StepSummary) -> None:
        """Fill in the figures that are known when the step's version is live."""
        step.time_s = self.time_s
        step.seconds = None if self._live_s is None else self.time_s - self._live_s
        dropped = Counter(self.state.accounting().dropped)
        step.dropped = dict(dropped - self._dropped)
        self._live_s = self.time_s
        self._dropped = dropped
        self.steps.append(step)


def summarize(records: Iterable[Buffer], restore: Callable[[Snapshot], Control]) -> RunSummary | None:
    """Return the summary of a journal; None without records. ``records``: records of the journal, a base first;
    ``restore``: function that makes control of a snapshot. Raises ``StreamRLError``."""
    codec = JournalCodec()
    replay = None
    for body in records:
        match codec.decode(body):
            case JournalBase() as base:
                replay = _Replay(base, restore)
            case JournalEvent(event=event, time_s=time_s) if replay is not None:
                replay.handle(event, time_s)
            case JournalDecision(decision=decision, time_s=time_s) if replay is not None:
                replay.decisions.append((time_s, decision.subject, decision.reason))
            case _ if replay is None:
                raise StreamRLError("this journal does not begin with the state of control")
    return None if replay is None else _summary(replay)


def _summary(replay: _Replay) -> RunSummary:
    state = replay.state
    pending = {
        "push": state.pending.push,
        "evaluation": state.evaluating,
        "checkpoint": state.pending.checkpoint,
        "step": state.batch.batch_id + 1 if state.batch_closed else None,
    }
    return RunSummary(
        events=replay.events,
        time_s=replay.time_s,
        wanted_steps=state.steps,
        trainer_version=state.trainer_version,
        live_version=state.live_version,
        accounting=state.accounting(),
        batch=_batch_text(state),
        prompts=_prompts_text(state),
        pending={work: version for work, version in pending.items() if version is not None},
        waits_for=replay.waits_for,
        waits_since_s=replay.waits_since_s,
        ending=_ending(state),
        finished=state.finished,
        failed=state.pending.end is not None and state.pending.end.error,
        steps=replay.steps,
        groups=[_group(group, replay) for group in state.buffer.groups()],
        decisions=list(replay.decisions),
        violations=violations(state, replay.control.rules),
    )


def _ending(state: RunState) -> str | None:
    if state.pending.end is not None:
        return state.pending.end.reason
    return state.stop_reason or (do.PROMPTS_EXHAUSTED if state.starved else None)


def _batch_text(state: RunState) -> str:
    batch = state.batch
    text = f"{batch.samples} trajectories in {len(batch.groups)} groups, {batch.filled / batch.target:.0%} full"
    if state.round_kind:
        text += f", {state.round_kind} round"
    if state.batch_closed:
        text += ", closed"
    return text


def _prompts_text(state: RunState) -> str:
    pool = state.prompts
    text = f"{pool.drawn:,} drawn, {len(pool.waiting)} waiting, {len(pool.queue)} deferred"
    if pool.exhausted:
        text += ", no more in the source"
    for name, drawn in pool.sets.items():
        if name:
            text += f"; {name}: {drawn.drawn:,} drawn, {drawn.skipped:,} skipped"
    if state.tracker.prompts:
        text += f"; baselines of {len(state.tracker.prompts):,} prompts"
    return text


def _group(group: Group, replay: _Replay) -> GroupSummary:
    if group.group_id in replay.state.buffer.batched:
        stage = "in the batch"
    elif group.open:
        progress = "paused" if group.paused else "not scored"
        stage = f"{group.open} of {len(group.members)} {progress}"
    else:
        stage = "ready"
    return GroupSummary(
        group_id=group.group_id,
        prompt_id=group.prompt.prompt_id,
        attempt=group.prompt.attempt,
        stage=stage,
        launched_s=replay.launched_s.get(group.group_id, replay.time_s),
        launch_version=group.launch_version,
        oldest_version=group.oldest_version,
    )
