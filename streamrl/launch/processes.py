"""Connections of the controller to the other processes of a run: engines, trainer ranks, reward workers, environment
workers, judge, teacher. ``run_controller`` makes them at the start, in the controller's process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from logging import getLogger
from pathlib import Path

from anyio import current_time, to_thread
from anyio.abc import TaskGroup
from msgspec import Struct

from streamrl.base.concurrent_calls import BackgroundCall
from streamrl.base.messages import (
    EngineReady,
    EnvironmentEvent,
    EnvironmentOrder,
    TrainerReady,
    TrainingEvent,
    TrainingOrder,
)
from streamrl.base.run_events import RunEvent, StartProgress
from streamrl.base.waits import Waits
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.stream import exchange_hello
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.contracts import Turns
from streamrl.engines.elastic.engine_processes import EngineProcesses
from streamrl.engines.elastic.turns import EngineTurns
from streamrl.engines.pool import EnginePool
from streamrl.engines.vllm.visible_gpus import installed_device
from streamrl.launch.attached_rewards import AttachedRewards
from streamrl.launch.control_protocol import ParentMessage, SteeringReply
from streamrl.launch.reward_workers import open_reward_stage
from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer, refuse_different_tokenizers
from streamrl.recipe.environment import ENVIRONMENT_REWARD
from streamrl.recipe.sections import Recipe
from streamrl.recipe.topology import Role, Topology, prepared_sets
from streamrl.rewards.reward_messages import RewardReply
from streamrl.rewards.served.link import ServedModelLink
from streamrl.run.trainer_ranks import RankStreams, TrainerRanks
from streamrl.stages.environment import EnvironmentStage, EnvironmentStreams
from streamrl.stages.reward import RewardStage

log = getLogger(__name__)

SayReady = Callable[[Iterable[str]], Awaitable[None]]
Emit = Callable[[RunEvent | RewardReply | SteeringReply], Awaitable[None]]


class Processes(Struct, frozen=True, kw_only=True):
    """Connections to the processes of a run that are ready. ``ready``: summary of the engines of the first set, which
    started within ``start_s`` seconds; ``rank``: hello of the first trainer rank; ``environment``: stage of the
    environment workers, or None; ``turns``: turns of engines and ranks; ``models``: judge and teacher, where the run
    serves them."""

    turns: Turns
    tokenizer: Tokenizer
    reward: RewardStage
    attached: AttachedRewards
    pool: EnginePool
    engine_processes: EngineProcesses
    ready: EngineReady
    start_s: float
    trainer: TrainerRanks
    rank: TrainerReady
    models: Sequence[ServedModelLink]
    environment: EnvironmentStage | None

    async def aclose(self) -> None:
        """End the streams of orders: a process ends when its orders end. The controller has ended the ranks' orders."""
        await self.engine_processes.aclose()
        await self.pool.aclose()
        for model in self.models:
            model.retire()


async def connect_ranks(recipe: Recipe, topology: Topology, streams: AsyncExitStack) -> TrainerRanks:
    """Bind the streams to all trainer ranks. ``streams``: exit stack that closes them."""
    return TrainerRanks(
        [await _connect_rank(recipe, topology, index, streams) for index in range(recipe.training.ranks)]
    )


async def connect_processes(
    recipe: Recipe,
    topology: Topology,
    run_directory: Path,
    *,
    trainer: TrainerRanks,
    models: Sequence[ServedModelLink],
    order: Callable[[ParentMessage], Awaitable[None]],
    emit: Emit,
    waits: Waits,
    nursery: TaskGroup,
) -> Processes:
    """Wait, concurrently, until every process is ready. ``order``: sends an order to the supervisor; ``nursery``: task
    group in which the connections are served. Raises ``StreamRLError`` for processes with different tokenizers."""
    began_s = current_time()

    async def say_ready(names: Iterable[str]) -> None:
        seconds = current_time() - began_s
        await emit(StartProgress(process=", ".join(names), state="ready", seconds=seconds))

    async def ready_ranks() -> list[TrainerReady]:
        hellos = await trainer.ready()
        await say_ready(f"trainer-{hello.rank}" for hello in hellos)
        return hellos

    for model in models:
        nursery.start_soon(model.run)
    loading = BackgroundCall(nursery, partial(to_thread.run_sync, load_tokenizer, recipe.model.path))
    environment = _environment_stage(recipe, topology, say_ready)
    scoring = BackgroundCall(nursery, partial(open_reward_stage, recipe, topology, run_directory, emit))
    training = BackgroundCall(nursery, ready_ranks)
    if recipe.in_turns:
        # A vLLM that starts needs its memory: the ranks have moved their state away when they are ready.
        with waits.waiting_for("the trainer ranks to load"):
            await training.result()
    with waits.waiting_for("the engines to start"):
        engine_processes, pool, ready = await _start_engines(recipe, topology, order, emit, nursery)
    await say_ready(prepared_sets(recipe)[0].engines)
    start_s = current_time() - began_s
    with waits.waiting_for("the trainer ranks to load"):
        hellos = await training.result()
    for model in models:
        await model.ready(pool.load, min(ready.max_num_seqs, recipe.batch_trajectories))
    tokenizer = await loading.result()
    reward, attached = await scoring.result()
    if tokenizer.end_notice:
        log.warning("%s", tokenizer.end_notice)
    await say_ready([f"reward-{index}" for index in range(recipe.reward_limits.workers)])
    digests = {"the controller": tokenizer.digest, "the engines": ready.tokenizer_digest}
    digests |= {f"trainer rank {hello.rank}": hello.tokenizer_digest for hello in hellos}
    refuse_different_tokenizers(recipe.model.path, digests)
    nursery.start_soon(trainer.run)
    turns = Turns()
    if recipe.in_turns:
        turns = EngineTurns(engine_processes, prepared_sets(recipe)[0].engines, lambda: trainer.holds_state)
    return Processes(
        turns=turns,
        tokenizer=tokenizer,
        reward=reward,
        attached=attached,
        pool=pool,
        engine_processes=engine_processes,
        ready=ready,
        start_s=start_s,
        trainer=trainer,
        rank=hellos[0],
        models=models,
        environment=environment,
    )


async def _start_engines(
    recipe: Recipe,
    topology: Topology,
    order: Callable[[ParentMessage], Awaitable[None]],
    emit: Emit,
    nursery: TaskGroup,
) -> tuple[EngineProcesses, EnginePool, EngineReady]:
    """Start and wait for the engines of the first set. Engines of other sets sleep, or end on a CPU, where vLLM's sleep
    frees nothing. Engines that take turns with the ranks sleep in any case: their sets are never exchanged."""
    sleeps = bool(recipe.engines.sets and recipe.engines.sleep_level) and installed_device() != "cpu"
    sets = prepared_sets(recipe)
    guard = KeyGuard(KeyRole.ENGINE)
    endpoints = {}
    for engine_set in sets:
        for name in engine_set.engines:
            endpoints[name] = (topology.endpoint(name, "orders"), topology.endpoint(name, "completions"))
    processes = EngineProcesses(
        endpoints,
        recipe.engines,
        order=order,
        emit=emit,
        guard=guard,
        sleeps=sleeps or recipe.in_turns,
        starts_inactive=recipe.in_turns,
    )
    await nursery.start(processes.run)
    return processes, *await processes.start(sets[0].engines)


async def _connect_rank(recipe: Recipe, topology: Topology, index: int, streams: AsyncExitStack) -> RankStreams:
    name = f"trainer-{index}"
    # The window holds twice the trajectories in flight, each in its own group: control never waits for a busy rank.
    window = 2 * recipe.max_in_flight + 64
    guard = KeyGuard(KeyRole.TRAINER)
    batches_at = topology.endpoint(name, "batches")
    reports_at = topology.endpoint(name, "reports")
    batches = await streams.enter_async_context(
        zmq_sender(TrainingOrder, batches_at, bind=True, window=window, name=f"{name}.batches", guard=guard)
    )
    reports = await streams.enter_async_context(
        zmq_receiver(TrainingEvent, reports_at, bind=True, name=f"{name}.reports", guard=guard)
    )
    return batches, reports


@asynccontextmanager
async def _open_environment(topology: Topology, say_ready: SayReady, name: str) -> AsyncIterator[EnvironmentStreams]:
    """Open the streams to an environment worker or to its successor, and wait until the worker is ready."""
    orders_at = topology.endpoint(name, "orders")
    events_at = topology.endpoint(name, "events")
    async with (
        zmq_sender(EnvironmentOrder, orders_at, bind=True, window=64, name=f"{name}.orders") as orders,
        zmq_receiver(EnvironmentEvent, events_at, bind=True, name=f"{name}.events") as events,
    ):
        await exchange_hello(events.receive, orders)
        await say_ready([name])
        yield orders, events


def _environment_stage(recipe: Recipe, topology: Topology, say_ready: SayReady) -> EnvironmentStage | None:
    """Return the stage that runs the episodes of a recipe with an environment; None where it has none."""
    names = [process.name for process in topology.processes if process.role is Role.ENVIRONMENT]
    workers = [partial(_open_environment, topology, say_ready, name) for name in names]
    rewards = [reward for reward in recipe.rewards if reward.function == ENVIRONMENT_REWARD]
    return EnvironmentStage(workers, *rewards[:1]) if workers else None
