"""Meanings of metrics, from ``metrics.txt``, which defines them. ``<name>`` in the name of a metric stands for a word
that a run fills in: a reward function, an engine, a reason. The dashboard and the Prometheus tracker look names up, and
``lint/metrics_page.py`` writes docs/metrics.md."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from msgspec import Struct

from streamrl.base.types import TextsByName

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
"""Ways to make the value of a step from the values measured in it, by the words of the table."""


class Metric(Struct, frozen=True):
    """One metric. ``name``: may have placeholders such as ``<function>``."""

    name: str
    unit: str
    aggregation: str
    meaning: str


def _read(table: str) -> tuple[Metric, ...]:
    """Read the table: one metric a line (name, unit, aggregation, meaning). Indented lines continue the line above."""
    rows = (row.split("|") for row in re.split(r"\n(?! )", table.strip()) if not row.startswith("#"))
    cells = ([" ".join(cell.split()) for cell in row] for row in rows)
    return tuple(Metric(name, unit, AGGREGATIONS[word], meaning) for name, unit, word, meaning in cells)


METRICS = _read(files(__package__).joinpath("metrics.txt").read_text(encoding="utf-8"))


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<(\w+)>", r"(?P<\1>[^/]+)", re.escape(name)))


@cache
def find_metric(name: str) -> tuple[Metric, TextsByName] | None:
    """Return the metric of the table that ``name`` (such as ``reward/func/exact/mean``) is an instance of, and the
    words that it fills in (``{"function": "exact"}``)."""
    for metric in METRICS:
        if match := _pattern(metric.name).fullmatch(name):
            return metric, match.groupdict()
    return None


@cache
def help_of(name: str) -> str:
    """Return a sentence about a metric, with its unit. It is empty for a metric that a user's code names."""
    entry = find_metric(name)
    if entry is None:
        return ""
    metric, _ = entry
    return f"{metric.meaning} ({metric.unit}, {metric.aggregation})"
