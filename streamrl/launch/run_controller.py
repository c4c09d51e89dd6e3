"""The picture and the one nursery.

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
(``streamrl.launch.pipeline.Pipeline``). This module is what the controller process runs.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread

from streamrl.base.concurrent_calls import BackgroundCall
from streamrl.base.messages import TrainerReady, TrainingEvent, TrainingOrder
from streamrl.base.run_events import RunEvent, RunFinished, RunStarted, StartProgress
from streamrl.base.stage_messages import RewardOutcome, RolloutOrder, RolloutOutcome
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.contracts import Observer
from streamrl.control.actions import Decision
from streamrl.control.settings import control_settings
from streamrl.engines.push.verify import WeightAudit
from streamrl.engines.vllm.options import expected_room
from streamrl.launch.control_protocol import ParentMessage
from streamrl.launch.controller_parts import (
    Emit,
    Parts,
    elastic_engines,
    open_engines,
    open_rollout,
    open_weight_sync,
    read_held_out,
    run_report,
    training_prompts,
)
from streamrl.launch.reward_workers import change_rewards, open_reward_stage
from streamrl.launch.run_record import JournalledRun, open_record
from streamrl.launch.supervise.child import ChildContext
from streamrl.launch.supervise.watchdog import Watchdog
from streamrl.observe.report.missing_samples import MissingSamples
from streamrl.observe.sinks import JsonlSink, PublishSink, Reporter
from streamrl.pretrained.tokenizer import load_tokenizer, refuse_different_tokenizers
from streamrl.recipe.rules.transport_rules import transport_metrics
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import Topology, metrics_endpoint, prepared_sets
from streamrl.rewards.judge.link import JudgeLink
from streamrl.rewards.reward_messages import RewardReply, RewardsListed
from streamrl.run.checkpoints import CheckpointKeeper
from streamrl.run.controller import Controller
from streamrl.run.evaluate.evaluation import HeldOutEvaluations
from streamrl.run.evaluate.sample_files import write_evaluation
from streamrl.run.journal.recover import Resumption
from streamrl.run.journal.run_journal import JournalledOutcomes
from streamrl.run.trainer_ranks import RankStreams, TrainerRanks

T = TypeVar("T")

log = logging.getLogger(__name__)

Ends = tuple[SendStream[T], ReceiveStream[T]]


async def run_controller_process(context: ChildContext) -> None:
    """Run the controller until the run is complete, or drained after SIGTERM."""
    await run_controller(context.recipe, context.topology, context.run_directory, resumes=context.resumes)


async def run_controller(recipe: Recipe, topology: Topology, run_directory: Path, *, resumes: bool = False) -> None:
    """Connect everything, run until training is done or drained, and end every stream. ``resumes``: an earlier life
    of this run ended without that."""
    async with AsyncExitStack() as streams:
        steps = await streams.enter_async_context(
            zmq_sender(ParentMessage, topology.endpoint("controller", "steps"), bind=False, name="controller.steps")
        )
        ranks = [await _connect_rank(recipe, topology, index, streams) for index in range(recipe.training.ranks)]
        socket = PublishSink(metrics_endpoint(recipe, topology), run_id=run_directory.name)
        lines = JsonlSink(run_directory / "metrics.jsonl")
        reporter = Reporter([lines, socket], standing=transport_metrics(recipe))
        streams.callback(reporter.close)

        async def emit(event: RunEvent | RewardReply) -> None:
            event = judge.measured(event)
            if not isinstance(event, RewardsListed):  # it concerns only the process that asked
                reporter.record(event)
            await steps.send(event)

        trainer, judge = TrainerRanks(ranks), JudgeLink(recipe.judge, topology)
        watch = Watchdog(recipe, run_directory, emit)
        async with anyio.create_task_group() as nursery:
            nursery.start_soon(watch.run)
            nursery.start_soon(judge.run)
            # Beside others that load: after the death of a controller nobody has work until it has all of this.
            loading = BackgroundCall(nursery, partial(anyio.to_thread.run_sync, load_tokenizer, recipe.model.path))
            scoring = BackgroundCall(nursery, partial(open_reward_stage, recipe, topology, run_directory, emit))
            began = anyio.current_time()
            ready_after = partial(_say_ready, emit, began)
            training = BackgroundCall(nursery, partial(_ready_ranks, trainer, ready_after))
            with watch.waits.waiting_for("the engines to start"):
                hosts, pool, ready = await open_engines(recipe, topology, steps.send, emit, nursery)
            await ready_after(prepared_sets(recipe)[0].engines)
            start_s = anyio.current_time() - began
            with watch.waits.waiting_for("the trainer ranks to load"):
                hellos = await training.result()
            await judge.ready(pool.load, min(ready.max_num_seqs, recipe.batch_trajectories))
            tokenizer, rewards = await loading.result(), await scoring.result()
            if tokenizer.end_notice:
                log.warning("%s", tokenizer.end_notice)
            await ready_after([f"reward-{index}" for index in range(recipe.reward_limits.workers)])
            digests = {"the controller": tokenizer.digest, "the engines": ready.tokenizer_digest}
            digests |= {f"trainer rank {hello.rank}": hello.tokenizer_digest for hello in hellos}
            refuse_different_tokenizers(recipe.model.path, digests)
            nursery.start_soon(trainer.run)
            version, parameters = hellos[0].policy_version, hellos[0].parameters
            await emit(
                RunStarted(
                    run_id=run_directory.name,
                    directory=str(run_directory),
                    metrics_endpoint=socket.endpoint,
                    steps=recipe.run.steps,
                    parameters=parameters,
                    trained_parameters=hellos[0].trained_parameters,
                )
            )
            rooms = expected_room(recipe, ready.kv_tokens // recipe.engines.count)
            parts = Parts(tokenizer, rewards, pool, hosts, trainer, ready, start_s, rooms, parameters, emit, watch)
            await _run_stages(recipe, topology, run_directory, parts, version)
            # Engines end when their orders end; so does everything else that is still open.
            await hosts.aclose()
            await pool.aclose()
            judge.retire()
            watch.end()


async def _run_stages(
    recipe: Recipe, topology: Topology, run_directory: Path, parts: Parts, start_version: int
) -> None:
    """Control, rollout and reward, from the version that the trainer holds to the end of the run."""
    held_out = await read_held_out(recipe, parts)
    reward, attached = parts.rewards
    rollout = await open_rollout(recipe, parts, held_out)
    settings = control_settings(recipe)
    record = await open_record(recipe, settings, run_directory, start_version)
    prompts = training_prompts(recipe, parts, start=record.control.state.prompts.drawn)
    sync = await open_weight_sync(recipe, parts, rollout)
    saved, limit = run_directory / "checkpoints", recipe.evaluation.limit
    keeper = CheckpointKeeper(parts.trainer, saved, recipe.checkpoint, held=start_version, limit=limit)
    await keeper.begin()
    store = partial(write_evaluation, run_directory / "evaluations", parts.tokenizer.decode)
    evaluations = HeldOutEvaluations(
        held_out,
        recipe.run.seed,
        emit=parts.emit,
        scored=keeper.scored,
        store=store if recipe.evaluation.store_samples else None,
    )
    resumption = Resumption(record.recovered, parts.trainer, parts.watch.waits) if record.recovered else None
    report = run_report(recipe, run_directory, parts, rollout, record, evaluations, resumption)
    record.journal.elapsed = report.elapsed
    elastic = elastic_engines(recipe, parts, record, report)
    report.engines = lambda: elastic.figures
    audit = WeightAudit(parts.pool.serving_engines, run_directory / "audits.jsonl", recipe.weights.audit_interval)
    missing = MissingSamples(record.control, parts.emit, train_truncated=recipe.objective_settings.train_truncated)
    observers: list[Observer] = [elastic, audit, report, missing, *([resumption] if resumption else [])]
    controller = Controller(
        record,
        prompts=prompts,
        trainer=parts.trainer,
        sync=sync,
        evaluations=evaluations,
        save=lambda version, files: keeper.save(version, {**files, **attached.file()}),
        observers=observers,
        waits=parts.watch.waits,
    )
    parts.watch.follow(
        controller.state, rollout.statistics, parts.pool.load, reward.in_flight, parts.trainer.answers, report.waits
    )
    # Everything in flight fits into the windows, so control never waits for a stage to take an order.
    window = 2 * record.control.rules.slots + held_out.in_flight + 64
    orders_ends: Ends[RolloutOrder] = memory_stream(window)
    trajectories_ends: Ends[RolloutOutcome] = memory_stream(window)
    scored_ends: Ends[RewardOutcome] = memory_stream(window)
    try:
        async with anyio.create_task_group() as stages:
            _start_beside(stages, recipe, run_directory, controller)
            stages.start_soon(record.run)
            stages.start_soon(sync.run)
            stages.start_soon(rollout.run, orders_ends[1], JournalledOutcomes(record.journal, trajectories_ends[0]))
            stages.start_soon(reward.run, trajectories_ends[1], scored_ends[0])
            stages.start_soon(change_rewards, topology, attached, run_directory, _note_rewards(record))
            reason = await controller.run(orders_ends[0], scored_ends[1])
            await parts.emit(RunFinished(reason=reason, step=controller.state.live_version))
            stages.cancel_scope.cancel()
    finally:
        report.close()
        await record.aclose()
        await prompts.aclose()


# ---- connecting ----------------------------------------------------------------------------------


async def _say_ready(emit: Emit, began: float, names: Iterable[str]) -> None:
    seconds = anyio.current_time() - began
    await emit(StartProgress(process=", ".join(names), state="ready", seconds=seconds))


async def _ready_ranks(
    trainer: TrainerRanks, ready_after: Callable[[Iterable[str]], Awaitable[None]]
) -> list[TrainerReady]:
    hellos = await trainer.ready()
    await ready_after(f"trainer-{hello.rank}" for hello in hellos)
    return hellos


async def _connect_rank(recipe: Recipe, topology: Topology, index: int, streams: AsyncExitStack) -> RankStreams:
    name = f"trainer-{index}"
    # All that may be in flight fits twice, each trajectory a group of its own: control never waits for a busy rank.
    window = 2 * recipe.max_in_flight + 64
    batches = await streams.enter_async_context(
        zmq_sender(
            TrainingOrder,
            topology.endpoint(name, "batches"),
            bind=True,
            window=window,
            name=f"{name}.batches",
            guard=KeyGuard(KeyRole.TRAINER),
        )
    )
    reports = await streams.enter_async_context(
        zmq_receiver(
            TrainingEvent,
            topology.endpoint(name, "reports"),
            bind=True,
            name=f"{name}.reports",
            guard=KeyGuard(KeyRole.TRAINER),
        )
    )
    return batches, reports


def _note_rewards(record: JournalledRun) -> Callable[[int, tuple[str, ...], str], None]:
    """Return what writes into the journal that other functions score from now on."""

    def note(version: int, rewards: tuple[str, ...], change: str) -> None:
        reason = f"{change}: version {version} is {', '.join(rewards)}"
        record.journal.decided(Decision(subject="rewards", reason=reason))

    return note


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
