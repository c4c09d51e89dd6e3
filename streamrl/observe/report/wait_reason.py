"""What the run as a whole waits for: exactly one named thing at every instant. Pure; no clock.

A run waits for what the next live version waits for. Where several things go on at once (engines sample the next batch
while a version is pushed) it is the one without which the others would not help: a batch that is not full yet needs its
trajectories, and only when nothing more can come for it does it wait for the version that would sample them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from streamrl.control.model import RunState

TAIL_SHARE = 0.25
"""Fewer running requests than this share of what the engines can run are a tail: most of them stand idle."""


class WaitReason(StrEnum):
    """``tail``: few trajectories still run, and no other can be launched. ``control``: none of the others; what has
    happened is on its way to control. ``recovery``: no engine serves, or the run is being restored."""

    ENGINE_START = "engine_start"
    SAMPLING = "sampling"
    TAIL = "tail"
    REWARD = "reward"
    TRAINING = "training"
    PUSH = "push"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    PROMPTS = "prompts"
    RECOVERY = "recovery"
    SHUTDOWN = "shutdown"
    CONTROL = "control"


class ShellView(msgspec.Struct, frozen=True, kw_only=True):
    """What only the shell knows. ``sampling``: trajectories on the engines, those of an evaluation with them;
    ``scoring``: those without a reward; ``capacity``: how many the engines can run; ``engines``: how many serve;
    ``recovering``: the run is being restored from its journal."""

    sampling: int = 0
    scoring: int = 0
    capacity: int = 1
    engines: int = 1
    recovering: bool = False


def wait_reason(state: RunState, shell: ShellView) -> WaitReason:
    """The one thing that the run waits for."""
    if shell.recovering:
        return WaitReason.RECOVERY
    if state.live_version < 0:
        return WaitReason.ENGINE_START
    if state.batch_closed:
        return WaitReason.TRAINING
    if state.finished or state.ending:
        return _gate(state) or WaitReason.SHUTDOWN
    if state.batch.seats <= 0:
        return _gate(state) or WaitReason.CONTROL
    if _can_be_sampled(state):
        return _rollout(state, shell)
    return _gate(state) or (WaitReason.PROMPTS if state.pending.draw else WaitReason.CONTROL)


def _gate(state: RunState) -> WaitReason | None:
    """What keeps a full batch from being closed, or a run that ends from ending."""
    if state.pending.push is not None:
        return WaitReason.PUSH
    if state.pending.evaluation is not None and (state.live_version < state.trainer_version or state.ending):
        return WaitReason.EVALUATION
    return WaitReason.CHECKPOINT if state.pending.checkpoint is not None else None


def _can_be_sampled(state: RunState) -> bool:
    """Whether groups are under way that the live version samples; others wait in paused engines for the next one."""
    buffer = state.buffer
    under_way = len(buffer.untrained) - len(buffer.ready) - len(buffer.paused)
    return under_way > 0 and buffer.versions()[0][0] <= state.live_version


def _rollout(state: RunState, shell: ShellView) -> WaitReason:
    if shell.engines == 0:
        return WaitReason.RECOVERY
    few = shell.sampling < TAIL_SHARE * shell.capacity
    if few and state.pending.draw:
        return WaitReason.PROMPTS
    if not shell.sampling:  # neither one nor the other: they are on their way to the engines
        return WaitReason.REWARD if shell.scoring else WaitReason.SAMPLING
    return WaitReason.TAIL if few else WaitReason.SAMPLING
