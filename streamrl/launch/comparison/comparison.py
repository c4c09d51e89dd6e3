"""Figures of a whole comparison, and its report as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec

from streamrl.launch.comparison.measured_run import ComparedRun
from streamrl.launch.comparison.run_figures import WARM_UP_STEPS
from streamrl.launch.comparison.step_timeline import timeline_svg, typical_step
from streamrl.observe.follow.run_files import RunFiles
from streamrl.recipe.toml_text import toml_value


class Figure(NamedTuple):
    """A figure of a run: its column, its value (NaN: not measured), the form of it, and its meaning."""

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
        "share of free slots from a live version until the next batch is full",
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


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """``systems``: names in the order in which they were asked for; ``runs``: those that are finished; ``failures``: a
    line for each run that broke; ``notes``: for who reads the figures."""

    recipe: str
    machine: str
    samples: int
    repeats: int
    systems: tuple[str, ...]
    runs: tuple[ComparedRun, ...] = ()
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def values(self, figure: Figure, system: str) -> list[float]:
        """The figure of each finished run of ``system`` that has it."""
        values = (figure.value(run) for run in self.runs if run.system == system)
        return [value for value in values if not math.isnan(value)]

    def speeds(self, system: str) -> list[float]:
        """Ratios of the wall time a sample of the first system to that of ``system``, by repeat."""
        times = {(run.system, run.repeat): run.sample_ms for run in self.runs}
        pairs = ((times.get((self.systems[0], n)), times.get((system, n))) for n in range(1, self.repeats + 1))
        return [base / own for base, own in pairs if base and own]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Heads and rows, one row a system: means over repeats, with the least and the greatest."""
        heads = ["system", "runs", "times as fast", *(figure.name for figure in FIGURES)]
        rows = []
        for system in self.systems:
            count = sum(run.system == system for run in self.runs)
            cells = [spread_text(self.values(figure, system), figure.form) for figure in FIGURES]
            rows.append([system, str(count), spread_text(self.speeds(system), ".2f"), *cells])
        return heads, rows


def spread_text(values: Sequence[float], form: str) -> str:
    """``1.52 (1.48 to 1.55)``: the mean, the least and the greatest; ``-`` of none."""
    if not values:
        return "-"
    ends = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{fmean(values):{form}}{ends}"


_STYLE = """:root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1140px;margin:2rem auto;
padding:0 1rem}table{border-collapse:collapse}th,td{font-size:14px;padding:.25rem .45rem;text-align:right;
border-bottom:1px solid #8884}th:first-child,td:first-child{text-align:left}td svg{display:block;width:85px;
height:12px;margin-left:auto}figure{margin:1.2rem 0}figure svg{width:100%}svg text{font-size:12px;fill:currentColor;
opacity:.7}.trained{fill:#2f6fde}.dropped{fill:#e8915b}.reward{fill:#2b8a3e}.train{fill:#8884}.live{stroke:currentColor;
fill:currentColor;opacity:.5}.track{fill:#8883}.mean{fill:#2f6fde}.run{fill:currentColor}.key{display:inline-block;
width:.8em;height:.8em;margin:0 .3em 0 1em}th[title]:not([title='']){text-decoration:underline dotted}
pre{overflow:auto}"""

_KEY = (
    ("#2f6fde", "sampled and trained"),
    ("#e8915b", "sampled and dropped, or cut"),
    ("#2b8a3e", "waits for its reward"),
    ("#8888", "from a full batch until its version is live"),
)


def comparison_page(comparison: Comparison) -> str:
    """The report as one HTML page that asks no other host. Reads the traces of the runs; a run that is gone has no
    timeline."""
    title = escape(f"{comparison.recipe}: systems compared")
    titles = {figure.name: figure.text for figure in FIGURES}
    heads = "".join(f'<th title="{titles.get(head, "")}">{head}</th>' for head in comparison.table()[0])
    key = "".join(f'<span class="key" style="background:{color}"></span>{text}' for color, text in _KEY)
    notes = "".join(f"<p><strong>{escape(note)}</strong></p>" for note in (*comparison.notes, *comparison.failures))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"></head><body>
<h1>{title}</h1><p>{comparison.samples:,} trained samples of each system after {WARM_UP_STEPS} steps of warm-up;
repeats of
each, in turns: {comparison.repeats}; {escape(comparison.machine)}. Figures are means over repeats, in brackets the
least and the greatest; a dot is a run. Ratios are taken repeat by repeat.</p>{notes}
<table><tr>{heads}</tr>{"".join(_rows(comparison))}</table>
<h2>The same seconds of each</h2><p>A row is a slot of the engines; empty places are the bubble. Each picture begins
with the step of its run whose time a sample is the median; a dot above is a step that went live.</p><p>{key}</p>
{"".join(_timelines(comparison))}
<h2>Settings that differ from those of the first</h2>{"".join(_settings(comparison))}</body></html>
"""


def _rows(comparison: Comparison) -> Iterator[str]:
    most = [max((v for s in comparison.systems for v in comparison.values(f, s)), default=0.0) for f in FIGURES]
    for row in comparison.table()[1]:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[: -len(FIGURES)])
        for figure, largest, cell in zip(FIGURES, most, row[-len(FIGURES) :], strict=True):
            cells += f"<td>{escape(cell)}{_strip(comparison.values(figure, row[0]), largest)}</td>"
        yield f"<tr>{cells}</tr>"


def _strip(values: Sequence[float], largest: float) -> str:
    """A bar to the mean and a dot for each run, from 0 to the largest of all."""
    if not values or largest <= 0:
        return ""
    dots = "".join(f'<circle class="run" cx="{3 + 104 * v / largest:.1f}" cy="6" r="2.5"/>' for v in values)
    bar = f'<rect class="mean" x="3" y="4" width="{104 * fmean(values) / largest:.1f}" height="4"/>'
    return f'<svg viewBox="0 0 110 12"><rect class="track" x="3" y="4" width="104" height="4"/>{bar}{dots}</svg>'


def _timelines(comparison: Comparison) -> Iterator[str]:
    """A picture of the first finished run of each system, all over as many seconds."""
    first = {run.system: run for run in reversed(comparison.runs)}
    places = {system: typical_step(run) for system, run in first.items()}
    seconds = max((first[system].steps[place]["time/step_s"] for system, place in places.items()), default=1.0)
    for system in (name for name in comparison.systems if name in first):
        run, place = first[system], places[system]
        caption = f"{system}: {run.sample_ms:.1f} ms a sample; from step {place + 1} of repeat {run.repeat} on"
        picture = timeline_svg(Path(run.directory), place, seconds, caption)
        yield f"<figure><figcaption>{escape(caption)}</figcaption>{picture}</figure>"


def _settings(comparison: Comparison) -> Iterator[str]:
    recipes = {run.system: RunFiles(Path(run.directory)).recipe() for run in comparison.runs}
    base = recipes.get(comparison.systems[0], {})
    for system, recipe in recipes.items():
        own = {key: value for key, value in recipe.items() if base.get(key) != value and not key.startswith("run.")}
        lines = "\n".join(f"{key} = {toml_value(value)}" for key, value in own.items())
        yield f"<h3>{escape(system)}</h3><pre>{escape(lines) or 'as the first'}</pre>"
    for run in (run for run in comparison.runs if run.warnings):
        warned = escape("\n".join(run.warnings))
        yield f"<h3>{escape(run.system)}, repeat {run.repeat}, warned</h3><pre>{warned}</pre>"
