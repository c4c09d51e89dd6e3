"""Watches over the controller, in its own process: that the run moves, that its loop answers, and where it stands.

``kill -USR1`` of the controller has it write what it waits for to ``RUN/stalls`` at any time; so does the parent when
another process died. A run that stands still does so by itself and then ends; a loop that is blocked is told by a
thread.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio

from streamrl.base.messages import EngineLoad
from streamrl.base.run_events import StallSeen
from streamrl.base.stage_messages import RolloutStatistics
from streamrl.base.waits import Waits
from streamrl.control.state import ControlState
from streamrl.observe.report.run_waits import RunWaits
from streamrl.plan.topology import Role
from streamrl.recipe.sections import Launch, Recipe
from streamrl.supervise.exit_reason import ExitKind, ExitReason, write_reason
from streamrl.supervise.watch.loop_watch import LoopWatch
from streamrl.supervise.watch.progress_clock import ProgressClock, bytes_below, groups_under_way
from streamrl.supervise.watch.stacks import ask_for_stacks
from streamrl.supervise.watch.stall_watch import StallWatch, write_stall
from streamrl.supervise.watch.task_stacks import thread_stacks

log = logging.getLogger(__name__)

REPORT_SIGNAL = signal.SIGUSR1
_STALLS = "stalls"
# Of the slowest thing that the recipe allows: what ends by its own limit is told by that, and is no stall.
_BEYOND_LIMITS = 1.5
# The first start may have to fill caches that later ones find.
_STARTS = 2.0


def stall_limit_s(recipe: Recipe) -> float:
    """How long a run may stand still: ``run.advanced.stall_timeout_s``, and longer than its slowest time limit; 0: for
    ever."""
    if not recipe.run.stall_timeout_s:
        return 0.0
    limits = [recipe.weights.push_timeout_s, recipe.engines.start_timeout_s, recipe.engines.progress_timeout_s]
    limits += [(reward.timeout_s + reward.backoff_s) * (reward.retries + 1) for reward in recipe.rewards]
    return max(recipe.run.stall_timeout_s, _BEYOND_LIMITS * max(limits))


class ControllerWatch:
    """``run`` is a child of the nursery, ended by ``end``. ``waits``: where whoever waits long says for what.

    Until ``follow`` was called the run starts up.
    """

    def __init__(self, recipe: Recipe, run_directory: Path, tell: Callable[[StallSeen], Awaitable[None]]) -> None:
        self.waits = Waits()
        self._run_directory = run_directory
        self._progress: Callable[[], object] = self._starting
        self._told: Callable[[], list[str]] = lambda: ["the run starts up"]
        self._groups: Callable[[], list[str]] = list
        self._scope = anyio.CancelScope()
        self._loop = LoopWatch(self._report_loop, self._abort)
        self._stall_s = stall_limit_s(recipe)
        # Nobody knows how long a person takes to start a process.
        by_hand = Launch.EXTERNAL in (recipe.transport.engines, recipe.transport.training)
        self._waits_for_people = by_hand
        self._stalls = StallWatch(
            run_directory / _STALLS,
            stall_timeout_s=max(self._stall_s, _STARTS * recipe.engines.start_timeout_s),
            progress=lambda: self._progress(),
            waits=self._lines,
            tell=tell,
            others=lambda: ask_for_stacks(os.getppid()),
        )

    def follow(
        self,
        state: ControlState,
        rollout: Callable[[], RolloutStatistics],
        load: Callable[[], EngineLoad],
        scoring: Callable[[], int],
        trainer: Callable[[], int],
        waits: RunWaits,
    ) -> None:
        """The run has begun. For the others see ``ProgressClock``; ``waits``: what the run waits for as a whole."""
        checkpoints = self._run_directory / "checkpoints"
        progress = ProgressClock(
            state=state, rollout=rollout, load=load, scoring=scoring, trainer=trainer, checkpoints=checkpoints
        )

        def told() -> list[str]:
            reason, seconds = waits.waits_for()
            return [f"the run waits for {reason}, for {seconds:.1f} s"]

        self._progress, self._told, self._stalls.stall_timeout_s = progress.read, told, self._stall_s
        self._groups = lambda: groups_under_way(state)

    def take_loop_lag(self) -> float:
        """Longest time in seconds without an answer of the loop since this was asked for last."""
        return self._loop.take_worst()

    async def run(self) -> None:
        """Until ``end``. Raises ``RunStalled``."""
        with self._loop, self._scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._loop.beat)
                tasks.start_soon(self._report_when_asked)
                if self._stall_s:
                    tasks.start_soon(self._stalls.run)

    def end(self) -> None:
        """The run ends."""
        self._scope.cancel()

    def _starting(self) -> object:
        """Which waits are open, and what the processes log while they load; a person may take as long as they like."""
        if self._waits_for_people:
            return time.monotonic()
        return [wait for wait, _ in self.waits.open()], bytes_below(self._run_directory / "logs")

    def _lines(self) -> list[str]:
        return [*self._told(), *self.waits.lines(), *self._groups()]

    async def _report_when_asked(self) -> None:
        with anyio.open_signal_receiver(REPORT_SIGNAL) as signals:
            async for _ in signals:
                path = await self._stalls.write("asked by a signal where everything stands")
                log.info("what is waited for, and all stacks, are in %s", path)

    def _report_loop(self, lag_s: float) -> None:
        path = write_stall(self._run_directory / _STALLS, self._loop_text(lag_s))
        log.error("the event loop has not answered for %.0f s; %s has the stacks", lag_s, path)

    def _abort(self, lag_s: float) -> None:
        path = write_stall(self._run_directory / _STALLS, self._loop_text(lag_s))
        message = (
            f"RunStalled: the event loop of the controller has not answered for {lag_s:.0f} s; {path} shows where it "
            "stands: whatever blocks there must run in a thread or in another process"
        )
        reason = ExitReason(kind=ExitKind.CAUSE, message=message, monotonic_s=time.monotonic())
        write_reason(self._run_directory, Role.CONTROLLER.value, reason)
        os._exit(1)

    def _loop_text(self, lag_s: float) -> str:
        waits = "\n".join(f"  {line}" for line in self.waits.lines())
        return f"the event loop has not answered for {lag_s:.1f} s\n\nwaits:\n{waits}\n\n{thread_stacks()}"
