"""The async shell around the pure core: streams and answers become events, actions become orders.

Everything that may take long (drawing prompts, a step, a push, an evaluation, a checkpoint) is a child of the
controller's task group and comes back as an event. The loop itself only sends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from streamrl.base.concurrent_calls import start_unless_ending
from streamrl.base.errors import RewardFailureLimit, StreamRLError
from streamrl.base.messages import EngineLoad, StepReport, WeightAnnouncement
from streamrl.base.seeds import derive_seed
from streamrl.base.stage_messages import (
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
from streamrl.base.types import DropReason, Prompt, ScoredTrajectory
from streamrl.base.waits import Waits
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.machine import Control
from streamrl.control.model import RunState, prompts_needed
from streamrl.control.pending import groups_in_batch
from streamrl.elastic.elastic_engines import ElasticEngines
from streamrl.evaluate.evaluation import Evaluation, HeldOut
from streamrl.journal.recover import RecoveredRun, Retrained, close_of, retrain_batches
from streamrl.journal.run_journal import RunJournal
from streamrl.observe.report.alarms import Alarms
from streamrl.observe.report.run_report import RunReport
from streamrl.recipe.scheduling import RoundKind
from streamrl.run.checkpoints import fork_point
from streamrl.run.outcome_events import event_of
from streamrl.run.trainer_ranks import TrainerRanks, announcement
from streamrl.sync.weight_sync import PushReport, WeightSync

MEASURING_INTERVAL_S = 0.25


class PromptSource(Protocol):
    """Where prompts come from; fewer than asked for means that it is exhausted."""

    async def draw(self, count: int) -> list[Prompt]: ...


class Controller:
    """Runs one ``Control`` against a trainer, a weight sync and the two stages. ``run`` once."""

    def __init__(
        self,
        control: Control,
        *,
        prompts: PromptSource,
        held_out: HeldOut,
        trainer: TrainerRanks,
        sync: WeightSync,
        report: RunReport,
        seed: int,
        save: Callable[[int, Mapping[str, bytes]], Awaitable[None]],
        beside: Callable[[], Mapping[str, bytes]] = dict,
        audit: Callable[[int], Awaitable[None]],
        scored: Callable[[int, dict[str, float], int], Awaitable[None]],
        store: Callable[[int, Sequence[EndedOutcome]], Awaitable[None]] | None,
        alarms: Alarms,
        load: Callable[[], EngineLoad],
        waits: Waits | None = None,
        elastic: ElasticEngines,
        contents: TrajectoryStore,
        journal: RunJournal,
        start_version: int = 0,
        recovered: RecoveredRun | None = None,
    ) -> None:
        self._control = control
        self._prompts = prompts
        self._held_out = held_out
        self._trainer = trainer
        self._sync = sync
        self._report = report
        self._seed = seed
        self._save = save
        self._beside = beside
        self._audit = audit
        self._scored = scored
        self._store = store
        self._alarms = alarms
        self._load = load
        self._waits = waits or Waits()
        self._elastic = elastic
        # Only a policy of the user's reads it; for others it would make the journal longer.
        self._reports_load = control.settings.rounds is RoundKind.CUSTOM
        self._start_version = start_version
        self._contents = contents
        self._journal = journal
        self._recovered = recovered
        self._live_push: PushReport | None = None
        self._announced: dict[int, WeightAnnouncement] = {}
        self._evaluation: Evaluation | None = None
        self._measuring = anyio.CancelScope()
        unbounded = float("inf")  # slots bound it, and one answer for each kind of order
        self._tell, self._events = anyio.create_memory_object_stream[on.ControlEvent](unbounded)

    @property
    def state(self) -> RunState:
        """The state of control."""
        return self._control.state

    def stop(self, reason: str) -> None:
        """Ask for a drain. May be called at any time from the event loop, also twice, also when the run has ended."""
        self.notify(on.StopRequested(reason=reason))

    def notify(self, event: on.ControlEvent) -> None:
        """Send ``event`` to control, from the event loop; nothing happens where the run has ended."""
        with suppress(anyio.ClosedResourceError):
            self._tell.send_nowait(event)

    async def run(self, orders: SendStream[RolloutOrder], scored: ReceiveStream[RewardOutcome]) -> str:
        """Make the first version live, train, and return why the run ended. Ends ``orders`` and the ranks' batches."""
        reason = ""
        async with self._tell, self._events, anyio.create_task_group() as children:
            children.start_soon(self._receive_outcomes, scored)
            self._sync.on_version_left = partial(start_unless_ending, children, self._cancel_evaluation, orders)
            retrained = Retrained(self._start_version)
            if self._recovered is not None:
                self._report.waits.look(self.state)
                with self._waits.waiting_for("the trainer to train again what the journal has"):
                    retrained = await retrain_batches(self._trainer, self._recovered, self._start_version)
            version = retrained.policy_version
            with self._waits.waiting_for(f"the trainer to publish version {version} complete"):
                anchor = await self._trainer.publish_anchor(version)
            with self._waits.waiting_for(f"every engine to hold version {version}"):
                self._live_push = await self._sync.push(anchor)
            await self._trainer.acknowledge(version)
            await self._audit(version)
            self._report.began()
            children.start_soon(self._measure_engines)
            children.start_soon(self._elastic.run)
            if self._recovered is None:
                self._tell.send_nowait(on.RunBegan(version, self._control.settings.steps))
            else:
                await self._report.resumed(self._recovered, retrained, self._start_version, anchor.state_hash)
                for action in await self._continue(self._recovered, retrained):
                    reason = await self._perform(action, orders, children) or reason
            while not reason:
                event = await self._events.receive()
                for action in await self._handle(event):
                    reason = await self._perform(action, orders, children) or reason
                await self._report.progress(self.state, self._evaluation)
            self._measuring.cancel()
            self._elastic.end()
            self._sync.on_version_left = lambda: None  # no evaluation waits for an engine that joins now
            await self._journal.settled()
            await orders.aclose()
        # Not before the last reward of a deferred prompt came back: the supervisor misses ranks that ended long ago.
        await self._trainer.aclose()
        return reason

    async def _continue(self, recovered: RecoveredRun, retrained: Retrained) -> list[do.ControlAction]:
        """Return what the last controller ordered and was not answered; answers that are known become events first."""
        version, state = retrained.policy_version, self.state
        steps = self._control.settings.steps  # of the recipe, which may have changed since
        if state.draining or state.finished or state.steps != steps:
            await self._handle(on.RunContinued(steps=steps))
        if (evaluated := state.evaluating) is not None and evaluated != version:
            await self._warn_cancelled_evaluation(evaluated, f"the run was resumed with version {version}")
            await self._handle(on.EvaluationDone(policy_version=evaluated))
        if version > state.live_version:
            self._report.trained_before(version, recovered.batch_of(version), retrained.reports)
        again = self._control.orders_again()
        for batch in recovered.trained:
            self._contents.forget(trajectory for group in batch.groups for trajectory in group.ids)
        return again

    async def _handle(self, event: on.ControlEvent) -> list[do.ControlAction]:
        """Journal ``event`` and let control decide."""
        elapsed_s = self._report.elapsed()
        self._journal.on_event(event, self._control, elapsed_s)
        if isinstance(event, on.StopRequested):
            self._elastic.give_up()
        if isinstance(event, on.TrajectoryFailed) and event.reason is DropReason.REWARD_FAILED:
            step = self.state.trainer_version + 1
            if warning := self._alarms.reward_failed(step, event.message):
                await self._report.warned(step, warning)
        batch = groups_in_batch(self.state) if isinstance(event, on.BatchTrained) else ()
        actions = self._control.handle(event)
        self._contents.forget(trajectory for group in batch for trajectory in group.ids)
        if isinstance(event, on.TrajectoryFailed):
            self._contents.forget((event.id,))
        if isinstance(event, on.RunBegan):
            await self._journal.begin(self._control)
        if isinstance(event, on.BatchTrained):
            self._contents.forget_other_prompts(lambda: prompts_needed(self.state))
        return actions

    async def _perform(self, action: do.ControlAction, orders: SendStream[RolloutOrder], children: TaskGroup) -> str:
        """Carry out one action. Returns the reason when it is the last one."""
        match action:
            case do.DrawPrompts():
                children.start_soon(self._draw, action.count)
            case do.LaunchGroup():
                await self._launch(action, orders, children)
            case do.Drop():
                self._report.dropped(action.ids, action.reason)
                self._contents.forget(action.ids)
                if action.abort:
                    await orders.send(CancelTrajectories(ids=action.ids))
            case do.Pause():
                if action.ids:
                    await orders.send(HoldTrajectories(ids=action.ids))
                else:  # before anything is submitted: what a running engine takes would be sampled by the old weights
                    await self._sync.pause()
            case do.Resume():
                await orders.send(ContinueTrajectories(ids=action.ids))
            case do.Decision():
                await self._report.decided(action, self.state.trainer_version + 1)
            case do.TrainGroupNow():
                group = self._contents.training_group(action.group_id, action.batch_id, action.ids)
                await self._trainer.train_group(group)
            case do.StepOptimizer():
                await self._journal.settled()  # what is trained must never be sampled again
                gather = await self._trainer.close_batch(close_of(action))
                self._report.batch_closed(action.round_kind)
                self._elastic.batch_closed()
                batch = [trajectory for group in groups_in_batch(self.state) for trajectory in group.ids]
                children.start_soon(self._step, action, gather, self._contents.scored(batch))
            case do.PublishWeights():
                children.start_soon(self._publish, action)
            case do.Evaluate():
                self._evaluation = Evaluation(
                    self._held_out, action.policy_version, limit=action.limit, seed=self._seed
                )
                children.start_soon(self._evaluate, self._evaluation, orders)
            case do.CancelEvaluation():
                if self._evaluation is not None:
                    await self._evaluation.cancel(orders)
            case do.WriteCheckpoint():
                beside = fork_point(self._control.snapshot(), self._contents) | dict(self._beside())
                children.start_soon(self._checkpoint, action.policy_version, beside)
            case do.End():
                if action.error:
                    raise RewardFailureLimit(action.reason)
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
            if isinstance(item, TrajectoryHeld):
                continue
            self._elastic.ended(item)
            if isinstance(item, Scored) and isinstance(item.outcome, ScoredTrajectory):
                identity = item.outcome.trajectory.id
                if self.state.buffer.member(identity) is None:
                    self._contents.forget((identity,))
                    continue  # cancelled while it was scored
                self._contents.add(item.outcome)
                self._journal.scored(item.outcome)
            await self._tell.send(event_of(item))

    @staticmethod
    def _is_held_out(item: RewardOutcome) -> bool:
        if isinstance(item, TrajectoryHeld):
            return False
        return item.evaluation if isinstance(item, TrajectoryLost) else item.outcome.trajectory.evaluation

    async def _draw(self, count: int) -> None:
        with self._waits.waiting_for(f"{count} prompts"):
            prompts = await self._prompts.draw(count)
        self._journal.drawn(prompts)
        self._contents.add_prompts(prompts)
        await self._tell.send(
            on.PromptsDrawn(
                prompt_ids=tuple(p.prompt_id for p in prompts),
                exhausted=len(prompts) < count,
                prompt_tokens=tuple(len(p.token_ids) for p in prompts),
            )
        )

    async def _launch(self, action: do.LaunchGroup, orders: SendStream[RolloutOrder], children: TaskGroup) -> None:
        prompt = self._contents.prompts[action.ids[0].prompt_id]
        tokens = len(prompt.token_ids)
        self._report.launched(action, tokens)
        await self._elastic.launched(action.round_kind, action.ids, tokens, action.policy_version, children)
        for trajectory in action.ids:
            # Not derived from the group: a prompt that is launched again with its seed draws the same completions.
            seed = derive_seed(self._seed, prompt.prompt_id, action.seed_base, trajectory.sample)
            await orders.send(
                LaunchTrajectory(
                    id=trajectory,
                    prompt=prompt,
                    group_size=len(action.ids),
                    seed=seed,
                    done=self._contents.done(trajectory),
                )
            )

    async def _step(
        self,
        action: do.StepOptimizer,
        gather: Callable[[], Awaitable[list[StepReport]]],
        batch: list[ScoredTrajectory],
    ) -> None:
        with self._waits.waiting_for(f"the trainer to make version {action.policy_version}"):
            reports = await gather()
        wrong = [r for r in reports if (r.batch_id, r.policy_version) != (action.batch_id, action.policy_version)]
        if wrong:
            raise StreamRLError(
                f"trainer ranks reported {[(r.batch_id, r.policy_version) for r in wrong]} for batch "
                f"{action.batch_id}, version {action.policy_version}"
            )
        announced = self._announced[action.policy_version] = announcement(reports)
        self._journal.published(action.policy_version, announced.state_hash)
        self._report.batch_trained(action.policy_version, batch, reports[0].metrics)
        await self._tell.send(on.BatchTrained(batch_id=action.batch_id, policy_version=action.policy_version))

    async def _publish(self, action: do.PublishWeights) -> None:
        policy_version = action.policy_version
        self._report.publishing()
        push = self._live_push
        if push is None or push.policy_version != policy_version:
            with self._waits.waiting_for(f"every engine to hold version {policy_version}"):
                push = self._live_push = await self._sync.push(self._announced.pop(policy_version))
            await self._trainer.acknowledge(policy_version)
        else:  # live since this controller began; only engines that were paused for it wait
            await self._sync.resume()
        await self._elastic.begin_round(last=action.last)
        await self._audit(policy_version)
        metrics = await self._report.step_finished(push, self.state, self._elastic.figures)
        for message in self._alarms.check(policy_version, metrics):
            await self._report.warned(policy_version, message)
        if (timed := self._report.round_timed(policy_version)) is not None:
            await self._tell.send(timed)
        await self._tell.send(on.WeightsLive(policy_version=policy_version))

    async def _measure_engines(self) -> None:
        with self._measuring:
            while True:
                await anyio.sleep(MEASURING_INTERVAL_S)
                measured = self._report.engines_measured(self._load())
                if self._reports_load:
                    await self._tell.send(measured)

    async def _evaluate(self, evaluation: Evaluation, orders: SendStream[RolloutOrder]) -> None:
        with self._waits.waiting_for(f"the evaluation of version {evaluation.policy_version}"):
            figures = await evaluation.run(orders)
        version, self._evaluation = evaluation.policy_version, None
        if not evaluation.cancelled:
            await self._report.evaluation_finished(version, figures)
        await self._tell.send(on.EvaluationDone(policy_version=version))
        # From here on a newer version may be published: it must not wait for the disk.
        if not evaluation.cancelled:
            await self._scored(version, figures, evaluation.limit)
        if not evaluation.cancelled and self._store is not None:
            await self._store(version, evaluation.outcomes)

    async def _cancel_evaluation(self, orders: SendStream[RolloutOrder]) -> None:
        """Cancel the evaluation of a version that is gone: the engines that held it died."""
        if (evaluation := self._evaluation) is not None and not evaluation.cancelled:
            await self._warn_cancelled_evaluation(evaluation.policy_version, "no engine holds it any more")
            await evaluation.cancel(orders)

    async def _warn_cancelled_evaluation(self, version: int, why: str) -> None:
        await self._report.warned(version, f"evaluation of version {version} given up: {why}")

    async def _checkpoint(self, policy_version: int, beside: Mapping[str, bytes]) -> None:
        with self._waits.waiting_for(f"the checkpoint of version {policy_version}"):
            await self._save(policy_version, beside)
        await self._tell.send(on.CheckpointDone(policy_version=policy_version))
