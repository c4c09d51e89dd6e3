"""How well the machinery of the run itself does."""

from __future__ import annotations

from streamrl.observe.metrics.metric import LAST, TOTAL, Metric

HEALTH: tuple[Metric, ...] = (
    Metric(
        "health/telemetry_dropped_total",
        "messages",
        TOTAL,
        "Dropped by the metrics socket; counts once for each time that a subscriber ran over its limit.",
    ),
    Metric(
        "health/metrics_refused_total",
        "values",
        TOTAL,
        "Not recorded: their names were more than a run may have (4,096), or too long: rewards name their parts.",
    ),
    Metric(
        "health/insecure_transport",
        "0 or 1",
        LAST,
        '1: sockets of this run are open to other hosts without keys (`transport.advanced.security = "none"`).',
    ),
)
