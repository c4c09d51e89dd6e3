"""One call process, as the reward worker sees it: its socket, its page, and what it prints."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from streamrl.rewards.calls.call_frames import CallAnswer, CallOrder, CallPage, FrameReader, to_frame
from streamrl.rewards.clock import Clock
from streamrl.rewards.values import CallResult

_RECEIVE_BYTES = 1 << 18
_LOGGED_BYTES = 64 << 10  # of what one process prints; the rest is read, counted and thrown away

_log = logging.getLogger(__name__)


class PoolCall(msgspec.Struct):
    """A call that waits for a process or runs in one. ``count``: of completions. ``rank``: smaller goes first.
    ``lost``: how often its process ended while nobody knew which call was to blame. ``again``: a process was exhausted
    when it ran there, so it runs once more, in a new one."""

    function: int
    completion: Any
    arguments: Mapping[str, Any]
    count: int
    limit_s: float
    rank: tuple[int, int]
    on_done: Callable[[CallResult], None]
    asked_at: float
    sent_at: float = 0.0
    lost: int = 0
    again: bool = False


class PrintedOutput:
    """A pipe for what ``process`` prints: the first 64 KiB go to the log. ``writable``: the end that it gets."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._printed = 0
        self._readable, self.writable = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._readable, False)

    def started(self) -> None:
        """The process has its end: listen."""
        os.close(self.writable)
        asyncio.get_running_loop().add_reader(self._readable, self._read)

    def close(self) -> None:
        """Log what is there, and give the pipe back."""
        self._read()
        asyncio.get_running_loop().remove_reader(self._readable)
        os.close(self._readable)
        if self._printed > _LOGGED_BYTES:
            _log.warning("%s printed %d bytes: only the first were kept", self._process, self._printed)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):  # the loop has other work: what is left is read next time
                printed = os.read(self._readable, _RECEIVE_BYTES)
                if not printed:
                    asyncio.get_running_loop().remove_reader(self._readable)
                    return
                if self._printed < _LOGGED_BYTES:
                    text = printed[: _LOGGED_BYTES - self._printed].decode(errors="replace").rstrip()
                    _log.info("%s: %s", self._process, text)
                self._printed += len(printed)


class CallChild:
    """``pending``: calls that it has, by sequence number, oldest first. ``on_answer(child, answer)`` is called for each
    answer, ``on_broken(child)`` when something else comes. ``forked_at``, ``heard_at``, ``killed_at``: when it was
    asked for, when it answered last, when its end was asked for. Raises ``OSError`` where no descriptors are left."""

    def __init__(
        self,
        number: int,
        *,
        loop: bool,
        on_answer: Callable[[CallChild, CallAnswer], None],
        on_broken: Callable[[CallChild], None],
    ) -> None:
        self.number = number
        self.loop = loop
        self.pending: dict[int, PoolCall] = {}
        self.expected_s = 0.0
        self.answers = 0
        self.retiring = False
        self.forked_at = self.heard_at = self.idle_since = self.killed_at = Clock.monotonic()
        self._on_answer = on_answer
        self._on_broken = on_broken
        self._sequence = 0
        self._unsent: list[CallOrder] = []
        self._outbox = bytearray()
        self._frames: FrameReader[CallAnswer] = FrameReader(CallAnswer)
        self._encoder = msgspec.msgpack.Encoder()
        self._closed = False
        self._connection, self._their_connection = socket.socketpair()
        self._connection.setblocking(False)
        self._their_page = CallPage.create()
        self.page = CallPage(self._their_page)
        self._output = PrintedOutput(f"reward process {number}")

    def descriptors(self) -> tuple[int, int, int]:
        """What the forked process gets."""
        return self._their_connection.fileno(), self._their_page, self._output.writable

    def started(self) -> None:
        """The fork server has its descriptors: listen."""
        self._their_connection.close()
        os.close(self._their_page)
        self._output.started()
        asyncio.get_running_loop().add_reader(self._connection.fileno(), self.drain)

    def take(self, call: PoolCall, expected_s: float) -> None:
        """Give it a call; ``flush`` sends."""
        self._sequence += 1
        call.sent_at = Clock.monotonic()
        self.pending[self._sequence] = call
        self.expected_s += expected_s
        self._unsent.append(
            CallOrder(self._sequence, call.function, call.limit_s, call.completion, dict(call.arguments))
        )

    def flush(self) -> None:
        """Send what was taken, in one frame."""
        if self._unsent and not self._closed:
            self._outbox += to_frame(self._encoder, self._unsent)
            self._unsent.clear()
            self._write()

    def take_back(self) -> list[PoolCall]:
        """All calls that it has not begun; they will not begin."""
        self.page.revoke(self._sequence)
        running, _ = self.page.running()
        back = [call for sequence, call in self.pending.items() if sequence != running]
        self.pending = {sequence: call for sequence, call in self.pending.items() if sequence == running}
        self.expected_s = 0.0
        return back

    def stands_still(self, grace_s: float) -> bool:
        """Whether nothing runs although a call could have begun for as long as it may take and ``grace_s``."""
        sequence, first = next(iter(self.pending.items()), (0, None))
        if first is None or self.page.running()[0]:
            return False
        since = max(first.sent_at, self.heard_at, self.page.ready_at)
        limit_s = 0.0 if self.page.revoked(sequence) else first.limit_s  # it was taken back while it began
        return Clock.monotonic() - since > limit_s + grace_s

    def drain(self) -> None:
        """Take in all answers that are there."""
        while not self._closed:
            try:
                received = self._connection.recv(_RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                received = b""
            if not received:
                self._stop_listening()
                return
            try:
                for answer in self._frames.feed(received):
                    self.answers += 1
                    self.heard_at = Clock.monotonic()
                    self._on_answer(self, answer)
            except msgspec.MsgspecError as error:  # user code wrote to the socket: the process is of no use any more
                _log.warning("reward process %d answers in no known way (%s)", self.number, error)
                self._stop_listening()
                self._on_broken(self)
                return

    def close(self) -> None:
        """Give back what it holds. Idempotent."""
        if self._closed:
            return
        self._stop_listening()
        self._closed = True
        self._output.close()
        self._connection.close()
        self.page.close()

    def _write(self) -> None:
        events = asyncio.get_running_loop()
        try:
            while self._outbox:
                sent = self._connection.send(self._outbox)
                del self._outbox[:sent]
        except (BlockingIOError, InterruptedError):
            events.add_writer(self._connection.fileno(), self._write)
            return
        except OSError:
            self._outbox.clear()  # it is gone: the fork server will report its exit
        events.remove_writer(self._connection.fileno())

    def _stop_listening(self) -> None:
        events = asyncio.get_running_loop()
        events.remove_reader(self._connection.fileno())
        events.remove_writer(self._connection.fileno())
