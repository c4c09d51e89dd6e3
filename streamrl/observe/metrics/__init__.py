"""Definitions of all metrics: name, unit, aggregation, meaning; a file a subject.
``docs/metrics.md`` is made from them."""
