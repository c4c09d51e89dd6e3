"""The work of the controller's process, and the streams between it and the other processes of a run.

::

    prompts -> CONTROL <--launch, outcome--> EPISODES: sampled (engines), recorded (journal), scored (user functions)
                 ^  '--groups, then "close"--> TRAINING --weight push--> engines
                 '---------reports------------'

=============  =======================  =============================================  ===================
stream         from -> to               item                                           bounded by
=============  =======================  =============================================  ===================
engine orders  episodes -> engine       ``EngineOrder``, answered by ``EngineEvent``   slots
reward orders  reward -> reward worker  ``RewardOrder``, answered by ``RewardResult``  slots
batches        control -> trainer rank  ``TrainGroup`` ..., then ``CloseBatch``        one batch in flight
reports        trainer rank -> control  ``StepReport``                                 one per step
weights        trainer rank -> engine   an anchor or a delta, as a transaction         one in flight
steps          control -> parent        ``ParentMessage``                              steps
=============  =======================  =============================================  ===================

A trajectory is one coroutine of the controller (``stages.episodes``), from its launch to its outcome. It has exactly
one outcome: a value, a recorded failure, or lost. Slots bound the number of trajectories. Ranks, engines and reward
workers end when their orders end.

The parent of these processes is a supervisor without torch (``streamrl.launch.pipeline.Pipeline``). ``roles`` starts
``run_controller`` in the controller's process. This function connects to the other processes, trains (``_train`` runs
control with its observers, and the episodes that control launches), and ends the connections."""

from __future__ import annotations

from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path
from signal import SIGTERM

import anyio
from anyio import create_task_group, to_thread
from anyio.abc import TaskGroup

from streamrl.base.run_events import RunEvent, RunFinished, RunStarted
from streamrl.base.types import Texts
from streamrl.comm.zmq_stream import zmq_sender
from streamrl.control.actions import Decision
from streamrl.control.settings import control_settings
from streamrl.launch.control_protocol import ParentMessage, SteeringReply
from streamrl.launch.observers import run_observers
from streamrl.launch.processes import Emit, Processes, connect_processes, connect_ranks
from streamrl.launch.reward_workers import change_rewards
from streamrl.launch.run_record import JournalledRun, open_record
from streamrl.launch.sampling import open_episodes, open_imitated_rows, open_weight_sync, training_prompts
from streamrl.launch.steering.steering import SteeringService
from streamrl.launch.steering.steering_requests import steering_endpoint
from streamrl.observe.report.trace_events import TraceEvents
from streamrl.observe.run_files.file_sizes import most_bytes
from streamrl.observe.sinks import JsonlSink, Reporter
from streamrl.observe.telemetry import TelemetryPublisher
from streamrl.observe.top.live_figures import Publish
from streamrl.observe.user_calls import UserObserver, close_all
from streamrl.processes.run_role import ChildSetup
from streamrl.processes.watchdog import Watchdog
from streamrl.recipe.rules.transport_rules import transport_metrics
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import metrics_endpoint, served_models
from streamrl.rewards.reward_messages import RewardReply, RewardsListed
from streamrl.rewards.served.link import ServedModelLink
from streamrl.run.checkpoints import CheckpointKeeper
from streamrl.run.controller import Controller
from streamrl.run.copies.checkpoint_copies import open_copies
from streamrl.run.evaluate.evaluation import HeldOut, HeldOutEvaluations, read_held_out
from streamrl.run.evaluate.sample_files import write_evaluation


async def run_controller(setup: ChildSetup) -> None:
    """Connect to every process, train until the run is done, or drained after SIGTERM, and end every stream."""
    recipe = setup.recipe
    topology = setup.topology
    run_directory = setup.run_directory
    async with AsyncExitStack() as streams:
        steps = await streams.enter_async_context(
            zmq_sender(ParentMessage, topology.endpoint("controller", "steps"), bind=False, name="controller.steps")
        )
        trainer = await connect_ranks(recipe, topology, streams)
        socket = TelemetryPublisher(metrics_endpoint(recipe, topology), run_id=run_directory.name)
        size = most_bytes(recipe.metrics.most_mib, "metrics")
        metrics = JsonlSink(run_directory / "metrics.jsonl", most_bytes=size)
        events = TraceEvents()
        reporter = Reporter([metrics, socket, events], constant_metrics=transport_metrics(recipe))
        streams.callback(reporter.close)
        models = [ServedModelLink(role, topology) for role in served_models(recipe)]

        async def emit(event: RunEvent | RewardReply | SteeringReply) -> None:
            for model in models:
                event = model.measured(event)
            if not isinstance(event, RewardsListed | SteeringReply):  # only the process that asked needs them
                event = reporter.record(event)
            await steps.send(event)

        watch = Watchdog(recipe, run_directory, emit)
        async with create_task_group() as nursery:
            nursery.start_soon(watch.run)
            processes = await connect_processes(
                recipe,
                topology,
                run_directory,
                trainer=trainer,
                models=models,
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
            await _train(setup, processes, watch, events, emit, socket.publish)
            await processes.aclose()
            watch.end()


async def _train(
    setup: ChildSetup, processes: Processes, watch: Watchdog, events: TraceEvents, emit: Emit, publish: Publish
) -> None:
    """Run control and the episodes that it launches, from the present version of the trainer to the end of the run."""
    recipe = setup.recipe
    topology = setup.topology
    run_directory = setup.run_directory
    # The record: the state of control, new or from before the run was resumed, and its journal.
    version = processes.rank.policy_version
    trainer = processes.trainer
    held_out = await read_held_out(recipe, processes.tokenizer, in_flight=processes.ready.max_num_seqs)
    record = await to_thread.run_sync(open_record, recipe, control_settings(recipe), run_directory, version)
    episodes = await open_episodes(recipe, setup.topology, processes, record.journal, held_out, emit)
    reward = processes.reward
    # The services of the controller: prompts, pushes of weights, checkpoints, evaluations.
    prompts = training_prompts(recipe, processes.tokenizer, record.control.state.prompts)
    imitated_rows = await open_imitated_rows(recipe, processes, emit)
    sync = await open_weight_sync(recipe, run_directory, processes, episodes, watch.waits)
    copies = await open_copies(recipe, run_directory, emit)
    keeper = CheckpointKeeper(
        processes.trainer,
        run_directory / "checkpoints",
        recipe.checkpoint,
        held_version=processes.rank.policy_version,
        limit=recipe.evaluation.regular[1],
        score=next(iter(held_out.sets), ""),  # the first held-out set ranks them
        changed=copies.want if copies else lambda _: None,
    )
    await keeper.begin()
    evaluations = _evaluations(recipe, run_directory, processes, held_out, keeper, emit)
    # The observers of the controller.
    users = [await to_thread.run_sync(UserObserver, spec) for spec in recipe.run.observers]
    report, observers = run_observers(
        recipe, run_directory, processes, record, episodes, evaluations, users, watch, events, emit, publish
    )
    steering = SteeringService(recipe, record.journal, watch, report.waits, emit)
    controller = Controller(
        record,
        prompts=prompts,
        trainer=trainer,
        sync=sync,
        evaluations=evaluations,
        save=lambda version, files: keeper.save(version, {**files, **processes.attached.file()}),
        turns=processes.turns,
        observers=[*observers, steering],
        waits=watch.waits,
        wait_for_copies=copies.settled if copies else None,
    )
    load = processes.pool.load
    scoring = reward.in_flight
    copied = copies.sent_bytes if copies else lambda: 0
    watch.follow(controller.state, episodes.statistics, load, scoring, trainer.answers, copied, report.waits)
    try:
        async with create_task_group() as services:
            _start_controls(services, recipe, run_directory, controller)
            services.start_soon(record.run)
            services.start_soon(steering.serve, steering_endpoint(topology), controller.state, controller.notify)
            services.start_soon(sync.run)
            if copies:
                services.start_soon(copies.run)
            note = partial(_note_rewards, record)
            services.start_soon(change_rewards, topology, processes.attached, run_directory, note)
            environment = processes.environment
            async with reward.running(), environment.running() if environment else nullcontext():
                reason = await controller.run(episodes)
            await emit(RunFinished(reason=reason, step=controller.state.live_version))
            services.cancel_scope.cancel()
    finally:
        report.close()
        await record.aclose()
        await prompts.aclose()
        await imitated_rows.aclose()
        await close_all([user.calls for user in users], "end")  # last: code of users may be slow


def _evaluations(
    recipe: Recipe, run_directory: Path, processes: Processes, held_out: HeldOut, keeper: CheckpointKeeper, emit: Emit
) -> HeldOutEvaluations:
    bound = most_bytes(recipe.metrics.most_mib, "evaluations")
    store = partial(write_evaluation, run_directory / "evaluations", processes.tokenizer, most_bytes=bound)
    stored = store if recipe.evaluation.store_samples else None
    return HeldOutEvaluations(held_out, recipe.run.seed, emit=emit, on_scored=keeper.scored, store=stored)


def _note_rewards(record: JournalledRun, version: int, rewards: Texts, change: str) -> None:
    """Write a change of the rewards into the journal."""
    reason = f"{change}: version {version} is {', '.join(rewards)}"
    record.journal.decided(Decision(subject="rewards", reason=reason))


def _start_controls(services: TaskGroup, recipe: Recipe, run_directory: Path, controller: Controller) -> None:
    """Start the tasks that stop or advise ``controller`` until the run ends."""
    services.start_soon(_stop_on_sigterm, controller)
    if recipe.rollout.rounds is RoundKind.AUTO:
        from streamrl.simulate.adviser import advise  # predicts kinds of rounds

        services.start_soon(advise, run_directory, recipe, lambda: controller.state.live_version, controller.notify)


async def _stop_on_sigterm(controller: Controller) -> None:
    with anyio.open_signal_receiver(SIGTERM) as signals:
        async for _ in signals:
            controller.stop("drained")
