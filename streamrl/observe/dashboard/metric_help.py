"""Meanings of metrics, from ``metrics.txt``, which defines them. ``<name>`` in the name of a metric stands for one word
that a run fills in: a reward function, an engine, a reason."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

import msgspec

AGGREGATIONS = {
    "mean": "mean",
    "std": "standard deviation",
    "min": "minimum",
    "max": "maximum",
    "p50": "median",
    "p95": "95th percentile",
    "p99": "99th percentile",
    "share": "share",
    "sum": "sum",
    "rate": "per second of the step",
    "total": "counter since the start of the run",
    "last": "value at the end of the step",
}
"""Ways to make the number of one step from what was seen in it, by the words of the table."""


class Metric(msgspec.Struct, frozen=True):
    """One metric."""

    name: str
    unit: str
    aggregation: str
    meaning: str


def _read(table: str) -> tuple[Metric, ...]:
    """One metric a line: name, unit, aggregation, meaning; indented lines continue the one above."""
    rows = (row.split("|") for row in re.split(r"\n(?! )", table.strip()) if not row.startswith("#"))
    cells = ([" ".join(cell.split()) for cell in row] for row in rows)
    return tuple(Metric(name, unit, AGGREGATIONS[made], meaning) for name, unit, made, meaning in cells)


METRICS = _read(files(__package__).joinpath("metrics.txt").read_text(encoding="utf-8"))


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))
    )


def find_metric(name: str) -> Metric | None:
    """The registered metric that ``name`` (filled in, such as ``engine/engine-0/running``) is one of."""
    return next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


@cache
def help_of(name: str) -> str:
    """One sentence about a metric, with its unit; empty for one that a user's code names."""
    metric = find_metric(name)
    return "" if metric is None else f"{metric.meaning} ({metric.unit}, {metric.aggregation})"
