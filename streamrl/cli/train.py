"""``streamrl train`` and ``resume``: the parent process of a run, and what its user sees of it."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, TextIO

import anyio
import anyio.abc
import msgspec

from streamrl.base.printable import also_log_to, log_to
from streamrl.base.run_events import RunFinished, RunStarted, StartProgress
from streamrl.base.waits import start_phases
from streamrl.cli.command import Argument, Command, Overrides, RecipePath, RunPath, recipe_file
from streamrl.cli.dry_run import dry_run
from streamrl.cli.models.runs import listed_run
from streamrl.launch.pipeline import Pipeline, recipe_of_run
from streamrl.launch.run_directory import refuse_running
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.prepare.hub.resolution import with_hub_folders
from streamrl.prepare.summary import SIMULATED_SENTENCE, streaming_notice
from streamrl.processes.cluster.opened import placed_lines
from streamrl.recipe.learning_rate import learning_rate_notice
from streamrl.recipe.rules.load import read_recipe
from streamrl.recipe.rules.transport_rules import insecure_notice
from streamrl.recipe.sections import ClusterKind, EngineKind, Recipe
from streamrl.recipe.topology import TOPOLOGY_FILE, Role, plan_topology, read_topology

DRAIN_S = 600.0
"""How long a drain may take: the open step and a checkpoint. A second signal ends the run at once."""


ClusterAddress = Annotated[str, Argument("HOST:PORT of Ray's head, on whose hosts engines and ranks run; or auto")]


class Train(Command, frozen=True):
    """Run a recipe. Ctrl-C drains; twice ends."""

    follows_a_run = True
    recipe: RecipePath
    overrides: Overrides = ()
    dry_run: Annotated[bool, Argument("check everything, print it, start nothing")] = False
    cluster: ClusterAddress = ""

    def run(self) -> int:
        """0: done or drained; 130: cut short."""
        if not self.dry_run:  # of a run that goes on: give its recipe.toml to begin another
            refuse_running(self.recipe)
        overrides = [*self.overrides, *_of_cluster(self.cluster)]
        recipe, system = read_recipe(recipe_file(self.recipe), overrides)
        if self.dry_run:
            with redirect_stdout(sys.stderr) if self.json else nullcontext():
                dry_run(recipe, system, self.recipe, overrides)
            return self.print({"checked": True, "recipe": recipe}) if self.json else 0
        recipe = with_hub_folders(recipe)
        return _follow(recipe, lambda: Pipeline(recipe), as_json=self.json)


class ResumeRun(Command, frozen=True):
    """Continue where the journal of a run ends: nothing that was sampled or scored is lost. --set run.steps=N makes it
    longer, or shorter."""

    follows_a_run = True
    run_directory: RunPath
    overrides: Overrides = ()
    force: Annotated[
        bool, Argument("also where its data, model, code, packages or settings other than run.steps have changed")
    ] = False
    cluster: ClusterAddress = ""

    def run(self) -> int:
        """0: done or drained; 130: cut short."""
        directory = self.run_directory
        overrides = [*self.overrides, *_of_cluster(self.cluster)]
        return _follow(
            recipe_of_run(directory, overrides),
            lambda: Pipeline.of_run(directory, overrides=overrides, despite_changes=self.force),
            as_json=self.json,
        )


def _of_cluster(address: str) -> list[str]:
    """Return the overrides that ``--cluster`` stands for."""
    return ["cluster.kind=ray", f"cluster.address={address}"] if address else []


def _follow(recipe: Recipe, make: Callable[[], Pipeline], *, as_json: bool) -> int:
    """``as_json``: what a person sees goes to stderr, and the run as ``streamrl runs --json`` has it to stdout."""
    log_to(sys.stderr, logging.WARNING, "%(levelname)s %(message)s")
    made: list[Pipeline] = []

    def noted() -> Pipeline:
        made.append(make())
        return made[0]

    try:
        uvloop = {"use_uvloop": sys.platform != "win32"}
        screen = sys.stderr if as_json else sys.stdout
        done = anyio.run(_follow_it, recipe, noted, screen, backend_options=uvloop)
    finally:
        if as_json and made and made[0].run_directory.name:
            print(msgspec.json.encode(listed_run(made[0].run_directory)).decode())
    return 0 if done else 130


def _drain_signals() -> list[signal.Signals]:
    """SIGHUP, of a terminal that goes away, where it is not ignored (nohup)."""
    hung_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []
    return [signal.SIGINT, signal.SIGTERM, *hung_up]


async def _follow_it(recipe: Recipe, make: Callable[[], Pipeline], screen: TextIO) -> bool:
    # Open to the end: a signal that comes while the second one is obeyed must not cut the clean-up short.
    with StdoutReporter(screen) as report, anyio.open_signal_receiver(*_drain_signals()) as signals:
        async with anyio.create_task_group() as tasks:
            run = _Run(recipe, make, report, tasks.cancel_scope)
            tasks.start_soon(run.handle, signals)
            tasks.start_soon(run.show_start)
            await run.follow()
            tasks.cancel_scope.cancel()
    return run.finished


class _Run:
    """One run in the foreground. Cancelling ``whole`` ends it at once, and then too nothing is left behind."""

    def __init__(
        self, recipe: Recipe, make: Callable[[], Pipeline], report: StdoutReporter, whole: anyio.CancelScope
    ) -> None:
        self.finished = False
        self._recipe = recipe
        self._make = make
        self._report = report
        self._whole = whole
        self._pipeline: Pipeline | None = None
        self._started = anyio.Event()

    async def follow(self) -> None:
        """Show every event until the run ends. Raises what broke the run."""
        try:
            async with self._make() as pipeline:
                self._pipeline = pipeline
                if self._recipe.cluster.kind is not ClusterKind.LOCAL:
                    for line in placed_lines(read_topology(pipeline.run_directory)):
                        self._report.line(line)
                with also_log_to(pipeline.run_directory / "logs" / "supervisor.log"):
                    async for event in pipeline.events():
                        self._report(event)
                        if isinstance(event, RunStarted):
                            self._started.set()
                            if self._recipe.engines.kind is EngineKind.SIMULATED:
                                self._report.line(f"  engines  {SIMULATED_SENTENCE}")
                            rate = self._recipe.training.learning_rate
                            adapters = bool(event.trained_parameters)
                            if notice := learning_rate_notice(rate, event.parameters, adapters=adapters):
                                self._report.line(f"  warning  {notice}")
                            if notice := streaming_notice(self._recipe):
                                self._report.line(f"  streaming {notice}")
                        self.finished = self.finished or isinstance(event, RunFinished)
        finally:
            self._pipeline = None
            self._started.set()

    async def handle(self, signals: AsyncIterator[signal.Signals]) -> None:
        """First SIGINT, SIGTERM or SIGHUP: drain. The second, or one before there is a run: end at once."""
        draining = False
        async for number in signals:
            if draining or self._pipeline is None:
                self._report.line(f"{number.name}: ending at once")
                self._whole.cancel()
                return
            draining = True
            note = "ending after the step that trains now; what is sampled then comes again on resume"
            self._report.line(f"{number.name}: {note}; send it again to end at once")
            self._whole.deadline = anyio.current_time() + DRAIN_S
            self._pipeline.drain()

    async def show_start(self) -> None:
        """Tell what the run waits for until every process is ready: loading an engine takes up to a minute."""
        began = time.monotonic()
        if notice := insecure_notice(self._recipe):
            self._report.line(notice)
        processes = plan_topology(self._recipe, Path()).processes
        by_hand = [process.name for process in processes if not process.local]
        if by_hand:
            self._report.line(f"waiting for {', '.join(by_hand)}: start them with `streamrl serve`")
        names = [p.name for p in processes if not p.starts_inactive and p.role is not Role.CONTROLLER]
        while not self._started.is_set():
            phases: dict[str, str] = {}
            if self._pipeline is not None:
                run = self._pipeline.run_directory
                phases = start_phases(run / "logs", names, run / TOPOLOGY_FILE)
            seconds = time.monotonic() - began
            self._report(StartProgress(process=", ".join(names), state="starting", seconds=seconds, phases=phases))
            with anyio.move_on_after(1):
                await self._started.wait()
