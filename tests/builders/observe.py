"""Names of metrics against the registry."""

from __future__ import annotations

from collections.abc import Iterable

from lint.metrics_page import find_metric


def unregistered(names: Iterable[str]) -> list[str]:
    """Metrics that the registry does not know: nothing may emit them."""
    return [name for name in names if find_metric(name) is None]
