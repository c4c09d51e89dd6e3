"""The warning about samples that a step should have trained and did not, with the reasons. ``launch/observers.py``
makes ``MissingSamples``, and the controller calls it as an observer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from streamrl.base.run_events import RunWarning
from streamrl.base.types import FinishReason, Metrics, ScoredTrajectory
from streamrl.contracts import Observer, PushReport
from streamrl.control import actions as do
from streamrl.control.events import ControlEvent, TrajectoryFailed
from streamrl.control.machine import Control


class MissingSamples(Observer):
    """Emits a warning for each step that lacks samples: samples that failed in the groups of its batch, empty places of
    its batch because the prompts have run out, and samples that the loss does not see. ``train_truncated``: whether the
    loss sees samples that were cut at ``max_tokens``."""

    def __init__(
        self, control: Control, emit: Callable[[RunWarning], Awaitable[None]], *, train_truncated: bool
    ) -> None:
        self._control = control
        self._emit = emit
        self._train_truncated = train_truncated
        self._failed: dict[int, list[TrajectoryFailed]] = {}
        self._reasons: Counter[str] = Counter()
        self._expected_samples = 0
        self._lines: dict[int, list[str]] = {}

    async def on_event(self, event: ControlEvent) -> None:
        """Note the failure of a trajectory, whose group may be trained without it."""
        if isinstance(event, TrajectoryFailed):
            self._failed.setdefault(event.id.group_id, []).append(event)

    async def on_action(self, action: do.ControlAction) -> None:
        """Note each group of the batch, and the end of the batch, whose ``missing`` is the part that stays empty."""
        buffer = self._control.state.buffer
        batch = self._control.state.batch
        if isinstance(action, do.TrainGroupNow):
            group = buffer.batched.get(action.group_id)
            if group is not None:
                self._note_group(action, group.keep)
        elif isinstance(action, do.StepOptimizer):
            self._failed = {
                group_id: events for group_id, events in self._failed.items() if group_id in buffer.untrained
            }
            self._write_lines(action.policy_version, batch.missing)

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: Metrics) -> None:
        """Note samples that the loss does not see."""
        empty = sum(not scored.trajectory.generated_tokens for scored in batch)
        truncated = sum(scored.trajectory.finish_reason is FinishReason.LENGTH for scored in batch)
        counts = {"have no token": empty, "were cut at max_tokens": 0 if self._train_truncated else truncated}
        self._lines.setdefault(policy_version, []).extend(
            f"{count} of {len(batch)} samples {text}, so the loss does not see them"
            for text, count in counts.items()
            if count
        )

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:
        """Emit the warning. The report, which is called before this observer, has emitted ``StepFinished``."""
        if lines := self._lines.pop(push.policy_version, []):
            await self._emit(RunWarning(step=push.policy_version, message="; ".join(lines)))

    def _note_group(self, action: do.TrainGroupNow, expected: int) -> None:
        """Count the samples of a group that are not trained, by reason. ``expected``: number that should be trained."""
        failures = self._failed.pop(action.group_id, [])
        trained = len(action.ids)
        self._expected_samples += max(expected, trained)
        for place in range(expected - trained):
            reason = "failed before the run was resumed"
            if place < len(failures):
                event = failures[place]
                reason = f"{event.reason}: {event.message or 'no message'}"
            self._reasons[reason] += 1

    def _write_lines(self, policy_version: int, empty_places: int) -> None:
        """Keep the texts of the closed batch until its version is live."""
        expected = self._expected_samples
        missing = self._reasons.total()
        lines = []
        if missing:
            reasons = "; ".join(f"{count} {reason}" for reason, count in self._reasons.most_common())
            lines.append(f"{expected - missing} of {expected} samples were trained ({reasons})")
        if empty_places > 0:
            lines.append(f"{empty_places} places of its batch stayed empty: no prompts are left")
        self._lines[policy_version] = lines
        self._reasons = Counter()
        self._expected_samples = 0
