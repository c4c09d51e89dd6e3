"""Definitions of all metrics: name, unit, aggregation, meaning. ``docs/metrics.md`` is made from them."""
