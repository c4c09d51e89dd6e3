"""Messages on the control socket of a run: one request a connection, one answer. Pure.

A request is an operation and, where the operation changes something, the run's key. An operation is a message: to add
one, add it to ``ControlOperation``, its answer to ``ControlAnswer``, and, where it only looks, to ``READ_ONLY``: all
others need the key. Both directions are a length of four bytes (big-endian) and so many bytes of msgpack, over a unix
socket in a directory that only this user may enter. Nothing is decoded that is longer than allowed."""

from __future__ import annotations

import hmac
import struct

import msgspec

from streamrl.base.errors import UNENCODABLE, WireError
from streamrl.base.messages import Message
from streamrl.base.run_events import RunEvent, SupervisorOrder
from streamrl.base.types import Record
from streamrl.comm.wire import WireCodec, WireLimits
from streamrl.launch.steering.steering_messages import (
    ChangeSettings,
    ReadStatus,
    SteeringReply,
    SteeringRequest,
    SteeringStatus,
    SteeringTaken,
    SteerRun,
)
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
"""Bytes. Bodies of empty lists grow about seventyfold when they are decoded: four MiB then."""

LARGEST_ANSWER = 1 << 20


class DrainRun(Message, frozen=True):
    """Finish the open step, save, and end, as after one SIGTERM."""


class Draining(Message, frozen=True):
    """The answer: it was asked for, and takes as long as a step and a checkpoint."""


ParentMessage = RunEvent | SupervisorOrder | RewardReply | SteeringReply
"""What the controller sends to its parent on the ``steps`` stream."""

ControlOperation = ListRewards | AttachReward | ReplaceReward | DetachReward | DrainRun | SteeringRequest
READ_ONLY = (ListRewards, ReadStatus)
"""Operations for everyone who may open the socket: this user. No other works without the key."""


class ControlRequest(Record, frozen=True):
    """``key``: content of the run's key file, empty where the operation only looks."""

    operation: ControlOperation
    key: str = ""


class ControlRefused(Message, frozen=True):
    """Refusal: nothing was done; a line for each reason."""

    problems: tuple[str, ...]


ControlAnswer = RewardsListed | RewardsChanged | Draining | SteeringStatus | SteeringTaken | ControlRefused

_LENGTH = struct.Struct(">I")
LENGTH_BYTES = _LENGTH.size


def is_allowed(request: ControlRequest, key: str) -> bool:
    """Return whether ``request.key`` permits the operation. Takes as long for every wrong key."""
    if isinstance(request.operation, READ_ONLY):
        return True
    return hmac.compare_digest(request.key.encode(), key.encode())


def described(operation: ControlOperation) -> str:
    """Name the operation and its rewards for the log, without their options, which may be secrets."""
    names: tuple[str, ...] = ()
    match operation:
        case AttachReward():
            names = (operation.reward.label,)
        case ReplaceReward():
            names = (operation.name, operation.reward.label)
        case DetachReward():
            names = (operation.name,)
        case SteerRun():
            names = (operation.order,)
        case ChangeSettings():
            names = operation.changes
    return f"{type(operation).__name__}({', '.join(map(repr, names))})"


def length_of(prefix: bytes, largest: int) -> int:
    """Bytes that follow the four. Raises ``WireError`` for more than ``largest``."""
    (length,) = _LENGTH.unpack(prefix)
    if not 0 < length <= largest:
        raise WireError(f"a message of {length} bytes on the control socket: 1 to {largest} are allowed")
    return int(length)


def encode(message: ControlRequest | ControlAnswer) -> bytes:
    """Encode a message with its length. Raises ``WireError`` for one that is too large."""
    largest = LARGEST_REQUEST if isinstance(message, ControlRequest) else LARGEST_ANSWER
    try:
        body = msgspec.msgpack.encode(message)
    except UNENCODABLE as error:
        raise WireError(f"a {type(message).__name__} cannot be sent: {error}") from error
    if len(body) > largest:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes: {largest} are allowed; shorten its options")
    return _LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> ControlRequest:
    """Raises ``WireError``, and nothing else, on bad bytes."""
    return WireCodec[ControlRequest](ControlRequest, _limits(LARGEST_REQUEST)).decode([body])


def decode_answer(body: bytes) -> ControlAnswer:
    """Raises ``WireError``, and nothing else, on bad bytes."""
    return WireCodec[ControlAnswer](ControlAnswer, _limits(LARGEST_ANSWER)).decode([body])


def _limits(largest: int) -> WireLimits:
    return WireLimits(message_bytes=largest + 64, frame_bytes=largest, body_bytes=largest, frames=2)
