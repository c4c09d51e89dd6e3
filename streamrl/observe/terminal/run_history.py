"""History of a run as its user sees it: progress, curves, and whether it learns. ``StdoutReporter`` calls
``RunHistory`` with the events of the run, in the process of the command (``streamrl train``, ``streamrl watch`` and
others)."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from statistics import fmean, variance

from streamrl.base.run_events import RunStarted, StepFinished
from streamrl.base.types import Clock, JsonMapping, JsonObject, Metrics
from streamrl.control.actions import ALL_STEPS_DONE
from streamrl.observe.run_files.run_reader import RunFiles, set_size
from streamrl.observe.terminal.curve import Curve, terminal_plot
from streamrl.observe.terminal.step_line import HELD_OUT, duration
from streamrl.recipe.learning_rate import learning_rate_notice

RECENT_STEPS = 20
"""Steps whose mean duration estimates the remaining time."""
_ADVICE = "look at samples (streamrl samples RUN), at no-signal, and at training.learning_rate"
SUMMARY_STEPS = 10
"""Window of the running reward mean on the step line, and of the first and last mean in the summary."""
VERDICT_STEP = 20
"""Step after which the history says whether the run learns."""
FEWEST_PLOTTED = 5
"""Least number of steps for a plot in the summary: the lines of fewer steps are still on the terminal."""
MOST_POINTS = 4096
"""Points of a curve, more than any screen shows. When there are more, every second point is dropped."""


class RunHistory:
    """Rewards and evaluations by step, and how long steps take. ``clock``: seconds, monotonic."""

    def __init__(self, clock: Clock) -> None:
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
        self._new_steps = 0  # since this process watches the run
        self._has_verdict = False
        self.rewards: dict[int, float] = {}
        self._reward_count = 0
        self._first_rewards: list[float] = []
        self._recent_rewards: deque[float] = deque(maxlen=SUMMARY_STEPS)
        self._score_name = ""  # metric of the held-out score
        # By step: held-out score, its standard error, and the number of prompts (None: not known).
        self._scores: dict[int, tuple[float, float, float | None]] = {}

    def started(self, event: RunStarted) -> None:
        """Note the start of a run, whose processes are ready. The time of the run counts from here."""
        self.run_id = event.run_id
        self.steps = event.steps
        self._parameters = event.parameters
        self._adapters = bool(event.trained_parameters)
        self.directory = Path(event.directory) if event.directory else None  # a watcher of the socket gets none
        self.resumed(event.policy_version)
        self._began = self._last = self._clock()

    def resumed(self, version: int) -> None:
        """Continue with ``version`` as the last step. Where this process has got no step yet, read the earlier steps
        from ``metrics.jsonl``."""
        self.last_step = version
        if self._new_steps:
            return  # only the controller was restarted: this process has the earlier steps
        self._first_step = version
        if self.directory is None or self.rewards or not version:
            return
        # Where a run made a step twice, the last line counts.
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
        """Add a step. Returns (seconds of this step, expected seconds of the remaining steps)."""
        now = self._clock()
        waited = now - self._last
        # A watcher that connected late waited only for the end of its first step.
        self._intervals.append(waited if self._intervals else max(waited, event.metrics.get("time/step_s", 0.0)))
        self._last = now
        self.last_step = event.step
        self._new_steps += 1
        self._learning_rate = max(self._learning_rate, event.metrics.get("optim/lr", 0.0))  # a schedule ends low
        self._take_reward(event.step, event.metrics)
        mean_interval = sum(self._intervals) / len(self._intervals)
        step_s = event.metrics.get("time/step_s", self._intervals[-1])
        return step_s, mean_interval * max(0, self.steps - event.step)

    def line_metrics(self, metrics: Metrics) -> Metrics:
        """Return the metrics for the line of a step: ``metrics`` of the step that was added last, with the mean reward
        of the last steps, and the score of the last evaluation."""
        line_metrics = dict(metrics)
        if "reward/mean" in metrics and self._recent_rewards:  # the first reward may be no finite number
            line_metrics["reward/mean"] = fmean(self._recent_rewards)
        if self._scores:
            score, _, _ = list(self._scores.values())[-1]
            line_metrics[HELD_OUT] = score
        return line_metrics

    def _take_reward(self, step: int, metrics: JsonObject) -> None:
        value = metrics.get("reward/mean")
        if value is None or not math.isfinite(value):
            return
        self.rewards[step] = value
        self._recent_rewards.append(value)
        if self._reward_count < SUMMARY_STEPS:
            self._first_rewards.append(value)
        self._reward_count += 1
        if len(self.rewards) > MOST_POINTS:
            self.rewards = dict([*self.rewards.items()][::2])

    def evaluated(self, step: int, metrics: JsonMapping) -> None:
        """Add an evaluation. Only the first of several held-out sets is followed."""
        for name, value in metrics.items():
            held_out_set, _, score = name.rpartition("/")
            if name.startswith("eval/") and score.startswith("avg@") and value is not None:
                if self._score_name and self._score_name.rpartition("/")[0] != held_out_set:
                    continue
                self._score_name = name
                error = metrics.get(f"{held_out_set}/standard_error") or 0.0
                self._scores[step] = value, error, set_size(name, metrics)

    @property
    def _comparable_scores(self) -> dict[int, tuple[float, float]]:
        """Scores and their standard errors by step, of the number of prompts that was evaluated most often, or last."""
        sizes = [size for _, _, size in self._scores.values()]
        compared = max(reversed(sizes), key=sizes.count, default=None)
        return {step: (score, error) for step, (score, error, size) in self._scores.items() if size == compared}

    def verdict(self) -> str | None:
        """Return a line that says whether the run learns, once, after step 20 and the evaluation that is due then; else
        None. It compares the first and the last held-out score where there are two, else rewards."""
        is_due = self.last_step > VERDICT_STEP or VERDICT_STEP in (self._scores or [self.steps])
        if self._has_verdict or not is_due or self.last_step not in (VERDICT_STEP, VERDICT_STEP + 1):
            return None
        if self._reward_count < VERDICT_STEP:  # this process began to watch after the run began
            return None
        self._has_verdict = True
        scores = list(self._comparable_scores.values())
        if len(scores) > 1:
            measure = "held-out"
            before, before_error = scores[0]
            after, after_error = scores[-1]
            error = math.hypot(before_error, after_error)
        else:
            measure = f"reward (mean of {SUMMARY_STEPS} steps)"
            first = self._first_rewards
            last = self._recent_rewards
            before = fmean(first)
            after = fmean(last)
            error = math.sqrt((variance(first) + variance(last)) / SUMMARY_STEPS)
        change = after - before
        text = f"after {VERDICT_STEP} steps: {measure} {before:.3f} -> {after:.3f}, {change:+.3f} ± {error:.3f}: "
        if change > 2 * error:
            return f"{text}it learns"
        trend = "it gets worse" if change < -2 * error else "no change beyond noise"
        advice = None
        if self._learning_rate:
            advice = learning_rate_notice(self._learning_rate, self._parameters, adapters=self._adapters)
        return f"{text}{trend}; {advice or _ADVICE}"

    def curves(self) -> list[Curve]:
        """Return the curves of the reward and of the held-out score."""
        scores = tuple((step, score) for step, (score, _) in self._comparable_scores.items())
        curves = [Curve("reward/mean", tuple(self.rewards.items())), Curve(self._score_name, scores, marked=True)]
        return [curve for curve in curves if curve.points]

    def summary(self, reason: str) -> list[str]:
        """Return the last lines of a run, with the steps before it was resumed."""
        seconds = self._clock() - self._began
        text = f"{reason}: {self.last_step} of {self.steps} steps"
        if self._first_step:
            text += f"; {self._new_steps} since it was resumed,"
        text += f" in {duration(seconds)}"
        if self._new_steps:
            text += f", {duration(seconds / self._new_steps)} a step"
        lines = ["", text]
        if self._reward_count:
            count = min(SUMMARY_STEPS, max(1, self._reward_count // 2))
            first = fmean(self._first_rewards[:count])
            last = fmean([*self._recent_rewards][-count:])
            lines.append(f"  reward/mean  {first:.3f} -> {last:.3f}  (means of the first and the last {count} steps)")
        if self._scores:
            scores = {step: score for step, (score, _) in self._comparable_scores.items()}
            best = max(scores, key=lambda step: scores[step])
            values = list(scores.values())
            first = values[0]
            last = values[-1]
            lines.append(f"  {self._score_name}  {first:.3f} -> {last:.3f}  (best {scores[best]:.3f} at step {best})")
        lines += self._what_next(reason)
        if self._reward_count >= FEWEST_PLOTTED:
            lines += terminal_plot(self.curves())
        if self.directory is not None:
            lines.append(f"  page  streamrl dashboard {self.directory}")
        return lines

    def _what_next(self, reason: str) -> list[str]:
        """Return lines about the place of the model, and the command that resumes the run."""
        if self.directory is None:
            return []
        model = self.directory / "checkpoints" / "latest" / "hf"
        lines = []
        if model.is_dir():
            lines.append(f"  model  {model}")
        if (self.directory / "journal").is_dir():
            command = f"streamrl resume {self.directory}"
            if reason == ALL_STEPS_DONE:
                command += f" run.steps={2 * self.steps}"
            lines.append(f"  go on with  {command}")
        return lines
