"""The pool of call processes: every call ends, whatever the function does, and only the call in progress pays for it.

============================================  =====================================================================
what a function does                          what becomes of it
============================================  =====================================================================
outlives its limit, blocks, deadlocks         its process and all that it started are killed; the call timed out
exits, crashes                                the call raised; what was queued behind it goes to another process
runs out of memory, threads or descriptors    the call is run once more, in a new process
a coroutine swallows its cancellation         the call timed out; its process gets no more calls and is killed
leaks memory, threads or descriptors          its process is replaced between two calls
its module is imported anew and does not end  its process is killed; what it was given goes to another process
============================================  =====================================================================

Calls are sent ahead to a process as long as it is expected to begin them within milliseconds, and taken back from
behind a call that turns out to be slow.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
import signal
from collections.abc import Iterable, Sequence

from streamrl.base.errors import StreamRLError
from streamrl.base.types import RewardFailureKind
from streamrl.recipe.rewards import Reward
from streamrl.rewards.calls.call_child import CallChild, PoolCall
from streamrl.rewards.calls.call_frames import CallAnswer, ChildEnded, answered_values
from streamrl.rewards.calls.call_process import late_message
from streamrl.rewards.calls.fork_link import LOAD_LIMIT_S, ForkLink
from streamrl.rewards.clock import Clock
from streamrl.rewards.signature import RewardSignature
from streamrl.rewards.values import CallResult, CheckedValue, failed

_TICK_S = 0.02
_AHEAD_S = 0.02  # expected work that a process may have
_MOST_AHEAD = 256
_UNKNOWN_S = 1.0  # what a call is expected to take before the first of its function: nothing is queued behind it
_SLOW_S = 0.05  # a call that ran for so long: what is queued behind it goes elsewhere
_GRACE_S = 2.0  # a process that shows no sign of life for so long after a limit is blocked
_BLOCKING_S = 0.25
_MOST_KILL_S = 10.0
_IDLE_S = 60.0
_MOST_BAD_STARTS = 5
_MOST_LOST = 2

_log = logging.getLogger(__name__)


class CallPool:
    """Runs calls of ``rewards`` in at most ``processes`` processes, and coroutines in one more.

    ``open``, then ``submit``; ``aclose`` leaves nothing behind. ``failed_for_good`` is set when no process can be
    started any more.
    """

    def __init__(self, rewards: Sequence[Reward], processes: int) -> None:
        self._rewards = rewards
        self._most = processes
        self._kept = min(processes, len(os.sched_getaffinity(0)))
        self._memory_bytes = max((reward.memory_mib for reward in rewards), default=0) << 20
        self._link = ForkLink(rewards, self._on_ended, self._on_lost)
        self._children: dict[int, CallChild] = {}
        self._dying: dict[int, CallChild] = {}
        self._waiting: dict[bool, list[tuple[tuple[int, int], int, PoolCall]]] = {False: [], True: []}
        self._is_async: list[bool] = []
        self._expected: dict[int, float] = {}
        self._submitted = 0
        self._next_child = 0
        self._bad_starts = 0
        self._assigning: asyncio.Handle | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._closed = False
        self.failed_for_good: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def open(self) -> list[RewardSignature]:
        """Import the functions and fork the first processes. Raises ``RecipeError`` with every problem."""
        signatures = await self._link.open()
        self._is_async = [signature.is_async for signature in signatures]
        if not all(self._is_async):
            for _ in range(self._kept):
                self._fork(loop=False)
        if any(self._is_async):
            self._fork(loop=True)
        return signatures

    def submit(self, call: PoolCall) -> None:
        """``call.on_done`` is called once, later, whatever becomes of it, unless the pool is closed before."""
        self._enqueue(call)
        self._soon()

    async def aclose(self) -> None:
        """Kill every process. Calls that have not ended are forgotten. Idempotent."""
        self._closed = True
        for handle in (self._assigning, self._ticking):
            if handle is not None:
                handle.cancel()
        await self._link.aclose()
        for child in (*self._children.values(), *self._dying.values()):
            child.close()
        self._children.clear()
        self._dying.clear()

    # ---- giving calls out ------------------------------------------------------------------------

    def _enqueue(self, call: PoolCall) -> None:
        self._submitted += 1
        heapq.heappush(self._waiting[self._is_async[call.function]], (call.rank, self._submitted, call))

    def _soon(self) -> None:
        """Assign once the loop has taken in what else has arrived, so that calls travel together."""
        if self._assigning is None and not self._closed:
            self._assigning = asyncio.get_running_loop().call_soon(self._assign)

    def _assign(self) -> None:
        self._assigning = None
        if self._closed:
            return
        for loop, waiting in self._waiting.items():
            while waiting:
                child = self._place_for(waiting[0][2], loop=loop)
                if child is None:
                    break
                call = heapq.heappop(waiting)[2]
                child.take(call, self._expected.get(call.function, _UNKNOWN_S))
        for child in self._children.values():
            child.flush()
        if self._ticking is None and any(child.pending for child in self._children.values()):
            self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _place_for(self, call: PoolCall, *, loop: bool) -> CallChild | None:
        children = [c for c in self._children.values() if c.loop is loop and not c.retiring]
        if call.again and not loop:
            children = [c for c in children if not c.answers and not c.pending]
        if loop:
            return children[0] if children else self._fork(loop=True)
        expected = self._expected.get(call.function, _UNKNOWN_S)
        best = min(children, key=lambda child: (child.expected_s, not child.page.ready_at), default=None)
        if best is None:
            return self._fork(loop=False)
        if not best.pending:
            return best
        fits = best.expected_s + expected <= _AHEAD_S and len(best.pending) < _MOST_AHEAD
        return best if fits else None

    # ---- taking answers in -----------------------------------------------------------------------

    def _on_answer(self, child: CallChild, answer: CallAnswer) -> None:
        self._bad_starts = 0
        first = not child.retiring  # calls that hit exhaustion after the first did not cause it
        child.retiring = child.retiring or answer.retire or answer.exhausted
        call = child.pending.pop(answer.sequence, None)
        if call is not None and answer.exhausted and not (first and call.again):
            call.again = call.again or first
            self._enqueue(call)
        elif call is not None:
            most_s = Clock.monotonic() - call.sent_at  # user code may have replaced the clock of its process
            seconds = answer.seconds if 0.0 <= answer.seconds <= most_s else most_s
            before = self._expected.get(call.function)
            child.expected_s -= before if before is not None else _UNKNOWN_S
            if not child.pending:
                child.expected_s = 0.0
            self._expected[call.function] = seconds if before is None else before + 0.1 * (seconds - before)
            self._finish(call, answered_values(answer, call.count), seconds)
        if child.retiring:
            self._retire(child)
        elif not child.pending:
            child.idle_since = Clock.monotonic()
        self._soon()

    def _finish(self, call: PoolCall, values: tuple[CheckedValue, ...], seconds: float) -> None:
        waited = max(Clock.monotonic() - call.asked_at - seconds, 0.0)
        call.on_done(CallResult(values, seconds, waited, call.limit_s))

    def _retire(self, child: CallChild) -> None:
        """No new calls; what it has not begun goes elsewhere, and it ends when nothing is left. Coroutines go on."""
        if not child.loop:
            self._give_back(child.take_back())
        if not child.pending and child.number in self._children:
            self._kill(child)

    # ---- watching --------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticking = None
        for child in list(self._children.values()):
            child.drain()
            if child.number not in self._children:
                continue
            if not child.page.ready_at:
                self._watch_start(child)
            elif child.pending or child.page.running()[0]:
                self._watch(child)
        if any(Clock.monotonic() - dying.killed_at > _MOST_KILL_S for dying in self._dying.values()):
            self._link.kill_server()  # user code has stopped it
        self._grow_or_shrink()
        self._soon()

    def _watch_start(self, child: CallChild) -> None:
        """It imports the functions anew where they have threads, which may take as long as it took at first. No call
        waits for it while another process has nothing to do."""
        if Clock.monotonic() - child.forked_at > LOAD_LIMIT_S:
            self._kill(child, explain=True)
            self._count_start(f"it was not ready within {LOAD_LIMIT_S:g} s", ready=False)
        elif child.pending and any(
            other.page.ready_at and not other.pending and not other.retiring and other.loop is child.loop
            for other in self._children.values()
        ):
            self._give_back(child.take_back())

    def _watch(self, child: CallChild) -> None:
        sequence, seconds = child.page.running()
        call = child.pending.get(sequence)
        if call is not None and seconds > call.limit_s:
            self._end_late(child, [sequence], seconds, late_message(call.limit_s))
        elif child.loop:
            self._watch_loop(child, sequence, seconds)
        elif sequence and call is None and seconds > max(reward.timeout_s for reward in self._rewards):
            self._kill(child)  # a call that was taken back has begun all the same
        elif sequence and seconds > _SLOW_S and len(child.pending) > 1:
            self._give_back(child.take_back())
        elif child.stands_still(_GRACE_S):
            self._blame(child, f"left its process so that it began no other call within {_GRACE_S:g} s")
            self._kill(child, explain=True)

    def _watch_loop(self, child: CallChild, sequence: int, seconds: float) -> None:
        now, ready_at = Clock.monotonic(), child.page.ready_at
        late = [key for key, c in child.pending.items() if now - max(c.sent_at, ready_at) > c.limit_s + _GRACE_S]
        if late and sequence in child.pending and seconds > _BLOCKING_S:
            message = (
                f"blocked the loop that it shares with others for {seconds:.1f} s: await, or write a plain function"
            )
            self._end_late(child, [sequence], seconds, message)
        elif late:
            limit_s = child.pending[late[0]].limit_s
            self._end_late(child, late, limit_s, late_message(limit_s))

    def _end_late(self, child: CallChild, sequences: Sequence[int], seconds: float, message: str) -> None:
        late = [call for key in sequences if (call := child.pending.pop(key, None)) is not None]
        self._kill(child, explain=True)
        for call in late:
            self._finish(call, failed(RewardFailureKind.TIMED_OUT, message, call.count), seconds)

    def _grow_or_shrink(self) -> None:
        if self._closed:
            return
        plain = [child for child in self._children.values() if not child.loop]
        if not all(self._is_async) and len([c for c in plain if not c.retiring]) < self._kept:
            self._fork(loop=False)
        elif self._waiting[False] and len(plain) < self._most:
            busy = all(child.retiring or child.page.running()[1] > _TICK_S for child in plain)
            if busy:
                self._fork(loop=False)
        elif len(plain) > self._kept:
            idle = [c for c in plain if not c.pending and Clock.monotonic() - c.idle_since > _IDLE_S]
            for child in idle[: len(plain) - self._kept]:
                self._kill(child)

    # ---- life of the processes -------------------------------------------------------------------

    def _fork(self, *, loop: bool) -> CallChild | None:
        if self.failed_for_good.done():
            return None
        self._next_child += 1
        child = CallChild(self._next_child, loop=loop, on_answer=self._on_answer, on_broken=self._on_broken)
        self._children[child.number] = child
        self._link.fork(child, self._memory_bytes)
        return child

    def _kill(self, child: CallChild, *, explain: bool = False) -> None:
        """End it and everything that it started. What it has not begun goes to others. ``explain``: the log tells where
        it was."""
        back = list(child.take_back()) + list(child.pending.values())
        child.pending.clear()
        self._children.pop(child.number, None)
        child.killed_at = Clock.monotonic()
        self._dying[child.number] = child
        self._link.kill(child.number, explain=explain)
        self._give_back(back)

    def _give_back(self, calls: Iterable[PoolCall]) -> None:
        for call in calls:
            self._enqueue(call)
        self._soon()

    def _on_ended(self, event: ChildEnded) -> None:
        """A process is gone, killed by us or not."""
        if (dead := self._dying.pop(event.child, None)) is not None:
            dead.close()
            return
        child = self._children.pop(event.child, None)
        if child is None:
            return
        child.drain()
        self._count_start(describe_end(event.status), ready=child.page.ready_at > 0)
        self._blame(child, f"ended its process ({describe_end(event.status)})")
        child.close()
        self._soon()

    def _on_broken(self, child: CallChild) -> None:
        """User code wrote to the socket. Plain calls are answered in order, so it was the oldest."""
        if child.number in self._children:
            oldest = next(iter(child.pending), 0)
            self._blame(child, "wrote to its channel", None if child.loop else oldest)
            self._kill(child)

    def _blame(self, child: CallChild, message: str, guilty_sequence: int | None = None) -> None:
        """The call in progress failed; others are run again, and no more than twice where nobody knows who it was."""
        sequence, seconds = child.page.running()
        guilty = child.pending.pop(sequence if guilty_sequence is None else guilty_sequence, None)
        if guilty is not None:
            self._finish(guilty, failed(RewardFailureKind.RAISED, message, guilty.count), seconds)
        for call in child.pending.values():
            call.lost += guilty is None and child.page.ready_at > 0
            if call.lost > _MOST_LOST:
                text = f"{message}, as it did {_MOST_LOST} times before"
                self._finish(call, failed(RewardFailureKind.RAISED, text, call.count), 0.0)
            else:
                self._enqueue(call)
        child.pending.clear()

    def _count_start(self, reason: str, *, ready: bool) -> None:
        """A process ended. Where it had become ready it is a call that ended it, and others can be started."""
        self._bad_starts = 0 if ready else self._bad_starts + 1
        if self._bad_starts >= _MOST_BAD_STARTS and not self.failed_for_good.done():
            problem = f"{self._bad_starts} reward processes in a row ended before they could take a call"
            remedy = "look for the reason in the log of the reward worker"
            self.failed_for_good.set_exception(StreamRLError(f"{problem} (the last: {reason}): {remedy}"))

    def _on_lost(self) -> None:
        """The fork server is gone, and with it all processes."""
        if self._closed:
            return
        children, self._children = list(self._children.values()), {}
        self._count_start("their server ended", ready=any(child.page.ready_at for child in children))
        for child in children:
            child.drain()
            self._blame(child, "ended the server of all reward processes")
        for child in (*children, *self._dying.values()):
            child.close()
        self._dying.clear()
        self._soon()


def describe_end(status: int) -> str:
    """``exit code 3`` or ``killed by SIGSEGV``, with what is likely."""
    if status >= 0:
        return f"exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    likely = {"SIGKILL": ", perhaps for want of memory", "SIGXCPU": ", it burned CPU past its limit"}
    return f"killed by {name}{likely.get(name, '')}"
