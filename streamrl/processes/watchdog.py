"""The watchdog of the controller: a run without progress says what it waits for, and ends.

It looks at a progress counter that changes whenever anything gets done: a token, an outcome, a step, a push, a byte of
a checkpoint. That something is alive (answers, uses the processor) is no progress. What is waited for is in ``waits``.
A thread looks whether the event loop answers. ``kill -USR1`` of the controller has it write ``RUN/stalls/<time>.txt``
(open waits, stacks) at any time, and nothing ends."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType

import anyio
import anyio.to_thread
import psutil

from streamrl.base.atomic_files import remove_oldest
from streamrl.base.errors import RunStalled
from streamrl.base.messages import EngineLoad
from streamrl.base.run_events import StallSeen
from streamrl.base.run_process import RUN_MARKER
from streamrl.base.stage_messages import RolloutStatistics
from streamrl.base.waits import Waits
from streamrl.control.model import RunState
from streamrl.processes.exit_files import ExitKind, ExitReason, write_reason
from streamrl.recipe.sections import LaunchedBy, Recipe
from streamrl.recipe.topology import Role
from streamrl.run.wait_reason import RunWaits

log = logging.getLogger(__name__)

REPORT_SIGNAL = signal.SIGUSR1
STACKS_SIGNAL = signal.SIGUSR2
BEAT_S = 0.05
WARN_AFTER_S = 0.25
STACKS_AFTER_S = 5.0
ABORT_AFTER_S = 60.0
"""Without an answer of the event loop: counted as lag, its stacks are written once, the process ends."""
# Of the slowest thing that the recipe allows: what ends by its own limit ends by that, and is no stall.
_BEYOND_LIMITS = 1.5
_STARTS = 2.0  # the first start may have to fill caches that later ones find
_LOOKS = 20
_LONGEST_PAUSE_S = 5.0
_MOST_WAITS = 100
_LONGEST_STACKS = 1 << 20  # characters: a run has thousands of tasks, most of them alike


def stall_limit_s(recipe: Recipe) -> float:
    """Seconds that a run may make no progress: ``run.advanced.stall_timeout_s``, and longer than its slowest time
    limit; 0: for ever."""
    if not recipe.run.stall_timeout_s:
        return 0.0
    limits = [recipe.weights.push_timeout_s, recipe.engines.start_timeout_s, recipe.engines.progress_timeout_s]
    limits += [(reward.timeout_s + reward.backoff_s) * (reward.retries + 1) for reward in recipe.rewards]
    limits += [recipe.environment.seconds] if recipe.environment.given else []
    return max(recipe.run.stall_timeout_s, _BEYOND_LIMITS * max(limits))


class Watchdog:
    """``run`` is a child of the nursery, ended by ``end``. ``waits``: where code that waits long says for what. The run
    is starting until ``follow`` is called. ``emit``: takes what is seen."""

    def __init__(
        self,
        recipe: Recipe,
        run_directory: Path,
        emit: Callable[[StallSeen], Awaitable[None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waits = Waits(clock)
        self._directory = run_directory
        self._emit = emit
        self._clock = clock
        self._progress: Callable[[], object] = self._starting
        self._bottleneck: Callable[[], str] = lambda: "the run starts up"
        self._scope = anyio.CancelScope()
        self._stall_s = stall_limit_s(recipe)
        self._limit_s = max(self._stall_s, _STARTS * recipe.engines.start_timeout_s)
        # How long a person takes to start a process is not known.
        self._waits_for_people = LaunchedBy.EXTERNAL in (recipe.transport.engines, recipe.transport.training)
        self._seen: object = None
        self._since_s = self._looked_s = self._beat_s = clock()
        self._worst_lag_s = 0.0
        self._is_lag_written = False
        self._ended = threading.Event()

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
        """The run has begun. ``scoring``: trajectories without a reward; ``trainer``: answers of the ranks;
        ``copied``: bytes of checkpoints, in a store; ``waits``: what the run waits for as a whole."""
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
                "paused": self._clock() if state.steering.paused else 0,  # nothing has to move
                "due": (state.evaluating, saving, bytes_below(checkpoints) if saving is not None else 0),
            }

        def bottleneck() -> str:
            reason, seconds = waits.waits_for()
            return f"the run waits for {reason}, for {seconds:.1f} s"

        self._progress = progress
        self._bottleneck = bottleneck
        self._limit_s = self._stall_s

    def take_loop_lag(self) -> float:
        """Longest time in seconds without an answer of the loop since this was asked for last; 0 for a short one."""
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
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._beat)
                    tasks.start_soon(self._report_when_asked)
                    if self._stall_s:
                        tasks.start_soon(self._watch_progress)
        finally:
            self._ended.set()
            thread.join(1.0)

    def end(self) -> None:
        """The run ends."""
        self._scope.cancel()

    # ---- progress ----------------------------------------------------------------------------------

    @property
    def still_s(self) -> float:
        """Seconds without progress."""
        return self._looked_s - self._since_s

    def check(self) -> None:
        """Look at the progress. Time in which it could not look (the process was stopped as a whole) counts as one
        look: what others did meanwhile is seen only at the next one."""
        now = self._clock()
        gap_s = self._clock() - self._looked_s
        if gap_s > self._limit_s / 2:
            self._since_s += gap_s
        self._looked_s = now
        found = self._progress()
        if found != self._seen:
            self._seen = found
            self._since_s = now

    async def _watch_progress(self) -> None:
        while True:
            self.check()
            if self.still_s >= self._limit_s:
                await self._stalled()
            await anyio.sleep(min(self._limit_s / _LOOKS, _LONGEST_PAUSE_S))

    async def _stalled(self) -> None:
        waits = [self._bottleneck(), *self.waits.lines()]
        seconds = self.still_s
        occasion = f"nothing has moved for {seconds:.0f} s"
        path = await self._write(occasion)
        await self._emit(StallSeen(waits=tuple(waits[:_MOST_WAITS]), seconds=seconds, file=str(path)))
        names = ", ".join(waits[:2])
        raise RunStalled(f"{occasion} (run.advanced.stall_timeout_s): {names}; {path} has all waits and stacks")

    def _starting(self) -> object:
        """Signs of progress of a start: the open waits, and what the processes log while they load."""
        if self._waits_for_people:
            return self._clock()
        return [wait for wait, _ in self.waits.open()], bytes_below(self._directory / "logs", but="tracker-")

    async def _report_when_asked(self) -> None:
        with anyio.open_signal_receiver(REPORT_SIGNAL) as signals:
            async for _ in signals:
                path = await self._write("asked by a signal where everything stands")
                log.info("what is waited for, and all stacks, are in %s", path)

    async def _write(self, occasion: str) -> Path:
        if asked := ask_for_stacks(os.getppid()):
            occasion += f"\nstacks of processes {', '.join(map(str, asked))} are at the end of their logs"
        occasion += f"\nprogress: {self._seen}, the same for {self.still_s:.1f} s"
        text = f"{self._text(occasion)}\n==== coroutines\n{task_stacks()}"
        return await anyio.to_thread.run_sync(write_stall, self._directory / "stalls", text)

    def _text(self, occasion: str) -> str:
        waits = "".join(f"  {line}\n" for line in (self._bottleneck(), *self.waits.lines()))
        return f"{occasion}\n\nwaits, the longest first:\n{waits}"

    # ---- the event loop ----------------------------------------------------------------------------

    def beat(self) -> None:
        """The event loop answers."""
        now = self._clock()
        self._worst_lag_s = max(self._worst_lag_s, now - self._beat_s - BEAT_S)
        self._beat_s = now
        self._is_lag_written = False

    async def _beat(self) -> None:
        while True:
            self.beat()
            await anyio.sleep(BEAT_S)

    def _watch_loop(self) -> None:
        before = self._clock()
        while not self._ended.wait(BEAT_S):
            now = self._clock()
            self.look_at_loop(now, now - before)
            before = now

    def look_at_loop(self, now_s: float, slept_s: float) -> None:
        """Check the event loop from the thread; ``slept_s``: since the last check. A loop that is blocked for good
        cannot be helped: the process ends."""
        if slept_s > 20 * BEAT_S:
            self._beat_s = now_s  # the process was stopped as a whole
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
            reason = ExitReason(kind=ExitKind.CAUSE, message=message, monotonic_s=time.monotonic())
            write_reason(self._directory, Role.CONTROLLER.value, reason)
            os._exit(1)


def bytes_below(folder: Path, but: str = "\0") -> int:
    """Bytes of all files in ``folder`` and below; those that vanish meanwhile, or have ``but`` in their names, do not
    count."""
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
    """List the stacks of all tasks of the running loop; those at the same place are listed once, with their number."""
    places: dict[str, list[str]] = {}
    for task in asyncio.all_tasks():
        places.setdefault(_stack_of(task), []).append(task.get_name())
    parts = [
        f"{len(names)} x {', '.join(sorted(names)[:3])}\n{stack}"
        for stack, names in sorted(places.items(), key=lambda item: -len(item[1]))
    ]
    return "\n".join(parts)[:_LONGEST_STACKS]


def _stack_of(task: asyncio.Task[object]) -> str:
    """Stack of a task along the chain of awaits, the outermost first. ``Task.get_stack`` ends at the first async
    generator."""
    lines: list[str] = []
    waiting: object = task.get_coro()
    while waiting is not None:
        # Coroutines, generators and async generators name these differently.
        found = {name.partition("_")[2]: getattr(waiting, name) for name in dir(waiting) if name[:3] in _OF_COROUTINES}
        if isinstance(frame := found.get("frame"), FrameType):
            lines += traceback.format_stack(frame, limit=1)
        waiting = found.get("await") or found.get("yieldfrom")
    return "".join(lines)


_OF_COROUTINES = ("cr_", "gi_", "ag_")


def ask_for_stacks(parent: int) -> list[int]:
    """Have the children of process ``parent`` that are of a run write the stacks of their threads to their logs, some
    milliseconds later. Returns their pids. One that does not catch the signal yet, and would die of it, is not asked:
    the kernel is (Linux; elsewhere no process is asked)."""
    asked = []
    try:
        children = psutil.Process(parent).children()
    except psutil.Error:
        return []
    for child in children:
        try:
            if child.pid != os.getpid() and RUN_MARKER in child.environ() and _catches(child.pid, STACKS_SIGNAL):
                child.send_signal(STACKS_SIGNAL)
                asked.append(child.pid)
        except (psutil.Error, OSError):
            continue  # it ended meanwhile
    return asked


def _catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
