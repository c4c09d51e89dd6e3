"""Requests by which people look at and steer a running run, and their answers: over its control socket to the parent,
and from there to the controller, which answers on ``steps``."""

from __future__ import annotations

from typing import Any, Literal

from streamrl.base.messages import Message
from streamrl.base.types import Record


class ReadStatus(Message, frozen=True):
    """Say where the run stands."""

    request_id: int = 0


class SteerRun(Message, frozen=True):
    """Pause launches or let them go on, evaluate or write a checkpoint (``control.events.Steered``)."""

    order: Literal["pause", "continue", "evaluate", "checkpoint"]
    request_id: int = 0


class ChangeSettings(Message, frozen=True):
    """Change settings, each ``key=value``, from the batch of ``step`` on (0: the next one that opens)."""

    changes: tuple[str, ...]
    step: int = 0
    request_id: int = 0


SteeringRequest = ReadStatus | SteerRun | ChangeSettings


class ProcessStatus(Record, frozen=True):
    """A process on the host of the parent. ``started_s``: seconds since it was started; ``restarts``: how often it was
    started again; ``exit_code``: None while it runs."""

    name: str
    pid: int
    started_s: float
    restarts: int
    exit_code: int | None = None


class WaitingChange(Record, frozen=True):
    """A change that was asked for, and the step whose batch it waits for (0: the next one that opens)."""

    step: int
    values: dict[str, Any]


class SteeringStatus(Message, frozen=True):
    """State of a run. ``state``: ``running``, ``paused``, ``draining``, ``ended``, or ``starting`` where the controller
    does not answer (yet), and only ``processes`` are known. ``step``: the last one whose version is live. Counts:
    ``in_flight`` trajectories, ``ready`` groups that wait for a batch, ``batch`` trajectories (or groups, where batches
    keep their prompts) of ``batch_target``, prompts in the ``queue``. ``waits_for``: what the run as a whole waits for,
    since ``waited_s``; ``waits``: who waits for what. ``pending``: orders that were not carried out yet. ``changed``:
    settings in force that the recipe does not have; ``waiting``: changes that wait for their step."""

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
    """The answer to all that changes something: it is in the journal, and ``text`` says what follows. ``problems``:
    nothing has changed."""

    request_id: int
    text: str = ""
    problems: tuple[str, ...] = ()


SteeringReply = SteeringStatus | SteeringTaken
