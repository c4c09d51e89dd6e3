"""The metrics of a run as columns: over its steps, over its evaluations, and the waits of each step. ``RunView`` keeps
them for the page, in the process of ``streamrl dashboard`` or ``streamrl report``."""

from __future__ import annotations

from bisect import bisect_right
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from streamrl.base.types import JsonObject
from streamrl.observe.run_files.followed_lines import FollowedLines
from streamrl.observe.run_files.metric_help import help_of
from streamrl.observe.run_files.run_reader import MetricLine, RunFiles, metric_lines
from streamrl.run.wait_reason import WAIT_METRICS

NAN = float("nan")


class MetricColumns:
    """Values of each metric by step, ascending. Where a run made a step twice, the later values count. ``began``:
    seconds since 1970 from which times count."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.step: list[int] = []
        self.time_s: list[float] = []
        self.values: dict[str, list[float]] = {}

    def take(self, line: MetricLine) -> None:
        """Append the line of a step or of an evaluation."""
        if self.step and line.step <= self.step[-1]:
            self._truncate(bisect_right(self.step, line.step - 1))
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

    def _truncate(self, count: int) -> None:
        del self.step[count:]
        for column in (self.time_s, *self.values.values()):
            del column[count:]

    def after(self, step: int) -> JsonObject:
        """Return the columns of the steps after ``step``. A missing value is nan, which JSON has as null."""
        first = bisect_right(self.step, step)
        values = {name: column[first:] for name, column in self.values.items()}
        return {"step": self.step[first:], "time_s": self.time_s[first:], "values": values}


class RunMetrics:
    """Steps and evaluations of a run, as of the last ``refresh``. Several threads may use it."""

    def __init__(self, files: RunFiles) -> None:
        self._lines = FollowedLines(files.metrics)
        began = files.started() or 0.0
        self.steps = MetricColumns(began)
        self.evaluations = MetricColumns(began)
        self.last_step: MetricLine | None = None
        self.lock = RLock()

    def refresh(self) -> None:
        """Read the lines that the run has appended."""
        with self.lock:
            while lines := self._lines.read():
                for line in metric_lines(lines):
                    if line.kind == "step":
                        self.steps.take(line)
                        self.last_step = line
                    else:
                        self.evaluations.take(line)

    def answer(self, after: int) -> JsonObject:
        """Return the steps after step ``after``, and the evaluations of ``after`` and later steps: an evaluation may
        end after its step."""
        with self.lock:
            steps = self.steps.after(after)
            tokens = np.nan_to_num(self._values("perf/train_tok_s") * self._values("time/step_s"))
            trained = np.cumsum(tokens)[len(tokens) - len(steps["step"]) :].tolist()
            evaluations = self.evaluations.after(after - 1)
            names = [*steps["values"], *evaluations["values"]]
            help_texts = {name: text for name in names if (text := help_of(name))}
            return steps | {"trained_tokens": trained, "evaluations": evaluations, "help": help_texts}

    def waits(self) -> JsonObject:
        """Return the seconds of each step by the reason that the run waited for, and the idle shares of the engines."""
        with self.lock:
            seconds = self._values("time/step_s")
            names = [name for name in self.steps.values if name.startswith(WAIT_METRICS)]
            reasons = {
                name.removeprefix(WAIT_METRICS): np.nan_to_num(self._values(name) * seconds).tolist() for name in names
            }
            return {
                "time_s": self.steps.time_s[:],
                "step": self.steps.step[:],
                "reasons": reasons,
                "bubble_rollout": self._values("util/rollout_bubble_ratio").tolist(),
                "bubble_step": self._values("util/free_slot_ratio").tolist(),
            }

    def _values(self, name: str) -> NDArray[np.float64]:
        return np.array(self.steps.values.get(name, [NAN] * len(self.steps.step)), dtype=float)
