"""Summary of a run from its journal: its last steps, and control as it was after the last event. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.types import TrajectoryId
from streamrl.buffers.rollout_buffer import Accounting, Group
from streamrl.comm.wire import Buffer
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.check import violations
from streamrl.control.machine import Control
from streamrl.control.model import RunState, Snapshot
from streamrl.run.journal.records import JournalBase, JournalCodec, JournalDecision, JournalEvent
from streamrl.run.wait_reason import ShellView, WaitReason, wait_reason

NEWEST_DECISIONS = 5


class StepSummary(msgspec.Struct, kw_only=True):
    """An optimizer step. ``time_s``: since the start of the run, when its version was live on the engines, ``seconds``
    after the one before (None: not in the journal). ``dropped``: trajectories since then. ``reward``: mean of those
    that were trained, as far as the journal has them."""

    step: int
    round_kind: str
    groups: int
    samples: int
    trained_tokens: int
    reward: float | None
    time_s: float = 0.0
    seconds: float | None = None
    dropped: dict[str, int] = {}


class GroupSummary(msgspec.Struct, kw_only=True):
    """A group that has not ended. ``launched_s``: since the start of the run (at the latest)."""

    group_id: int
    prompt_id: str
    attempt: int
    stage: str
    launched_s: float
    launch_version: int
    oldest_version: int


class RunSummary(msgspec.Struct, kw_only=True):
    """``events``, ``time_s``: since the start of the run. ``steps``: the newest, oldest first, of ``wanted_steps`` that
    it is to make. ``pending``: version by what is done with it. ``waits_for`` since ``waits_since_s``. ``decisions``:
    the newest, with their time. ``ending``: why no more is trained. ``violations``: invariants that do not hold of
    control after the last event (``streamrl.control.check``): a bug of streamrl."""

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
    steps: list[StepSummary]
    groups: list[GroupSummary]
    decisions: list[tuple[float, str, str]]
    violations: list[str] = []


class _Replay:
    """Control after each event, and what it did."""

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
        self._closed: dict[int, StepSummary] = {}
        self._live_s: float | None = None
        self._dropped = Counter(self.state.accounting().dropped)

    @property
    def state(self) -> RunState:
        """State of control."""
        return self.control.state

    def take(self, event: on.ControlEvent, time_s: float) -> None:
        """The next event."""
        self.events += 1
        self.time_s = time_s
        if isinstance(event, on.TrajectoryScored):
            self._rewards[event.id] = event.reward
        for action in self.control.handle(event):
            self._note(action)
        if isinstance(event, on.WeightsLive) and (step := self._closed.pop(event.policy_version, None)) is not None:
            self._live(step)
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
                self._batch += [self._rewards.pop(i) for i in action.ids if i in self._rewards]
            case do.StepOptimizer():
                self._closed[action.policy_version] = StepSummary(
                    step=action.policy_version,
                    round_kind=action.round_kind,
                    groups=action.groups,
                    samples=action.samples,
                    trained_tokens=action.trained_tokens,
                    reward=sum(self._batch) / len(self._batch) if self._batch else None,
                )
                self._batch = []

    def _live(self, step: StepSummary) -> None:
        step.time_s = self.time_s
        step.seconds = None if self._live_s is None else self.time_s - self._live_s
        dropped = Counter(self.state.accounting().dropped)
        step.dropped = dict(dropped - self._dropped)
        self._live_s = self.time_s
        self._dropped = dropped
        self.steps.append(step)


def summarize(records: Iterable[Buffer], restore: Callable[[Snapshot], Control]) -> RunSummary | None:
    """Replay the ``records`` of a journal from a base on; None where there are none. ``restore`` makes control of a
    snapshot.     Raises ``StreamRLError``."""
    codec = JournalCodec()
    replay: _Replay | None = None
    for body in records:
        match codec.decode(body):
            case JournalBase() as base:
                replay = _Replay(base, restore)
            case JournalEvent(event=event, time_s=time_s) if replay is not None:
                replay.take(event, time_s)
            case JournalDecision(decision=decision, time_s=time_s) if replay is not None:
                replay.decisions.append((time_s, decision.subject, decision.reason))
            case _ if replay is None:
                raise StreamRLError("this journal does not begin with the state of control")
    return None if replay is None else _summary(replay)


def _summary(replay: _Replay) -> RunSummary:
    state = replay.state
    batch = state.batch
    pool = state.prompts
    pending = {
        "push": state.pending.push,
        "evaluation": state.evaluating,
        "checkpoint": state.pending.checkpoint,
        "step": batch.batch_id + 1 if state.batch_closed else None,
    }
    return RunSummary(
        events=replay.events,
        time_s=replay.time_s,
        wanted_steps=state.steps,
        trainer_version=state.trainer_version,
        live_version=state.live_version,
        accounting=state.accounting(),
        batch=f"{batch.samples} trajectories in {len(batch.groups)} groups, {batch.filled / batch.target:.0%} full"
        + (f", {state.round_kind} round" if state.round_kind else "")
        + (", closed" if state.batch_closed else ""),
        prompts=f"{pool.drawn:,} drawn, {len(pool.waiting)} waiting, {len(pool.queue)} deferred"
        + (", no more in the source" if pool.exhausted else ""),
        pending={what: version for what, version in pending.items() if version is not None},
        waits_for=replay.waits_for,
        waits_since_s=replay.waits_since_s,
        ending=state.stop_reason or ("prompts exhausted" if state.starved else None),
        finished=state.finished,
        steps=replay.steps,
        groups=[_group(group, replay) for group in state.buffer.groups()],
        decisions=list(replay.decisions),
        violations=violations(state, replay.control.rules),
    )


def _group(group: Group, replay: _Replay) -> GroupSummary:
    if group.group_id in replay.state.buffer.batched:
        stage = "in the batch"
    elif group.open:
        stage = f"{group.open} of {len(group.members)} {'paused' if group.paused else 'not scored'}"
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
