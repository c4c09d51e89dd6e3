"""The controller's process: what flows between the stages and the other processes, and who runs it.

::

    prompts -> CONTROL --orders--> ROLLOUT --trajectories--> REWARD --scored--> CONTROL
                 ^  |              engines               user functions           | rollout buffer
       reports,  |  '--weight push --'                                            v
       weights --'------------------------- TRAINING <------- groups, then "close" -'

===============  =======================  =========================================  ====================
stream           from -> to               item                                       bounded by
===============  =======================  =========================================  ====================
orders           control -> rollout       ``LaunchTrajectory``, ``CancelTrajectories``  slots
trajectories     rollout -> reward        ``FinishedTrajectory``, ``TrajectoryLost``    slots
scored           reward -> control        ``Scored``, ``TrajectoryLost``                slots
engine orders    rollout -> engine host   ``EngineOrder``, answered by ``EngineEvent``  slots
batches          control -> trainer rank  ``TrainGroup`` ..., then ``CloseBatch``       one batch in flight
reports          trainer rank -> control  ``StepReport``                             one per step
weights          trainer rank -> engine   an anchor or a delta, as a transaction     one in flight
steps            control -> parent        ``ParentMessage``                          steps
===============  =======================  =========================================  ====================

Every trajectory that control launches comes back on ``scored`` exactly once: as a value, a recorded failure, or lost.
Control ends ``orders``; each stage ends its output when its input ended; ranks and engines end when their orders end.

A supervisor without torch is the parent of the controller, the engine hosts, the trainer ranks and the reward workers
(``streamrl.launch.pipeline.Pipeline``). The controller's process runs ``run_controller``: it connects to the others,
trains (``_train``: control between the stages, with its observers), and ends them."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from streamrl.base.run_events import RunEvent, RunFinished, RunStarted
from streamrl.base.stage_messages import RewardOutcome, RolloutOrder, RolloutOutcome
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.comm.zmq_stream import zmq_sender
from streamrl.control.actions import Decision
from streamrl.control.settings import control_settings
from streamrl.launch.control_protocol import ParentMessage
from streamrl.launch.observers import run_observers
from streamrl.launch.processes import Emit, Processes, connect_processes, connect_ranks
from streamrl.launch.reward_workers import change_rewards
from streamrl.launch.run_record import JournalledRun, open_record
from streamrl.launch.sampling import open_rollout, open_weight_sync, training_prompts
from streamrl.launch.steering.steering import SteeringService
from streamrl.launch.steering.steering_messages import SteeringReply
from streamrl.launch.steering.steering_requests import steering_endpoint
from streamrl.launch.supervise.child import ChildContext
from streamrl.launch.supervise.watchdog import Watchdog
from streamrl.launch.user_calls import UserObserver, close_all
from streamrl.observe.follow.file_sizes import most_bytes
from streamrl.observe.report.trace_events import TraceEvents
from streamrl.observe.sinks import JsonlSink, PublishSink, Reporter
from streamrl.observe.top.live_figures import Publish
from streamrl.recipe.rules.transport_rules import transport_metrics
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import metrics_endpoint
from streamrl.rewards.judge.link import JudgeLink
from streamrl.rewards.reward_messages import RewardReply, RewardsListed
from streamrl.run.checkpoints import CheckpointKeeper
from streamrl.run.controller import Controller
from streamrl.run.evaluate.evaluation import HeldOut, HeldOutEvaluations, read_held_out
from streamrl.run.evaluate.sample_files import write_evaluation
from streamrl.run.journal.run_journal import JournalledOutcomes

T = TypeVar("T")

StreamPair = tuple[SendStream[T], ReceiveStream[T]]


async def run_controller(context: ChildContext) -> None:
    """Connect to every process, train until the run is done, or drained after SIGTERM, and end every stream."""
    recipe, topology, run_directory = context.recipe, context.topology, context.run_directory
    async with AsyncExitStack() as streams:
        steps = await streams.enter_async_context(
            zmq_sender(ParentMessage, topology.endpoint("controller", "steps"), bind=False, name="controller.steps")
        )
        trainer = await connect_ranks(recipe, topology, streams)
        socket = PublishSink(metrics_endpoint(recipe, topology), run_id=run_directory.name)
        size = most_bytes(recipe.metrics.most_mib, "metrics")
        metrics, events = JsonlSink(run_directory / "metrics.jsonl", most_bytes=size), TraceEvents()
        reporter = Reporter([metrics, socket, events], constant_metrics=transport_metrics(recipe))
        streams.callback(reporter.close)
        judge = JudgeLink(recipe.judge, topology)

        async def emit(event: RunEvent | RewardReply | SteeringReply) -> None:
            event = judge.measured(event)
            if not isinstance(event, RewardsListed | SteeringReply):  # they concern only the process that asked
                event = reporter.record(event)
            await steps.send(event)

        watch = Watchdog(recipe, run_directory, emit)
        async with anyio.create_task_group() as nursery:
            nursery.start_soon(watch.run)
            processes = await connect_processes(
                recipe,
                topology,
                run_directory,
                trainer=trainer,
                judge=judge,
                order=steps.send,
                emit=emit,
                waits=watch.waits,
                nursery=nursery,
            )
            await emit(
                RunStarted(
                    run_id=run_directory.name,
                    directory=str(run_directory),
                    metrics_endpoint=socket.endpoint,
                    steps=recipe.run.steps,
                    parameters=processes.rank.parameters,
                    trained_parameters=processes.rank.trained_parameters,
                )
            )
            await _train(context, processes, watch, events, emit, socket.publish)
            await processes.aclose()
            watch.end()


async def _train(
    context: ChildContext, processes: Processes, watch: Watchdog, events: TraceEvents, emit: Emit, publish: Publish
) -> None:
    """Control, rollout and reward, from the version that the trainer holds to the end of the run."""
    recipe, topology, run_directory = context.recipe, context.topology, context.run_directory
    # The record: what control knows, here or from an earlier life of the run, and the journal that it is written into.
    version, trainer = processes.rank.policy_version, processes.trainer
    held_out = await read_held_out(recipe, processes.tokenizer, in_flight=processes.ready.max_num_seqs)
    rollout, reward = await open_rollout(recipe, processes, held_out, emit), processes.reward
    record = await anyio.to_thread.run_sync(open_record, recipe, control_settings(recipe), run_directory, version)
    # What the controller asks: for prompts, for a push of weights, for a checkpoint, for an evaluation.
    prompts = training_prompts(recipe, processes.tokenizer, start=record.control.state.prompts.drawn)
    sync = await open_weight_sync(recipe, processes, rollout, watch.waits)
    saved, score = run_directory / "checkpoints", next(iter(held_out.sets), "")
    limit = recipe.evaluation.regular[1]
    keeper = CheckpointKeeper(trainer, saved, recipe.checkpoint, held=version, limit=limit, score=score)
    await keeper.begin()
    evaluations = _evaluations(recipe, run_directory, processes, held_out, keeper, emit)
    # Who is called with what happens.
    users = [await anyio.to_thread.run_sync(UserObserver, spec) for spec in recipe.run.observers]
    report, observers = run_observers(
        recipe, run_directory, processes, record, rollout, evaluations, users, watch, events, emit, publish
    )
    steering = SteeringService(recipe, record.journal, watch, report.waits, emit)
    controller = Controller(
        record,
        prompts=prompts,
        trainer=trainer,
        sync=sync,
        evaluations=evaluations,
        save=lambda version, files: keeper.save(version, {**files, **processes.attached.file()}),
        observers=[*observers, steering],
        waits=watch.waits,
    )
    watch.follow(
        controller.state, rollout.statistics, processes.pool.load, reward.in_flight, trainer.answers, report.waits
    )
    # Everything in flight fits into the windows, so control never waits for a stage to take an order.
    window = 2 * record.control.rules.slots + held_out.in_flight + 64
    orders: StreamPair[RolloutOrder] = memory_stream(window)
    trajectories: StreamPair[RolloutOutcome] = memory_stream(window)
    scored: StreamPair[RewardOutcome] = memory_stream(window)
    try:
        async with anyio.create_task_group() as stages:
            _start_beside(stages, recipe, run_directory, controller)
            stages.start_soon(record.run)
            stages.start_soon(steering.serve, steering_endpoint(topology), controller.state, controller.notify)
            stages.start_soon(sync.run)
            stages.start_soon(rollout.run, orders[1], JournalledOutcomes(record.journal, trajectories[0]))
            stages.start_soon(reward.run, trajectories[1], scored[0])
            note = partial(_note_rewards, record)
            stages.start_soon(change_rewards, topology, processes.attached, run_directory, note)
            reason = await controller.run(orders[0], scored[1])
            await emit(RunFinished(reason=reason, step=controller.state.live_version))
            stages.cancel_scope.cancel()
    finally:
        report.close()
        await record.aclose()
        await prompts.aclose()
        await close_all([user.calls for user in users], "end")  # last: they may take their time


def _evaluations(
    recipe: Recipe, run_directory: Path, processes: Processes, held_out: HeldOut, keeper: CheckpointKeeper, emit: Emit
) -> HeldOutEvaluations:
    bound = 2 * most_bytes(recipe.metrics.most_mib, "evaluations")
    store = partial(write_evaluation, run_directory / "evaluations", processes.tokenizer.decode, most_bytes=bound)
    stored = store if recipe.evaluation.store_samples else None
    return HeldOutEvaluations(held_out, recipe.run.seed, emit=emit, scored=keeper.scored, store=stored)


def _note_rewards(record: JournalledRun, version: int, rewards: tuple[str, ...], change: str) -> None:
    """Write into the journal that other functions score from now on."""
    reason = f"{change}: version {version} is {', '.join(rewards)}"
    record.journal.decided(Decision(subject="rewards", reason=reason))


def _start_beside(stages: anyio.abc.TaskGroup, recipe: Recipe, run_directory: Path, controller: Controller) -> None:
    """Start what acts on ``controller`` from outside until the run ends."""
    stages.start_soon(_stop_on_sigterm, controller)
    if recipe.rollout.rounds is RoundKind.AUTO:
        from streamrl.simulate.adviser import advise  # predicts kinds of rounds

        stages.start_soon(advise, run_directory, recipe, lambda: controller.state.live_version, controller.notify)


async def _stop_on_sigterm(controller: Controller) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            controller.stop("drained")
