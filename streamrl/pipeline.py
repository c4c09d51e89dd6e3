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
(``streamrl.run.Pipeline``). This module is what the controller process runs.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import msgspec

from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.reward_changes import RewardReply, RewardsListed
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.comm.supervisor_orders import ParentMessage
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.config.canary import canary_bounds
from streamrl.config.recipe import Recipe, ReleaseKind
from streamrl.config.topology import Topology, prepared_sets
from streamrl.control.alarms import Alarms, alarm_rules
from streamrl.control.checkpoints import CheckpointKeeper
from streamrl.control.control_file import read_control_file
from streamrl.control.controller import Controller
from streamrl.control.engine_release import EngineRelease, engine_sizes
from streamrl.control.engine_switch import SWITCH, engine_switch
from streamrl.control.evaluation import HeldOut
from streamrl.control.evaluation_samples import EvaluationSamples
from streamrl.control.event_log import EventLog
from streamrl.control.publisher import WeightPublisher
from streamrl.control.run_report import RunReport
from streamrl.control.settings import ControlSettings
from streamrl.control.trainer_ranks import RankStreams, TrainerRanks
from streamrl.control.trajectory_trace import TrajectoryTrace, trace_header
from streamrl.control.weight_audit import WeightAudit
from streamrl.control.weight_canary import canary_of
from streamrl.engines.engine_options import CPU_BLOCK_TOKENS, expected_room, installed_device
from streamrl.engines.engine_pool import EnginePool
from streamrl.engines.engine_seat import EngineSeat, SeatedEngines, seated_engines
from streamrl.engines.pool_service import PoolService
from streamrl.learning.durable_files import surviving
from streamrl.messages import (
    EngineReady,
    EvaluationFinished,
    RunEvent,
    RunFinished,
    RunStarted,
    StepFinished,
    TrainingEvent,
    TrainingOrder,
)
from streamrl.observe.reporter import Reporter
from streamrl.observe.sinks import JsonlSink, PublishSink
from streamrl.processes.judge_link import JudgeLink
from streamrl.processes.reward_workers import change_rewards, open_reward_stage
from streamrl.stage_messages import RewardOutcome, RolloutOrder, RolloutOutcome
from streamrl.stages.prompts import open_prompts
from streamrl.stages.reward import RewardStage
from streamrl.stages.rollout import RolloutStage
from streamrl.tokenizer import Tokenizer, load_tokenizer, refuse_different_tokenizers
from streamrl.types import Prompt

MOST_HELD_OUT = 10_000

T = TypeVar("T")
Ends = tuple[SendStream[T], ReceiveStream[T]]
Emit = Callable[[RunEvent | RewardReply], Awaitable[None]]


async def run_controller(recipe: Recipe, topology: Topology, run_directory: Path) -> None:
    """Connect everything, run until training is done or drained, and end every stream."""
    async with AsyncExitStack() as streams:
        steps = await streams.enter_async_context(
            zmq_sender(ParentMessage, topology.endpoint("controller", "steps"), bind=False, name="controller.steps")
        )
        ranks = [await _connect_rank(recipe, topology, index, streams) for index in range(recipe.training.ranks)]
        socket = PublishSink(
            recipe.metrics.endpoint or f"{topology.endpoint('controller', 'steps')}.metrics", run_id=run_directory.name
        )
        reporter = Reporter([JsonlSink(run_directory / "metrics.jsonl"), socket])
        streams.callback(reporter.close)

        async def emit(event: RunEvent | RewardReply) -> None:
            event = judge.measured(event)
            _report(event, reporter)
            await steps.send(event)

        trainer, seats, judge = TrainerRanks(ranks), _seats(recipe, topology), JudgeLink(recipe, topology)
        async with anyio.create_task_group() as nursery:
            for seat in seats.values():
                nursery.start_soon(seat.run)
            nursery.start_soon(judge.run)
            first, *others = (one.engines for one in prepared_sets(recipe))
            absent = [name for engines in others for name in engines]
            began = anyio.current_time()
            pool = EnginePool([await seats[name].open() for name in first], absent=absent, by=SWITCH)
            ready = await pool.start()
            start_s = anyio.current_time() - began
            greetings = await trainer.ready()
            await judge.ready(pool.load, min(ready.max_running, recipe.rollout.batch_trajectories))
            tokenizer = await anyio.to_thread.run_sync(load_tokenizer, recipe.model.path)
            digests = {"the controller": tokenizer.digest, "the engines": ready.tokenizer_digest}
            digests |= {f"trainer rank {greeting.rank}": greeting.tokenizer_digest for greeting in greetings}
            refuse_different_tokenizers(recipe.model.path, digests)
            nursery.start_soon(trainer.run)
            await emit(
                RunStarted(
                    run_id=run_directory.name,
                    directory=str(run_directory),
                    metrics_endpoint=socket.endpoint,
                    steps=recipe.run.steps,
                    parameters=greetings[0].parameters,
                )
            )
            version = greetings[0].policy_version
            hosts = seated_engines(recipe, seats, pool, steps.send)
            rooms = expected_room(recipe, ready.kv_tokens // recipe.engines.count)
            parts = _Parts(tokenizer, pool, hosts, trainer, ready, start_s, rooms, greetings[0].parameters, emit)
            await _run_stages(recipe, topology, run_directory, parts, version)
            # Engines end when their orders end; so does everything else that is still open.
            await pool.aclose()
            await hosts.aclose()
            for seat in seats.values():
                seat.retire()
            judge.retire()


class _Parts(msgspec.Struct, frozen=True):
    """What is connected: the stages work on it."""

    tokenizer: Tokenizer
    pool: EnginePool
    hosts: SeatedEngines
    trainer: TrainerRanks
    ready: EngineReady
    start_s: float
    rooms: dict[str, int]
    parameters: int
    emit: Emit


async def _run_stages(
    recipe: Recipe, topology: Topology, run_directory: Path, parts: _Parts, start_version: int
) -> None:
    """Control, rollout and reward, from the version that the trainer holds to the end of the run."""
    held_out = await _held_out(recipe, parts)
    reward, attached = await open_reward_stage(recipe, topology, run_directory, parts.emit)
    rollout = RolloutStage(
        parts.pool,
        max_tokens=recipe.sampling.max_tokens,
        temperature=recipe.sampling.temperature,
        top_p=recipe.sampling.top_p,
        verifies_losers=recipe.tail_batching.verifies,
    )
    resumed = recipe.checkpoint.resume_from
    kept = await anyio.to_thread.run_sync(read_control_file, surviving(Path(resumed))) if resumed else None
    settings = control_settings(recipe)
    log = EventLog(run_directory / "events.jsonl", run_directory.name, settings)
    drawn = kept.snapshot.drawn if kept else start_version * recipe.rollout.prompts_per_batch
    source, shuffle = recipe.prompts.train, recipe.prompts.shuffle
    prompts = open_prompts(source, parts.tokenizer, seed=recipe.run.seed, shuffle=shuffle, max_tokens=None, start=drawn)
    service = _service(recipe, parts.pool)
    publisher = WeightPublisher(
        list(parts.pool.attached.values()),
        parts.trainer.publish_anchor,
        in_flight=recipe.rollout.in_flight,
        timeout_s=recipe.weights.push_timeout_s,
        on_hold=rollout.stand_still,
        service=service,
        patience_s=recipe.weights.engine_patience_s,
        canary=await anyio.to_thread.run_sync(canary_of, recipe, installed_device()),
    )
    keeper = CheckpointKeeper(parts.trainer, run_directory / "checkpoints", recipe.checkpoint, forget=_remove_directory)
    samples = EvaluationSamples(run_directory / "evaluations", parts.tokenizer.decode)
    audit = WeightAudit(parts.pool.attached, run_directory / "audits.jsonl", recipe.weights.audit_interval)
    report = _run_report(recipe, run_directory, parts, rollout, reward)
    controller = Controller(
        settings,
        prompts=prompts,
        held_out=held_out,
        trainer=parts.trainer,
        publisher=publisher,
        log=log,
        report=report,
        seed=recipe.run.seed,
        save=keeper.save,
        beside=attached.file,
        audit=audit.after_push,
        scored=keeper.scored,
        store=samples.write if recipe.evaluation.store_samples else None,
        alarms=Alarms(alarm_rules(recipe.off_policy.alarm, canary_bounds(recipe, installed_device()).alarm)),
        load=parts.pool.load,
        release=_release(recipe, parts, publisher),
        switch=engine_switch(recipe, parts.pool, parts.rooms, publisher, parts.hosts, parts.start_s),
        start_version=start_version,
        kept=kept,
    )
    # Everything in flight fits into the windows, so control never waits for a stage to take an order.
    window = 2 * controller.state.slots.capacity + held_out.in_flight + 64
    orders_ends: Ends[RolloutOrder] = memory_stream(window)
    trajectories_ends: Ends[RolloutOutcome] = memory_stream(window)
    scored_ends: Ends[RewardOutcome] = memory_stream(window)
    try:
        async with anyio.create_task_group() as stages:
            stages.start_soon(_stop_on_sigterm, controller)
            if service is not None:
                stages.start_soon(service.run)
            stages.start_soon(publisher.run)
            stages.start_soon(rollout.run, orders_ends[1], trajectories_ends[0])
            stages.start_soon(reward.run, trajectories_ends[1], scored_ends[0])
            stages.start_soon(change_rewards, topology, attached, controller.rewards_attached)
            reason = await controller.run(orders_ends[0], scored_ends[1])
            await parts.emit(RunFinished(reason=reason, step=controller.state.live_version))
            stages.cancel_scope.cancel()
    finally:
        log.close()
        report.close()
        await prompts.aclose()


def _run_report(
    recipe: Recipe, run_directory: Path, parts: _Parts, rollout: RolloutStage, reward: RewardStage
) -> RunReport:
    """What the run tells observers and the trace. Whatever the rounds, engines are measured against one capacity."""
    capacity = min(parts.ready.max_running, recipe.rollout.batch_trajectories)
    header = trace_header(
        recipe,
        run_id=run_directory.name,
        started_at=time.time(),
        max_context=parts.ready.max_context,
        capacity=capacity,
        kv_tokens=parts.ready.kv_tokens,
        parameters=parts.parameters,
    )
    trace = TrajectoryTrace(run_directory / "trace.jsonl", header)
    return RunReport(
        parts.emit,
        rollout.statistics,
        capacity,
        engines=recipe.engines.count,
        rewards_in_flight=lambda: reward.in_flight,
        trace=trace,
    )


def _service(recipe: Recipe, pool: EnginePool) -> PoolService | None:
    """Whoever frees or changes engines readmits them itself: those runs end with a tainted engine, as ever."""
    stay = recipe.engines.release is ReleaseKind.NEVER and not recipe.engines.sets
    return PoolService(pool) if stay else None


def _release(recipe: Recipe, parts: _Parts, publisher: WeightPublisher) -> EngineRelease | None:
    """Who frees engines late in a round, where the recipe wants it."""
    engines = recipe.engines
    if engines.release is ReleaseKind.NEVER:
        return None
    return EngineRelease(
        parts.pool,
        # vLLM's blocks are smaller on a GPU: there these are the more careful figure.
        engine_sizes(recipe, parts.ready.kv_tokens // engines.count, CPU_BLOCK_TOKENS),
        publisher=publisher,
        share_cores=parts.trainer.engines_freed,
        hosts=parts.hosts if engines.release is ReleaseKind.STOP else None,
        start_timeout_s=engines.start_timeout_s,
    )


# ---- connecting ----------------------------------------------------------------------------------


def _seats(recipe: Recipe, topology: Topology) -> dict[str, EngineSeat]:
    names = [name for one in prepared_sets(recipe) for name in one.engines]
    return {n: EngineSeat(n, topology.endpoint(n, "orders"), topology.endpoint(n, "completions")) for n in names}


async def _connect_rank(recipe: Recipe, topology: Topology, index: int, streams: AsyncExitStack) -> RankStreams:
    name = f"trainer-{index}"
    # A whole batch and its close fit, so control never waits for a rank that is busy with another one.
    window = 2 * recipe.rollout.prompts_per_batch + 64
    batches = await streams.enter_async_context(
        zmq_sender(TrainingOrder, topology.endpoint(name, "batches"), bind=True, window=window, name=f"{name}.batches")
    )
    reports = await streams.enter_async_context(
        zmq_receiver(TrainingEvent, topology.endpoint(name, "reports"), bind=True, name=f"{name}.reports")
    )
    return batches, reports


async def _stop_on_sigterm(controller: Controller) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            controller.stop("drained")


async def _remove_directory(path: Path) -> None:
    await anyio.to_thread.run_sync(partial(shutil.rmtree, path, ignore_errors=True))


# ---- from the recipe -----------------------------------------------------------------------------


def control_settings(recipe: Recipe) -> ControlSettings:
    """What of the recipe decides."""
    has_held_out = bool(recipe.evaluation.prompts)
    return ControlSettings(
        steps=recipe.run.steps,
        batch_groups=recipe.rollout.prompts_per_batch,
        group_size=recipe.rollout.group_size,
        rounds=recipe.rollout.rounds,
        max_staleness=recipe.rollout.max_staleness,
        when_stale=recipe.rollout.when_stale,
        dynamic_sampling=recipe.dynamic_sampling,
        order=recipe.rollout.order,
        presubmit=recipe.rollout.presubmit,
        policy=recipe.rollout.policy,
        tail_batching=recipe.tail_batching,
        length_sorted=recipe.length_sorted,
        group_sizing=recipe.group_sizing,
        seed=recipe.run.seed,
        max_failed_share=recipe.reward_limits.max_failed_share,
        failure_window=recipe.reward_limits.window,
        evaluate_every=recipe.evaluation.every if has_held_out else 0,
        evaluate_limit=recipe.evaluation.limit,
        evaluate_at_start=has_held_out and recipe.evaluation.at_start,
        evaluate_at_end=has_held_out and recipe.evaluation.at_end,
        checkpoint_every=recipe.checkpoint.every,
        checkpoint_at_end=recipe.checkpoint.at_end,
    )


async def _held_out(recipe: Recipe, parts: _Parts) -> HeldOut:
    """All held-out prompts, in file order; of an iterator at most ``MOST_HELD_OUT``."""
    evaluation = recipe.evaluation
    prompts: list[Prompt] = []
    if evaluation.prompts:
        source = open_prompts(evaluation.prompts, parts.tokenizer, seed=0, shuffle=False, max_tokens=None)
        try:
            prompts = await source.draw(source.size or MOST_HELD_OUT)
        finally:
            await source.aclose()
    return HeldOut(
        prompts=prompts,
        samples=evaluation.samples,
        temperature=evaluation.temperature,
        in_flight=parts.ready.max_running,
    )


def _report(event: RunEvent | RewardReply, reporter: Reporter) -> None:
    match event:
        case StepFinished():
            reporter.step(event.step, event.policy_version, event.metrics)
        case EvaluationFinished():
            reporter.evaluation(event.step, event.policy_version, event.metrics)
        case RewardsListed():
            return  # it concerns whoever asked
        case _:
            reporter.event(type(event).__name__, **msgspec.structs.asdict(event))
