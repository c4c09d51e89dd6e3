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
    return re.compile(re.sub(r"<(\w+)>", r"(?P<\1>[^/]+)", re.escape(name)))


@cache
def find_metric(name: str) -> tuple[Metric, dict[str, str]] | None:
    """The registered metric that ``name`` (filled in, such as ``reward/func/exact/mean``) is one of, and its words
    (``{"function": "exact"}``)."""
    return next(((one, found.groupdict()) for one in METRICS if (found := _pattern(one.name).fullmatch(name))), None)


@cache
def help_of(name: str) -> str:
    """One sentence about a metric, with its unit; empty for one that a user's code names."""
    found = find_metric(name)
    return f"{found[0].meaning} ({found[0].unit}, {found[0].aggregation})" if found else ""
