"""``streamrl.live_curve``: the curve of a run in a notebook, in the process of the notebook."""

from __future__ import annotations

import importlib
import sys
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

from streamrl.base.run_events import StepFinished
from streamrl.observe.terminal.curve import Curve, terminal_plot


async def live_curve(steps: AsyncIterable[StepFinished], *metrics: str) -> AsyncIterator[StepFinished]:
    """Yield the steps of a ``Pipeline`` to the loop of the caller, and draw a curve of ``metrics`` (default: the mean
    reward) below the cell after each step. Outside of a notebook nothing is drawn."""
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in metrics or ("reward/mean",)}
    ipython: Any = sys.modules.get("IPython")
    display = importlib.import_module("IPython.display") if ipython and ipython.get_ipython() else None
    output = None
    async for step in steps:
        for name, values in points.items():
            if name in step.metrics:
                values.append((step.step, step.metrics[name]))
        if display is not None:
            curves = [Curve(name, tuple(values)) for name, values in points.items()]
            last = ", ".join(f"{name} {values[-1][1]:.3f}" for name, values in points.items() if values)
            text = {"text/plain": "\n".join([f"step {step.step}: {last}", *terminal_plot(curves)])}
            if output is None:
                output = display.display(text, raw=True, display_id=True)
            else:
                output.update(text, raw=True)
        yield step
