"""Figures of a comparison, and its report as one HTML page. ``compare/command`` writes both after each run, in the
command's own process; ``Comparison`` is the content of comparison.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import NamedTuple

from msgspec import Struct

from streamrl.base.types import Texts
from streamrl.cli.compare.measured_run import ComparedRun
from streamrl.cli.compare.run_figures import WARM_UP_STEPS, RunFigures, samples_of
from streamrl.observe.dashboard.report_page import report_page
from streamrl.observe.run_files.run_reader import RunFiles


class Figure(NamedTuple):
    """A figure of a run: its column, its value (NaN: not measured), its format, and its meaning."""

    name: str
    value: Callable[[ComparedRun], float]
    form: str
    text: str


FIGURES = (
    Figure("ms a sample", lambda run: run.sample_ms, ".1f", "wall time of the measured steps, a trained sample"),
    Figure(
        "rollout bubble",
        lambda run: run.weighted("util/rollout_bubble_ratio"),
        ".2f",
        "share of the engines' slots that are free, from when a version is live until the next batch is full",
    ),
    Figure("step bubble", lambda run: run.weighted("util/free_slot_ratio"), ".2f", "the same over whole steps"),
    Figure("trained length", lambda run: run.length, ".0f", "mean tokens of a trained sample"),
    Figure("accuracy", lambda run: run.accuracy, ".3f", "held-out score of the model after these samples"),
    Figure(
        "stragglers",
        lambda run: run.stragglers,
        ".2f",
        "share of trained groups whose longest completion is twice their median, or was cut at the limit",
    ),
)


class Comparison(Struct, frozen=True, kw_only=True):
    """``systems``: names in the order of the command line; ``runs``: finished runs; ``failures``: a line for each run
    that broke; ``notes``: remarks for readers of the figures."""

    recipe: str
    machine: str
    samples: int
    repeats: int
    systems: Texts
    runs: tuple[ComparedRun, ...] = ()
    failures: Texts = ()
    notes: Texts = ()

    def values(self, figure: Figure, system: str) -> list[float]:
        """Return the figure of each finished run of ``system`` in which it was measured."""
        values = (figure.value(run) for run in self.runs if run.system == system)
        return [value for value in values if not math.isnan(value)]

    def speeds(self, system: str) -> list[float]:
        """Return the ratios of the wall time a sample of the first system to that of ``system``, by repeat."""
        times = {(run.system, run.repeat): run.sample_ms for run in self.runs}
        pairs = ((times.get((self.systems[0], n)), times.get((system, n))) for n in range(1, self.repeats + 1))
        return [base_ms / system_ms for base_ms, system_ms in pairs if base_ms and system_ms]

    def caption(self, system: str) -> str:
        """Return the name of the system with its figures as the table has them."""
        heads, rows = self.table()
        row = dict(zip(heads, rows[self.systems.index(system)], strict=True))
        return f"{system}: {row['times as fast']} times as fast, {row['ms a sample']} ms a sample"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return heads and rows, one row a system: means over repeats, with the least and the greatest value. The mean
        of ratios is the geometric one, in which twice and half as fast are once as fast."""
        heads = ["system", "runs", "times as fast", *(figure.name for figure in FIGURES)]
        rows = []
        for system in self.systems:
            count = sum(run.system == system for run in self.runs)
            cells = [spread_text(self.values(figure, system), figure.form) for figure in FIGURES]
            speed = spread_text(self.speeds(system), ".2f", geometric_mean)
            rows.append([system, str(count), speed, *cells])
        return heads, rows


def spread_text(values: Sequence[float], form: str, mean_of: Callable[[Sequence[float]], float] = fmean) -> str:
    """Return ``1.52 (1.48 to 1.55)``: the mean, the least and the greatest value; ``-`` without values."""
    if not values:
        return "-"
    mean = f"{mean_of(values):{form}}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{form}} to {max(values):{form}})"


def comparison_page(comparison: Comparison) -> bytes:
    """Return the report as one HTML page without links to other hosts: the page of ``streamrl report`` for the first
    finished run of each system whose directory still exists, below a panel with the figures of all runs. The panel
    also shows the timeline of each of these runs from its typical step on, the same number of seconds of each."""
    first = {run.system: run for run in reversed(comparison.runs) if RunFiles(Path(run.directory)).recipe()}
    page_runs = [first[system] for system in comparison.systems if system in first]
    places = [typical_step(run) for run in page_runs]
    heads, rows = comparison.table()
    meanings = {figure.name: figure.text for figure in FIGURES}
    values = [[comparison.values(figure, system) for figure in FIGURES] for system in comparison.systems]
    step_seconds = [run.steps[place]["time/step_s"] for run, place in zip(page_runs, places, strict=True)]
    answer = {
        "about": f"{comparison.recipe}: {comparison.samples:,} trained samples of each system after {WARM_UP_STEPS} "
        f"steps of warm-up; repeats of each, alternately: {comparison.repeats}; {comparison.machine}.",
        "heads": [{"name": head, "meaning": meanings.get(head, "")} for head in heads],
        "rows": [
            # The first columns (system, runs, times as fast) have no values of single runs.
            {"cells": row, "values": [[]] * (len(row) - len(FIGURES)) + system_values}
            for row, system_values in zip(rows, values, strict=True)
        ],
        "notes": [*comparison.notes, *comparison.failures],
        "warnings": [f"{run.system}, repeat {run.repeat}: {text}" for run in comparison.runs for text in run.warnings],
        "stretches": [
            {"title": f"{comparison.caption(run.system)}; repeat {run.repeat} from step {place + 1} on", "place": place}
            for run, place in zip(page_runs, places, strict=True)
        ],
        "seconds": max(step_seconds, default=1.0),
    }
    return report_page([Path(run.directory) for run in page_runs], {"/api/comparison": answer})


def typical_step(run: RunFigures) -> int:
    """Return the index, among all steps of the run, of the measured step with the median of seconds a sample."""
    places = range(WARM_UP_STEPS, WARM_UP_STEPS + len(run.measured))
    by_speed = sorted(places, key=lambda place: run.steps[place]["time/step_s"] / samples_of(run.steps[place]))
    return by_speed[(len(by_speed) - 1) // 2]
