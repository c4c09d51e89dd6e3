"""Alarms: rules over the metrics of steps that tell a person that training went wrong. Pure; they stop nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

REPEAT_STEPS = 20
"""An alarm is reported at most once in so many steps, whether it lasts or comes and goes."""
NO_SIGNAL_SHARE = 0.95
NO_SIGNAL_STEPS = 10


class AlarmRule(msgspec.Struct, frozen=True, kw_only=True):
    """Raised when ``metric`` was above ``bound`` (or not a number) in ``steps`` steps in a row. ``advice`` follows the
    value and the bound in the message."""

    metric: str
    bound: float
    steps: int = 1
    advice: str


def alarm_rules(mismatch_bound: float, canary_bound: float = 0.0) -> tuple[AlarmRule, ...]:
    """The rules of a run. ``mismatch_bound``: ``off_policy.advanced.alarm`` of the recipe; ``canary_bound``: see
    ``config.canary``; 0 leaves a rule out."""
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
    return (*(rule for rule in (mismatch, canary) if rule.bound > 0), no_signal, observers)


class Alarms:
    """The state of the rules in one run. Feed it every step, in order."""

    def __init__(self, rules: Sequence[AlarmRule]) -> None:
        self._rules = tuple(rules)
        self._above = dict.fromkeys(self._rules, 0)
        self._reported: dict[AlarmRule, int] = {}
        self._failures = 0
        self._failure_reported = -math.inf

    def check(self, step: int, metrics: dict[str, float]) -> list[str]:
        """Alarms to report after ``step``: those that were not reported in the last ``REPEAT_STEPS`` steps."""
        return [message for rule in self._rules if (message := self._check_rule(rule, step, metrics))]

    def reward_failed(self, step: int, message: str) -> str:
        """Report failed rewards: the first one, and others as seldom as an alarm; empty: nothing to report."""
        self._failures += 1
        if step - self._failure_reported < REPEAT_STEPS:
            return ""
        self._failure_reported = step
        count = "a reward has failed" if self._failures == 1 else f"{self._failures} rewards have failed so far"
        return f"{count}; what they were for is not trained on. The last one: {message or 'no message'}"

    def _check_rule(self, rule: AlarmRule, step: int, metrics: dict[str, float]) -> str:
        value = metrics.get(rule.metric)
        if value is None:  # not measured in this step: nothing is known
            return ""
        above = math.isnan(value) or value > rule.bound
        self._above[rule] = self._above[rule] + 1 if above else 0
        if not above or self._above[rule] < rule.steps or step - self._reported.get(rule, -math.inf) < REPEAT_STEPS:
            return ""
        self._reported[rule] = step
        row = f" for {self._above[rule]} steps" if self._above[rule] > 1 else ""
        return f"{rule.metric} is {value:.3g}, above {rule.bound:g}{row}: {rule.advice}"
