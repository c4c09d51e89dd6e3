"""The watchdog of a run, in the controller's process: it reports the open waits of a run without progress, and ends it.

``run_controller`` starts it. It polls progress counters that change with every token, outcome, step, push and byte of a
checkpoint. A process that is alive (answers, uses the processor) is no progress. ``waits`` has the open waits. A thread
checks that the event loop answers. After ``kill -USR1`` the controller writes ``RUN/stalls/<time>.txt`` (open waits,
stacks) and goes on."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from logging import getLogger
from pathlib import Path
from time import monotonic
from types import FrameType

import anyio
import psutil
from anyio import CancelScope, create_task_group, sleep, to_thread
from psutil import Error as PsutilError

from streamrl.base.atomic_files import remove_oldest
from streamrl.base.errors import RunStalled
from streamrl.base.messages import EngineLoad
from streamrl.base.run_events import StallSeen
from streamrl.base.run_process import RUN_MARKER
from streamrl.base.stage_messages import RolloutStatistics
from streamrl.base.types import Clock
from streamrl.base.waits import Waits
from streamrl.control.run_state import RunState
from streamrl.processes.exit_reason import ExitKind, ExitReason, write_reason
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import Role
from streamrl.run.wait_reason import RunWaits

log = getLogger(__name__)

REPORT_SIGNAL = signal.SIGUSR1
STACKS_SIGNAL = signal.SIGUSR2
BEAT_S = 0.05
WARN_AFTER_S = 0.25
STACKS_AFTER_S = 5.0
ABORT_AFTER_S = 60.0
"""Seconds without an answer of the event loop after which lag is counted, stacks are written, the process ends."""
# Factor beyond the slowest time limit of the recipe: a call that ends by its own limit is no stall.
_BEYOND_LIMITS = 1.5
_STARTS = 2.0  # factor for the first start, which may have to fill caches that later starts use
_LOOKS = 20
_LONGEST_PAUSE_S = 5.0
_MOST_WAITS = 100
_LONGEST_STACKS = 1 << 20  # characters: a run has thousands of tasks, most of them alike


def stall_limit_s(recipe: Recipe) -> float:
    """Seconds that a run may make no progress: ``run.advanced.stall_timeout_s``, or more where its slowest time limit
    is longer; 0 for no limit."""
    if not recipe.run.stall_timeout_s:
        return 0.0
    limits = [recipe.weights.push_timeout_s, recipe.engines.start_timeout_s, recipe.engines.progress_timeout_s]
    limits += [(reward.timeout_s + reward.backoff_s) * (reward.retries + 1) for reward in recipe.rewards]
    if recipe.environment.configured:
        limits += [environment.seconds for environment in recipe.environment.by_name.values()]
    return max(recipe.run.stall_timeout_s, _BEYOND_LIMITS * max(limits))


class Watchdog:
    """Watches progress and the event loop. Start ``run`` in a nursery; ``end`` ends it. The run is starting until
    ``follow`` is called. ``waits``: register of open waits, in which code that waits long names its reason; ``emit``:
    receives a ``StallSeen``."""

    def __init__(
        self,
        recipe: Recipe,
        run_directory: Path,
        emit: Callable[[StallSeen], Awaitable[None]],
        *,
        clock: Clock = monotonic,
    ) -> None:
        self.waits = Waits(clock)
        self._directory = run_directory
        self._emit = emit
        self._clock = clock
        self._progress: Callable[[], object] = self._starting
        self._bottleneck: Callable[[], str] = lambda: "the run starts up"
        self._scope = CancelScope()
        self._stall_s = stall_limit_s(recipe)
        self._limit_s = max(self._stall_s, _STARTS * recipe.engines.start_timeout_s)
        self._progress_before: object = None
        self._since_s = self._looked_s = self._beat_s = clock()
        self._worst_lag_s = 0.0
        self._is_lag_written = False
        self._loop_watch_stopped = threading.Event()

    def follow(
        self,
        state: RunState,
        rollout: Callable[[], RolloutStatistics],
        load: Callable[[], EngineLoad],
        scoring: Callable[[], int],
        trainer: Callable[[], int],
        copied: Callable[[], int],
        waits: RunWaits,
    ) -> None:
        """Watch the progress of a run that has begun. ``scoring``: number of trajectories without a reward;
        ``trainer``: number of answers of the ranks; ``copied``: bytes of checkpoints copied to a store; ``waits``:
        reason for which the run as a whole waits."""
        checkpoints = self._directory / "checkpoints"

        def progress() -> dict[str, object]:
            sampled = rollout()
            counts = state.accounting()
            saving = state.pending.checkpoint
            return {
                "tokens": (sampled.generated_tokens, load().generated_tokens),
                "sampled": sampled.finished,
                "scoring": scoring(),
                "groups": (counts.issued, counts.trained, sum(counts.dropped.values()), state.batch.samples),
                "prompts": state.prompts.drawn,
                "trainer": trainer(),
                "copied": copied(),
                "versions": (state.trainer_version, state.live_version, state.pending.push),
                "paused": self._clock() if state.steering.paused else 0,  # a paused run makes no progress
                "due": (state.evaluating, saving, bytes_below(checkpoints) if saving is not None else 0),
            }

        def bottleneck() -> str:
            reason, seconds = waits.waits_for()
            return f"the run waits for {reason}, for {seconds:.1f} s"

        self._progress = progress
        self._bottleneck = bottleneck
        self._limit_s = self._stall_s

    def take_loop_lag(self) -> float:
        """Longest time in seconds without an answer of the loop since the last call; 0 for a short time."""
        worst = self._worst_lag_s
        self._worst_lag_s = 0.0
        return worst if worst >= WARN_AFTER_S else 0.0

    async def run(self) -> None:
        """Watch until ``end``. Raises ``RunStalled``."""
        self.beat()
        thread = threading.Thread(target=self._watch_loop, name="watchdog", daemon=True)
        thread.start()
        try:
            with self._scope:
                async with create_task_group() as tasks:
                    tasks.start_soon(self._beat)
                    tasks.start_soon(self._report_when_asked)
                    if self._stall_s:
                        tasks.start_soon(self._watch_progress)
        finally:
            self._loop_watch_stopped.set()
            thread.join(1.0)

    def end(self) -> None:
        """Stop ``run``: the run ends."""
        self._scope.cancel()

    # ---- progress ----------------------------------------------------------------------------------

    @property
    def still_s(self) -> float:
        """Seconds without progress."""
        return self._looked_s - self._since_s

    def check(self) -> None:
        """Compare the progress with the last check. Time in which the whole process was stopped does not count as time
        without progress: the progress of other processes meanwhile is seen only at the next check."""
        now = self._clock()
        gap_s = self._clock() - self._looked_s
        if gap_s > self._limit_s / 2:
            self._since_s += gap_s
        self._looked_s = now
        progress = self._progress()
        if progress != self._progress_before:
            self._progress_before = progress
            self._since_s = now

    async def _watch_progress(self) -> None:
        while True:
            self.check()
            if self.still_s >= self._limit_s:
                await self._stalled()
            await sleep(min(self._limit_s / _LOOKS, _LONGEST_PAUSE_S))

    async def _stalled(self) -> None:
        waits = [self._bottleneck(), *self.waits.lines()]
        seconds = self.still_s
        occasion = f"nothing has moved for {seconds:.0f} s"
        path = await self._write(occasion)
        await self._emit(StallSeen(waits=tuple(waits[:_MOST_WAITS]), seconds=seconds, file=str(path)))
        names = ", ".join(waits[:2])
        raise RunStalled(f"{occasion} (run.advanced.stall_timeout_s): {names}; {path} has all waits and stacks")

    def _starting(self) -> object:
        """Signs of progress of a start: the open waits, and the bytes that processes log while they load."""
        return [wait for wait, _ in self.waits.open()], bytes_below(self._directory / "logs", but="tracker-")

    async def _report_when_asked(self) -> None:
        with anyio.open_signal_receiver(REPORT_SIGNAL) as signals:
            async for _ in signals:
                path = await self._write("asked by a signal where everything stands")
                log.info("what is waited for, and all stacks, are in %s", path)

    async def _write(self, occasion: str) -> Path:
        if pids := ask_for_stacks(os.getppid()):
            occasion += f"\nstacks of processes {', '.join(map(str, pids))} are at the end of their logs"
        occasion += f"\nprogress: {self._progress_before}, the same for {self.still_s:.1f} s"
        text = f"{self._text(occasion)}\n==== coroutines\n{task_stacks()}"
        return await to_thread.run_sync(write_stall, self._directory / "stalls", text)

    def _text(self, occasion: str) -> str:
        waits = "".join(f"  {line}\n" for line in (self._bottleneck(), *self.waits.lines()))
        return f"{occasion}\n\nwaits, the longest first:\n{waits}"

    # ---- the event loop ----------------------------------------------------------------------------

    def beat(self) -> None:
        """Note that the event loop answers."""
        now = self._clock()
        self._worst_lag_s = max(self._worst_lag_s, now - self._beat_s - BEAT_S)
        self._beat_s = now
        self._is_lag_written = False

    async def _beat(self) -> None:
        while True:
            self.beat()
            await sleep(BEAT_S)

    def _watch_loop(self) -> None:
        before = self._clock()
        while not self._loop_watch_stopped.wait(BEAT_S):
            now = self._clock()
            self.look_at_loop(now, now - before)
            before = now

    def look_at_loop(self, now_s: float, slept_s: float) -> None:
        """Check the event loop from the thread. ``slept_s``: seconds since the last check. Ends the process where the
        loop is blocked for ``ABORT_AFTER_S``."""
        if slept_s > 20 * BEAT_S:
            self._beat_s = now_s  # the whole process was stopped
            return
        lag_s = now_s - self._beat_s
        if lag_s < STACKS_AFTER_S or (self._is_lag_written and lag_s < ABORT_AFTER_S):
            return
        self._is_lag_written = True
        occasion = f"the event loop of the controller has not answered for {lag_s:.0f} s"
        path = write_stall(self._directory / "stalls", self._text(occasion))
        log.error("%s; %s has the stacks", occasion, path)
        if lag_s >= ABORT_AFTER_S:
            message = f"RunStalled: {occasion}; {path} shows where: what blocks must run in a thread or a process"
            reason = ExitReason(kind=ExitKind.CAUSE, message=message, monotonic_s=monotonic())
            write_reason(self._directory, Role.CONTROLLER.value, reason)
            os._exit(1)


def bytes_below(folder: Path, but: str = "\0") -> int:
    """Bytes of all files below ``folder``, without files that vanish meanwhile or have ``but`` in their names."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in (name for name in names if but not in name):
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except OSError:
                continue
    return total


# ---- stacks ----------------------------------------------------------------------------------------


def write_stall(directory: Path, text: str) -> Path:
    """Write ``text`` and the stacks of all threads to ``<time>.txt`` in ``directory``, whole or not at all. Blocking;
    safe in any thread."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**9:09d}.txt"
    partial = path.with_suffix(".partial")
    with partial.open("w", errors="replace") as file:
        file.write(f"{text}\n==== threads\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    partial.rename(path)
    remove_oldest(directory.glob("*.txt"))
    return path


def task_stacks() -> str:
    """List the stacks of all tasks of the running loop; equal stacks once, with the number of their tasks."""
    names_of_stack: dict[str, list[str]] = {}
    for task in asyncio.all_tasks():
        names_of_stack.setdefault(_stack_of(task), []).append(task.get_name())
    parts = [
        f"{len(names)} x {', '.join(sorted(names)[:3])}\n{stack}"
        for stack, names in sorted(names_of_stack.items(), key=lambda item: -len(item[1]))
    ]
    return "\n".join(parts)[:_LONGEST_STACKS]


def _stack_of(task: asyncio.Task[object]) -> str:
    """Stack of a task along the chain of awaits, the outermost first. ``Task.get_stack`` ends at the first async
    generator."""
    lines: list[str] = []
    awaited: object = task.get_coro()
    while awaited is not None:
        # Coroutines (cr_frame), generators (gi_frame) and async generators (ag_frame) have different attributes.
        attributes = {
            name.partition("_")[2]: getattr(awaited, name) for name in dir(awaited) if name[:3] in _COROUTINE_PREFIXES
        }
        frame = attributes.get("frame")
        if isinstance(frame, FrameType):
            lines += traceback.format_stack(frame, limit=1)
        awaited = attributes.get("await") or attributes.get("yieldfrom")
    return "".join(lines)


_COROUTINE_PREFIXES = ("cr_", "gi_", "ag_")


def ask_for_stacks(parent: int) -> list[int]:
    """Signal the children of process ``parent`` that belong to a run to write the stacks of their threads to their
    logs, some milliseconds later. Returns their pids. A child that does not catch the signal yet, and would die of it,
    gets none: the kernel lists the caught signals (Linux; on other systems no child gets the signal)."""
    signalled = []
    try:
        children = psutil.Process(parent).children()
    except PsutilError:
        return []
    for child in children:
        try:
            if child.pid != os.getpid() and RUN_MARKER in child.environ() and _catches(child.pid, STACKS_SIGNAL):
                child.send_signal(STACKS_SIGNAL)
                signalled.append(child.pid)
        except (PsutilError, OSError):
            continue  # it ended meanwhile
    return signalled


def _catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
