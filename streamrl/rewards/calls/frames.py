"""Messages between the reward worker, its fork server and its call processes.

``pool`` (reward worker) exchanges frames with a call process over a socket pair. A frame is a length (4 bytes, little
endian) and MessagePack. ``pool`` exchanges packets with the fork server: one packet for each message, with file
descriptors attached."""

from __future__ import annotations

import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from msgspec import DecodeError, Struct, msgpack

from streamrl.base.errors import UNDECODABLE
from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import Reward
from streamrl.rewards.signature import RewardSignature
from streamrl.rewards.values import CheckedValue, CheckedValues, failed

LARGEST_FRAME = 1 << 30
_LENGTH = struct.Struct("<I")

Received = TypeVar("Received")


class Clock:
    """The functions of ``time`` as they are before user code is imported. Libraries such as freezegun replace them in
    ``time`` and in each module that imported them by name, but not in classes."""

    monotonic = staticmethod(time.monotonic)
    perf_counter = staticmethod(time.perf_counter)
    process_time = staticmethod(time.process_time)
    sleep = staticmethod(time.sleep)


class CallOrder(Struct, frozen=True, array_like=True):
    """Order to make one call. ``sequence``: number of the call in its process, from 1; ``function``: index of the
    function; ``completion``: first argument: a text, a list of texts (per group), or the values that a combining
    function gets."""

    sequence: int
    function: int
    limit_s: float
    completion: Any
    arguments: dict[str, Any]


class CallAnswer(Struct, frozen=True, array_like=True):
    """Answer to a call: one value for each completion. ``sequence``: number of the call; 0: the process is ready, or
    asks to be replaced without an answer; ``retire``: the process is to be replaced, because it has grown too large or
    too old, or has a coroutine that does not end; ``exhausted``: the call raised because the process had no memory,
    threads or descriptors left, so the call may succeed in another process."""

    sequence: int
    seconds: float
    values: list[CheckedValue]
    retire: bool = False
    exhausted: bool = False


READY = CallAnswer(0, 0.0, [])


class LoadRewards(Struct, frozen=True, tag=True):
    """First order to the fork server. ``preload``: the fork server imports the functions of ``rewards``; otherwise each
    call process imports them after it was forked."""

    rewards: list[Reward]
    preload: bool = True


class RewardsLoaded(Struct, frozen=True, tag=True):
    """Answer to ``LoadRewards``: signatures, or problems. ``threads``: number of threads of the fork server; a process
    with several threads cannot be forked safely."""

    signatures: list[RewardSignature]
    problems: list[str]
    threads: int


class ForkChild(Struct, frozen=True, tag=True):
    """Order to fork a call process. The descriptors of its socket, its page and its output pipe are attached.
    ``loop``: the process runs coroutines."""

    child: int
    loop: bool
    memory_bytes: int


class KillChild(Struct, frozen=True, tag=True):
    """Order to kill a call process, and all processes that it started. ``explain``: the process prints its stacks
    first, if it can."""

    child: int
    explain: bool = False


class ChildEnded(Struct, frozen=True, tag=True):
    """Report of the fork server that a call process ended. ``status``: exit code, or minus the signal."""

    child: int
    status: int


ServerOrder = LoadRewards | ForkChild | KillChild
ServerEvent = RewardsLoaded | ChildEnded


class FrameReader(Generic[Received]):
    """Splits a stream of bytes into frames of ``Received``."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[Received]:
        """Yield the frames that ``received`` completes. Raises ``msgspec.DecodeError`` for bytes that are no frame."""
        buffer = self._buffer
        buffer += received
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > LARGEST_FRAME:
                raise DecodeError(f"a frame of {length} bytes")
            end = start + _LENGTH.size + length
            if end > len(buffer):
                break
            body = bytes(memoryview(buffer)[start + _LENGTH.size : end])
            start = end
            yield decoded(self._decoder, body)
        del buffer[:start]


def to_frame(content: Any) -> bytes:
    """The frame of ``content``."""
    body = msgpack.encode(content)
    return _LENGTH.pack(len(body)) + body


def answered_values(answer: CallAnswer, count: int) -> CheckedValues:
    """The values of a call about ``count`` completions. An answer that no call process of streamrl sends is a failure
    of all completions: user code wrote it to the socket."""
    if len(answer.values) != count:
        problem = f"answered {len(answer.values)} values for {count} completions"
    elif not all(map(_is_finite, answer.values)):
        problem = "answered a value that is not finite, which was never checked"
    else:
        return tuple(answer.values)
    return failed(RewardFailureKind.WRONG_TYPE, f"its process {problem}: it does not speak the protocol", count)


def _is_finite(value: CheckedValue) -> bool:
    numbers = [value.value, *value.parts.values(), *(span.number for span in value.spans), *value.token_numbers]
    return all(number is None or math.isfinite(number) for number in numbers)


def decoded(decoder: msgpack.Decoder[Received], body: bytes) -> Received:
    """Decode a message: a frame, or one to the fork server (``ORDERS``) or from it (``EVENTS``). Raises
    ``msgspec.DecodeError`` for any wrong body."""
    try:
        return decoder.decode(body)
    except DecodeError:
        raise
    except UNDECODABLE as error:
        raise DecodeError(f"{type(error).__name__}: {error}") from error


ORDERS: msgpack.Decoder[ServerOrder] = msgpack.Decoder(ServerOrder)
EVENTS: msgpack.Decoder[ServerEvent] = msgpack.Decoder(ServerEvent)


class SharedStatus:
    """Memory page that a call process shares with the worker. A process of coroutines writes the call whose step runs
    now, if any: it is the call that holds the loop, or that ended the process. A process of plain functions reads the
    number of its last call."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, mmap.PAGESIZE)
        # Words: sequence number of the running call (0: none), number of steps begun, last call (0: no limit).
        self._words = memoryview(self._map).cast("Q")
        self._last_step = (0, 0)
        self._last_step_at = 0.0

    @staticmethod
    def create() -> int:
        """Create a page and return its descriptor."""
        descriptor = os.memfd_create("streamrl-call")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        return descriptor

    def begin(self, sequence: int) -> None:
        """Note that a step of a call runs from now on."""
        self._words[1] += 1
        self._words[0] = sequence

    def end(self) -> None:
        """Note that no call runs."""
        self._words[0] = 0

    def running(self) -> tuple[int, float]:
        """Sequence number of the call whose step runs (0: none), and the seconds since the worker first observed the
        step."""
        sequence = self._words[0]
        step = (sequence, self._words[1])
        now = Clock.monotonic()
        if step != self._last_step:
            self._last_step = step
            self._last_step_at = now
        return sequence, now - self._last_step_at if sequence else 0.0

    def stop_after(self, sequence: int) -> None:
        """Forbid the process to begin a call after ``sequence``, which it may not have begun yet."""
        self._words[2] = sequence

    def permits(self, sequence: int) -> bool:
        """Return whether the process may begin the call ``sequence``."""
        return not self._words[2] or sequence <= self._words[2]

    def close(self) -> None:
        """Release the memory."""
        self._words.release()
        self._map.close()
