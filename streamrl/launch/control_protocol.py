"""Messages by which users watch and steer a run, on its control socket: one request and one answer a connection. Pure.
``control_socket`` serves them in the process that started the run; commands such as ``streamrl set``, ``pause``,
``reward attach`` and ``top`` ask. A request about steering goes on to the controller, which answers on ``steps``.

A request is an operation and, where the operation changes the run, the secret of the run's key file. To add an
operation, add its message to ``ControlOperation``, its answer to ``ControlAnswer``, and, where it only reads, to
``READ_ONLY``: all other operations need the key. A message in either direction is a length of four bytes (big-endian)
and so many bytes of msgpack, over a unix socket in a directory that only this user may enter. Longer messages than
allowed are not decoded."""

from __future__ import annotations

import hmac
import struct

from msgspec import msgpack

from streamrl.base.errors import UNENCODABLE, WireError
from streamrl.base.messages import Message
from streamrl.base.run_events import RunEvent, SupervisorOrder
from streamrl.base.types import JsonObject, Record, Texts
from streamrl.comm.wire import WireCodec, WireLimits
from streamrl.control.events import UserOrder
from streamrl.rewards.reward_messages import (
    AttachReward,
    DetachReward,
    ListRewards,
    ReplaceReward,
    RewardReply,
    RewardsChanged,
    RewardsListed,
)

LARGEST_REQUEST = 64 << 10
"""Bytes. A body of empty lists takes about seventy times its size when it is decoded: 4 MiB at most."""

LARGEST_ANSWER = 1 << 20


class ReadStatus(Message, frozen=True):
    """Ask for the status of the run."""

    request_id: int = 0


class SteerRun(Message, frozen=True):
    """Pause or continue launches, evaluate, write a checkpoint, or have ``engine`` serve or not
    (``control.events.Steered``)."""

    order: UserOrder
    engine: str = ""
    request_id: int = 0


class ChangeSettings(Message, frozen=True):
    """Change settings, each ``key=value``, from the batch of ``step`` on (0: the next batch that opens)."""

    changes: Texts
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
    values: JsonObject


class SteeringStatus(Message, frozen=True):
    """State of a run.

    ``state``: ``running``, ``paused``, ``draining``, ``ended``, or ``starting`` where the controller does not answer
    (yet), and only ``processes`` has values. ``step``: last step whose version is live.
    ``in_flight``: number of trajectories in flight. ``ready``: number of groups that wait for a batch.
    ``batch``: number of trajectories in the batch (or groups, where batches keep their prompts), of ``batch_target``.
    ``queue``: number of prompts in the queue. ``waits_for``: reason for which the run as a whole waits, for
    ``waited_s`` seconds. ``waits``: open waits, one line each. ``pending``: orders that were not carried out yet.
    ``engines_away``: last order about each engine whose host needs its GPU.
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
    waits: Texts = ()
    pending: Texts = ()
    engines_away: dict[str, UserOrder] = {}
    changed: JsonObject = {}
    waiting: tuple[WaitingChange, ...] = ()
    processes: tuple[ProcessStatus, ...] = ()


class SteeringTaken(Message, frozen=True):
    """Answer to a request that changes the run, which is in the journal. ``text``: effect of the request, for the user;
    ``problems``: reasons for which nothing was changed, or empty."""

    request_id: int
    text: str = ""
    problems: Texts = ()


SteeringReply = SteeringStatus | SteeringTaken


class DrainRun(Message, frozen=True):
    """Finish the step in progress, save a checkpoint, and end, as after one SIGTERM."""


class Draining(Message, frozen=True):
    """Answer to ``DrainRun``: the run drains, which takes as long as a step and a checkpoint."""


ParentMessage = RunEvent | SupervisorOrder | RewardReply | SteeringReply
"""Messages of the controller to the process that started the run, on the ``steps`` stream; not on the control
socket."""

ControlOperation = ListRewards | AttachReward | ReplaceReward | DetachReward | DrainRun | SteeringRequest
READ_ONLY = (ListRewards, ReadStatus)
"""Operations without a key, for every process of this user. All other operations need the key."""


class ControlRequest(Record, frozen=True):
    """A request. ``key``: content of the run's key file, empty where the operation only reads."""

    operation: ControlOperation
    key: str = ""


class ControlRefused(Message, frozen=True):
    """Refusal of an operation, which was not carried out. ``problems``: reasons, one a line."""

    problems: Texts


ControlAnswer = RewardsListed | RewardsChanged | Draining | SteeringStatus | SteeringTaken | ControlRefused

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size


def is_allowed(request: ControlRequest, key: str) -> bool:
    """Return whether ``request.key`` permits the operation. The comparison takes the same time for every wrong key."""
    if isinstance(request.operation, READ_ONLY):
        return True
    return hmac.compare_digest(request.key.encode(), key.encode())


def described(operation: ControlOperation) -> str:
    """Name the operation, its rewards and changed settings for the log, without options of rewards, which may be
    secrets."""
    names: Texts = ()
    match operation:
        case AttachReward():
            names = (operation.reward.label,)
        case ReplaceReward():
            names = (operation.name, operation.reward.label)
        case DetachReward():
            names = (operation.name,)
        case SteerRun():
            names = (operation.order, operation.engine)
        case ChangeSettings():
            names = operation.changes
    return f"{type(operation).__name__}({', '.join(map(repr, names))})"


def length_of(prefix: bytes, largest: int) -> int:
    """Number of bytes that follow the four bytes of ``prefix``. Raises ``WireError`` for more than ``largest``."""
    (length,) = _LENGTH.unpack(prefix)
    if not 0 < length <= largest:
        raise WireError(f"a message of {length} bytes on the control socket: 1 to {largest} are allowed")
    return int(length)


def encode(message: ControlRequest | ControlAnswer) -> bytes:
    """Encode a message with its length. Raises ``WireError`` for one that is too large."""
    largest = LARGEST_REQUEST if isinstance(message, ControlRequest) else LARGEST_ANSWER
    try:
        body = msgpack.encode(message)
    except UNENCODABLE as error:
        raise WireError(f"a {type(message).__name__} cannot be sent: {error}") from error
    if len(body) > largest:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes: {largest} are allowed; shorten its options")
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> ControlRequest:
    """Decode a request. Raises ``WireError``, and no other error, on bad bytes."""
    return WireCodec[ControlRequest](ControlRequest, _limits(LARGEST_REQUEST)).decode([body])


def decode_answer(body: bytes) -> ControlAnswer:
    """Decode an answer. Raises ``WireError``, and no other error, on bad bytes."""
    return WireCodec[ControlAnswer](ControlAnswer, _limits(LARGEST_ANSWER)).decode([body])


def _limits(largest: int) -> WireLimits:
    return WireLimits(message_bytes=largest + 64, frame_bytes=largest, body_bytes=largest, frames=2)
