"""``streamrl train`` and ``resume``: the command's own process, which is the supervisor of the run. It starts the other
processes through ``Pipeline``, prints the events of the run, and handles signals."""

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
from msgspec import json

from streamrl.base.errors import StreamRLError
from streamrl.base.printable import also_log_to, log_to
from streamrl.base.run_events import RunFinished, RunStarted, StartProgress
from streamrl.base.waits import start_phases
from streamrl.cli.command import Argument, Command, Overrides, RecipePath, RunPath, recipe_file
from streamrl.cli.dry_run import dry_run
from streamrl.cli.show import nothing_left, read_run
from streamrl.cli.trained_models.runs import listed_run
from streamrl.launch.pipeline import Pipeline, recipe_of_run
from streamrl.launch.run_directory import refuse_running
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.prepare.hub.resolution import with_hub_folders
from streamrl.prepare.summary import SIMULATED_SENTENCE, streaming_notice
from streamrl.processes.cluster.open_launcher import placed_lines
from streamrl.recipe.learning_rate import learning_rate_notice
from streamrl.recipe.rules.load_recipe import read_recipe
from streamrl.recipe.rules.transport_rules import insecure_notice
from streamrl.recipe.sections import EngineKind, Recipe
from streamrl.recipe.topology import TOPOLOGY_FILE, Role, plan_topology, read_topology

DRAIN_S = 600.0
"""Time limit of a drain: the open step and a checkpoint. A second signal ends the run at once."""


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
        if not self.dry_run:  # the recipe.toml of a running run, unlike its directory, starts another run
            refuse_running(self.recipe)
        overrides = [*self.overrides, *_cluster_overrides(self.cluster)]
        recipe, system = read_recipe(recipe_file(self.recipe), overrides)
        if self.dry_run:
            with redirect_stdout(sys.stderr) if self.json else nullcontext():
                dry_run(recipe, system)
            return self.print({"checked": True, "recipe": recipe}) if self.json else 0
        recipe = with_hub_folders(recipe)
        return run_in_foreground(recipe, lambda: Pipeline(recipe), as_json=self.json)


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
        overrides = [*self.overrides, *_cluster_overrides(self.cluster)]
        recipe = recipe_of_run(directory, overrides)
        refuse_running(directory)
        if not overrides and not recipe.checkpoint.copy_to and (ending := self._nothing_left()):
            sentence = f"{directory} has ended: {ending}; nothing is started. --set run.steps=N makes it longer"
            return self.print(listed_run(directory), sentence)
        return run_in_foreground(
            recipe,
            lambda: Pipeline.of_run(directory, overrides=overrides, despite_changes=self.force),
            as_json=self.json,
        )

    def _nothing_left(self) -> str:
        """Return what the run ended with, where nothing is left to do. A journal that cannot be read is named by the
        start, which also says what to do."""
        try:
            return nothing_left(read_run(self.run_directory))
        except StreamRLError:
            return ""


def _cluster_overrides(address: str) -> list[str]:
    """Return the overrides that ``--cluster`` stands for."""
    if not address:
        return []
    return ["cluster.kind=ray", f"cluster.address={address}"]


def run_in_foreground(recipe: Recipe, make: Callable[[], Pipeline], *, as_json: bool) -> int:
    """Run the pipeline with its lines on the terminal, drain at signals, and return the exit code. ``as_json``: whether
    the lines for people go to stderr, and the run in the form of ``streamrl runs --json`` to stdout."""
    log_to(sys.stderr, logging.WARNING, "%(levelname)s %(message)s")
    pipelines = []

    def make_and_keep() -> Pipeline:
        pipelines.append(make())
        return pipelines[0]

    try:
        uvloop = {"use_uvloop": sys.platform != "win32"}
        screen = sys.stderr if as_json else sys.stdout
        finished = anyio.run(_follow_it, recipe, make_and_keep, screen, backend_options=uvloop)
    finally:
        if as_json and pipelines and pipelines[0].run_directory.name:
            print(json.encode(listed_run(pipelines[0].run_directory)).decode())
    return 0 if finished else 130


def _drain_signals() -> list[signal.Signals]:
    """Return the signals that drain: also SIGHUP, when the terminal is closed, unless it is ignored (nohup)."""
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signals.append(signal.SIGHUP)
    return signals


async def _follow_it(recipe: Recipe, make: Callable[[], Pipeline], screen: TextIO) -> bool:
    # The receiver stays open to the end: further signals must not interrupt the clean-up after the second signal.
    with StdoutReporter(screen) as report, anyio.open_signal_receiver(*_drain_signals()) as signals:
        async with anyio.create_task_group() as tasks:
            run = _Run(recipe, make, report, tasks.cancel_scope)
            tasks.start_soon(run.handle, signals)
            tasks.start_soon(run.show_start)
            await run.follow()
            tasks.cancel_scope.cancel()
    return run.finished


class _Run:
    """One run in the foreground. Cancelling ``cancel_scope`` ends the run at once, with its clean-up."""

    def __init__(
        self, recipe: Recipe, make: Callable[[], Pipeline], report: StdoutReporter, cancel_scope: anyio.CancelScope
    ) -> None:
        self.finished = False
        self._recipe = recipe
        self._make = make
        self._report = report
        self._cancel_scope = cancel_scope
        self._pipeline: Pipeline | None = None
        self._started = anyio.Event()

    async def follow(self) -> None:
        """Show every event until the run ends. Raises what broke the run."""
        try:
            async with self._make() as pipeline:
                self._pipeline = pipeline
                if not self._recipe.on_one_host:
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
        """Drain at the first SIGINT, SIGTERM or SIGHUP; end the run at once at the second, or before the run has
        started."""
        draining = False
        async for number in signals:
            if draining or self._pipeline is None:
                self._report.line(f"{number.name}: ending at once")
                self._cancel_scope.cancel()
                return
            draining = True
            note = "ending after the step that trains now; what is sampled then comes again on resume"
            self._report.line(f"{number.name}: {note}; send it again to end at once")
            self._cancel_scope.deadline = anyio.current_time() + DRAIN_S
            self._pipeline.drain()

    async def show_start(self) -> None:
        """Show the phases of the start until every process is ready: loading an engine takes up to a minute."""
        began = time.monotonic()
        if notice := insecure_notice(self._recipe):
            self._report.line(notice)
        processes = plan_topology(self._recipe, Path()).processes
        planned = [process for process in processes if self._recipe.in_turns or not process.starts_inactive]
        names = [process.name for process in planned if process.role is not Role.CONTROLLER]
        while not self._started.is_set():
            phases = {}
            if self._pipeline is not None:
                run = self._pipeline.run_directory
                phases = start_phases(run / "logs", names, run / TOPOLOGY_FILE)
            seconds = time.monotonic() - began
            self._report(StartProgress(process=", ".join(names), state="starting", seconds=seconds, phases=phases))
            with anyio.move_on_after(1):
                await self._started.wait()
