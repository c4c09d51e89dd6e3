"""``streamrl train RECIPE``: the parent process of a run, and what its user sees of it."""

from __future__ import annotations

import logging
import signal
import sys
import time
from pathlib import Path

import anyio
import anyio.abc

from streamrl.config.objective_text import streaming_notice
from streamrl.config.recipe import Recipe
from streamrl.config.topology import plan_topology
from streamrl.messages import RunFinished, RunStarted, StartProgress
from streamrl.observe.stdout import StdoutReporter
from streamrl.run import Pipeline

DRAIN_S = 600.0
"""How long a drain may take: the open step and a checkpoint. Whoever cannot wait sends the signal again."""


def train(recipe: Recipe) -> bool:
    """Run ``recipe``. True: it is done or drained; False: it was cut short. Raises what broke it."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    return anyio.run(_follow, recipe, backend_options={"use_uvloop": sys.platform != "win32"})


async def _follow(recipe: Recipe) -> bool:
    with StdoutReporter() as report:
        async with anyio.create_task_group() as tasks:
            run = _Run(recipe, report, tasks.cancel_scope)
            await tasks.start(run.obey_signals)
            tasks.start_soon(run.show_start)
            await run.follow()
            tasks.cancel_scope.cancel()
    return run.finished


class _Run:
    """One run in the foreground. Cancelling ``whole`` ends it at once, and then too nothing is left behind."""

    def __init__(self, recipe: Recipe, report: StdoutReporter, whole: anyio.CancelScope) -> None:
        self.finished = False
        self._recipe = recipe
        self._report = report
        self._whole = whole
        self._pipeline: Pipeline | None = None
        self._started = anyio.Event()

    async def follow(self) -> None:
        """Show every event until the run ends. Raises what broke the run."""
        try:
            async with Pipeline(self._recipe) as pipeline:
                self._pipeline = pipeline
                async for event in pipeline.events():
                    self._report(event)
                    if isinstance(event, RunStarted):
                        self._started.set()
                        if notice := streaming_notice(self._recipe):
                            self._report.line(f"  streaming {notice}")
                    self.finished = self.finished or isinstance(event, RunFinished)
        finally:
            self._pipeline = None
            self._started.set()

    async def obey_signals(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """First SIGINT or SIGTERM: drain. The second, or one before there is a run: end at once."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            draining = False
            async for number in signals:
                if draining or self._pipeline is None:
                    self._report.line(f"{number.name}: ending at once")
                    self._whole.cancel()
                    return
                draining = True
                self._report.line(f"{number.name}: finishing the open step, then ending; send it again to end at once")
                self._whole.deadline = anyio.current_time() + DRAIN_S
                self._pipeline.drain()

    async def show_start(self) -> None:
        """Tell what the run waits for until every process is ready: loading an engine takes up to a minute."""
        began = time.monotonic()
        processes = plan_topology(self._recipe, Path()).processes
        by_hand = [process.name for process in processes if not process.local]
        if by_hand:
            self._report.line(f"waiting for {', '.join(by_hand)}: start them with `streamrl serve`")
        names = ", ".join(process.name for process in processes if process.local and not process.resting)
        while not self._started.is_set():
            self._report(StartProgress(process=names, state="starting", seconds=time.monotonic() - began))
            with anyio.move_on_after(1):
                await self._started.wait()
