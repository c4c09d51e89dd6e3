"""Messages between the reward worker, its fork server and its call processes.

Call processes: frames of a length (4 bytes, little endian) and MessagePack, over a socket pair. The fork server: a
packet for each message, with descriptors beside it."""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from streamrl.base.errors import UNDECODABLE
from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import Reward
from streamrl.rewards.signature import RewardSignature
from streamrl.rewards.values import CheckedValue, failed

LARGEST_FRAME = 1 << 30
_LENGTH = struct.Struct("<I")

Received = TypeVar("Received")


class Clock:
    """The functions of ``time``, taken before user code is imported. Libraries such as freezegun replace them in
    ``time`` and in each module that imported them by name, but not in classes."""

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    process_time = staticmethod(time.process_time)
    sleep = staticmethod(time.sleep)


class CallOrder(msgspec.Struct, frozen=True, array_like=True):
    """One call. ``sequence`` grows by one in each process; ``function``: index in the set of rewards;
    ``completion``: a text, a list of texts (per group), or what a combining function gets."""

    sequence: int
    function: int
    limit_s: float
    completion: Any
    arguments: dict[str, Any]


class CallAnswer(msgspec.Struct, frozen=True, array_like=True):
    """One value for each completion of the call. ``sequence`` 0: the process is ready, or only says that it is to
    ``retire``: it has grown too large or too old, or holds a coroutine that does not end. ``exhausted``: the call
    raised because this process had no memory, threads or descriptors left, which another process may have."""

    sequence: int
    seconds: float
    values: list[CheckedValue]
    retire: bool = False
    exhausted: bool = False


READY = CallAnswer(0, 0.0, [])


class LoadRewards(msgspec.Struct, frozen=True, tag=True):
    """Order to the fork server, once: import these. ``preload`` False: in each process after it was forked."""

    rewards: list[Reward]
    preload: bool = True


class RewardsLoaded(msgspec.Struct, frozen=True, tag=True):
    """Signatures, or why there is none. ``threads``: of the fork server; forking more than one is not safe."""

    signatures: list[RewardSignature]
    problems: list[str]
    threads: int


class ForkChild(msgspec.Struct, frozen=True, tag=True):
    """Fork one. Descriptors travel with it: its socket, its page, where it may print. ``loop``: for coroutines."""

    child: int
    loop: bool
    memory_bytes: int


class KillChild(msgspec.Struct, frozen=True, tag=True):
    """Kill it, and all processes that it started. ``explain``: let it print where it is first, if it can."""

    child: int
    explain: bool = False


class ChildEnded(msgspec.Struct, frozen=True, tag=True):
    """``status``: exit code, or minus the signal."""

    child: int
    status: int


ServerOrder = LoadRewards | ForkChild | KillChild
ServerEvent = RewardsLoaded | ChildEnded


class FrameReader(Generic[Received]):
    """Cuts a stream of bytes into frames of ``Received``."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[Received]:
        """The frames that ``received`` completes. Raises ``msgspec.DecodeError`` for what is none."""
        buffer = self._buffer
        buffer += received
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > LARGEST_FRAME:
                raise msgspec.DecodeError(f"a frame of {length} bytes")
            end = start + _LENGTH.size + length
            if end > len(buffer):
                break
            body = bytes(memoryview(buffer)[start + _LENGTH.size : end])
            start = end
            yield _decoded(self._decoder, body)
        del buffer[:start]


def to_frame(content: Any) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(content)
    return _LENGTH.pack(len(body)) + body


def answered_values(answer: CallAnswer, count: int) -> tuple[CheckedValue, ...]:
    """The values of a call about ``count`` completions. A reply that the process made up is a failure of all of
    them."""
    if len(answer.values) != count:
        problem = f"answered {len(answer.values)} values for {count} completions"
    elif not all(map(_is_finite, answer.values)):
        problem = "answered a value that is not finite, which was never checked"
    else:
        return tuple(answer.values)
    return failed(RewardFailureKind.WRONG_TYPE, f"its process {problem}: it does not speak the protocol", count)


def _is_finite(value: CheckedValue) -> bool:
    number = 0.0 if value.value is None else value.value
    return math.isfinite(number) and (not value.parts or all(map(math.isfinite, value.parts.values())))


def decode_order(received: bytes) -> ServerOrder:
    """An order to the fork server. Raises ``msgspec.DecodeError``."""
    return _decoded(_orders, received)


def decode_event(received: bytes) -> ServerEvent:
    """A report of the fork server. Raises ``msgspec.DecodeError``."""
    return _decoded(_events, received)


def _decoded(decoder: msgspec.msgpack.Decoder[Received], body: bytes) -> Received:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError:
        raise
    except UNDECODABLE as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from error


_orders: msgspec.msgpack.Decoder[ServerOrder] = msgspec.msgpack.Decoder(ServerOrder)
_events: msgspec.msgpack.Decoder[ServerEvent] = msgspec.msgpack.Decoder(ServerEvent)


class SharedStatus:
    """Memory that a process shares with the worker. One of coroutines shows there the call whose step runs now, if any:
    which holds the loop, or ended the process. One of plain functions sees there which call is its last."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("Q")  # sequence number, steps begun, last call (0: none)
        self._seen = (0, 0)
        self._seen_at = 0.0

    @staticmethod
    def create() -> int:
        """Descriptor of a new page."""
        descriptor = os.memfd_create("streamrl-call", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return descriptor

    def begin(self, sequence: int) -> None:
        """A step of a call runs from now on."""
        self._words[1] += 1
        self._words[0] = sequence

    def end(self) -> None:
        """Note that no call runs."""
        self._words[0] = 0

    def running(self) -> tuple[int, float]:
        """Sequence number of the call whose step runs (0: none), and the seconds since the worker saw it first."""
        seen = (self._words[0], self._words[1])
        now = Clock.monotonic()
        if seen != self._seen:
            self._seen = seen
            self._seen_at = now
        return seen[0], now - self._seen_at if seen[0] else 0.0

    def stop_after(self, sequence: int) -> None:
        """The process begins no call after this one, which it may not have begun yet."""
        self._words[2] = sequence

    def permits(self, sequence: int) -> bool:
        """Return whether the process is to begin this call."""
        return not self._words[2] or sequence <= self._words[2]

    def close(self) -> None:
        """Give the memory back."""
        self._words.release()
        self._map.close()
