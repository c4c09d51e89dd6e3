"""What looks at a run while its controller works: the report with its alarms, elastic engines, the audit of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from streamrl.base.messages import EngineLoad, WeightAnnouncement
from streamrl.base.stage_messages import RewardOutcome, TrajectoryPaused
from streamrl.base.types import DropReason, ScoredTrajectory
from streamrl.base.waits import Waits
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.machine import Control
from streamrl.engines.elastic.elastic_engines import ElasticEngines
from streamrl.engines.push.verify import WeightAudit
from streamrl.engines.push.weight_sync import PushReport
from streamrl.observe.report.alarms import Alarms
from streamrl.observe.report.run_report import RunReport
from streamrl.recipe.scheduling import RoundKind
from streamrl.run.evaluate.evaluation import Evaluations
from streamrl.run.journal.recover import RecoveredRun, Retrained, retrain_batches
from streamrl.run.parts import Observer
from streamrl.run.trainer_ranks import TrainerRanks

MEASURING_INTERVAL_S = 0.25


class ReportObserver(Observer):
    """``report`` and ``alarms`` on what ``control`` does. ``load``: of all engines; ``engines``: figures of the sets of
    engines, for the record of a step."""

    def __init__(
        self,
        report: RunReport,
        alarms: Alarms,
        control: Control,
        store: TrajectoryStore,
        evaluations: Evaluations,
        *,
        load: Callable[[], EngineLoad],
        engines: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self._report, self._alarms, self._control, self._store = report, alarms, control, store
        self._evaluations, self._load, self._engines = evaluations, load, engines
        self._notify: Callable[[on.ControlEvent], None] = lambda event: None
        self._measuring = anyio.CancelScope()

    @property
    def _next_step(self) -> int:
        return self._control.state.trainer_version + 1

    async def run(self, notify: Callable[[on.ControlEvent], None]) -> None:
        """Measure the engines a few times a second."""
        self._notify = notify
        # Only a policy of the user's reads it; for others it would make the journal longer.
        reports_load = self._control.settings.rounds is RoundKind.CUSTOM
        with self._measuring:
            while True:
                await anyio.sleep(MEASURING_INTERVAL_S)
                measured = self._report.engines_measured(self._load())
                if reports_load:
                    notify(measured)

    def end(self) -> None:
        """See ``Observer``."""
        self._measuring.cancel()

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """See ``Observer``."""
        self._report.began()

    async def on_event(self, event: on.ControlEvent) -> None:
        """See ``Observer``."""
        if isinstance(event, on.TrajectoryFailed) and event.reason is DropReason.REWARD_FAILED:
            step = self._next_step
            if warning := self._alarms.reward_failed(step, event.message):
                await self._report.warned(step, warning)

    async def on_action(self, action: do.ControlAction, beside: TaskGroup) -> None:
        """See ``Observer``."""
        match action:
            case do.LaunchGroup():
                prompt = self._store.prompts[action.ids[0].prompt_id]
                self._report.launched(action, len(prompt.token_ids))
            case do.Drop():
                self._report.dropped(action.ids, action.reason)
            case do.Decision():
                await self._report.decided(action, self._next_step)
            case do.StepOptimizer():
                self._report.batch_closed(action.round_kind)
            case do.PublishWeights():
                self._report.publishing()

    def on_outcome(self, outcome: RewardOutcome) -> None:
        """See ``Observer``."""
        self._report.came_back(outcome)

    def on_trained(self, policy_version: int, batch: Sequence[ScoredTrajectory], metrics: dict[str, float]) -> None:
        """See ``Observer``."""
        self._report.batch_trained(policy_version, batch, metrics)

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:  # type: ignore[override]
        """See ``Observer``."""
        version = push.policy_version
        metrics = await self._report.step_finished(push, self._control.state, self._engines())
        for message in self._alarms.check(version, metrics):
            await self._report.warned(version, message)
        if (timed := self._report.round_timed(version)) is not None:
            self._notify(timed)

    async def on_progress(self) -> None:
        """See ``Observer``."""
        await self._report.progress(self._control.state, self._evaluations.running)


class ResumeObserver(Observer):
    """Brings the trainer ranks of a resumed run to the version of the journal, then reports what was restored."""

    def __init__(self, recovered: RecoveredRun, trainer: TrainerRanks, report: RunReport, waits: Waits) -> None:
        self._recovered, self._trainer, self._report, self._waits = recovered, trainer, report, waits
        self._held_version = trainer.policy_version
        self._retrained = Retrained(self._held_version)

    async def prepare(self) -> None:
        """See ``Observer``."""
        self._report.waits.look(self._recovered.state)
        with self._waits.waiting_for("the trainer to train again what the journal has"):
            self._retrained = await retrain_batches(self._trainer, self._recovered, self._held_version)

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """See ``Observer``."""
        recovered, retrained = self._recovered, self._retrained
        version = retrained.policy_version
        await self._report.resumed(recovered, retrained, self._held_version, anchor.state_hash)
        if version > recovered.state.live_version:
            self._report.trained_before(version, recovered.batch_of(version), retrained.reports)
        recovered.store.forget(t for batch in recovered.trained for group in batch.groups for t in group.ids)


class EnginesObserver(Observer):
    """``elastic`` engines, and the audit of their weights once all of them serve again."""

    def __init__(self, elastic: ElasticEngines, store: TrajectoryStore, audit: WeightAudit) -> None:
        self._elastic, self._store, self._audit = elastic, store, audit

    async def run(self, notify: Callable[[on.ControlEvent], None]) -> None:
        """See ``Observer``."""
        await self._elastic.run()

    def end(self) -> None:
        """See ``Observer``."""
        self._elastic.end()

    async def on_began(self, anchor: WeightAnnouncement) -> None:
        """See ``Observer``."""
        await self._audit.after_push(anchor.policy_version)

    async def on_event(self, event: on.ControlEvent) -> None:
        """See ``Observer``."""
        if isinstance(event, on.StopRequested):
            self._elastic.give_up()

    async def on_action(self, action: do.ControlAction, beside: TaskGroup) -> None:
        """See ``Observer``."""
        if isinstance(action, do.LaunchGroup):
            tokens = len(self._store.prompts[action.ids[0].prompt_id].token_ids)
            await self._elastic.launched(action.round_kind, action.ids, tokens, action.policy_version, beside)
        elif isinstance(action, do.StepOptimizer):
            self._elastic.batch_closed()

    def on_outcome(self, outcome: RewardOutcome) -> None:
        """See ``Observer``."""
        if not isinstance(outcome, TrajectoryPaused):
            self._elastic.ended(outcome)

    async def on_weights_live(self, push: PushReport, *, last: bool) -> None:  # type: ignore[override]
        """See ``Observer``."""
        await self._elastic.version_live(push.policy_version, last=last)
        await self._audit.after_push(push.policy_version)
