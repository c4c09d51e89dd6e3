"""What the reward functions did since the last step, and what waiting for them cost the round. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from streamrl.base.stage_messages import Scored
from streamrl.base.types import RewardFailure, ScoredTrajectory, TrajectoryId
from streamrl.observe.report.step_metrics import percentile


class _Returned(msgspec.Struct, frozen=True):
    """When a reward came back, how long it had taken since its trajectory was sampled, and the function of most."""

    at_s: float
    reward_s: float
    slowest: str


class RewardWindow:
    """Counts calls as their outcomes come back; ``take`` once a step."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._waited: defaultdict[str, list[float]] = defaultdict(list)
        self._limits: defaultdict[str, list[float]] = defaultdict(list)
        self._failures: Counter[str] = Counter()
        self._returned: dict[TrajectoryId, _Returned] = {}

    def came_back(self, item: Scored, now: float, *, wanted: bool = True) -> None:
        """The outcome of one trajectory arrived, at ``now`` in seconds. ``wanted``: it was not dropped before."""
        outcome = item.outcome
        for call in outcome.calls:
            name = call.function
            self._seconds[name].append(call.seconds)
            self._waited[name].append(call.waited_s)
            if call.adapted:
                self._limits[name].append(call.limit_s)
            if call.failure is not None:
                self._failures[f"reward/func/{name}/{call.failure}_total"] += 1
        if isinstance(outcome, RewardFailure):
            if outcome.function not in {call.function for call in outcome.calls if call.failure is not None}:
                self._failures[f"reward/func/{outcome.function}/{outcome.kind}_total"] += 1
            return
        if not wanted:
            return  # it is in no batch, and nobody will say again that it is dropped
        slowest = max(outcome.calls, key=lambda call: call.seconds + call.waited_s, default=None)
        name = "" if slowest is None else slowest.function
        self._returned[outcome.trajectory.id] = _Returned(now, item.reward_s or outcome.reward_seconds, name)

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        """They will not be trained."""
        for identity in ids:
            self._returned.pop(identity, None)

    def cost(self, batch: Sequence[ScoredTrajectory]) -> dict[str, float]:
        """``round_cost_s``: how much sooner the batch would have been complete, had every reward come at once. It is
        counted to the function that the last sample waited for longest."""
        members = [r for scored in batch if (r := self._returned.pop(scored.trajectory.id, None)) is not None]
        if not members:
            return {}
        last = max(members, key=lambda member: member.at_s)
        cost = max(last.at_s - max(member.at_s - member.reward_s for member in members), 0.0)
        metrics = {"reward/round_cost_s": cost}
        if last.slowest:
            metrics[f"reward/func/{last.slowest}/round_cost_s"] = cost
        return metrics

    def take(self) -> dict[str, float]:
        """Figures of the calls since this was asked before; failures since the start."""
        metrics: dict[str, float] = {}
        for name, seconds in self._seconds.items():
            metrics[f"reward/func/{name}/latency_p50_s"] = percentile(seconds, 0.5)
            metrics[f"reward/func/{name}/latency_p95_s"] = percentile(seconds, 0.95)
            metrics[f"reward/func/{name}/waited_p95_s"] = percentile(self._waited[name], 0.95)
        for name, limits in self._limits.items():
            metrics[f"reward/func/{name}/adapted_limit_p50_s"] = percentile(limits, 0.5)
        for kept in (self._seconds, self._waited, self._limits):
            kept.clear()
        return metrics | {name: float(count) for name, count in self._failures.items()}
