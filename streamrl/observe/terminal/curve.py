"""Curves of a run as a plot of braille dots. Pure, no dependency."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec

_BRAILLE_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row of four][column of two]


class Curve(msgspec.Struct, frozen=True):
    """One line: ``points`` are (step, value), ascending by step. ``marked``: few points, so each gets a mark, and two
    of them are not joined: nothing was measured between."""

    label: str
    points: tuple[tuple[float, float], ...]
    marked: bool = False

    @property
    def joined(self) -> bool:
        """Return whether a line goes through its points."""
        return len(self.points) > 2 or not self.marked


def finite(curve: Curve) -> Curve:
    """The curve without points that have no finite value."""
    kept = tuple(point for point in curve.points if math.isfinite(point[0]) and math.isfinite(point[1]))
    return Curve(curve.label, kept, curve.marked)


def has_shape(curves: Sequence[Curve]) -> bool:
    """Return whether there is something to see: two steps, and two values of one of the curves."""
    return any(len({value for _, value in finite(curve).points}) > 1 for curve in curves)


class _Frame(msgspec.Struct, frozen=True):
    """The values at the edges of a plot."""

    left: float
    right: float
    low: float
    high: float

    def across(self, step: float) -> float:
        """0 at the left edge, 1 at the right."""
        return (step - self.left) / (self.right - self.left)

    def up(self, value: float) -> float:
        """0 at the bottom, 1 at the top."""
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
    left = min(steps)
    right = max(steps)
    return _Frame(left, right if right > left else left + 1, low - margin, high + margin)


def terminal_plot(curves: Sequence[Curve], *, width: int = 60, height: int = 8) -> list[str]:
    """Lines of a plot with a value axis on the left and steps below; empty where there is nothing to show."""
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
    first = f"{frame.left:g}"
    last = f"{frame.right:g}"
    lines.append(" " * indent + " └" + "─" * width)
    lines.append(" " * (indent + 2) + first + last.rjust(width - len(first)))
    return lines


def _dense(curve: Curve, frame: _Frame, samples: int) -> list[tuple[float, float]]:
    """Points along the polyline, close enough to leave no gap between dots; shares of the frame."""
    placed = [(frame.across(step), frame.up(value)) for step, value in curve.points]
    if not curve.joined:
        return placed
    dense = placed[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(placed):
        count = max(1, math.ceil(max(x1 - x0, abs(y1 - y0)) * samples))
        dense += [(x0 + (x1 - x0) * i / count, y0 + (y1 - y0) * i / count) for i in range(1, count + 1)]
    return dense
