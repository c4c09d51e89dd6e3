"""What the parent process remembers of a run to tell how far it is and to draw its curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from streamrl.observe.curve import Curve, svg_plot, terminal_plot
from streamrl.observe.step_line import duration
from streamrl.run_events import EvaluationFinished, RunResumed, RunStarted, StepFinished

RECENT_STEPS = 20
SUMMARY_STEPS = 10
MOST_POINTS = 4096
"""Of a curve: more than any screen shows."""


class ThinnedCurve:
    """A value of each step, in at most ``MOST_POINTS`` points however many steps there are: each is the mean of as many
    steps. ``first``, ``last``: the values of a few steps."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=SUMMARY_STEPS)
        self._points: list[tuple[float, float]] = []
        self._open: list[tuple[float, float]] = []
        self._width = 1

    def add(self, step: float, value: float) -> None:
        """The next step."""
        self.count += 1
        self.last.append(value)
        if len(self.first) < SUMMARY_STEPS:
            self.first.append(value)
        self._open.append((step, value))
        if len(self._open) == self._width:
            self._points.append(_mean(self._open))
            self._open = []
        if len(self._points) == MOST_POINTS:
            self._points = [_mean(self._points[place : place + 2]) for place in range(0, MOST_POINTS, 2)]
            self._width *= 2

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(step, value), ascending by step."""
        return tuple(self._points + ([_mean(self._open)] if self._open else []))


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(step for step, _ in points) / len(points), sum(value for _, value in points) / len(points)


class RunHistory:
    """Rewards and evaluations by step, and how long steps take. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._intervals: deque[float] = deque(maxlen=RECENT_STEPS)
        self._began = self._last = clock()
        self.run_id = ""
        self.steps = 0
        self.last_step = 0
        self.directory: Path | None = None
        self.rewards = ThinnedCurve()
        self.evaluations: dict[str, list[tuple[float, float]]] = {}

    def started(self, event: RunStarted) -> None:
        """Every process is ready: time counts from here."""
        self.run_id = event.run_id
        self.steps = event.steps
        self.last_step = event.policy_version
        self.directory = Path(event.directory) if event.directory else None  # a watcher has none
        self._began = self._last = self._clock()

    def resumed(self, event: RunResumed) -> None:
        """It goes on with that step done."""
        self.last_step = event.policy_version

    def stepped(self, event: StepFinished) -> tuple[float, float]:
        """Take in a step. Returns (seconds of this step, seconds that the remaining steps will take)."""
        now = self._clock()
        waited = now - self._last
        # A watcher that came late saw only the end of its first step.
        self._intervals.append(waited if self._intervals else max(waited, event.metrics.get("time/step_s", 0.0)))
        self._last = now
        self.last_step = event.step
        if "reward/mean" in event.metrics:
            self.rewards.add(event.step, event.metrics["reward/mean"])
        each = sum(self._intervals) / len(self._intervals)
        return event.metrics.get("time/step_s", self._intervals[-1]), each * max(0, self.steps - event.step)

    def evaluated(self, event: EvaluationFinished) -> None:
        """Take in an evaluation."""
        for name, value in event.metrics.items():
            if name.startswith("eval/") and name.rpartition("/")[2].startswith("avg@"):
                self.evaluations.setdefault(name, []).append((event.step, value))

    def curves(self) -> list[Curve]:
        """Reward over steps, and each evaluation."""
        reward = [Curve("reward/mean", self.rewards.points)] if self.rewards.count else []
        return reward + [Curve(name, tuple(points), marked=True) for name, points in self.evaluations.items()]

    def summary(self, reason: str) -> list[str]:
        """The last lines of a run."""
        seconds = self._clock() - self._began
        each = f", {duration(seconds / self.rewards.count)} a step" if self.rewards.count else ""
        lines = ["", f"{reason}: {self.last_step} of {self.steps} steps in {duration(seconds)}{each}"]
        if self.rewards.count:
            count = min(SUMMARY_STEPS, max(1, self.rewards.count // 2))
            first, last = sum(self.rewards.first[:count]) / count, sum([*self.rewards.last][-count:]) / count
            lines.append(f"  reward/mean  {first:.3f} -> {last:.3f}  (means of the first and the last {count} steps)")
        for name, points in self.evaluations.items():
            best_step, best = max(points, key=lambda point: point[1])
            lines.append(
                f"  {name}  {points[0][1]:.3f} -> {points[-1][1]:.3f}  (best {best:.3f} at step {best_step:g})"
            )
        lines += self._what_next(reason)
        return lines + terminal_plot([curve for curve in self.curves() if len(curve.points) > 1])

    def _what_next(self, reason: str) -> list[str]:
        """Where the model is, and how to go on."""
        if self.directory is None:
            return []
        model = self.directory / "checkpoints" / "latest" / "hf"
        found = [f"  model  {model}"] if model.is_dir() else []
        ended = reason == "finished" or not (self.directory / "journal").is_dir()
        return found if ended else [*found, f"  go on with  streamrl resume {self.directory}"]

    def write_curve(self) -> Path | None:
        """Write ``curve.svg`` in the run directory; None where there is nothing to draw or nowhere to write."""
        if self.directory is None or not self.curves() or not self.directory.is_dir():
            return None
        path = self.directory / "curve.svg"
        path.write_text(
            svg_plot(self.curves(), title=f"{self.directory.name}: {self.last_step} steps"), encoding="utf-8"
        )
        return path
