"""Curves of a run as a plot of braille dots: below the summary of a run, in ``streamrl top``, and in notebooks. No
I/O."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from msgspec import Struct

_BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row of four][column of two]


class Curve(Struct, frozen=True):
    """One curve. ``points``: pairs (step, value), ascending by step. ``marked``: whether the points are few, as those
    of evaluations are; two such points are not joined by a line, because nothing was measured between them."""

    label: str
    points: tuple[tuple[float, float], ...]
    marked: bool = False

    @property
    def joined(self) -> bool:
        """Whether a line joins the points."""
        return len(self.points) > 2 or not self.marked


def finite(curve: Curve) -> Curve:
    """Return the curve without points that are not finite."""
    points = tuple(point for point in curve.points if math.isfinite(point[0]) and math.isfinite(point[1]))
    return Curve(curve.label, points, curve.marked)


def has_shape(curves: Sequence[Curve]) -> bool:
    """Return whether a plot would show a shape: one of the curves has two different values."""
    return any(len({value for _, value in finite(curve).points}) > 1 for curve in curves)


class _Frame(Struct, frozen=True):
    """The values at the edges of a plot."""

    first_step: float
    last_step: float
    low: float
    high: float

    def across(self, step: float) -> float:
        """Return the position of a step: 0 at the left edge, 1 at the right."""
        return (step - self.first_step) / (self.last_step - self.first_step)

    def up(self, value: float) -> float:
        """Return the position of a value: 0 at the bottom, 1 at the top."""
        return (value - self.low) / (self.high - self.low)


def _frame(curves: Sequence[Curve]) -> _Frame | None:
    points = [point for curve in curves for point in curve.points]
    if not points:
        return None
    steps = [step for step, _ in points]
    values = [value for _, value in points]
    low = min(values)
    high = max(values)
    margin = (high - low) * 0.05 or max(abs(high), 1.0) * 0.1
    first_step = min(steps)
    last_step = max(steps)
    if last_step <= first_step:
        last_step = first_step + 1
    return _Frame(first_step, last_step, low - margin, high + margin)


def terminal_plot(curves: Sequence[Curve], *, width: int = 60, height: int = 8) -> list[str]:
    """Return the lines of a plot with a value axis on the left and steps below; none where there is no shape to
    show."""
    curves = [finite(curve) for curve in curves]
    frame = _frame(curves)
    if frame is None or not has_shape(curves):
        return []
    cells = [[0] * width for _ in range(height)]
    for curve in curves:
        for across, up in _dense(curve, frame, 4 * width):
            column = round(across * (2 * width - 1))
            row = round((1 - up) * (4 * height - 1))
            cells[row // 4][column // 2] |= _BRAILLE_DOTS[row % 4][column % 2]
    labels = {0: f"{frame.high:.3g}", height - 1: f"{frame.low:.3g}"}
    indent = max(map(len, labels.values()))
    lines = [
        f"{labels.get(row, ''):>{indent}} ┤" + "".join(chr(0x2800 + dots) for dots in cells[row]).rstrip("\u2800")
        for row in range(height)
    ]
    first = f"{frame.first_step:g}"
    last = f"{frame.last_step:g}"
    lines.append(" " * indent + " └" + "─" * width)
    lines.append(" " * (indent + 2) + first + last.rjust(width - len(first)))
    return lines


def _dense(curve: Curve, frame: _Frame, samples: int) -> list[tuple[float, float]]:
    """Return points along the polyline, dense enough to leave no gap between dots, as shares of the frame."""
    corners = [(frame.across(step), frame.up(value)) for step, value in curve.points]
    if not curve.joined:
        return corners
    dense = corners[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(corners):
        count = max(1, math.ceil(max(x1 - x0, abs(y1 - y0)) * samples))
        dense += [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(1, count + 1)]
    return dense
