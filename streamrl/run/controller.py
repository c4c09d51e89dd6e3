"""The main loop of a run: the async shell around ``Control``, which is pure. Outcomes and answers become events for
``Control``, and its actions become calls.

``launch/run_controller.py`` makes the ``Controller`` and runs it, in the controller process. Everything that may take
long (drawing prompts, a step, a push, an evaluation, a checkpoint) runs in a child task, which sends an event when it
is done. The loop itself only sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct
from msgspec.structs import replace

from streamrl.base.concurrent_calls import start_unless_ending
from streamrl.base.errors import CannotContinue, StreamRLError
from streamrl.base.messages import StepReport, WeightAnnouncement
from streamrl.base.seeds import derive_seed
from streamrl.base.stage_messages import (
    EndedOutcome,
    LaunchTrajectory,
    Scored,
    TrajectoryLost,
    TrajectoryOutcome,
    TrajectoryPaused,
)
from streamrl.base.types import DropReason, RewardFailure, ScoredTrajectory, TrajectoryId
from streamrl.base.waits import Waits
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.contracts import (
    EpisodeRunner,
    Evaluations,
    Journal,
    Observer,
    PromptSource,
    PushReport,
    Turns,
    WeightPush,
)
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.machine import Control
from streamrl.control.run_state import RunState, prompts_needed
from streamrl.control.unanswered_orders import groups_in_batch
from streamrl.rewards.credited_numbers import compared_numbers
from streamrl.run.checkpoints import fork_point
from streamrl.run.trainer_ranks import TrainerRanks, announcement, close_of


class RunRecord(Struct, frozen=True):
    """The state from which a controller begins.

    ``control``: state of control: new, from the checkpoint that the run was forked from, or from the journal;
    ``store``: trajectories and prompts that control's state names;
    ``journal``: journal, which records everything that happens from now on;
    ``resumed``: whether ``control`` is from the journal of an earlier life of the run."""

    control: Control
    store: TrajectoryStore
    journal: Journal
    resumed: bool = False


class Controller:
    """Runs ``record.control`` against a trainer, a weight push and episodes. ``run`` may be called once.

    ``save``: function that writes a checkpoint of a version, with files by name beside the model;
    ``wait_for_copies``: function that waits until checkpoints are copied (None: they are not copied);
    ``turns``: turns of engines and trainer ranks;
    ``observers``: observers of all events, actions and outcomes, called in this order."""

    def __init__(
        self,
        record: RunRecord,
        *,
        prompts: PromptSource,
        trainer: TrainerRanks,
        sync: WeightPush,
        evaluations: Evaluations,
        save: Callable[[int, Mapping[str, bytes]], Awaitable[None]],
        wait_for_copies: Callable[[], Awaitable[None]] | None = None,
        turns: Turns | None = None,
        observers: Sequence[Observer],
        waits: Waits,
    ) -> None:
        self._control = record.control
        self._store = record.store
        self._journal = record.journal
        self._resumed = record.resumed
        self._prompts = prompts
        self._trainer = trainer
        self._sync = sync
        self._evaluations = evaluations
        self._save = save
        self._wait_for_copies = wait_for_copies
        self._turns = turns or Turns()
        self._observers = observers
        self._waits = waits
        self._live: PushReport | None = None
        self._announced: dict[int, WeightAnnouncement] = {}
        # The number of slots bounds the events, and there is one open order of each kind at most.
        unbounded = float("inf")
        self._event_sender, self._events = anyio.create_memory_object_stream[on.ControlEvent](unbounded)

    @property
    def state(self) -> RunState:
        """State of control."""
        return self._control.state

    def stop(self, reason: str) -> None:
        """Request a drain. May be called from the event loop at any time, also twice or after the end of the run."""
        self.notify(on.StopRequested(reason=reason))

    def notify(self, event: on.ControlEvent) -> None:
        """Send ``event`` to control, from the event loop. After the end of the run, nothing happens."""
        with suppress(anyio.ClosedResourceError):
            self._event_sender.send_nowait(event)

    async def run(self, episodes: EpisodeRunner) -> str:
        """Make the first version live, train, and return the reason for which the run ended. The trainer ranks end with
        the run."""
        reason = ""
        async with self._event_sender, self._events, anyio.create_task_group() as children, episodes.running():
            self._sync.on_version_left = partial(
                start_unless_ending, children, self._evaluations.cancel, episodes, "no engine holds it any more"
            )
            for observer in self._observers:
                await observer.prepare()
            version = self._trainer.policy_version
            with self._waits.waiting_for(f"the trainer to publish version {version} complete"):
                anchor = await self._trainer.publish_anchor(version)
            with self._waits.waiting_for(f"every engine to hold version {version}"):
                self._live = await self._push(anchor)
            if self._trainer.first_probe is not None:
                with self._waits.waiting_for("an engine to score its first tokens"):
                    await self._sync.check_first_tokens(self._trainer.first_probe)
            await self._trainer.acknowledge(version)
            for observer in self._observers:
                await observer.on_began(anchor)
                children.start_soon(observer.run, self.notify)
            settings = self._control.settings
            if self._resumed:
                for action in await self._continue(version):
                    reason = await self._perform(action, episodes, children) or reason
            else:
                self._event_sender.send_nowait(on.RunBegan(version, settings.steps, settings.prompts))
            while not reason:
                event = await self._events.receive()
                for action in await self._handle(event):
                    reason = await self._perform(action, episodes, children) or reason
                await self._progress()
            for observer in self._observers:
                observer.end()
            self._sync.on_version_left = lambda: None  # no evaluation waits for an engine any more
            await self._journal.flushed()
        if self._wait_for_copies is not None:
            await self._wait_for_copies()
        # Only now, when the last reward of a dropped trajectory has come back: the supervisor treats ranks that ended
        # long before the run as failed.
        await self._trainer.aclose()
        return reason

    async def _continue(self, version: int) -> list[do.ControlAction]:
        """Return the actions of the last controller that have had no answer. Answers that are known here become events
        first."""
        state = self.state
        # The recipe may have a new number of steps; unless it has, a number that was set while the run ran counts.
        settings = self._control.settings
        steps = settings.steps
        prompts = settings.prompts
        if steps == state.steering.recipe_steps:
            steps = state.steps
            prompts = state.prompts.limit
        elif prompts and prompts == state.prompts.limit:
            steps = state.steps  # the prediction of the recipe is older
        if state.draining or state.finished or state.steps != steps:
            await self._handle(on.RunContinued(steps=steps, prompts=prompts))
        # An evaluation of an older version cannot go on: no engine holds that version any more.
        evaluation = state.evaluating
        if evaluation is not None and evaluation != version:
            await self._evaluations.warn_cancelled(evaluation, f"the run was resumed with version {version}")
            await self._handle(on.EvaluationDone(policy_version=evaluation))
        return self._control.unanswered_orders()

    async def _handle(self, event: on.ControlEvent) -> list[do.ControlAction]:
        """Record ``event`` in the journal, and return the actions of control."""
        self._journal.on_event(event, self._control)
        for observer in self._observers:
            await observer.on_event(event)
        trained = []
        if isinstance(event, on.BatchTrained):
            trained = _trajectories_in_batch(self.state)  # control forgets them when it handles the event
        actions = self._control.handle(event)
        self._store.forget(trained)
        if isinstance(event, on.TrajectoryFailed):
            self._store.forget((event.id,))
        if isinstance(event, on.RunBegan):
            await self._journal.begin(self._control)
        if isinstance(event, on.BatchTrained):
            self._store.forget_other_prompts(lambda: prompts_needed(self.state))
        return actions

    async def _perform(self, action: do.ControlAction, episodes: EpisodeRunner, children: TaskGroup) -> str:
        """Carry out one action. Return the reason for which the run ends, which is empty unless the action is the last
        one."""
        for observer in self._observers:
            await observer.on_action(action)
        match action:
            case do.DrawPrompts():
                children.start_soon(self._draw, action)
            case do.LaunchGroup():
                self._launch(action, episodes)
            case do.Drop():
                self._store.forget(action.ids)
                if action.abort:
                    episodes.cancel(action.ids)
            case do.PauseTrajectories():
                episodes.pause(action.ids)
            case do.ResumeTrajectories():
                episodes.resume(action.ids)
            case do.PauseEngines():
                # Awaited before the next action: a running engine would sample its trajectories by the old weights.
                await self._sync.pause()
            case do.TrainGroupNow():
                group = self._store.training_group(
                    action.group_id, action.batch_id, action.ids, action.temperature, action.baseline
                )
                await self._trainer.train_group(group)
            case do.StepOptimizer():
                await self._journal.flushed()  # a resumed run must never sample again what was trained
                await self._turns.train()  # nothing is sampled, and no event that comes meanwhile is urgent
                gather = await self._trainer.close_batch(close_of(action))
                batch = self._store.scored(_trajectories_in_batch(self.state))
                children.start_soon(self._step, action, gather, batch)
            case do.PublishWeights():
                children.start_soon(self._publish, action)
            case do.Evaluate():
                self._evaluations.begin(action.policy_version, action.limit)
                children.start_soon(self._evaluate, action.policy_version, episodes)
            case do.CancelEvaluation():
                await self._evaluations.cancel(episodes)
            case do.WriteCheckpoint():
                # Encoded at once: control's state changes while the checkpoint is written.
                sidecar_files = fork_point(self._control.snapshot(), self._store)
                children.start_soon(self._checkpoint, action.policy_version, sidecar_files)
            case do.End():
                if action.error:
                    await self._journal.flushed()  # ``streamrl show`` says why the run has failed
                    raise CannotContinue(action.reason)
                return action.reason
        return ""

    async def _on_outcome(self, item: TrajectoryOutcome) -> None:
        """Report the outcome of a trajectory to control, unless control has dropped the trajectory."""
        for observer in self._observers:
            observer.on_outcome(item)
        if isinstance(item, TrajectoryPaused):
            return
        if isinstance(item, Scored) and isinstance(item.outcome, ScoredTrajectory):
            identity = item.outcome.trajectory.id
            if self.state.buffer.member(identity) is None:
                self._store.forget((identity,))
                return  # the trajectory was cancelled while it was scored
            self._store.add(item.outcome)
            self._journal.on_scored(item.outcome)
        self.notify(event_of(item))

    async def _progress(self) -> None:
        for observer in self._observers:
            await observer.on_progress()

    async def _draw(self, action: do.DrawPrompts) -> None:
        with self._waits.waiting_for(f"{action.count} prompts"):
            prompts = await self._prompts.draw(action.count, action.sets)
        self._journal.on_prompts(prompts)
        self._store.add_prompts(prompts)
        sets = tuple(prompt.set for prompt in prompts if prompt.set)
        await self._event_sender.send(
            on.PromptsDrawn(
                prompt_ids=tuple(p.prompt_id for p in prompts),
                exhausted=not action.sets and len(prompts) < action.count,
                prompt_tokens=tuple(len(p.token_ids) for p in prompts),
                sets=sets,
                exhausted_sets=tuple(sorted((Counter(action.sets) - Counter(sets)).keys())),
            )
        )

    def _launch(self, action: do.LaunchGroup, episodes: EpisodeRunner) -> None:
        prompt = self._store.prompts[action.ids[0].prompt_id]
        size = len(action.ids)
        for trajectory in action.ids:
            # The seed is independent of the group: a prompt that is launched again draws the same completions.
            seed = derive_seed(self._control.settings.seed, prompt.prompt_id, action.seed_base, trajectory.sample)
            order = LaunchTrajectory(
                id=trajectory,
                prompt=prompt,
                group_size=size,
                seed=seed,
                sampling=action.sampling,
                completion_so_far=self._store.completion_so_far(trajectory),
                sampled_trajectory=self._store.sampled_trajectory(trajectory),
                episode_so_far=self._store.episode_so_far(trajectory),
            )
            episodes.launch(order, self._on_outcome)

    async def _step(
        self, action: do.StepOptimizer, gather: Callable[[], Awaitable[list[StepReport]]], batch: list[ScoredTrajectory]
    ) -> None:
        with self._waits.waiting_for(f"the trainer to make version {action.policy_version}"):
            reports = await gather()
        wrong = [r for r in reports if (r.batch_id, r.policy_version) != (action.batch_id, action.policy_version)]
        if wrong:
            raise StreamRLError(
                f"trainer ranks reported {[(r.batch_id, r.policy_version) for r in wrong]} for batch "
                f"{action.batch_id}, version {action.policy_version}"
            )
        weights = announcement(reports)
        self._announced[action.policy_version] = weights
        self._journal.on_published(action.policy_version, weights.state_hash)
        for observer in self._observers:
            observer.on_trained(action.policy_version, batch, reports[0].metrics)
        change = reports[0].metrics.get("policy/step_change", 0.0)
        await self._event_sender.send(
            on.BatchTrained(batch_id=action.batch_id, policy_version=action.policy_version, change=change)
        )

    async def _publish(self, action: do.PublishWeights) -> None:
        policy_version = action.policy_version
        push = self._live
        if push is None or push.policy_version != policy_version:
            with self._waits.waiting_for(f"every engine to hold version {policy_version}"):
                push = self._live = await self._push(self._announced.pop(policy_version))
            await self._trainer.acknowledge(policy_version)
        else:  # the version has been live since this controller began, and the engines were only paused
            await self._sync.resume()
        for observer in self._observers:
            await observer.on_weights_live(push, last=action.last)
        await self._event_sender.send(on.WeightsLive(policy_version=policy_version))

    async def _push(self, announced: WeightAnnouncement) -> PushReport:
        """Make ``announced`` live on every engine, also on those that slept while the ranks had their turn."""
        began_s = anyio.current_time()
        push = await self._sync.push(announced)
        await self._turns.sample()
        return replace(push, total_s=anyio.current_time() - began_s)

    async def _evaluate(self, policy_version: int, episodes: EpisodeRunner) -> None:
        with self._waits.waiting_for(f"the evaluation of version {policy_version}"):
            store = await self._evaluations.run(episodes, self._progress)
        await self._event_sender.send(on.EvaluationDone(policy_version=policy_version))
        await store()  # after the event, because the next version can be published now and need not wait for the disk

    async def _checkpoint(self, policy_version: int, sidecar_files: Mapping[str, bytes]) -> None:
        with self._waits.waiting_for(f"the checkpoint of version {policy_version}"):
            await self._journal.flushed()  # a resumed run must not find a version that its journal does not know
            await self._save(policy_version, sidecar_files)
        await self._event_sender.send(on.CheckpointDone(policy_version=policy_version))


def _trajectories_in_batch(state: RunState) -> list[TrajectoryId]:
    return [trajectory for group in groups_in_batch(state) for trajectory in group.ids]


def event_of(item: EndedOutcome) -> on.TrajectoryFailed | on.TrajectoryScored:
    """Return the event that reports ``item`` to control."""
    if isinstance(item, TrajectoryLost):
        reason = DropReason.CANCELLED if item.cancelled else DropReason.ENGINE_FAILED
        return on.TrajectoryFailed(id=item.id, reason=reason, message=item.reason, tokens=item.tokens)
    outcome = item.outcome
    trajectory = outcome.trajectory
    if isinstance(outcome, RewardFailure):
        return on.TrajectoryFailed(
            id=trajectory.id,
            reason=DropReason.REWARD_FAILED,
            message=f"{outcome.function} {outcome.kind}: {outcome.message}",
            tokens=trajectory.generated_tokens,
            policy=outcome.policy,
            reward_version=outcome.reward_version,
        )
    separate_rewards, signal = compared_numbers(outcome)
    return on.TrajectoryScored(
        id=trajectory.id,
        reward=outcome.reward,
        tokens=trajectory.generated_tokens,
        finish_reason=trajectory.finish_reason,
        oldest_version=trajectory.oldest_version,
        newest_version=trajectory.newest_version,
        reward_version=outcome.reward_version,
        separate_rewards=separate_rewards,
        turn_rewards=outcome.turn_rewards,
        seconds=round(trajectory.rollout_seconds + item.reward_s, 3),
        signal=signal,
    )
