"""The metric registry: what every number means is fixed here and nowhere else; docs/metrics.md is made from it.

The metrics stand in ``observe/metrics/``, one room a subject. ``<name>`` in a metric's name stands for one word that
a run fills in: a reward function, an engine, a reason.
"""

from __future__ import annotations

import re
from functools import cache

from streamrl.observe.metrics.engines import ENGINES
from streamrl.observe.metrics.health import HEALTH
from streamrl.observe.metrics.learning import LEARNING
from streamrl.observe.metrics.metric import Metric
from streamrl.observe.metrics.rewards import REWARDS
from streamrl.observe.metrics.samples import SAMPLES
from streamrl.observe.metrics.scheduling import SCHEDULING
from streamrl.observe.metrics.speed import SPEED

METRICS: tuple[Metric, ...] = (*REWARDS, *SAMPLES, *LEARNING, *SCHEDULING, *SPEED, *ENGINES, *HEALTH)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))
    )


def find_metric(name: str) -> Metric | None:
    """The registered metric that ``name`` (filled in, such as ``engine/engine-0/running``) is one of."""
    return next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


def unregistered(names: list[str]) -> list[str]:
    """The names that the registry does not know: a stage must not emit them."""
    return [name for name in names if find_metric(name) is None]
