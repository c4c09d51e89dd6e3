"""What the controller orders of the supervisor, whose the processes are, and answers to changes of rewards: on the
stream ``steps``, among the events."""

from __future__ import annotations

from streamrl.base.messages import Message
from streamrl.base.reward_changes import RewardReply
from streamrl.base.run_events import RunEvent


class StopEngine(Message, frozen=True):
    """The host of ``engine`` serves nothing any more, and its end is no death. It was ordered to end: the supervisor
    ends it when it has not done so after ``patience_s``."""

    engine: str
    patience_s: float = 0.0


class StartEngine(Message, frozen=True):
    """Start the host of ``engine`` again, which was stopped."""

    engine: str


class KillEngine(Message, frozen=True):
    """The host of ``engine`` makes no progress (``reason``): end it as a death would, so that another is started in its
    place. Only the host that is meant: by its ``pid``, or (0: it never said one) the one that was started
    ``older_than_s`` ago or earlier."""

    engine: str
    reason: str
    pid: int = 0
    older_than_s: float = 0.0


SupervisorOrder = StopEngine | StartEngine | KillEngine
ParentMessage = RunEvent | SupervisorOrder | RewardReply
