"""Live curve of a run in a notebook."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from streamrl.base.run_events import StepFinished
from streamrl.observe.terminal.curve import Curve, terminal_plot


async def live_curve(
    steps: AsyncIterable[StepFinished], *metrics: str, title: str = "reward"
) -> AsyncIterator[StepFinished]:
    """The steps of a ``Pipeline`` as they come, for a loop of one's own; below the cell a curve of ``metrics`` (the
    mean reward) grows with each. Outside of a notebook nothing is shown."""
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in metrics or ("reward/mean",)}
    ipython: Any = sys.modules.get("IPython")
    display = importlib.import_module("IPython.display") if ipython and ipython.get_ipython() else None
    shown: Any = None
    async for step in steps:
        for name, values in points.items():
            if name in step.metrics:
                values.append((step.step, step.metrics[name]))
        if display is not None:
            curves = [Curve(name, tuple(values)) for name, values in points.items()]
            last = ", ".join(f"{name} {values[-1][1]:.3f}" for name, values in points.items() if values)
            text = {"text/plain": "\n".join([f"{title}, step {step.step}: {last}", *terminal_plot(curves)])}
            if shown is None:
                shown = display.display(text, raw=True, display_id=True)
            else:
                shown.update(text, raw=True)
        yield step
