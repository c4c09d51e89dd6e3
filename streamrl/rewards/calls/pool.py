"""Processes that call reward functions, one call after the other in each, and one that runs all coroutines.

============================================  =====================================================================
a function that                               has this effect
============================================  =====================================================================
outlives its limit, blocks, deadlocks         its process and all that it started are killed; the call timed out
exits, crashes                                the call raised; another process takes the place of the one that ended
runs out of memory, threads or descriptors    the call is run once more, in a new process
is a coroutine and swallows its cancellation  the call timed out; its process gets no more calls and is killed
leaks memory, threads or descriptors          its process is replaced between two calls
is imported again in a process and hangs      the process is killed; no call was lost, for none was given to it
============================================  =====================================================================

Quick calls are sent to a process several at a time, so that it need not wait for the next one. The oldest without an
answer is the one that runs: it alone is blamed, and its time counts from the answer before it. The others are queued
again when the process ends, or when the oldest turns out to be slow."""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import anyio
import anyio.abc
import msgspec

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.notifier import Notifier
from streamrl.base.run_process import signal_name, usable_cores
from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import Reward
from streamrl.rewards.calls.frames import (
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
    decode_event,
    to_frame,
)
from streamrl.rewards.calls.process import late_message
from streamrl.rewards.environment import passed_environment
from streamrl.rewards.signature import RewardSignature
from streamrl.rewards.values import CallResult, CheckedValue, failed

LOAD_LIMIT_S = 120.0
_READY_LIMIT_S = LOAD_LIMIT_S  # of one process, which imports the functions again where they have threads
_LEAVE_LIMIT_S = 3.0
_STATUS_LIMIT_S = 2.0  # from the end of a process's socket until the fork server reports how it ended
_TICK_S = 0.02
_AHEAD_S = 0.005  # of expected work that is sent to a process at a time
_MOST_AHEAD = 64
_UNKNOWN_S = 1.0  # what a call is expected to take before the first of its function: no other is sent with it
_SLOW_S = 0.05
_IDLE_S = 60.0
_LATE_GRACE_S = 2.0  # a process of coroutines ends the late ones itself, unless its loop is blocked for so long
_BLOCKING_S = 0.25
_MOST_BAD_STARTS = 5
_MOST_LOST = 2
_BYTES = 1 << 18
_LARGEST_PACKET = 1 << 20
_LOGGED_BYTES = 64 << 10  # of what one process prints; the rest is read, counted and thrown away

_log = logging.getLogger(__name__)


class Call(msgspec.Struct, eq=False):
    """A call that waits for a process or runs in one. ``count``: of completions. ``lost``: how often its process ended
    while it ran and another call, or none, was to blame. ``again``: it ran where a process was exhausted."""

    function: int
    completion: Any
    arguments: Mapping[str, Any]
    count: int
    limit_s: float
    done: anyio.Event
    sent_at: float = 0.0
    lost: int = 0
    again: bool = False
    result: CallResult | None = None

    def finish(self, values: tuple[CheckedValue, ...], seconds: float) -> None:
        """Set the result. ``seconds``: that the function took, which the process may not exaggerate."""
        most_s = anyio.current_time() - self.sent_at if self.sent_at else 0.0
        self.result = CallResult(values, seconds if 0.0 <= seconds <= most_s else most_s, 0.0, self.limit_s)
        self.done.set()

    def fail(self, kind: RewardFailureKind, message: str) -> None:
        """The call has no value, for this reason."""
        self.finish(failed(kind, message, self.count), -1.0)


class CallChild:
    """A call process: its socket, its page, and how it ended. ``pending``: calls without an answer by sequence number,
    the oldest first. ``retired``: it gets no more calls; ``hangs``: so that it is to print where it was before it is
    killed. Raises ``OSError`` where no descriptors are left."""

    def __init__(self, number: int, *, loop: bool) -> None:
        self.number = number
        self.loop = loop
        self.pending: dict[int, Call] = {}
        self.answered = 0
        self.retired = False
        self.hangs = False
        self.ended = anyio.Event()
        self.status: int | None = None
        self._frames: FrameReader[CallAnswer] = FrameReader(CallAnswer)
        self._answers: deque[CallAnswer] = deque()
        self._broken: msgspec.DecodeError | None = None
        self._sequence = 0
        self._socket, self.their_socket = socket.socketpair()
        self._socket.setblocking(False)
        self.their_page = SharedStatus.create()
        self.page = SharedStatus(self.their_page)

    async def send(self, calls: Sequence[Call]) -> None:
        """Give it calls, in one write. A process that is gone is seen by ``receive``."""
        frames = []
        for call in calls:
            self._sequence += 1
            self.pending[self._sequence] = call
            call.sent_at = anyio.current_time()
            order = CallOrder(self._sequence, call.function, call.limit_s, call.completion, dict(call.arguments))
            frames.append(to_frame(order))
        rest = memoryview(b"".join(frames))
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except (BlockingIOError, InterruptedError):
                await anyio.wait_writable(self._socket)
            except OSError:
                break

    async def receive(self) -> CallAnswer | None:
        """The next answer; None: the process is gone. Raises ``msgspec.DecodeError`` for what is no answer."""
        while not self._answers:
            if self._broken is not None:
                raise self._broken
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
            except msgspec.DecodeError as error:  # after the answers that came before it
                self._broken = error
        return self._answers.popleft()

    def unread(self) -> bytes | None:
        """The first byte that ``receive`` has not read. None: there is none; empty: the process has ended."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    async def end_reason(self) -> str:
        """``exit code 3`` or ``killed by SIGSEGV``, with what is likely."""
        with anyio.move_on_after(_STATUS_LIMIT_S):
            await self.ended.wait()
        if self.status is None:
            return "with the server of all reward processes"
        if self.status >= 0:
            return f"exit code {self.status}"
        name = signal_name(-self.status)
        likely = {"SIGKILL": ", perhaps for want of memory", "SIGXCPU": ", it burned CPU past its limit"}
        return f"killed by {name}{likely.get(name, '')}"

    def close(self) -> None:
        """Give back what it holds."""
        self._socket.close()
        self.page.close()


class _ForkServer:
    """The worker's end of the fork server. ``children``: call processes whose end has not been reported."""

    def __init__(self, rewards: Sequence[Reward], tasks: anyio.abc.TaskGroup) -> None:
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
        if loaded.problems:
            raise RecipeError(*loaded.problems)
        if loaded.threads > 1:
            # A thread may hold a lock that a forked child waits for for ever.
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
        """Fork a call process for ``child``, which sends that it is ready."""
        self.children[child.number] = child
        printed, writable = os.pipe2(os.O_CLOEXEC)
        descriptors = (child.their_socket.fileno(), child.their_page, writable)
        self._send(ForkChild(child.number, child.loop, memory_bytes), descriptors)
        child.their_socket.close()
        os.close(child.their_page)
        os.close(writable)
        self._tasks.start_soon(_log_output, printed, f"reward process {child.number}")

    def kill(self, child: CallChild) -> None:
        """Kill a call process and all that it started."""
        self._send(KillChild(child.number, explain=child.hangs))

    async def aclose(self) -> None:
        """End the server and all its processes. Idempotent."""
        if self._process is None or self._control is None:
            return
        self._control.shutdown(socket.SHUT_RDWR)
        with anyio.move_on_after(_LEAVE_LIMIT_S, shield=True):
            while self._process.poll() is None:  # noqa: ASYNC110 - ends of processes are polled
                await anyio.sleep(0.005)
        self._process.kill()
        self._process.wait()
        self._control.close()
        self._process = None
        self._control = None

    async def _watch(self) -> None:
        """Note which children ended. A server that ended is replaced, and its children are gone."""
        while True:
            event = await self._receive()
            if isinstance(event, RewardsLoaded):
                continue
            if event is not None:
                if (child := self.children.pop(event.child, None)) is not None:
                    child.status = event.status
                    child.ended.set()
                continue
            await self.aclose()
            _log.warning("the server of the reward processes ended: another one is started")
            self.starts_since_ready += 1
            lost = self.children
            self.children = {}
            self._start()
            for child in lost.values():
                child.ended.set()

    def _start(self) -> None:
        printed, writable = os.pipe2(os.O_CLOEXEC)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = str(theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "streamrl.rewards.calls.fork_server", number, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stderr=writable,
                pass_fds=[theirs.fileno()],
                env=passed_environment(self._rewards),
                start_new_session=True,
            )
        os.close(writable)
        self._tasks.start_soon(_log_output, printed, "the server of the reward processes")
        self._send(LoadRewards(self._rewards, self._preload))

    def _send(self, order: ServerOrder, descriptors: Sequence[int] = ()) -> None:
        assert self._control is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is gone: its end is read
            socket.send_fds(self._control, [msgspec.msgpack.encode(order)], list(descriptors))

    async def _receive(self) -> Any:
        """The next event; None: the server ended, or user code that it imported wrote to its socket."""
        assert self._control is not None
        while True:
            await anyio.wait_readable(self._control)
            try:
                received = self._control.recv(_LARGEST_PACKET, socket.MSG_DONTWAIT)
                return decode_event(received) if received else None
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                return None
            except msgspec.DecodeError as error:
                _log.warning("the server of the reward processes answers in no known way (%s)", error)
                return None


class CallPool:
    """Runs calls of ``rewards`` in at most ``processes`` processes, and coroutines in one more. ``run`` as a task of
    its own for as long as it is used; ``opened`` before ``call``."""

    def __init__(self, rewards: Sequence[Reward], processes: int) -> None:
        self._rewards = rewards
        self._most = processes
        self._warm = min(processes, usable_cores())
        self._memory_bytes = max((reward.memory_mib for reward in rewards), default=0) << 20
        self._signatures: list[RewardSignature] = []
        self._problems: list[str] = []
        self._waiting: dict[bool, list[tuple[tuple[int, int], Call]]] = {False: [], True: []}
        self._changed = Notifier()
        self._opened = anyio.Event()
        self._closed = anyio.Event()
        self._scope = anyio.CancelScope()
        self._slots = 0
        self._children: set[CallChild] = set()
        self._plain: set[_PlainProcess] = set()
        self._expected_s: dict[int, float] = {}
        self._calls = 0
        self._forked = 0

    async def run(self) -> None:
        """Run until ``aclose``. Raises an exception group with ``StreamRLError`` when no process can be started any
        more; calls then get no answer."""
        try:
            with self._scope:
                async with anyio.create_task_group() as self._tasks:
                    self._server = _ForkServer(self._rewards, self._tasks)
                    try:
                        self._signatures = await self._server.open()
                        self._opened.set()
                        is_async = [signature.is_async for signature in self._signatures]
                        for _ in range(0 if all(is_async) else self._warm):
                            self._add_slot()
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
            self._opened.set()
            self._closed.set()

    async def opened(self) -> list[RewardSignature]:
        """The signatures, once the functions are imported. Raises ``RecipeError`` with every problem."""
        await self._opened.wait()
        if self._problems:
            raise RecipeError(*self._problems)
        return self._signatures

    async def call(
        self, function: int, completion: Any, arguments: Mapping[str, Any], *, count: int, limit_s: float, rank: int
    ) -> CallResult:
        """The result of one call, whatever user code does. The waiting call with the smallest ``rank`` begins first."""
        call = Call(function, completion, arguments, count, limit_s, anyio.Event())
        self.enqueue(call, rank)
        await call.done.wait()
        assert call.result is not None
        return call.result

    async def aclose(self) -> None:
        """Kill every process. Calls that have not ended are forgotten. Idempotent."""
        self._scope.cancel()
        await self._closed.wait()

    # ---- which call next -------------------------------------------------------------------------

    def enqueue(self, call: Call, rank: int = -1) -> None:
        """Let a call wait for a process; before all others where it has been given to one already."""
        self._calls += 1
        waiting = self._waiting[self._signatures[call.function].is_async]
        heapq.heappush(waiting, ((rank, self._calls), call))
        self._changed.notify()

    def enqueue_all(self, calls: Iterable[Call]) -> None:
        """Let calls that a process had wait again, in their order."""
        for call in calls:
            self.enqueue(call)

    async def next_calls(self, *, coroutines: bool) -> list[Call]:
        """The calls that are to begin next: the first that waits, and those behind it that are expected to be quick."""
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
        """Calls of the same function are expected to take as long as this one did."""
        if call.result is not None:
            seconds = call.result.seconds
            before = self._expected_s.setdefault(call.function, seconds)
            self._expected_s[call.function] = before + 0.1 * (seconds - before)

    async def _watch(self) -> None:
        """Look after calls that take long, and add a slot where a call waits although every process has such a call."""
        while True:
            if not self._waiting[False] and not any(process.busy for process in self._plain):
                await self._changed.wait()
            await anyio.sleep(_TICK_S)
            now = anyio.current_time()
            for process in self._plain:
                process.check(now)
            busy = [process for process in self._plain if process.busy and process.since < now - _TICK_S]
            if self._waiting[False] and len(busy) == self._slots < self._most:
                self._add_slot()

    def _add_slot(self) -> None:
        self._slots += 1
        self._tasks.start_soon(self._serve_plain)

    def add_loop(self) -> None:
        """Start a process of coroutines, beside one that retires."""
        self._tasks.start_soon(self._serve_coroutines)

    # ---- processes -------------------------------------------------------------------------------

    async def _start_child(self, *, loop: bool) -> CallChild:
        """A process that is ready for calls."""
        while True:
            self._forked += 1
            child = CallChild(self._forked, loop=loop)
            self._children.add(child)
            self._server.fork(child, self._memory_bytes)
            reason = f"it was not ready within {_READY_LIMIT_S:g} s"
            with anyio.move_on_after(_READY_LIMIT_S), contextlib.suppress(msgspec.DecodeError):
                if await child.receive() is not None:
                    self._server.starts_since_ready = 0
                    return child
                reason = await child.end_reason()
            child.hangs = not child.ended.is_set()
            self._end(child)
            # Otherwise the end of the fork server was counted.
            self._server.starts_since_ready += child.status is not None or child.hangs
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
        """One process and its successors."""
        again: list[Call] = []
        while True:
            child = await self._start_child(loop=False)
            process = _PlainProcess(child, self)
            self._plain.add(process)
            again = await process.serve(again)
            self._plain.discard(process)
            self.enqueue_all(child.pending.values())
            self._end(child)
            if process.idle:
                return

    @property
    def idle_s(self) -> float | None:
        """Seconds that a process may be without a call. None: for ever, since there are no more slots than usual."""
        return _IDLE_S if self._slots > self._warm else None

    def remove_slot(self) -> bool:
        """Return whether there was a slot more than usual; then it is gone."""
        removed = self._slots > self._warm
        self._slots -= removed
        return removed

    async def _serve_coroutines(self) -> None:
        """The process of coroutines, and its successors. One that retires finishes what it has beside its successor."""
        while True:
            child = await self._start_child(loop=True)
            await _LoopProcess(child, self).serve()
            self.enqueue_all(child.pending.values())
            self._end(child)
            if child.retired:
                return


class _PlainProcess:
    """A process of plain functions while it serves. ``since``: when its oldest call became the oldest; ``idle``: it
    ends because it had no call for long."""

    def __init__(self, child: CallChild, pool: CallPool) -> None:
        self.since = 0.0
        self.idle = False
        self._child = child
        self._pool = pool
        self._answered = Notifier()
        self._scope = anyio.CancelScope()

    @property
    def busy(self) -> bool:
        """Return whether it has a call."""
        return bool(self._child.pending)

    async def serve(self, calls: list[Call]) -> list[Call]:
        """Serve until the process ends, or is to end; calls that are pending then have to run in another. ``calls``:
        the first ones. Returns the call that has to run once more in a new process, if any."""
        again: list[Call] = []
        with self._scope:
            async with anyio.create_task_group() as serving:
                serving.start_soon(self._send_calls, calls)
                again = await self._take_answers()
                self._scope.cancel()
        return again

    def check(self, now: float) -> None:
        """End the process where its oldest call is late. The calls behind one that is slow go elsewhere."""
        child = self._child
        if not child.pending or child.unread() is not None:
            return
        sequence, oldest = next(iter(child.pending.items()))
        if now - self.since > oldest.limit_s:
            child.hangs = True
            self._take_oldest().fail(RewardFailureKind.TIMED_OUT, late_message(oldest.limit_s))
            self._pool.expect(oldest)
            self._scope.cancel()
        elif now - self.since > _SLOW_S and len(child.pending) > 1:
            child.pending = {sequence: self._take_oldest()}

    async def _send_calls(self, calls: list[Call]) -> None:
        """Send calls; ``calls`` first."""
        child = self._child
        while not self.idle:
            if calls and not child.pending and child.unread() == b"":
                child.retired = True  # it ended before it had these: none of them is to blame
            if child.retired:
                self._pool.enqueue_all(calls)
                return
            if not child.pending:
                self.since = anyio.current_time()
            await child.send(calls)
            while len(child.pending) > len(calls) // 2:
                await self._answered.wait()
            calls = []
            with anyio.move_on_after(self._pool.idle_s) as limit:
                calls = await self._pool.next_calls(coroutines=False)
            self.idle = limit.cancelled_caught and not child.pending and self._pool.remove_slot()
        self._scope.cancel()

    async def _take_answers(self) -> list[Call]:
        """Take answers until the process ends, or is to end. Returns the call that has to run once more, if any."""
        child = self._child
        while not child.retired or child.pending:
            try:
                answer = await child.receive()
                if answer is not None and answer.sequence != next(iter(child.pending), None):
                    raise msgspec.DecodeError("an answer to no call")
            except msgspec.DecodeError as error:  # user code wrote to the socket
                if child.pending:
                    self._take_oldest().fail(RewardFailureKind.RAISED, f"wrote to its channel ({error})")
                break
            if answer is None:
                if child.pending:
                    oldest = self._take_oldest()
                    how = await child.end_reason()
                    oldest.fail(RewardFailureKind.RAISED, f"ended its process ({how})")
                break
            self.since = anyio.current_time()
            call = child.pending.pop(answer.sequence)
            child.retired = child.retired or answer.retire or answer.exhausted
            if answer.exhausted and child.answered:
                return [call]
            child.answered += 1
            call.finish(answered_values(answer, call.count), answer.seconds)
            self._pool.expect(call)
            self._answered.notify()
            if child.retired:
                break
        return []

    def _take_oldest(self) -> Call:
        """The call that runs. The process gets no more, and those behind it have to run in another."""
        child = self._child
        child.retired = True
        child.page.stop_after(next(iter(child.pending)))
        oldest, *others = child.pending.values()
        child.pending = {}
        self._pool.enqueue_all(others)
        return oldest


class _LoopProcess:
    """A process of coroutines while it serves."""

    def __init__(self, child: CallChild, pool: CallPool) -> None:
        self._child = child
        self._pool = pool

    async def serve(self) -> None:
        """Serve until the process ends, or is to end; calls that are pending then have to run in another."""
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
            except msgspec.DecodeError as error:
                await self._fail_running_call(f"wrote to its channel ({error})")
                return
            if answer is None:
                await self._fail_running_call(f"ended its process ({await self._child.end_reason()})")
                return
            first = not self._child.retired  # calls that find it exhausted after the first did not cause it
            if (answer.retire or answer.exhausted) and first:
                self._child.retired = True
                self._pool.add_loop()
            call = self._child.pending.pop(answer.sequence, None)
            if call is not None and answer.exhausted and not (first and call.again):
                call.again = call.again or first
                self._pool.enqueue(call)
            elif call is not None:
                call.finish(answered_values(answer, call.count), answer.seconds)

    async def _fail_running_call(self, message: str) -> None:
        """The call whose step ran failed; others are run again, and no more than twice where no step ran."""
        guilty = self._child.pending.pop(self._child.page.running()[0], None)
        if guilty is not None:
            guilty.fail(RewardFailureKind.RAISED, message)
        for sequence, call in list(self._child.pending.items()):
            call.lost += guilty is None
            if call.lost > _MOST_LOST:
                del self._child.pending[sequence]
                call.fail(RewardFailureKind.RAISED, f"{message}, as it did {_MOST_LOST} times before")

    async def _watch(self, serving: anyio.CancelScope) -> None:
        """End the process when a call is late although the process should have ended it."""
        while True:
            await anyio.sleep(_TICK_S * 5)
            sequence, seconds = self._child.page.running()  # at every turn: its time counts from when it was seen
            now = anyio.current_time()
            late = [
                key for key, call in self._child.pending.items() if now - call.sent_at > call.limit_s + _LATE_GRACE_S
            ]
            if not late:
                continue
            if sequence in self._child.pending and seconds > _BLOCKING_S:
                late = [sequence]
            for key in late:
                call = self._child.pending.pop(key)
                message = late_message(call.limit_s)
                if key == sequence:
                    message = (
                        f"blocked the loop that it shares with others for {seconds:.1f} s ({message}): await, or write "
                        "a plain function"
                    )
                call.fail(RewardFailureKind.TIMED_OUT, message)
            self._child.hangs = True
            serving.cancel()


async def _log_output(descriptor: int, process: str) -> None:
    """Log the first 64 KiB that a process prints, and read the rest, until all its ends of the pipe are closed."""
    os.set_blocking(descriptor, False)
    printed = 0

    def read() -> bool:
        """Log what the pipe has; False: it has ended."""
        nonlocal printed
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):  # the loop has other work: what is left is read next time
                content = os.read(descriptor, _BYTES)
                if not content:
                    return False
                if printed < _LOGGED_BYTES:
                    text = content[: _LOGGED_BYTES - printed].decode(errors="replace").rstrip()
                    _log.info("%s: %s", process, text)
                printed += len(content)
        return True

    try:
        while read():
            await anyio.wait_readable(descriptor)
    finally:
        read()
        os.close(descriptor)
        if printed > _LOGGED_BYTES:
            _log.warning("%s printed %d bytes: only the first were logged", process, printed)
