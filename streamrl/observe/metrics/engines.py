"""What engines and weight pushes report."""

from __future__ import annotations

from streamrl.observe.metrics.metric import LAST, SHARE, SUM, TOTAL, Metric

ENGINES: tuple[Metric, ...] = (
    Metric("engines/set", "number", LAST, "Which of the prepared sets of engines serves: 0 is the first."),
    Metric("engines/serving", "engines", LAST, "Engines of the set that serves."),
    Metric("engines/switches_total", "switches", TOTAL, "Changes from one prepared set of engines to another."),
    Metric("engines/restarts_total", "engines", TOTAL, "Engines that died, or were ended, and serve again."),
    Metric(
        "engines/lost_requests_total",
        "requests",
        TOTAL,
        "Requests that an engine served when it died: they were sampled again, to the same tokens.",
    ),
    Metric("weights/payload_bytes", "bytes", SUM, "Encoded bytes of the version, over ranks."),
    Metric("weights/changed_ratio", "share", SHARE, "Elements whose published bits changed."),
    Metric("weights/reanchored", "engines", SUM, "Engines that refused the delta and took an anchor."),
    Metric(
        "weights/canary_deviation",
        "nats",
        LAST,
        "How far engines are from the trainer on fixed tokens (`weights.advanced.canary`): the worst engine's "
        "median over the "
        "tokens. Of the latest version that was answered for when this one was pushed, the one before as a rule.",
    ),
)
