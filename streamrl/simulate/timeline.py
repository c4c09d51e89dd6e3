"""A picture of a simulated run: what the engines ran, round by round, beside training and pushes. SVG, no library."""

from __future__ import annotations

from html import escape

from streamrl.simulate.report import StepRow

MOST_POINTS = 400_000
ROWS = 24
WIDTH, LEFT, ROW_HEIGHT, GAP, TOP = 1180, 92, 26, 3, 58
COLUMNS = 900
COLOURS = ("#2f6fb0", "#c2571a", "#3f8f4f", "#7b4fa3", "#8a7a1f", "#2a8f93")
TRAINING, PUSH = "#555555", "#b02a4a"


class Timeline:
    """Records the first ``steps`` steps of ``engines`` engines; engines share a row where there are more than fit.

    ``running`` is told every change of an engine's number of running requests, ``step`` each step that ended.
    """

    def __init__(self, engines: int, steps: int = 12) -> None:
        self._per_row = -(-engines // ROWS)
        self._rows = -(-engines // self._per_row)
        self._wanted = steps
        self._now: list[int] = [0] * engines
        self._sums = [0] * self._rows
        self._points: list[list[tuple[float, int]]] = [[(0.0, 0)] for _ in range(self._rows)]
        self._count = 0
        self._steps: list[tuple[float, StepRow]] = []
        self._open = True

    def running(self, engine: int, now: float, count: int) -> None:
        """``engine`` runs ``count`` requests from ``now`` on."""
        if not self._open:
            return
        row = engine // self._per_row
        self._sums[row] += count - self._now[engine]
        self._now[engine] = count
        self._points[row].append((now, self._sums[row]))
        self._count += 1
        self._open = self._count < MOST_POINTS

    def step(self, row: StepRow, now: float) -> None:
        """A step ended at ``now``."""
        if self._open:
            self._steps.append((now, row))
            self._open = len(self._steps) < self._wanted

    def svg(self, title: str) -> str:
        """The picture, as the text of an SVG file. Without a whole step: an empty frame that says so."""
        height = TOP + self._rows * (ROW_HEIGHT + GAP) + 92
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">'
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
            f'<text x="10" y="20" font-size="14">{escape(title)}</text>'
        )
        if not self._steps:
            return f'{head}<text x="10" y="44">no step was completed while the picture was recorded</text></svg>\n'
        end = self._steps[-1][0]
        kinds = list(dict.fromkeys(row.round_kind for _, row in self._steps))
        colour = {kind: COLOURS[index % len(COLOURS)] for index, kind in enumerate(kinds)}
        parts = [head, self._legend(colour)]
        parts += [self._engine_row(index, end, colour) for index in range(self._rows)]
        parts += [self._stage_rows(end, colour), self._axis(end, height), "</svg>\n"]
        return "\n".join(parts)

    def _x(self, time: float, end: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * time / end

    def _spans(self) -> list[tuple[float, float, StepRow]]:
        spans, begun = [], 0.0
        for ended, row in self._steps:
            spans.append((begun, ended, row))
            begun = ended
        return spans

    def _engine_row(self, index: int, end: float, colour: dict[str, str]) -> str:
        top = TOP + index * (ROW_HEIGHT + GAP)
        most = max(max(count for _, count in points) for points in self._points) or 1
        first = index * self._per_row
        last = min(first + self._per_row, len(self._now)) - 1
        name = f"engine {first}" if first == last else f"engines {first}-{last}"
        parts = [f'<text x="8" y="{top + ROW_HEIGHT - 8}">{name}</text>']
        means = _means(self._points[index], end)
        for begun, ended, row in self._spans():
            low, high = int(begun / end * COLUMNS), max(int(ended / end * COLUMNS), int(begun / end * COLUMNS) + 1)
            shape = [f"{self._x(begun, end):.1f},{top + ROW_HEIGHT}"]
            for column in range(low, min(high, COLUMNS)):
                y = top + ROW_HEIGHT * (1 - means[column] / most)
                left, right = column / COLUMNS * end, (column + 1) / COLUMNS * end
                shape += [f"{self._x(left, end):.1f},{y:.1f}", f"{self._x(right, end):.1f},{y:.1f}"]
            shape.append(f"{self._x(ended, end):.1f},{top + ROW_HEIGHT}")
            parts.append(f'<polygon points="{" ".join(shape)}" fill="{colour[row.round_kind]}" fill-opacity="0.8"/>')
        parts.append(
            f'<path d="M{LEFT} {top + ROW_HEIGHT}H{WIDTH - 20}" stroke="#cccccc" stroke-width="0.6" fill="none"/>'
        )
        return "".join(parts)

    def _stage_rows(self, end: float, colour: dict[str, str]) -> str:
        top = TOP + self._rows * (ROW_HEIGHT + GAP) + 6
        parts = [f'<text x="8" y="{top + 10}">training</text><text x="8" y="{top + 26}">push</text>']
        for begun, ended, row in self._spans():
            full, push = begun + row.rollout_s, ended - row.push_s
            parts.append(_box(self._x(full, end), self._x(full + row.training_s, end), top, TRAINING))
            parts.append(_box(self._x(push, end), self._x(ended, end), top + 16, PUSH))
            x = self._x(ended, end)
            parts.append(f'<path d="M{x:.1f} {TOP - 6}V{top + 30}" stroke="#999999" stroke-width="0.5"/>')
            label = f"{row.policy_version} {row.round_kind}: {row.step_s:.3g} s, longest {row.longest}"
            if self._x(ended, end) - self._x(begun, end) > 6.2 * len(label):
                middle = (self._x(begun, end) + x) / 2
                text = f'<text x="{middle:.1f}" y="{TOP - 8}" text-anchor="middle" fill="{colour[row.round_kind]}">'
                parts.append(f"{text}{escape(label)}</text>")
        return "".join(parts)

    def _axis(self, end: float, height: int) -> str:
        marks = (f"{end * part / 8:.3g} s" for part in range(9))
        return "".join(
            f'<text x="{self._x(end * part / 8, end):.1f}" y="{height - 14}" text-anchor="middle">{mark}</text>'
            for part, mark in enumerate(marks)
        )

    @staticmethod
    def _legend(colour: dict[str, str]) -> str:
        parts, x = [], 10
        named = [(f"{kind or 'no'} round: requests that run", value) for kind, value in colour.items()]
        for name, value in [*named, ("training after the rollout", TRAINING), ("weight push", PUSH)]:
            parts.append(f'<rect x="{x}" y="29" width="10" height="10" fill="{value}"/>')
            parts.append(f'<text x="{x + 14}" y="38">{escape(name)}</text>')
            x += 34 + 6 * len(name)
        return "".join(parts)


def _box(left: float, right: float, top: float, colour: str) -> str:
    return f'<rect x="{left:.1f}" y="{top}" width="{max(right - left, 0.6):.1f}" height="12" fill="{colour}"/>'


def _means(points: list[tuple[float, int]], end: float) -> list[float]:
    """Mean number of running requests in each of ``COLUMNS`` equal parts of ``[0, end]``."""
    width = end / COLUMNS
    means = [0.0] * COLUMNS
    following = [time for time, _ in points[1:]] + [end]
    for (begun, count), ended in zip(points, following, strict=True):
        position, limit = begun, min(ended, end)
        while count and position < limit - 1e-12 * end:
            column = min(int(position / width), COLUMNS - 1)
            edge = limit if column == COLUMNS - 1 else min((column + 1) * width, limit)
            if edge <= position:  # the border of a column, rounded
                column, edge = column + 1, min((column + 2) * width, limit)
            means[column] += count * (edge - position) / width
            position = edge
    return means
