"""Processes that call reward functions: plain functions one after the other in each of several processes, and all
coroutines in one more process.

A ``RewardSet`` uses a ``CallPool`` for functions that are not trusted, in the reward worker or in the process of a
command. ``fork_server`` starts the call processes, ``process`` is their code.

============================================  =====================================================================
a function that                               has this effect
============================================  =====================================================================
outlives its limit, blocks, deadlocks         its process and all that it started are killed; the call timed out
exits, crashes                                the call raised; a new process replaces the one that ended
runs out of memory, threads or descriptors    the call is run once more, in a new process
is a coroutine and swallows its cancellation  the call timed out; its process gets no more calls and is killed
leaks memory, threads or descriptors          its process is replaced between two calls
is imported again in a process and hangs      the process is killed before it gets a call, so no call fails
============================================  =====================================================================

Quick calls are sent to a process several at a time, so the process need not wait for the next call. The oldest call
without an answer is the running call: it alone fails when the process ends, and its time counts from the answer before
it. The calls behind it are queued again when the process ends, or when the oldest call is slow."""

from __future__ import annotations

import heapq
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup
from msgspec import DecodeError, Struct, msgpack

from streamrl.base.errors import RecipeError, StreamRLError, raise_problems
from streamrl.base.notifier import Notifier
from streamrl.base.run_process import end_session, signal_name, start_session, usable_cores
from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import Reward
from streamrl.rewards.calls.frames import (
    EVENTS,
    CallAnswer,
    CallOrder,
    ForkChild,
    FrameReader,
    KillChild,
    LoadRewards,
    RewardsLoaded,
    ServerOrder,
    SharedStatus,
    answered_values,
    decoded,
    to_frame,
)
from streamrl.rewards.calls.process import late_message
from streamrl.rewards.signature import RewardSignature
from streamrl.rewards.user_variables import variables_of_user_code
from streamrl.rewards.values import CallResult, CheckedValues, failed

LOAD_LIMIT_S = 120.0
_READY_LIMIT_S = LOAD_LIMIT_S  # a process imports the functions itself where the fork server would have threads
_LEAVE_LIMIT_S = 3.0
_STATUS_LIMIT_S = 2.0  # from the end of a process's socket until the fork server reports the end of the process
_TICK_S = 0.02
_AHEAD_S = 0.005  # expected work that is sent to a process at a time
_MOST_AHEAD = 64
_UNKNOWN_S = 1.0  # expected time of the first call of a function: no other call is sent with it
_SLOW_S = 0.05
_IDLE_S = 60.0
_LATE_GRACE_S = 2.0  # a process of coroutines answers late calls itself, unless its loop is blocked for so long
_BLOCKING_S = 0.25
_MOST_BAD_STARTS = 5
_MOST_LOSSES = 2
_BYTES = 1 << 18
_LARGEST_PACKET = 1 << 20
_LOGGED_BYTES = 64 << 10  # output of one process that is logged; further output is read, counted and dropped

_log = logging.getLogger(__name__)


class Call(Struct, eq=False):
    """A call that waits for a process or runs in one.

    ``function``: index of the function among the rewards of the pool; ``count``: number of completions; ``finished``:
    event that is set with ``result``; ``sent_at``: time at which a process got the call (0: it waits); ``losses``:
    number of processes of coroutines that ended under the call while no call's step ran; ``was_exhausted``: the call
    has run in a process that was exhausted."""

    function: int
    completion: Any
    arguments: Mapping[str, Any]
    count: int
    limit_s: float
    finished: anyio.Event
    sent_at: float = 0.0
    losses: int = 0
    was_exhausted: bool = False
    result: CallResult | None = None

    def finish(self, values: CheckedValues, seconds: float) -> None:
        """Set the result. ``seconds``: time of the function as the process reports it. A negative time, or one longer
        than the time since the call was sent, is replaced by the time since the call was sent."""
        since_sent_s = anyio.current_time() - self.sent_at if self.sent_at else 0.0
        if not 0.0 <= seconds <= since_sent_s:
            seconds = since_sent_s
        self.result = CallResult(values, seconds, 0.0, self.limit_s)
        self.finished.set()

    def fail(self, kind: RewardFailureKind, message: str) -> None:
        """Set a failure as the result."""
        self.finish(failed(kind, message, self.count), -1.0)


class CallChild:
    """The worker's end of a call process: its socket, its page and its exit status. Raises ``OSError`` where no
    descriptors are left.

    ``pending``: calls without an answer by sequence number, the oldest first; ``answer_count``: number of answered
    calls; ``retired``: flag that the process gets no more calls; ``hangs``: flag that the process is to print its
    stacks before it is killed; ``end_reported``: event that the fork server reported the end of the process, with
    ``status``, or ended itself (``status`` None)."""

    def __init__(self, number: int, *, loop: bool) -> None:
        self.number = number
        self.loop = loop
        self.pending: dict[int, Call] = {}
        self.answer_count = 0
        self.retired = False
        self.hangs = False
        self.end_reported = anyio.Event()
        self.status: int | None = None
        self._frames: FrameReader[CallAnswer] = FrameReader(CallAnswer)
        self._answers: deque[CallAnswer] = deque()
        self._decode_error: DecodeError | None = None
        self._sequence = 0
        self._socket, self.child_socket = socket.socketpair()
        self._socket.setblocking(False)
        self.child_page_fd = SharedStatus.create()
        self.page = SharedStatus(self.child_page_fd)

    async def send(self, calls: Sequence[Call]) -> None:
        """Send calls to the process, in one write. The end of the process is noticed by ``receive``."""
        frames = []
        for call in calls:
            self._sequence += 1
            self.pending[self._sequence] = call
            call.sent_at = anyio.current_time()
            order = CallOrder(self._sequence, call.function, call.limit_s, call.completion, dict(call.arguments))
            frames.append(to_frame(order))
        unsent = memoryview(b"".join(frames))
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent) :]
            except (BlockingIOError, InterruptedError):
                await anyio.wait_writable(self._socket)
            except OSError:
                break

    async def receive(self) -> CallAnswer | None:
        """The next answer; None: the process has ended. Raises ``msgspec.DecodeError`` for bytes that are no answer."""
        while not self._answers:
            if self._decode_error is not None:
                raise self._decode_error
            try:
                received = self._socket.recv(_BYTES)
            except (BlockingIOError, InterruptedError):
                await anyio.wait_readable(self._socket)
                continue
            except OSError:
                received = b""
            if not received:
                return None
            try:
                self._answers.extend(self._frames.feed(received))
            except DecodeError as error:  # raised once the answers before it are returned
                self._decode_error = error
        return self._answers.popleft()

    def unread_byte(self) -> bytes | None:
        """The first byte that ``receive`` has not read. None: no such byte; empty: the process has ended."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    async def end_reason(self) -> str:
        """``exit code 3`` or ``killed by SIGSEGV``, with a likely cause."""
        with anyio.move_on_after(_STATUS_LIMIT_S):
            await self.end_reported.wait()
        if self.status is None:
            return "with the server of all reward processes"
        if self.status >= 0:
            return f"exit code {self.status}"
        name = signal_name(-self.status)
        likely = {"SIGKILL": ", perhaps for want of memory", "SIGXCPU": ", it burned CPU past its limit"}
        return f"killed by {name}{likely.get(name, '')}"

    def close(self) -> None:
        """Close the socket and the page."""
        self._socket.close()
        self.page.close()


class _ForkServerClient:
    """The worker's end of the fork server. ``children``: call processes whose end has not been reported;
    ``starts_since_ready``: number of processes in a row that ended before they were ready."""

    def __init__(self, rewards: Sequence[Reward], tasks: TaskGroup) -> None:
        self.children: dict[int, CallChild] = {}
        self.starts_since_ready = 0
        self._rewards = list(rewards)
        self._tasks = tasks
        self._preload = True
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    async def open(self) -> list[RewardSignature]:
        """Start the server and import the rewards in it. Raises ``RecipeError``."""
        loaded = await self._load()
        raise_problems(loaded.problems)
        if loaded.threads > 1:
            # A forked child would wait for ever for a lock that another thread holds at the time of the fork.
            _log.info("reward modules start %d threads: each process imports them itself", loaded.threads - 1)
            self._preload = False
            await self.aclose()
            self._start()
        self._tasks.start_soon(self._watch)
        return loaded.signatures

    async def _load(self) -> RewardsLoaded:
        self._start()
        names = ", ".join(reward.label for reward in self._rewards)
        with anyio.move_on_after(LOAD_LIMIT_S):
            event = await self._receive()
            if isinstance(event, RewardsLoaded):
                return event
            assert self._process is not None
            status = self._process.wait()
            problem = f"the process that imported the rewards {names} ended (exit code {status}): import them by hand"
            return RewardsLoaded([], [problem], 1)
        problem = f"rewards {names} were not imported within {LOAD_LIMIT_S:g} s: move slow work out of their modules"
        return RewardsLoaded([], [problem], 1)

    def fork(self, child: CallChild, memory_bytes: int) -> None:
        """Fork a call process for ``child``. The process sends an answer when it is ready."""
        self.children[child.number] = child
        readable, writable = os.pipe()
        descriptors = (child.child_socket.fileno(), child.child_page_fd, writable)
        self._send(ForkChild(child.number, child.loop, memory_bytes), descriptors)
        child.child_socket.close()
        os.close(child.child_page_fd)
        os.close(writable)
        self._tasks.start_soon(_log_output, readable, f"reward process {child.number}")

    def kill(self, child: CallChild) -> None:
        """Kill a call process and all that it started."""
        self._send(KillChild(child.number, explain=child.hangs))

    async def aclose(self) -> None:
        """End the server and all its processes. Idempotent."""
        if self._process is None or self._control is None:
            return
        self._control.shutdown(socket.SHUT_RDWR)
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(end_session, self._process, _LEAVE_LIMIT_S)
        self._control.close()
        self._process = None
        self._control = None

    async def _watch(self) -> None:
        """Set the status of children that ended. A server that ended is replaced; its children have ended, too."""
        while True:
            event = await self._receive()
            if isinstance(event, RewardsLoaded):
                continue
            if event is not None:
                child = self.children.pop(event.child, None)
                if child is not None:
                    child.status = event.status
                    child.end_reported.set()
                continue
            await self.aclose()
            _log.warning("the server of the reward processes ended: another one is started")
            self.starts_since_ready += 1
            children_of_ended = self.children
            self.children = {}
            self._start()
            for child in children_of_ended.values():
                child.end_reported.set()

    def _start(self) -> None:
        readable, writable = os.pipe()
        self._control, server_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_socket:
            number = str(server_socket.fileno())
            self._process = start_session(
                [sys.executable, "-P", "-m", "streamrl.rewards.calls.fork_server", number, str(os.getpid())],
                stderr=writable,
                pass_fds=[server_socket.fileno()],
                env=variables_of_user_code(self._rewards),
            )
        os.close(writable)
        self._tasks.start_soon(_log_output, readable, "the server of the reward processes")
        self._send(LoadRewards(self._rewards, self._preload))

    def _send(self, order: ServerOrder, descriptors: Sequence[int] = ()) -> None:
        assert self._control is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # ``_watch`` notices the end of the server
            socket.send_fds(self._control, [msgpack.encode(order)], list(descriptors))

    async def _receive(self) -> Any:
        """The next event; None: the server ended, or user code that it imported wrote to its socket."""
        assert self._control is not None
        while True:
            await anyio.wait_readable(self._control)
            try:
                received = self._control.recv(_LARGEST_PACKET, socket.MSG_DONTWAIT)
                return decoded(EVENTS, received) if received else None
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                return None
            except DecodeError as error:
                _log.warning("the server of the reward processes answers in no known way (%s)", error)
                return None


class CallPool:
    """Runs calls of ``rewards`` in at most ``processes`` processes, and coroutines in one more. Its owner runs ``run``
    as a task, waits for ``loaded_signatures``, and then makes calls."""

    def __init__(self, rewards: Sequence[Reward], processes: int) -> None:
        self._rewards = rewards
        self._most_processes = processes
        self._usual_processes = min(processes, usable_cores())
        self._memory_bytes = max((reward.memory_mib for reward in rewards), default=0) << 20
        self._signatures: list[RewardSignature] = []
        self._problems: list[str] = []
        # Heaps of (rank, number) and call, for plain functions (False) and coroutines (True).
        self._waiting: dict[bool, list[tuple[tuple[int, int], Call]]] = {False: [], True: []}
        self._changed = Notifier()
        self._load_ended = anyio.Event()
        self._closed = anyio.Event()
        self._scope = anyio.CancelScope()
        self._processes = 0  # number of processes of plain functions, with processes that are being replaced
        self._children: set[CallChild] = set()
        self._plain_processes: set[_PlainProcess] = set()
        self._expected_s: dict[int, float] = {}  # seconds of a call, by function
        self._enqueue_count = 0
        self._fork_count = 0

    async def run(self) -> None:
        """Run until ``aclose``. Raises an exception group with ``StreamRLError`` when no process can be started any
        more; then calls get no result."""
        try:
            with self._scope:
                async with anyio.create_task_group() as self._tasks:
                    self._server = _ForkServerClient(self._rewards, self._tasks)
                    try:
                        self._signatures = await self._server.open()
                        self._load_ended.set()
                        is_async = [signature.is_async for signature in self._signatures]
                        if not all(is_async):
                            for _ in range(self._usual_processes):
                                self._add_process()
                        if any(is_async):
                            self.add_loop()
                        await self._watch()
                    except RecipeError as error:
                        self._problems = error.problems
                        self._tasks.cancel_scope.cancel()
                    finally:
                        await self._server.aclose()
        finally:
            for child in self._children:
                child.close()
            self._load_ended.set()
            self._closed.set()

    async def loaded_signatures(self) -> list[RewardSignature]:
        """The signatures, once the functions are imported. Raises ``RecipeError`` with every problem."""
        await self._load_ended.wait()
        raise_problems(self._problems)
        return self._signatures

    async def call(
        self, function: int, completion: Any, arguments: Mapping[str, Any], *, count: int, limit_s: float, rank: int
    ) -> CallResult:
        """The result of one call, whatever user code does. ``rank``: rank of the call, the smallest begins first."""
        call = Call(function, completion, arguments, count, limit_s, anyio.Event())
        self.enqueue(call, rank)
        await call.finished.wait()
        assert call.result is not None
        return call.result

    async def aclose(self) -> None:
        """Kill every process. Unfinished calls get no result. Idempotent."""
        self._scope.cancel()
        await self._closed.wait()

    # ---- which call next -------------------------------------------------------------------------

    def enqueue(self, call: Call, rank: int = -1) -> None:
        """Queue a call. The default rank is that of a call which a process already had: such a call begins before all
        others."""
        self._enqueue_count += 1
        waiting = self._waiting[self._signatures[call.function].is_async]
        heapq.heappush(waiting, ((rank, self._enqueue_count), call))
        self._changed.notify()

    def enqueue_all(self, calls: Iterable[Call]) -> None:
        """Queue calls again that a process had, in their order."""
        for call in calls:
            self.enqueue(call)

    async def next_calls(self, *, coroutines: bool) -> list[Call]:
        """Wait for calls and return the first one, with the calls behind it that are expected to be quick."""
        waiting = self._waiting[coroutines]
        while not waiting:
            await self._changed.wait()
        calls = [heapq.heappop(waiting)[1]]
        expected_s = 0.0
        while waiting and len(calls) < _MOST_AHEAD:
            expected_s += 0.0 if coroutines else self._expected_s.get(calls[-1].function, _UNKNOWN_S)
            next_s = 0.0 if coroutines else self._expected_s.get(waiting[0][1].function, _UNKNOWN_S)
            if expected_s + next_s > _AHEAD_S:
                break
            calls.append(heapq.heappop(waiting)[1])
        return calls

    def expect(self, call: Call) -> None:
        """Update the expected time of the function by a finished call (moving average)."""
        if call.result is not None:
            seconds = call.result.seconds
            before = self._expected_s.setdefault(call.function, seconds)
            self._expected_s[call.function] = before + 0.1 * (seconds - before)

    async def _watch(self) -> None:
        """Check calls that take long, and add a process where a call waits while every process has a call that takes
        long."""
        while True:
            if not self._waiting[False] and not any(process.busy for process in self._plain_processes):
                await self._changed.wait()
            await anyio.sleep(_TICK_S)
            now = anyio.current_time()
            for process in self._plain_processes:
                process.check(now)
            slow_processes = [
                process for process in self._plain_processes if process.busy and process.oldest_since < now - _TICK_S
            ]
            if self._waiting[False] and len(slow_processes) == self._processes < self._most_processes:
                self._add_process()

    def _add_process(self) -> None:
        self._processes += 1
        self._tasks.start_soon(self._serve_plain)

    def add_loop(self) -> None:
        """Start a process of coroutines: the first one, or the successor of one that retires."""
        self._tasks.start_soon(self._serve_coroutines)

    # ---- processes -------------------------------------------------------------------------------

    async def _start_child(self, *, loop: bool) -> CallChild:
        """Start a process, and return it when it is ready for calls. Raises ``StreamRLError`` where several processes
        in a row were never ready."""
        while True:
            self._fork_count += 1
            child = CallChild(self._fork_count, loop=loop)
            self._children.add(child)
            self._server.fork(child, self._memory_bytes)
            reason = f"it was not ready within {_READY_LIMIT_S:g} s"
            with anyio.move_on_after(_READY_LIMIT_S), suppress(DecodeError):
                if await child.receive() is not None:
                    self._server.starts_since_ready = 0
                    return child
                reason = await child.end_reason()
            child.hangs = not child.end_reported.is_set()
            self._end(child)
            # Without a status the fork server itself has ended, which ``_ForkServerClient`` counts.
            if child.status is not None or child.hangs:
                self._server.starts_since_ready += 1
            starts = self._server.starts_since_ready
            if starts >= _MOST_BAD_STARTS:
                problem = f"{starts} reward processes in a row ended before they could take a call"
                remedy = "look for the reason in the log of the reward worker"
                raise StreamRLError(f"{problem} (the last: {reason}): {remedy}")

    def _end(self, child: CallChild) -> None:
        self._server.kill(child)
        self._children.discard(child)
        child.close()

    async def _serve_plain(self) -> None:
        """Run one process of plain functions, and its successors."""
        exhausted_calls: list[Call] = []
        while True:
            child = await self._start_child(loop=False)
            process = _PlainProcess(child, self)
            self._plain_processes.add(process)
            exhausted_calls = await process.serve(exhausted_calls)
            self._plain_processes.discard(process)
            self.enqueue_all(child.pending.values())
            self._end(child)
            if process.idle:
                return

    @property
    def idle_s(self) -> float | None:
        """Seconds after which a process without a call ends. None: it never ends, since there are no more processes
        than usual."""
        return _IDLE_S if self._processes > self._usual_processes else None

    def remove_process(self) -> bool:
        """Count one process less, where there are more than usual. Return whether there were."""
        if self._processes <= self._usual_processes:
            return False
        self._processes -= 1
        return True

    async def _serve_coroutines(self) -> None:
        """Run a process of coroutines, and its successors. A process that retires finishes its calls while its
        successor (``add_loop``) already gets new calls."""
        while True:
            child = await self._start_child(loop=True)
            await _LoopProcess(child, self).serve()
            self.enqueue_all(child.pending.values())
            self._end(child)
            if child.retired:
                return


class _PlainProcess:
    """A process of plain functions while it serves. ``oldest_since``: time at which its oldest call became the oldest;
    ``idle``: flag that the process ends because it had no call for long."""

    def __init__(self, child: CallChild, pool: CallPool) -> None:
        self.oldest_since = 0.0
        self.idle = False
        self._child = child
        self._pool = pool
        self._answered = Notifier()
        self._scope = anyio.CancelScope()

    @property
    def busy(self) -> bool:
        """Return whether the process has a call."""
        return bool(self._child.pending)

    async def serve(self, calls: list[Call]) -> list[Call]:
        """Serve until the process ends, or is to end. Calls that are pending then have to run in another process.
        ``calls``: first calls. Returns the call that found the process exhausted and has to run in a new one, if
        any."""
        exhausted_calls = []
        with self._scope:
            async with anyio.create_task_group() as serving:
                serving.start_soon(self._send_calls, calls)
                exhausted_calls = await self._take_answers()
                self._scope.cancel()
        return exhausted_calls

    def check(self, now: float) -> None:
        """End the process where its oldest call is late. Queue the calls behind a slow call for other processes."""
        child = self._child
        if not child.pending or child.unread_byte() is not None:
            return
        sequence, oldest = next(iter(child.pending.items()))
        if now - self.oldest_since > oldest.limit_s:
            child.hangs = True
            self._take_oldest().fail(RewardFailureKind.TIMED_OUT, late_message(oldest.limit_s))
            self._pool.expect(oldest)
            self._scope.cancel()
        elif now - self.oldest_since > _SLOW_S and len(child.pending) > 1:
            child.pending = {sequence: self._take_oldest()}

    async def _send_calls(self, calls: list[Call]) -> None:
        """Send ``calls``, then calls of the queue."""
        child = self._child
        while not self.idle:
            if calls and not child.pending and child.unread_byte() == b"":
                child.retired = True  # the process ended before it got these calls, so none of them fails
            if child.retired:
                self._pool.enqueue_all(calls)
                return
            if not child.pending:
                self.oldest_since = anyio.current_time()
            await child.send(calls)
            while len(child.pending) > len(calls) // 2:
                await self._answered.wait()
            calls = []
            with anyio.move_on_after(self._pool.idle_s) as limit:
                calls = await self._pool.next_calls(coroutines=False)
            self.idle = limit.cancelled_caught and not child.pending and self._pool.remove_process()
        self._scope.cancel()

    async def _take_answers(self) -> list[Call]:
        """Take answers until the process ends, or is to end. Returns the call that found the process exhausted, if
        another process may succeed."""
        child = self._child
        while not child.retired or child.pending:
            try:
                answer = await child.receive()
                if answer is not None and answer.sequence != next(iter(child.pending), None):
                    raise DecodeError("an answer to no call")
            except DecodeError as error:  # user code wrote to the socket
                if child.pending:
                    self._take_oldest().fail(RewardFailureKind.RAISED, f"wrote to its channel ({error})")
                break
            if answer is None:
                if child.pending:
                    oldest = self._take_oldest()
                    reason = await child.end_reason()
                    oldest.fail(RewardFailureKind.RAISED, f"ended its process ({reason})")
                break
            self.oldest_since = anyio.current_time()
            call = child.pending.pop(answer.sequence)
            child.retired = child.retired or answer.retire or answer.exhausted
            if answer.exhausted and child.answer_count:  # calls before this one may have exhausted the process
                return [call]
            child.answer_count += 1
            call.finish(answered_values(answer, call.count), answer.seconds)
            self._pool.expect(call)
            self._answered.notify()
            if child.retired:
                break
        return []

    def _take_oldest(self) -> Call:
        """Return the running call. The process gets no more calls, and the calls behind it are queued again."""
        child = self._child
        child.retired = True
        child.page.stop_after(next(iter(child.pending)))
        oldest, *later_calls = child.pending.values()
        child.pending = {}
        self._pool.enqueue_all(later_calls)
        return oldest


class _LoopProcess:
    """A process of coroutines while it serves."""

    def __init__(self, child: CallChild, pool: CallPool) -> None:
        self._child = child
        self._pool = pool

    async def serve(self) -> None:
        """Serve until the process ends, or is to end. Calls that are pending then have to run in another process."""
        async with anyio.create_task_group() as serving:
            serving.start_soon(self._send_calls)
            serving.start_soon(self._watch, serving.cancel_scope)
            await self._take_answers()
            serving.cancel_scope.cancel()

    async def _send_calls(self) -> None:
        while not self._child.retired:
            calls = await self._pool.next_calls(coroutines=True)
            if self._child.retired:
                self._pool.enqueue_all(calls)
            else:
                await self._child.send(calls)

    async def _take_answers(self) -> None:
        """Take answers until the process ends, or is to end."""
        while not self._child.retired or self._child.pending:
            try:
                answer = await self._child.receive()
            except DecodeError as error:
                await self._fail_running_call(f"wrote to its channel ({error})")
                return
            if answer is None:
                await self._fail_running_call(f"ended its process ({await self._child.end_reason()})")
                return
            # Only the first call that finds the process exhausted may have caused it.
            first = not self._child.retired
            if (answer.retire or answer.exhausted) and first:
                self._child.retired = True
                self._pool.add_loop()
            call = self._child.pending.pop(answer.sequence, None)
            if call is None:
                continue
            if answer.exhausted and not (first and call.was_exhausted):
                call.was_exhausted = call.was_exhausted or first
                self._pool.enqueue(call)
            else:
                call.finish(answered_values(answer, call.count), answer.seconds)

    async def _fail_running_call(self, message: str) -> None:
        """Fail the call whose step ran when the process ended. Other calls stay pending, to run in another process;
        where no step ran, a call that has lost too many processes fails."""
        running_sequence, _ = self._child.page.running()
        running_call = self._child.pending.pop(running_sequence, None)
        if running_call is not None:
            running_call.fail(RewardFailureKind.RAISED, message)
            return
        for sequence, call in list(self._child.pending.items()):
            call.losses += 1
            if call.losses > _MOST_LOSSES:
                del self._child.pending[sequence]
                call.fail(RewardFailureKind.RAISED, f"{message}, as it did {_MOST_LOSSES} times before")

    async def _watch(self, serving: anyio.CancelScope) -> None:
        """End the process when a call is late although the process should have ended it."""
        while True:
            await anyio.sleep(_TICK_S * 5)
            # Called in every round: the seconds count from the first call that observes the step.
            running_sequence, seconds = self._child.page.running()
            now = anyio.current_time()
            late = [
                sequence
                for sequence, call in self._child.pending.items()
                if now - call.sent_at > call.limit_s + _LATE_GRACE_S
            ]
            if not late:
                continue
            if running_sequence in self._child.pending and seconds > _BLOCKING_S:
                late = [running_sequence]  # it holds the loop, so the other calls are late because of it
            for sequence in late:
                call = self._child.pending.pop(sequence)
                message = late_message(call.limit_s)
                if sequence == running_sequence:
                    message = (
                        f"blocked the loop that it shares with others for {seconds:.1f} s ({message}): await, or write "
                        "a plain function"
                    )
                call.fail(RewardFailureKind.TIMED_OUT, message)
            self._child.hangs = True
            serving.cancel()


async def _log_output(descriptor: int, process: str) -> None:
    """Log the first 64 KiB that a process prints, and read all further output, until the process and its children have
    closed the pipe."""
    os.set_blocking(descriptor, False)
    printed_bytes = 0

    def read() -> bool:
        """Log the content of the pipe; False: the pipe has ended."""
        nonlocal printed_bytes
        with suppress(BlockingIOError):
            for _ in range(16):  # at most 4 MiB at a time: the loop has other work
                content = os.read(descriptor, _BYTES)
                if not content:
                    return False
                if printed_bytes < _LOGGED_BYTES:
                    text = content[: _LOGGED_BYTES - printed_bytes].decode(errors="replace").rstrip()
                    _log.info("%s: %s", process, text)
                printed_bytes += len(content)
        return True

    try:
        while read():
            await anyio.wait_readable(descriptor)
    finally:
        read()
        os.close(descriptor)
        if printed_bytes > _LOGGED_BYTES:
            _log.warning("%s printed %d bytes: only the first were logged", process, printed_bytes)
