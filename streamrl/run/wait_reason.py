"""The reason for which a run waits, exactly one at every instant, and its duration.

The controller process updates it after each event (``observe/report``); the dashboard, ``streamrl top`` and the
watchdog show it. A run waits for whatever its next version waits for. Where several things go on at once (engines
sample the next batch while a version is pushed), the reason is the thing without which the others do not help: a batch
that is not full needs its trajectories, and it waits for the version that samples them only when the live version can
give it no more."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from streamrl.base.types import Clock, Metrics

if TYPE_CHECKING:
    from streamrl.control.run_state import RunState

WAIT_METRICS = "util/wait_reason/"
"""Prefix of the metrics of ``RunWaits.take``; a ``WaitReason`` follows."""
TAIL_SHARE = 0.25
"""Share of the engines' capacity below which the running requests are a tail: most engines are idle."""


class WaitReason(StrEnum):
    """Reasons to wait, named after the part of the run that is waited for. Some need an explanation.

    ``TAIL``: few trajectories still run, and no other can be launched;
    ``ENVIRONMENT``: most engines are idle, and more trajectories are in their environments than on engines;
    ``RECOVERY``: no engine serves, or the run is being restored;
    ``PAUSED``: a user has paused launches;
    ``CONTROL``: none of the other reasons, because an event is on its way to control."""

    ENGINE_START = "engine_start"
    SAMPLING = "sampling"
    TAIL = "tail"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    TRAINING = "training"
    PUSH = "push"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    PROMPTS = "prompts"
    RECOVERY = "recovery"
    SHUTDOWN = "shutdown"
    PAUSED = "paused"
    CONTROL = "control"


class ShellView(Struct, frozen=True, kw_only=True):
    """Facts that are not in the state of control.

    ``sampling``: number of trajectories on engines, evaluations included;
    ``scoring``: number of trajectories whose reward is being computed;
    ``environment``: number of trajectories between two turns;
    ``capacity``: number of trajectories that the engines can run at once;
    ``engines``: number of engines that serve;
    ``recovering``: whether the run is being restored from its journal."""

    sampling: int = 0
    scoring: int = 0
    environment: int = 0
    capacity: int = 1
    engines: int = 1
    recovering: bool = False


def wait_reason(state: RunState, shell: ShellView) -> WaitReason:
    """Return the reason for which a run in this state waits. Pure."""
    if shell.recovering:
        return WaitReason.RECOVERY
    if state.live_version < 0:
        return WaitReason.ENGINE_START
    if state.batch_closed:
        return WaitReason.TRAINING
    if state.finished or state.ending:
        return _gate(state) or WaitReason.SHUTDOWN
    if state.batch.missing <= 0:
        return _gate(state) or _full_batch(state, shell)
    if _can_be_sampled(state):
        return _rollout(state, shell)
    gate = _gate(state)
    if gate is not None:
        return gate
    if state.pending.draw:
        return WaitReason.PROMPTS
    return WaitReason.PAUSED if state.steering.paused else WaitReason.CONTROL


def _gate(state: RunState) -> WaitReason | None:
    """Return the reason that keeps a full batch from being closed, or a run from ending; None: there is none."""
    if state.pending.push is not None:
        return WaitReason.PUSH
    if state.pending.evaluation is not None and (state.live_version < state.trainer_version or state.ending):
        return WaitReason.EVALUATION
    return WaitReason.CHECKPOINT if state.pending.checkpoint is not None else None


def _full_batch(state: RunState, shell: ShellView) -> WaitReason:
    """Return the reason for which a full batch is not closed: where engines and ranks take turns, all that the engines
    have to do comes first."""
    if _can_be_sampled(state):
        return _rollout(state, shell)
    return WaitReason.EVALUATION if state.pending.evaluation is not None else WaitReason.CONTROL


def _can_be_sampled(state: RunState) -> bool:
    """Return whether the live version has groups to sample. Other groups wait in paused engines for the next
    version."""
    buffer = state.buffer
    under_way = len(buffer.untrained) - len(buffer.ready) - len(buffer.paused)
    return under_way > 0 and buffer.versions()[0][0] <= state.live_version


def _rollout(state: RunState, shell: ShellView) -> WaitReason:
    """Return the reason for which a batch waits that trajectories under way can fill."""
    if shell.engines == 0:
        return WaitReason.RECOVERY
    few = shell.sampling < TAIL_SHARE * shell.capacity
    if few and state.pending.draw:
        return WaitReason.PROMPTS
    if few and shell.environment > shell.sampling:
        return WaitReason.ENVIRONMENT
    if not shell.sampling:
        # Trajectories that are neither sampled nor scored are on their way to the engines.
        return WaitReason.REWARD if shell.scoring else WaitReason.SAMPLING
    return WaitReason.TAIL if few else WaitReason.SAMPLING


class RunWaits:
    """The wait reason of a run, with its duration. Between two calls of ``update`` the run counts as waiting for the
    reason at the first of them: ``update`` is to be called whenever control has handled an event, and a few times a
    second. ``shell``: function that returns the present ``ShellView``."""

    def __init__(self, clock: Clock, shell: Callable[[], ShellView]) -> None:
        self._clock = clock
        self.shell = shell
        self._state: RunState | None = None
        self._reason = WaitReason.ENGINE_START
        self._since_s = self._updated_s = clock()
        self._seconds: dict[WaitReason, float] = {}

    def update(self, state: RunState | None = None) -> None:
        """Determine the reason anew. ``state``: state of control (None: the state of the last call)."""
        self._state = state or self._state
        now = self._clock()
        self._count(now)
        if self._state is None:
            return
        reason = wait_reason(self._state, self.shell())
        if reason is not self._reason:
            self._reason = reason
            self._since_s = now

    def waits_for(self) -> tuple[WaitReason, float]:
        """Return the reason and its duration in seconds."""
        return self._reason, max(self._clock() - self._since_s, 0.0)

    def take(self, now_s: float) -> Metrics:
        """Return each reason's share of the time since the last call, as metrics with the sum 1; empty where no time
        has passed. ``now_s``: time of the clock at which the counted time ends."""
        self._count(now_s)
        seconds_by_reason = self._seconds
        self._seconds = {}
        total = sum(seconds_by_reason.values())
        if not total:
            return {}
        return {f"util/wait_reason/{reason}": seconds / total for reason, seconds in seconds_by_reason.items()}

    def _count(self, now_s: float) -> None:
        self._seconds[self._reason] = self._seconds.get(self._reason, 0.0) + now_s - self._updated_s
        self._updated_s = now_s
