"""Samples that a step should have trained and did not, with the reasons, in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from streamrl.base.run_events import RunWarning
from streamrl.base.types import FinishReason, ScoredTrajectory
from streamrl.contracts import Observer, PushReport
from streamrl.control import actions as do
from streamrl.control.events import ControlEvent, TrajectoryFailed
from streamrl.control.machine import Control


class MissingSamples(Observer):
    """Emits a warning for each step that lacks samples: those that failed in its groups, places of its batch that no
    prompt was left for, and samples that the loss does not see. ``train_truncated``: it sees those that were cut."""

    def __init__(
        self, control: Control, emit: Callable[[RunWarning], Awaitable[None]], *, train_truncated: bool
    ) -> None:
        self._control = control
        self._emit = emit
        self._train_truncated = train_truncated
        self._failed: dict[int, list[TrajectoryFailed]] = {}
        self._reasons: Counter[str] = Counter()
        self._wanted = 0
        self._lines: dict[int, list[str]] = {}

    async def on_event(self, event: ControlEvent) -> None:
        """Note the failure of a trajectory, whose group may be trained without it."""
        if isinstance(event, TrajectoryFailed):
            self._failed.setdefault(event.id.group_id, []).append(event)

    async def on_action(self, action: do.ControlAction) -> None:
        """Note the groups of the batch, and that it is closed."""
        buffer = self._control.state.buffer
        batch = self._control.state.batch
        if isinstance(action, do.TrainGroupNow) and (group := buffer.batched.get(action.group_id)) is not None:
            self._joined(action, group.keep)
        elif isinstance(action, do.StepOptimizer):
            self._failed = {group: events for group, events in self._failed.items() if group in buffer.untrained}
            self._closed(action.policy_version, batch.missing)

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: dict[str, float]) -> None:
        """Note samples that the loss does not see."""
        empty = sum(not scored.trajectory.generated_tokens for scored in batch)
        cut = sum(scored.trajectory.finish_reason is FinishReason.LENGTH for scored in batch)
        why = {"have no token": empty, "were cut at max_tokens": 0 if self._train_truncated else cut}
        self._lines.setdefault(policy_version, []).extend(
            f"{count} of {len(batch)} samples {text}, so the loss does not see them"
            for text, count in why.items()
            if count
        )

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Emit the warning, after the line of the step."""
        if lines := self._lines.pop(push.policy_version, []):
            await self._emit(RunWarning(step=push.policy_version, message="; ".join(lines)))

    def _joined(self, action: do.TrainGroupNow, wanted: int) -> None:
        failures = self._failed.pop(action.group_id, [])
        trained = len(action.ids)
        self._wanted += max(wanted, trained)
        for place in range(wanted - trained):
            event = failures[place] if place < len(failures) else None
            reason = (
                f"{event.reason}: {event.message or 'no message'}" if event else "failed before the run was resumed"
            )
            self._reasons[reason] += 1

    def _closed(self, policy_version: int, empty_places: int) -> None:
        lacks = self._reasons.total()
        reasons = "; ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
        lines = [f"{self._wanted - lacks} of {self._wanted} samples were trained ({reasons})"] if lacks else []
        if empty_places > 0:
            lines.append(f"{empty_places} places of its batch stayed empty: no prompts are left")
        self._lines[policy_version] = lines
        self._reasons = Counter()
        self._wanted = 0
