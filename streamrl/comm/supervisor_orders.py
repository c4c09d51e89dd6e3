"""What the controller orders of the supervisor, whose the processes are, and answers to whoever changes rewards: on the
stream ``steps``, among the events."""

from __future__ import annotations

from streamrl.comm.reward_changes import RewardReply
from streamrl.messages import Message, RunEvent


class StopEngine(Message, frozen=True):
    """The host of ``engine`` serves nothing any more, and its end is no death. It was told to end: the supervisor ends
    it when it has not done so after ``patience_s``."""

    engine: str
    patience_s: float = 0.0


class StartEngine(Message, frozen=True):
    """Start the host of ``engine`` again, which was stopped."""

    engine: str


SupervisorOrder = StopEngine | StartEngine
ParentMessage = RunEvent | SupervisorOrder | RewardReply
