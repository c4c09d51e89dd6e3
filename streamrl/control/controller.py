"""The async shell around the pure core: streams and answers become events, actions become orders.

Everything that may take long (drawing prompts, a step, a push, an evaluation, a checkpoint) is a child of the
controller's task group and comes back as an event. The loop itself only sends.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.alarms import Alarms
from streamrl.control.evaluation import Evaluation, HeldOut
from streamrl.control.event_log import EventLog
from streamrl.control.publisher import WeightPublisher
from streamrl.control.run_report import RunReport
from streamrl.control.state import ControlSettings, ControlState
from streamrl.control.trainer_ranks import TrainerRanks, announcement
from streamrl.errors import RewardFailureLimit, StreamRLError
from streamrl.messages import CloseBatch, StepReport, WeightAnnouncement
from streamrl.seeds import derive_seed
from streamrl.stage_messages import (
    CancelTrajectories,
    LaunchTrajectory,
    RewardOutcome,
    RolloutOrder,
    TrajectoryLost,
)
from streamrl.types import (
    DropReason,
    Prompt,
    RewardFailure,
    ScoredTrajectory,
    TrainingGroup,
    TrajectoryId,
    to_training_sample,
)


class PromptSource(Protocol):
    """Where prompts come from; fewer than asked for means that it is exhausted."""

    async def draw(self, count: int) -> list[Prompt]: ...


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
        save: Callable[[int], Awaitable[None]],
        audit: Callable[[int], Awaitable[None]],
        scored: Callable[[int, dict[str, float]], Awaitable[None]],
        store: Callable[[int, Sequence[RewardOutcome]], Awaitable[None]] | None,
        alarms: Alarms,
        start_version: int = 0,
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
        self._audit = audit
        self._scored = scored
        self._store = store
        self._alarms = alarms
        self._start_version = start_version
        self._drawn: OrderedDict[str, Prompt] = OrderedDict()
        # What may be asked for again is bounded by the slots; the rest of the shelf is forgotten.
        self._shelf = 1024 + 32 * (settings.max_staleness + 1) * settings.batch_groups
        self._payloads: dict[TrajectoryId, ScoredTrajectory] = {}
        self._batch: list[ScoredTrajectory] = []
        self._announced: dict[int, WeightAnnouncement] = {}
        self._evaluation: Evaluation | None = None
        # Bounded by the slots and by one answer for each kind of order.
        self._tell, self._events = anyio.create_memory_object_stream[on.ControlEvent](math.inf)

    def stop(self, reason: str) -> None:
        """Ask for a drain. May be called at any time from the event loop, also twice."""
        self._tell.send_nowait(on.StopRequested(reason=reason))

    async def run(self, orders: SendStream[RolloutOrder], scored: ReceiveStream[RewardOutcome]) -> str:
        """Make the first version live, train, and return why the run ended. Ends ``orders`` and the ranks' batches."""
        reason, version = "", self._start_version
        async with self._tell, self._events, anyio.create_task_group() as children:
            children.start_soon(self._receive_outcomes, scored)
            await self._publisher.push(await self._trainer.publish_anchor(version))
            await self._trainer.acknowledge(version)
            await self._audit(version)
            self._report.began()
            self._tell.send_nowait(on.RunBegan(policy_version=version))
            while not reason:
                event = await self._events.receive()
                self._log.append(event, self._report.elapsed())
                for action in self.state.handle(event):
                    reason = await self._perform(action, orders, children) or reason
                await self._report.progress(self.state, self._evaluation)
            await orders.aclose()
            await self._trainer.aclose()
        return reason

    async def _perform(self, action: do.ControlAction, orders: SendStream[RolloutOrder], children: TaskGroup) -> str:
        """Carry out one action. Returns the reason when it is the last one."""
        match action:
            case do.DrawPrompts():
                children.start_soon(self._draw, action.count)
            case do.LaunchGroup():
                await self._launch(action, orders)
            case do.CancelGroup():
                self._forget(action.ids)
                await orders.send(CancelTrajectories(ids=action.ids))
            case do.ForgetTrajectories():
                self._forget(action.ids)
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
                self._report.batch_closed()
                batch, self._batch = self._batch, []
                children.start_soon(self._step, action, gather, batch)
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
                children.start_soon(self._checkpoint, action.policy_version)
            case do.StopRun():
                raise RewardFailureLimit(action.message)
            case do.FinishRun():
                return action.reason
        return ""

    async def _receive_outcomes(self, scored: ReceiveStream[RewardOutcome]) -> None:
        async for item in scored:
            if self._is_held_out(item):
                if self._evaluation is not None:
                    self._evaluation.take(item)
                await self._report.progress(self.state, self._evaluation)
                continue
            event = self._event_of(item)
            if event is not None:
                await self._tell.send(event)

    @staticmethod
    def _is_held_out(item: RewardOutcome) -> bool:
        return item.evaluation if isinstance(item, TrajectoryLost) else item.outcome.trajectory.evaluation

    def _event_of(self, item: RewardOutcome) -> on.ControlEvent | None:
        if isinstance(item, TrajectoryLost):
            reason = DropReason.CANCELLED if item.cancelled else DropReason.ENGINE_FAILED
            return on.TrajectoryFailed(id=item.id, reason=reason, message=item.reason, tokens=item.tokens)
        outcome = item.outcome
        trajectory = outcome.trajectory
        if isinstance(outcome, RewardFailure):
            self._report.reward_failed(outcome)
            message = f"{outcome.function} {outcome.kind}: {outcome.message}"
            tokens = trajectory.generated_tokens
            return on.TrajectoryFailed(
                id=trajectory.id, reason=DropReason.REWARD_FAILED, message=message, tokens=tokens
            )
        if self.state.buffer.member(trajectory.id) is None:
            return None  # cancelled while it was scored
        self._payloads[trajectory.id] = outcome
        return on.TrajectoryScored(
            id=trajectory.id,
            reward=outcome.reward,
            tokens=trajectory.generated_tokens,
            finish_reason=trajectory.finish_reason,
            oldest_version=trajectory.oldest_version,
            newest_version=trajectory.newest_version,
        )

    async def _draw(self, count: int) -> None:
        prompts = await self._prompts.draw(count)
        for prompt in prompts:
            self._drawn[prompt.prompt_id] = prompt
            self._drawn.move_to_end(prompt.prompt_id)
        while len(self._drawn) > self._shelf:
            self._drawn.popitem(last=False)
        names = tuple(p.prompt_id for p in prompts)
        await self._tell.send(on.PromptsDrawn(prompt_ids=names, exhausted=len(prompts) < count))

    async def _launch(self, action: do.LaunchGroup, orders: SendStream[RolloutOrder]) -> None:
        version = self.state.live_version
        for trajectory in action.ids:
            identity = (trajectory.prompt_id, trajectory.group_id, trajectory.sample, trajectory.attempt)
            seed = derive_seed(self._seed, *identity, version)
            await orders.send(
                LaunchTrajectory(
                    id=trajectory, prompt=self._drawn[trajectory.prompt_id], group_size=len(action.ids), seed=seed
                )
            )

    def _forget(self, ids: Sequence[TrajectoryId]) -> None:
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
        await self._audit(policy_version)
        metrics = await self._report.step_finished(push, self.state)
        for message in self._alarms.check(policy_version, metrics):
            await self._report.warned(policy_version, message)
            await self._tell.send(on.AlarmRaised(step=policy_version, message=message))
        await self._tell.send(on.WeightsLive(policy_version=policy_version))

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

    async def _checkpoint(self, policy_version: int) -> None:
        await self._save(policy_version)
        await self._tell.send(on.CheckpointDone(policy_version=policy_version))
