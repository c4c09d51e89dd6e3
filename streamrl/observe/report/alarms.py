"""Alarms: rules over the metrics of steps that warn a person of a training that goes wrong. An alarm stops nothing.
``launch/observers.py`` makes the rules and ``RunReport`` checks them after each step, in the process of the controller.
No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from streamrl.base.types import Metrics

REPEAT_STEPS = 20
"""An alarm is reported at most once in this number of steps, whether it lasts or comes and goes."""
FAR_BELOW_SHARE = 0.01
NO_SIGNAL_SHARE = 0.95
NO_SIGNAL_STEPS = 10


class AlarmRule(Struct, frozen=True, kw_only=True):
    """An alarm that is reported when ``metric`` was above ``bound`` (or not a number) in ``steps`` steps in a row.
    ``advice``: end of the message, after the value and the bound."""

    metric: str
    bound: float
    steps: int = 1
    advice: str


def alarm_rules(mismatch_bound: float, canary_bound: float = 0.0) -> tuple[AlarmRule, ...]:
    """Return the rules of a run. ``mismatch_bound``: ``off_policy.advanced.alarm`` of the recipe. ``canary_bound``:
    alarm of ``learning/canary.py``. A bound of 0 leaves its rule out."""
    no_signal = AlarmRule(
        metric="reward/zero_std_ratio",
        bound=NO_SIGNAL_SHARE,
        steps=NO_SIGNAL_STEPS,
        advice="almost every prompt is always or never solved, so there is nothing to learn from: choose prompts of "
        "other difficulty, a larger rollout.group_size, or end the run",
    )
    mismatch = AlarmRule(
        metric="policy/mismatch_abs_mean",
        bound=mismatch_bound,
        advice="engine and trainer disagree about the logprobs of tokens that this very version sampled. Look at "
        "engines.dtype and training.compute_dtype (set both to float32 to compare), at sampling.temperature and "
        "sampling.top_p, and set weights.advanced.audit_interval = 1 to see "
        "whether the engines hold the trainer's weights; off_policy.correct_mismatch = true corrects what stays, "
        "off_policy.advanced.alarm moves this bound",
    )
    lower_tail = AlarmRule(
        metric="policy/mismatch_below_ratio",
        bound=FAR_BELOW_SHARE if mismatch_bound > 0 else 0.0,
        advice="the engine sampled tokens that the trainer, on the same weights, finds less than 1 / e as likely: the "
        "policy would hardly sample them, and training on them may diverge (Sparrow, arXiv 2606.08446). Look at "
        "engines.dtype and training.compute_dtype, at engines.args, and at sampling settings that cut tokens; "
        'off_policy.mask = "icepop" leaves such tokens out',
    )
    canary = AlarmRule(
        metric="weights/canary_deviation",
        bound=canary_bound,
        advice="an engine finds other logprobs for fixed tokens than the trainer does on the same weights. Look at "
        "policy/mismatch_abs_mean for what was sampled meanwhile, and set weights.advanced.audit_interval = 1 to "
        "see whether "
        "the engines hold the trainer's weights; an engine that is much further off takes them anew by itself",
    )
    observers = AlarmRule(
        metric="health/observer_errors_total",
        bound=0,
        advice="an observer of run.advanced.observers raises; logs/controller.log has the first error of each",
    )
    return (*(rule for rule in (mismatch, lower_tail, canary) if rule.bound > 0), no_signal, observers)


class Alarms:
    """State of the rules in one run. Call ``check`` for every step, in order."""

    def __init__(self, rules: Sequence[AlarmRule]) -> None:
        self._rules = tuple(rules)
        self._steps_above = dict.fromkeys(self._rules, 0)
        self._reported_at: dict[AlarmRule, int] = {}
        self._failures = 0
        self._failure_reported_at = -math.inf

    def check(self, step: int, metrics: Metrics) -> list[str]:
        """Return the messages to report after ``step``. A rule that was reported in the last ``REPEAT_STEPS`` steps has
        none."""
        messages = [self._check_rule(rule, step, metrics) for rule in self._rules]
        return [message for message in messages if message]

    def reward_failed(self, step: int, message: str) -> str:
        """Count a failed reward. Returns the message to report: for the first failure, then at most once in
        ``REPEAT_STEPS`` steps; else an empty text."""
        self._failures += 1
        if step - self._failure_reported_at < REPEAT_STEPS:
            return ""
        self._failure_reported_at = step
        count = "a reward has failed" if self._failures == 1 else f"{self._failures} rewards have failed so far"
        return f"{count}; what they were for is not trained on. The last one: {message or 'no message'}"

    def _check_rule(self, rule: AlarmRule, step: int, metrics: Metrics) -> str:
        value = metrics.get(rule.metric)
        if value is None:  # not measured in this step
            return ""
        above = math.isnan(value) or value > rule.bound
        steps_above = self._steps_above[rule] + 1 if above else 0
        self._steps_above[rule] = steps_above
        if not above or steps_above < rule.steps or step - self._reported_at.get(rule, -math.inf) < REPEAT_STEPS:
            return ""
        self._reported_at[rule] = step
        text = f"{rule.metric} is {value:.3g}, above {rule.bound:g}"
        if steps_above > 1:
            text += f" for {steps_above} steps"
        return f"{text}: {rule.advice}"
