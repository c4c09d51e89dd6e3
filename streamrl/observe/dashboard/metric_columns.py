"""The metrics of a run as columns over its steps, its evaluations, and what they say of waits."""

from __future__ import annotations

from bisect import bisect_right
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamrl.observe.follow.followed_lines import FollowedLines
from streamrl.observe.follow.metric_help import help_of
from streamrl.observe.follow.run_files import MetricLine, RunFiles, metric_lines
from streamrl.run.wait_reason import WAIT_METRICS

NAN = float("nan")


class MetricColumns:
    """Values by name, one a step, ascending; of steps that a run made twice the later ones. ``began``: seconds since
    1970 from which times count."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.step: list[int] = []
        self.time_s: list[float] = []
        self.values: dict[str, list[float]] = {}

    def take(self, line: MetricLine) -> None:
        """Append a step or an evaluation."""
        if self.step and line.step <= self.step[-1]:
            self._keep(bisect_right(self.step, line.step - 1))
        self.began = self.began or line.time
        count = len(self.step)
        self.step.append(line.step)
        self.time_s.append(line.time - self.began)
        for name, value in line.values.items():
            column = self.values.setdefault(name, [])
            column += [NAN] * (count - len(column)) + [value]
        for column in self.values.values():
            if len(column) == count:
                column.append(NAN)

    def _keep(self, count: int) -> None:
        del self.step[count:]
        for column in (self.time_s, *self.values.values()):
            del column[count:]

    def after(self, step: int) -> dict[str, Any]:
        """Columns of the steps after ``step``; nan, which JSON shows as null, where there is no value."""
        first = bisect_right(self.step, step)
        values = {name: column[first:] for name, column in self.values.items()}
        return {"step": self.step[first:], "time_s": self.time_s[first:], "values": values}


class RunMetrics:
    """Steps and evaluations of ``files``, up to the last ``refresh``. May be used from several threads."""

    def __init__(self, files: RunFiles) -> None:
        self._lines = FollowedLines(files.metrics)
        began = files.started() or 0.0
        self.steps = MetricColumns(began)
        self.evaluations = MetricColumns(began)
        self.last_step: MetricLine | None = None
        self.lock = RLock()

    def refresh(self) -> None:
        """Read what the run has appended."""
        with self.lock:
            while lines := self._lines.read():
                for line in metric_lines(lines):
                    if line.kind == "step":
                        self.steps.take(line)
                        self.last_step = line
                    else:
                        self.evaluations.take(line)

    def answer(self, after: int) -> dict[str, Any]:
        """Steps after step ``after``; evaluations of ``after``, which may end later, are among it."""
        with self.lock:
            found = self.steps.after(after)
            tokens = np.nan_to_num(self._values("perf/train_tok_s") * self._values("time/step_s"))
            trained = np.cumsum(tokens)[len(tokens) - len(found["step"]) :].tolist()
            evaluations = self.evaluations.after(after - 1)
            names = [*found["values"], *evaluations["values"]]
            help_texts = {name: text for name in names if (text := help_of(name))}
            return found | {"trained_tokens": trained, "evaluations": evaluations, "help": help_texts}

    def waits(self) -> dict[str, Any]:
        """Seconds of each step by what the run waited for, and the idle shares of engines."""
        with self.lock:
            seconds = self._values("time/step_s")
            names = {k.removeprefix(WAIT_METRICS): k for k in self.steps.values if k.startswith(WAIT_METRICS)}
            reasons = {reason: np.nan_to_num(self._values(k) * seconds).tolist() for reason, k in names.items()}
            return {
                "time_s": self.steps.time_s[:],
                "step": self.steps.step[:],
                "reasons": reasons,
                "bubble_rollout": self._values("util/rollout_bubble_ratio").tolist(),
                "bubble_step": self._values("util/free_slot_ratio").tolist(),
            }

    def _values(self, name: str) -> NDArray[np.float64]:
        return np.array(self.steps.values.get(name, [NAN] * len(self.steps.step)), dtype=float)
