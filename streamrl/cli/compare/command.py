"""``streamrl compare RECIPE``: a recipe under several systems, alternately, as one report. The command's own process is
the supervisor of one run after the other."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import anyio
from anyio import to_thread
from msgspec import json
from msgspec.structs import replace

from streamrl.base.atomic_files import make_directory, write_durable
from streamrl.base.errors import RecipeError, StreamRLError, leaves, raise_problems
from streamrl.base.printable import log_to
from streamrl.base.types import Texts
from streamrl.cli.command import Argument, Command, Overrides, RecipePath, print_json, recipe_file
from streamrl.cli.compare.candidates import compared_recipes
from streamrl.cli.compare.comparison import Comparison, comparison_page
from streamrl.cli.compare.measured_run import measure_run, measured_recipe
from streamrl.cli.simulate import results_table
from streamrl.observe.terminal.console import wide_console
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.observe.terminal.step_line import duration
from streamrl.prepare.hub.resolution import with_hub_folders
from streamrl.prepare.preflight import preflight
from streamrl.prepare.run_length import with_steps_of_epochs
from streamrl.prepare.summary import SIMULATED_SENTENCE
from streamrl.recipe.sections import EngineKind, Recipe

FIGURES = "comparison.json"
PAGE = "comparison.html"


class Compare(Command, frozen=True, kw_only=True):
    """Run a recipe under several systems, alternately and for as many trained samples each, and write one report: a
    step of each beside the others, waits, time, lengths, accuracy."""

    recipe: RecipePath
    overrides: Overrides = ()
    systems: Annotated[
        str, Argument("systems or rounds, each with its settings: fastest:rollout.rounds=auto,sagc", metavar="NAME,...")
    ] = "synchronous,rollpacker,sortedrl,sagc,fastest"
    samples: Annotated[int, Argument("trained ones that are measured (default: those of run.steps)", metavar="N")] = 0
    repeats: Annotated[int, Argument("runs of each system, with seeds of their own (default 2)", metavar="N")] = 2
    out: Annotated[
        Path | None, Argument("for runs and report (default: runs/compare-NAME-TIME)", metavar="DIRECTORY")
    ] = None

    def run(self) -> int:
        """1 when a run broke; what is finished is reported all the same."""
        if self.samples < 0 or self.repeats < 1:
            raise RecipeError(f"--samples {self.samples} --repeats {self.repeats}: at least 0 and 1")
        recipes = compared_recipes(recipe_file(self.recipe), self.overrides, self.systems, "--systems")
        first = with_steps_of_epochs(recipes[0][1])[0]
        stem = f"compare-{first.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        out = self.out or Path(first.run.directory) / stem
        if (out / FIGURES).exists():
            raise RecipeError(f"--out {out}: a comparison is there already: name another directory")
        samples = self.samples or first.run.steps * first.batch_trajectories
        plan = []
        for repeat in range(1, self.repeats + 1):
            # Every second repeat runs in the opposite order, so that drifts of the machine cancel.
            for name, recipe in recipes if repeat % 2 else reversed(recipes):
                run_recipe = measured_recipe(recipe, samples, repeat, name.partition(":")[0], out)
                plan.append((name, repeat, with_hub_folders(run_recipe)))
        check_all([(name, recipe) for name, repeat, recipe in plan if repeat == 1])
        make_directory(out.absolute(), 0o700)  # its report has completions
        log_to(sys.stderr, logging.WARNING, "%(levelname)s %(message)s")
        notes: Texts = ()
        if first.engines.kind is EngineKind.SIMULATED:
            notes = (f"engines are {SIMULATED_SENTENCE}",)
        empty = Comparison(
            recipe=first.run.name,
            machine=f"{platform.node()}, {os.cpu_count()} cores, {first.engines.count} engines",
            samples=samples,
            repeats=self.repeats,
            systems=tuple(name for name, _ in recipes),
            notes=notes,
        )
        comparison = anyio.run(compare, plan, empty, out)
        if self.json:
            print_json(comparison)
        else:
            heads, cells = comparison.table()
            rows = (zip(heads, row, strict=True) for row in cells)
            wide_console().print(results_table("", rows))
            lines = list(comparison.notes)
            if comparison.runs:
                lines.append(f"report: {out / PAGE}")
            print("\n".join(lines))
        return 1 if comparison.failures else 0


def check_all(recipes: Sequence[tuple[str, Recipe]]) -> None:
    """Raise ``RecipeError`` with the problems of every recipe that cannot run, before one is started."""
    problems = []
    for name, recipe in recipes:
        try:
            preflight(recipe)
        except RecipeError as error:
            problems += [f"{name}: {line}" for line in error.problems]
    raise_problems(problems)


async def compare(plan: Sequence[tuple[str, int, Recipe]], comparison: Comparison, out: Path) -> Comparison:
    """Run ``plan``, one run after the other, and write the report after each. ``plan``: name of the system, repeat and
    recipe of each run."""
    started_at = time.monotonic()
    with StdoutReporter(sys.stderr) as screen:
        for number, (system, repeat, recipe) in enumerate(plan):
            title = f"{system} {repeat}, run {number + 1} of {len(plan)}"

            def progress(share: float, number: int = number, title: str = title) -> None:
                # A tenth of a run is its start, its end and its evaluation.
                finished_share = (number + 0.9 * share) / len(plan)
                text = title
                if finished_share:
                    remaining_s = (time.monotonic() - started_at) * (1 / finished_share - 1)
                    text += f", about {duration(remaining_s)} left"
                screen.progress(text, round(100 * share), 100)

            progress(0.0)
            try:
                run = await measure_run(recipe, comparison.samples, system, repeat, progress)
            except* StreamRLError as errors:
                reason = next(str(error) for error in leaves(errors))
                failures = (*comparison.failures, f"{system}, repeat {repeat}: {reason}")
                comparison = replace(comparison, failures=failures)
                screen.line(failures[-1])
            else:
                comparison = replace(comparison, runs=(*comparison.runs, run))
                screen.line(f"{title}: {run.sample_ms:.1f} ms a sample, {len(run.measured)} steps")
            write_durable(out / FIGURES, json.format(json.encode(comparison), indent=1))
            if comparison.runs:
                write_durable(out / PAGE, await to_thread.run_sync(comparison_page, comparison))
    return comparison
