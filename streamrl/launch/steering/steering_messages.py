"""Requests by which users watch and steer a running run, and their answers. A request goes over the control socket to
the parent (the process of the command) and on to the controller, which answers on ``steps``."""

from __future__ import annotations

from typing import Any, Literal

from streamrl.base.messages import Message
from streamrl.base.types import Record


class ReadStatus(Message, frozen=True):
    """Ask for the status of the run."""

    request_id: int = 0


class SteerRun(Message, frozen=True):
    """Pause or continue launches, evaluate, or write a checkpoint (``control.events.Steered``)."""

    order: Literal["pause", "continue", "evaluate", "checkpoint"]
    request_id: int = 0


class ChangeSettings(Message, frozen=True):
    """Change settings, each ``key=value``, from the batch of ``step`` on (0: the next batch that opens)."""

    changes: tuple[str, ...]
    step: int = 0
    request_id: int = 0


SteeringRequest = ReadStatus | SteerRun | ChangeSettings


class ProcessStatus(Record, frozen=True):
    """A process of the parent. ``started_s``: seconds since its start; ``restarts``: number of its restarts;
    ``exit_code``: None while it runs."""

    name: str
    pid: int
    started_s: float
    restarts: int
    exit_code: int | None = None


class WaitingChange(Record, frozen=True):
    """A requested change of settings that waits for the batch of ``step`` (0: the next batch that opens)."""

    step: int
    values: dict[str, Any]


class SteeringStatus(Message, frozen=True):
    """State of a run.

    ``state``: ``running``, ``paused``, ``draining``, ``ended``, or ``starting`` where the controller does not answer
    (yet), and only ``processes`` has values. ``step``: last step whose version is live.
    ``in_flight``: number of trajectories in flight. ``ready``: number of groups that wait for a batch.
    ``batch``: number of trajectories in the batch (or groups, where batches keep their prompts), of ``batch_target``.
    ``queue``: number of prompts in the queue. ``waits_for``: reason for which the run as a whole waits, for
    ``waited_s`` seconds. ``waits``: open waits, one line each. ``pending``: orders that were not carried out yet.
    ``changed``: settings in force that differ from the recipe. ``waiting``: changes that wait for their step."""

    request_id: int = 0
    state: str = "starting"
    step: int = 0
    steps: int = 0
    trainer_version: int = 0
    live_version: int = -1
    round_kind: str = ""
    group_size: int = 0
    in_flight: int = 0
    ready: int = 0
    batch: int = 0
    batch_target: int = 0
    queue: int = 0
    waits_for: str = ""
    waited_s: float = 0.0
    waits: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    changed: dict[str, Any] = {}
    waiting: tuple[WaitingChange, ...] = ()
    processes: tuple[ProcessStatus, ...] = ()


class SteeringTaken(Message, frozen=True):
    """Answer to a request that changes the run, which is in the journal. ``text``: effect of the request, for the user;
    ``problems``: reasons for which nothing was changed, or empty."""

    request_id: int
    text: str = ""
    problems: tuple[str, ...] = ()


SteeringReply = SteeringStatus | SteeringTaken
