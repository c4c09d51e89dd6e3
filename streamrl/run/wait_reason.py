"""Reason for which the run as a whole waits: exactly one at every instant, and for how long.

A run waits for what the next live version waits for. Where several things go on at once (engines sample the next batch
while a version is pushed) it is the one without which the others would not help: a batch that is not full yet needs its
trajectories, and only when nothing more can come for it does it wait for the version that would sample them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from streamrl.control.model import RunState

WAIT_METRICS = "util/wait_reason/"
"""Beginning of the metrics of ``take``, which end with the reason: for their readers."""
TAIL_SHARE = 0.25
"""Fewer running requests than this share of what the engines can run are a tail: most of them stand idle."""


class WaitReason(StrEnum):
    """``tail``: few trajectories still run, and no other can be launched. ``environment``: fewer are sampled than are
    in their environments, and most engines idle. ``control``: none of the others; what has happened is on its way to
    control. ``paused``: a person paused launches. ``recovery``: no engine serves, or the run is being restored."""

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


class ShellView(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that only the shell knows. ``sampling``: trajectories on the engines, those of an evaluation with them;
    ``environment``: those between two turns; ``scoring``: those without a reward; ``capacity``: how many the engines
    can run; ``engines``: how many serve; ``recovering``: the run is being restored from its journal."""

    sampling: int = 0
    scoring: int = 0
    environment: int = 0
    capacity: int = 1
    engines: int = 1
    recovering: bool = False


def wait_reason(state: RunState, shell: ShellView) -> WaitReason:
    """Return the one thing that the run waits for. Pure."""
    if shell.recovering:
        return WaitReason.RECOVERY
    if state.live_version < 0:
        return WaitReason.ENGINE_START
    if state.batch_closed:
        return WaitReason.TRAINING
    if state.finished or state.ending:
        return _gate(state) or WaitReason.SHUTDOWN
    if state.batch.missing <= 0:
        return _gate(state) or WaitReason.CONTROL
    if _can_be_sampled(state):
        return _rollout(state, shell)
    return _gate(state) or (WaitReason.PROMPTS if state.pending.draw else _nothing(state))


def _gate(state: RunState) -> WaitReason | None:
    """Return what keeps a full batch from being closed, or a run that ends from ending."""
    if state.pending.push is not None:
        return WaitReason.PUSH
    if state.pending.evaluation is not None and (state.live_version < state.trainer_version or state.ending):
        return WaitReason.EVALUATION
    return WaitReason.CHECKPOINT if state.pending.checkpoint is not None else None


def _nothing(state: RunState) -> WaitReason:
    return WaitReason.PAUSED if state.steering.paused else WaitReason.CONTROL


def _can_be_sampled(state: RunState) -> bool:
    """Return whether groups are under way that the live version samples; others wait in paused engines for the next
    one."""
    buffer = state.buffer
    under_way = len(buffer.untrained) - len(buffer.ready) - len(buffer.paused)
    return under_way > 0 and buffer.versions()[0][0] <= state.live_version


def _rollout(state: RunState, shell: ShellView) -> WaitReason:
    if shell.engines == 0:
        return WaitReason.RECOVERY
    few = shell.sampling < TAIL_SHARE * shell.capacity
    if few and state.pending.draw:
        return WaitReason.PROMPTS
    if few and shell.environment > shell.sampling:
        return WaitReason.ENVIRONMENT
    if not shell.sampling:  # neither one nor the other: they are on their way to the engines
        return WaitReason.REWARD if shell.scoring else WaitReason.SAMPLING
    return WaitReason.TAIL if few else WaitReason.SAMPLING


class RunWaits:
    """``shell``: what only the shell knows, now. Between two looks the run counts as waiting for what it waited for at
    the first of them: look whenever control has handled an event, and a few times a second."""

    def __init__(self, clock: Callable[[], float], shell: Callable[[], ShellView]) -> None:
        self._clock = clock
        self.shell = shell
        self._state: RunState | None = None
        self._reason = WaitReason.ENGINE_START
        self._since_s = self._looked_s = clock()
        self._seconds: dict[WaitReason, float] = {}

    def update(self, state: RunState | None = None) -> None:
        """Ask what the run waits for; of the state that was given last where there is none."""
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
        """Return the reason and the seconds that it has lasted."""
        return self._reason, max(self._clock() - self._since_s, 0.0)

    def take(self, now_s: float) -> dict[str, float]:
        """Shares of the time since the last call, as metrics; their sum is 1, or there are none where no time passed.
        ``now_s``: by the clock, the moment at which the time ends."""
        self._count(now_s)
        taken = self._seconds
        self._seconds = {}
        total = sum(taken.values())
        return {f"util/wait_reason/{reason}": seconds / total for reason, seconds in taken.items()} if total else {}

    def _count(self, now_s: float) -> None:
        self._seconds[self._reason] = self._seconds.get(self._reason, 0.0) + now_s - self._looked_s
        self._looked_s = now_s
