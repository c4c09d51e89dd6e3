"""The async shell around the pure core: streams and answers become events, actions become orders.

Everything that may take long (drawing prompts, a step, a push, an evaluation, a checkpoint) is a child of the
controller's task group and comes back as an event. The loop itself only sends.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import anyio
from anyio.abc import TaskGroup

from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.config.scheduling import RoundKind
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.alarms import Alarms
from streamrl.control.control_file import control_file
from streamrl.control.engine_release import EngineRelease
from streamrl.control.engine_sets import SetPlan
from streamrl.control.engine_switch import EngineSwitch
from streamrl.control.evaluation import Evaluation, HeldOut
from streamrl.control.event_log import EventLog
from streamrl.control.kept_state import KeptControl
from streamrl.control.outcome_events import event_of
from streamrl.control.prompt_shelf import PromptShelf, PromptSource
from streamrl.control.publisher import WeightPublisher
from streamrl.control.run_report import RunReport
from streamrl.control.settings import ControlSettings
from streamrl.control.snapshot import take_snapshot
from streamrl.control.state import ControlState
from streamrl.control.trainer_ranks import TrainerRanks, announcement
from streamrl.errors import RewardFailureLimit, StreamRLError
from streamrl.messages import CloseBatch, EngineLoad, StepReport, WeightAnnouncement
from streamrl.seeds import derive_seed
from streamrl.stage_messages import (
    CancelTrajectories,
    ContinueTrajectories,
    EndedOutcome,
    HoldTrajectories,
    LaunchTrajectory,
    RewardOutcome,
    RolloutOrder,
    Scored,
    TrajectoryHeld,
    TrajectoryLost,
)
from streamrl.types import (
    DropReason,
    ScoredTrajectory,
    TrainingGroup,
    TrajectoryId,
    to_training_sample,
)

MEASURING_INTERVAL_S = 0.25


class Controller:
    """Runs one ``ControlState`` against a trainer, a publisher and the two stages. ``run`` once."""

    def __init__(
        self,
        settings: ControlSettings,
        *,
        prompts: PromptSource,
        held_out: HeldOut,
        trainer: TrainerRanks,
        publisher: WeightPublisher,
        log: EventLog,
        report: RunReport,
        seed: int,
        save: Callable[[int, Mapping[str, bytes]], Awaitable[None]],
        beside: Callable[[], Mapping[str, bytes]] = dict,
        audit: Callable[[int], Awaitable[None]],
        scored: Callable[[int, dict[str, float]], Awaitable[None]],
        store: Callable[[int, Sequence[EndedOutcome]], Awaitable[None]] | None,
        alarms: Alarms,
        load: Callable[[], EngineLoad],
        release: EngineRelease | None = None,
        switch: EngineSwitch | None = None,
        start_version: int = 0,
        kept: KeptControl | None = None,
    ) -> None:
        self.state = ControlState(settings)
        self._prompts = prompts
        self._held_out = held_out
        self._trainer = trainer
        self._publisher = publisher
        self._log = log
        self._report = report
        self._seed = seed
        self._save = save
        self._beside = beside
        self._audit = audit
        self._scored = scored
        self._store = store
        self._alarms = alarms
        self._load = load
        self._release = release
        self._switch = switch
        # Others decide nothing from it, and a log of a run of days is long enough.
        self._tells_load = settings.rounds in (RoundKind.AUTO, RoundKind.CUSTOM)
        self._start_version = start_version
        self._kept = kept.snapshot if kept else None
        # What may be asked for again is bounded by the slots, and by the queue that a few batches of losers make.
        # A cohort is drawn at once and launched in any order.
        cohort = max(settings.tail_batching.cohort_batches, settings.length_sorted.cohort_batches)
        remembered = 1024 + 32 * max(self.state.slots.capacity, settings.batch_groups)
        remembered += cohort * settings.batch_trajectories
        self._shelf = PromptShelf(remembered, settings.tail_batching.domain_column, settings.tail_batching.domains)
        self._shelf.put(kept.prompts if kept else ())
        self._payloads: dict[TrajectoryId, ScoredTrajectory] = {}
        self._batch: list[ScoredTrajectory] = []
        self._announced: dict[int, WeightAnnouncement] = {}
        self._evaluation: Evaluation | None = None
        self._measuring = anyio.CancelScope()
        self._freeing = anyio.CancelScope()
        self._served_late = 0
        # Bounded by the slots and by one answer for each kind of order.
        self._tell, self._events = anyio.create_memory_object_stream[on.ControlEvent](math.inf)

    def stop(self, reason: str) -> None:
        """Ask for a drain. May be called at any time from the event loop, also twice."""
        self._tell.send_nowait(on.StopRequested(reason=reason))

    def rewards_attached(self, version: int, rewards: tuple[str, ...], change: str) -> None:
        """Other functions score from now on: for whoever reads the log. In turn with the outcomes that come back."""
        self._tell.send_nowait(on.RewardsAttached(reward_version=version, rewards=rewards, change=change))

    async def run(self, orders: SendStream[RolloutOrder], scored: ReceiveStream[RewardOutcome]) -> str:
        """Make the first version live, train, and return why the run ended. Ends ``orders`` and the ranks' batches."""
        reason, version = "", self._start_version
        async with self._tell, self._events, anyio.create_task_group() as children:
            children.start_soon(self._receive_outcomes, scored)
            await self._publisher.push(await self._trainer.publish_anchor(version))
            await self._trainer.acknowledge(version)
            await self._audit(version)
            self._report.began()
            children.start_soon(self._measure_engines)
            children.start_soon(self._free_engines)
            self._tell.send_nowait(on.RunBegan(policy_version=version, kept=self._kept))
            while not reason:
                event = await self._events.receive()
                self._log.append(event, self._report.elapsed())
                if isinstance(event, on.StopRequested):
                    self._stay_as_they_are()
                for action in self.state.handle(event):
                    reason = await self._perform(action, orders, children) or reason
                await self._report.progress(self.state, self._evaluation)
            self._measuring.cancel()
            self._freeing.cancel()
            await orders.aclose()
            await self._trainer.aclose()
        return reason

    async def _perform(self, action: do.ControlAction, orders: SendStream[RolloutOrder], children: TaskGroup) -> str:
        """Carry out one action. Returns the reason when it is the last one."""
        match action:
            case do.DrawPrompts():
                children.start_soon(self._draw, action.count)
            case do.LaunchGroup():
                await self._launch(action, orders, children)
            case do.CancelGroup():
                self._forget(action.ids, action.reason)
                await orders.send(CancelTrajectories(ids=action.ids))
            case do.ForgetTrajectories():
                self._forget(action.ids, action.reason)
            case do.CutTrajectories():
                await orders.send(HoldTrajectories(ids=action.ids))
            case do.ResumeTrajectories():
                await orders.send(ContinueTrajectories(ids=action.ids))
            case do.HoldEngines():
                # Before anything is submitted: what a running engine takes would be sampled by the old weights.
                await self._publisher.hold()
            case do.Explain():
                self._log.decided(action, self._report.elapsed())
                await self._report.decided(action, self.state.trainer_version + 1)
            case do.TrainGroupNow():
                await self._train_group(action)
            case do.StepOptimizer():
                gather = await self._trainer.close_batch(
                    CloseBatch(
                        batch_id=action.batch_id,
                        policy_version=action.policy_version,
                        groups=action.groups,
                        samples=action.samples,
                        trained_tokens=action.trained_tokens,
                        engines_idle=action.engines_idle,
                    )
                )
                self._report.batch_closed(self.state.round_kind)
                if self._switch is not None:
                    self._switch.round_closed()
                batch, self._batch = self._batch, []
                children.start_soon(self._step, action, gather, batch)
                if self._release is not None and not self._is_last(action.policy_version):
                    children.start_soon(self._release.call_back)
            case do.PublishWeights():
                children.start_soon(self._publish, action.policy_version)
            case do.Evaluate():
                self._evaluation = Evaluation(
                    self._held_out, action.policy_version, limit=action.limit, seed=self._seed
                )
                children.start_soon(self._evaluate, self._evaluation, orders)
            case do.CancelEvaluation():
                if self._evaluation is not None:
                    await self._evaluation.cancel(orders)
            case do.WriteCheckpoint():
                beside = control_file(take_snapshot(self.state), self._shelf) | dict(self._beside())
                children.start_soon(self._checkpoint, action.policy_version, beside)
            case do.StopRun():
                raise RewardFailureLimit(action.message)
            case do.FinishRun():
                return action.reason
        return ""

    async def _receive_outcomes(self, scored: ReceiveStream[RewardOutcome]) -> None:
        async for item in scored:
            if self._is_held_out(item):
                if self._evaluation is not None and not isinstance(item, TrajectoryHeld):
                    self._evaluation.take(item)
                await self._report.progress(self.state, self._evaluation)
                continue
            self._report.came_back(item)
            if not isinstance(item, TrajectoryHeld):
                for follower in (self._release, self._switch):
                    if follower is not None:
                        follower.ended(*_end_of(item))
            event = self._event_of(item)
            if event is not None:
                await self._tell.send(event)

    @staticmethod
    def _is_held_out(item: RewardOutcome) -> bool:
        if isinstance(item, TrajectoryHeld):
            return False
        return item.evaluation if isinstance(item, TrajectoryLost) else item.outcome.trajectory.evaluation

    def _event_of(self, item: RewardOutcome) -> on.ControlEvent | None:
        if isinstance(item, Scored) and isinstance(item.outcome, ScoredTrajectory):
            identity = item.outcome.trajectory.id
            if self.state.buffer.member(identity) is None:
                return None  # cancelled while it was scored
            self._payloads[identity] = item.outcome
        return event_of(item)

    async def _draw(self, count: int) -> None:
        prompts = await self._prompts.draw(count)
        await self._tell.send(self._shelf.drawn(prompts, exhausted=len(prompts) < count))

    async def _launch(self, action: do.LaunchGroup, orders: SendStream[RolloutOrder], children: TaskGroup) -> None:
        prompt = self._shelf[action.ids[0].prompt_id]
        group = self.state.buffer.groups[action.group_id]
        self._report.launched(action, group.round_kind, len(prompt.token_ids))
        if self._release is not None:
            self._release.launched(group.round_kind, action.ids)
        if self._switch is not None:
            version = action.policy_version
            plan = self._switch.launched(group.round_kind, action.ids, len(prompt.token_ids), version)
            if plan is not None and plan.because is not None:
                self._log.decided(plan.because, self._report.elapsed())
                await self._report.decided(plan.because, self.state.trainer_version + 1)
                children.start_soon(self._change_engines, self._switch, plan, version)
        for trajectory in action.ids:
            # Of the noise and not of the group: a loser that is replayed draws what it drew before.
            seed = derive_seed(self._seed, prompt.prompt_id, action.noise, trajectory.sample)
            await orders.send(LaunchTrajectory(id=trajectory, prompt=prompt, group_size=len(action.ids), seed=seed))

    async def _change_engines(self, switch: EngineSwitch, plan: SetPlan, policy_version: int) -> None:
        await switch.carry_out(plan, policy_version)
        self._report.engines_serve(switch.serving)

    def _stay_as_they_are(self) -> None:
        """The run ends: engines are neither freed nor changed, and none is waited for."""
        for part in (self._release, self._switch):
            if part is not None:
                part.give_up()

    def _forget(self, ids: Sequence[TrajectoryId], reason: DropReason) -> None:
        self._report.dropped(ids, reason)
        for trajectory in ids:
            self._payloads.pop(trajectory, None)

    async def _train_group(self, action: do.TrainGroupNow) -> None:
        members = [self._payloads.pop(trajectory) for trajectory in action.ids]
        self._batch.extend(members)
        samples = tuple(to_training_sample(member) for member in members)
        await self._trainer.train_group(
            TrainingGroup(group_id=action.group_id, batch_id=action.batch_id, samples=samples)
        )

    async def _step(
        self,
        action: do.StepOptimizer,
        gather: Callable[[], Awaitable[list[StepReport]]],
        batch: list[ScoredTrajectory],
    ) -> None:
        reports = await gather()
        wrong = [r for r in reports if (r.batch_id, r.policy_version) != (action.batch_id, action.policy_version)]
        if wrong:
            raise StreamRLError(
                f"trainer ranks reported {[(r.batch_id, r.policy_version) for r in wrong]} for batch "
                f"{action.batch_id}, version {action.policy_version}"
            )
        self._announced[action.policy_version] = announcement(reports)
        self._report.batch_trained(action.policy_version, batch, reports[0].metrics)
        await self._tell.send(on.BatchTrained(batch_id=action.batch_id, policy_version=action.policy_version))

    async def _publish(self, policy_version: int) -> None:
        self._report.publishing()
        push = await self._publisher.push(self._announced.pop(policy_version))
        await self._trainer.acknowledge(policy_version)
        await self._begin_round(policy_version)
        await self._audit(policy_version)
        metrics = await self._report.step_finished(push, self.state, self._switch.figures if self._switch else {})
        for message in self._alarms.check(policy_version, metrics):
            await self._report.warned(policy_version, message)
            await self._tell.send(on.AlarmRaised(step=policy_version, message=message))
        await self._tell.send(self._report.round_timed(policy_version))
        await self._tell.send(on.WeightsLive(policy_version=policy_version))

    async def _measure_engines(self) -> None:
        with self._measuring:
            while True:
                await anyio.sleep(MEASURING_INTERVAL_S)
                measured = self._report.engines_measured(self._load())
                if self._tells_load:
                    await self._tell.send(measured)

    async def _free_engines(self) -> None:
        if self._release is not None:
            with self._freeing:
                await self._release.run(self._engines_decided)

    async def _engines_decided(self, decision: do.Explain, done: bool) -> None:
        assert self._release is not None
        self._log.decided(decision, self._report.elapsed())
        if not done:
            return
        serving = self._release.serving
        self._report.engines_serve(serving)
        if serving != self._served_late:  # it will be much the same in every round: people need not be told of each
            self._served_late = serving
            await self._report.decided(decision, self.state.trainer_version + 1)

    async def _begin_round(self, policy_version: int) -> None:
        """All engines serve again: only then is a version live everywhere. After the last one nobody needs them."""
        if self._release is None:
            return
        if self._is_last(policy_version):
            self._release.give_up()
        await self._release.begin_round(policy_version)
        self._report.engines_serve(self._release.serving)

    def _is_last(self, policy_version: int) -> bool:
        """Whether nothing will be sampled for training by ``policy_version``."""
        return self.state.stopping is not None or policy_version >= self.state.settings.steps

    async def _evaluate(self, evaluation: Evaluation, orders: SendStream[RolloutOrder]) -> None:
        figures = await evaluation.run(orders)
        version, self._evaluation = evaluation.policy_version, None
        if not evaluation.cancelled:
            await self._report.evaluation_finished(version, figures)
        await self._tell.send(on.EvaluationDone(policy_version=version))
        # From here on a newer version may be published: the disk must not hold it up.
        if not evaluation.cancelled:
            await self._scored(version, figures)
        if not evaluation.cancelled and self._store is not None:
            await self._store(version, evaluation.outcomes)

    async def _checkpoint(self, policy_version: int, beside: Mapping[str, bytes]) -> None:
        await self._save(policy_version, beside)
        await self._tell.send(on.CheckpointDone(policy_version=policy_version))


def _end_of(item: EndedOutcome) -> tuple[TrajectoryId, int | None]:
    """Which trajectory it is, and the length of its completion, if it has one."""
    if isinstance(item, TrajectoryLost):
        return item.id, None
    trajectory = item.outcome.trajectory
    return trajectory.id, trajectory.generated_tokens
