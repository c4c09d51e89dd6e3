"""History of a run in the parent process: its progress, its curves, and whether it learns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from streamrl.base.run_events import RunStarted, StepFinished
from streamrl.observe.follow.run_files import RunFiles
from streamrl.observe.terminal.curve import Curve, terminal_plot
from streamrl.observe.terminal.step_line import HELD_OUT, duration
from streamrl.recipe.learning_rate import learning_rate_notice

RECENT_STEPS = 20
_ADVICE = "look at samples (streamrl samples RUN), at no-signal, and at training.learning_rate"
SUMMARY_STEPS = 10
"""Window of the running reward mean on the step line, and of the first and last mean in the summary."""
VERDICT_STEP = 20
FEWEST_PLOTTED = 5
"""Steps of a run that gets a plot on the terminal: fewer stand on the terminal already."""
MOST_POINTS = 4096
"""Of a curve: more than any screen shows. From there on every second one of the past is forgotten, again and again."""


class RunHistory:
    """Rewards and evaluations by step, and how long steps take. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._intervals: deque[float] = deque(maxlen=RECENT_STEPS)
        self._began = self._last = clock()
        self.run_id = ""
        self.steps = 0
        self.last_step = 0
        self._first_step = 0
        self.directory: Path | None = None
        self._parameters = 0
        self._adapters = False
        self._learning_rate = 0.0
        self._stepped = 0
        self._judged = False
        self.rewards: dict[int, float] = {}
        self._counted = 0
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=SUMMARY_STEPS)
        self._score = ""  # the name of the held-out score, and by step its value and standard error
        self._scores: dict[int, tuple[float, float]] = {}

    def started(self, event: RunStarted) -> None:
        """Every process is ready: time counts from here."""
        self.run_id = event.run_id
        self.steps = event.steps
        self._parameters = event.parameters
        self._adapters = bool(event.trained_parameters)
        self.directory = Path(event.directory) if event.directory else None  # a watcher has none
        self.resumed(event.policy_version)
        self._began = self._last = self._clock()

    def resumed(self, version: int) -> None:
        """Continue with ``version`` as the last step. Take in what ``metrics.jsonl`` holds up to it, where this life of
        the run has seen nothing yet."""
        self.last_step = version
        if self._stepped:
            return  # the controller was started again, and this process was there all the time
        self._first_step = version
        if self.directory is None or self.rewards or not version:
            return
        # of a step that a run made twice the last
        rewards = {}
        scores = {}
        for line in RunFiles(self.directory).metric_lines():
            if line.step > version:
                continue
            if line.kind == "step":
                rewards[line.step] = {"reward/mean": line.values.get("reward/mean")}
            else:
                scores[line.step] = line.values
        for step in sorted(rewards):
            self._take_reward(step, rewards[step])
        for step in sorted(scores):
            self.evaluated(step, scores[step])

    def stepped(self, event: StepFinished) -> tuple[float, float]:
        """Take in a step. Returns (seconds of this step, seconds that the remaining steps will take)."""
        now = self._clock()
        waited = now - self._last
        # A watcher that came late saw only the end of its first step.
        self._intervals.append(waited if self._intervals else max(waited, event.metrics.get("time/step_s", 0.0)))
        self._last = now
        self.last_step = event.step
        self._stepped += 1
        self._learning_rate = max(self._learning_rate, event.metrics.get("optim/lr", 0.0))  # a schedule ends low
        self._take_reward(event.step, event.metrics)
        each = sum(self._intervals) / len(self._intervals)
        return event.metrics.get("time/step_s", self._intervals[-1]), each * max(0, self.steps - event.step)

    def shown(self, metrics: dict[str, float]) -> dict[str, float]:
        """``metrics`` of the step taken in last, as its line shows them: with the mean reward of the last steps, and
        the score of the last evaluation."""
        smoothed = {"reward/mean": fmean(self._recent)} if "reward/mean" in metrics else {}
        return metrics | smoothed | ({HELD_OUT: [*self._scores.values()][-1][0]} if self._scores else {})

    def _take_reward(self, step: int, metrics: dict[str, Any]) -> None:
        value = metrics.get("reward/mean")
        if value is None or not math.isfinite(value):
            return
        self.rewards[step] = value
        self._recent.append(value)
        self._first += [value] if self._counted < SUMMARY_STEPS else []
        self._counted += 1
        if len(self.rewards) > MOST_POINTS:
            self.rewards = dict([*self.rewards.items()][::2])

    def evaluated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in an evaluation; of several sets the first one."""
        for name, value in metrics.items():
            if name.startswith("eval/") and name.rpartition("/")[2].startswith("avg@") and value is not None:
                if self._score and self._score.rpartition("/")[0] != name.rpartition("/")[0]:
                    continue
                self._score = name
                self._scores[step] = value, metrics.get(f"{name.rpartition('/')[0]}/standard_error") or 0.0

    def verdict(self) -> str | None:
        """One line, once, after step 20 and the evaluation that is due then: whether the run learns, by its held-out
        score where it was taken twice, else by its reward; else None."""
        known = self.last_step > VERDICT_STEP or VERDICT_STEP in (self._scores or [self.steps])
        if self._judged or not known or self.last_step not in (VERDICT_STEP, VERDICT_STEP + 1):
            return None
        if self._counted < VERDICT_STEP:  # attached after the run began
            return None
        self._judged = True
        if len(self._scores) > 1:
            what = "held-out"
            (before, spread), *_, (after, more) = self._scores.values()
            error = math.hypot(spread, more)
        else:
            what = f"reward (mean of {SUMMARY_STEPS} steps)"
            first = self._first
            last = self._recent
            before = fmean(first)
            after = fmean(last)
            error = math.sqrt((variance(first) + variance(last)) / SUMMARY_STEPS)
        change = after - before
        text = f"after {VERDICT_STEP} steps: {what} {before:.3f} -> {after:.3f}, {change:+.3f} ± {error:.3f}: "
        if change > 2 * error:
            return f"{text}it learns"
        rate = self._learning_rate
        adapters = self._adapters
        advice = learning_rate_notice(rate, self._parameters, adapters=adapters) if rate else None
        return f"{text}{'it gets worse' if change < -2 * error else 'no change beyond noise'}; {advice or _ADVICE}"

    def curves(self) -> list[Curve]:
        """Reward over steps, and the held-out score."""
        scores = tuple((step, score) for step, (score, _) in self._scores.items())
        curves = [Curve("reward/mean", tuple(self.rewards.items())), Curve(self._score, scores, marked=True)]
        return [curve for curve in curves if curve.points]

    def summary(self, reason: str) -> list[str]:
        """The last lines of a run, about all of its lives."""
        seconds = self._clock() - self._began
        each = f", {duration(seconds / self._stepped)} a step" if self._stepped else ""
        lives = f"; {self._stepped} since it was resumed," if self._first_step else ""
        lines = ["", f"{reason}: {self.last_step} of {self.steps} steps{lives} in {duration(seconds)}{each}"]
        if self._counted:
            count = min(SUMMARY_STEPS, max(1, self._counted // 2))
            first = fmean(self._first[:count])
            last = fmean([*self._recent][-count:])
            lines.append(f"  reward/mean  {first:.3f} -> {last:.3f}  (means of the first and the last {count} steps)")
        if self._scores:
            scores = {step: score for step, (score, _) in self._scores.items()}
            best = max(scores, key=lambda step: scores[step])
            first, *_, last = (*scores.values(),) * 2
            lines.append(f"  {self._score}  {first:.3f} -> {last:.3f}  (best {scores[best]:.3f} at step {best})")
        lines += self._what_next(reason)
        lines += terminal_plot(self.curves()) if self._counted >= FEWEST_PLOTTED else []
        return lines + ([f"  page  streamrl dashboard {self.directory}"] if self.directory is not None else [])

    def _what_next(self, reason: str) -> list[str]:
        """Say where the model is, and how to resume."""
        if self.directory is None:
            return []
        model = self.directory / "checkpoints" / "latest" / "hf"
        found = [f"  model  {model}"] if model.is_dir() else []
        more = f" run.steps={2 * self.steps}" if reason == "finished" else ""
        resumed = f"  go on with  streamrl resume {self.directory}{more}"
        return [*found, resumed] if (self.directory / "journal").is_dir() else found
