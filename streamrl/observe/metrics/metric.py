"""What a metric is: a name, a unit, how the number of a step is made, and what it means."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Aggregation(StrEnum):
    """How the number of one step is made from what was seen in it."""

    MEAN = "mean"
    STD = "standard deviation"
    MIN = "minimum"
    MAX = "maximum"
    P50 = "median"
    P95 = "95th percentile"
    P99 = "99th percentile"
    SHARE = "share"
    SUM = "sum"
    RATE = "per second of the step"
    TOTAL = "counter since the start of the run"
    LAST = "value at the end of the step"


class Metric(msgspec.Struct, frozen=True):
    """One metric. ``line``: its label on the step line, empty where it is not shown there."""

    name: str
    unit: str
    aggregation: Aggregation
    meaning: str
    line: str = ""


MEAN, STD, MIN, MAX = Aggregation.MEAN, Aggregation.STD, Aggregation.MIN, Aggregation.MAX
P50, P95, P99, SHARE = Aggregation.P50, Aggregation.P95, Aggregation.P99, Aggregation.SHARE
SUM, RATE, TOTAL, LAST = Aggregation.SUM, Aggregation.RATE, Aggregation.TOTAL, Aggregation.LAST
