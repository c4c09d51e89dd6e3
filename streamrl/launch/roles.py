"""Entry points of the processes of a run, by role. ``launch.__main__`` calls them in their process. Each imports only
the modules of its role."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from streamrl.base.messages import (
    EngineEvent,
    EngineOrder,
    EnvironmentEvent,
    EnvironmentOrder,
    TrainingEvent,
    TrainingOrder,
)
from streamrl.base.run_process import RUN_MARKER
from streamrl.base.waits import note_phase
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.zmq_stream import ZmqReceiveStream, ZmqSendStream, zmq_receiver, zmq_sender
from streamrl.contracts import WatchedEngine
from streamrl.engines.engine_process import serve_engine
from streamrl.engines.push.relay_tree import relay_endpoint
from streamrl.engines.vllm.options import EngineOptions, engine_options
from streamrl.processes.run_role import ChildSetup, RoleMain
from streamrl.recipe.judge import JUDGE_MODEL, JUDGE_SOCKET
from streamrl.recipe.remote_names import place_of_run
from streamrl.recipe.sections import EngineKind, Recipe
from streamrl.recipe.topology import RENDEZVOUS, RENDEZVOUS_FILE, ProcessPlan, Role, Topology, judge_socket
from streamrl.rewards.judge.gate import JudgeEvent, JudgeOrder
from streamrl.rewards.reward_messages import RewardOrder, RewardResult
from streamrl.rewards.user_variables import keep_variables_of_user_code

Streams = tuple[ZmqReceiveStream[Any], ZmqSendStream[Any]]


def role_main(role: Role) -> RoleMain:
    """The coroutine that a process of ``role`` runs."""
    if role is Role.CONTROLLER:
        from streamrl.launch.run_controller import run_controller

        return run_controller
    return {
        Role.ENGINE: run_engine,
        Role.TRAINER: run_trainer,
        Role.REWARD: run_reward,
        Role.ENVIRONMENT: run_environment,
        Role.JUDGE: run_judge,
    }[role]


@asynccontextmanager
async def controller_streams(
    topology: Topology, name: str, orders: tuple[str, Any], events: tuple[str, Any]
) -> AsyncIterator[Streams]:
    """Open the two streams between process ``name`` and the controller. ``orders`` and ``events``: name of the stream
    and type of its items."""
    orders_stream, order_type = orders
    events_stream, event_type = events
    guard = KeyGuard(KeyRole.CONTROLLER)
    orders_at = topology.endpoint(name, orders_stream)
    events_at = topology.endpoint(name, events_stream)
    async with (
        zmq_sender(event_type, events_at, bind=False, name=f"{name}.{events_stream}", guard=guard) as sender,
        zmq_receiver(order_type, orders_at, bind=False, name=f"{name}.{orders_stream}", guard=guard) as receiver,
    ):
        yield receiver, sender


# ---- engine ----------------------------------------------------------------------------------------


async def run_engine(setup: ChildSetup) -> None:
    """Serve one engine of vLLM or a simulated engine until the orders end."""
    engine = engine_of(setup.recipe, setup.plan, setup.socket_directory)
    name = setup.plan.name
    streams = controller_streams(setup.topology, name, ("orders", EngineOrder), ("completions", EngineEvent))
    endpoint = relay_endpoint(setup.topology, name)
    if not endpoint:
        await serve_engine(engine, streams)
    else:
        from streamrl.weights.relay.relay import Relay  # takes a second, for numba

        relay = Relay(endpoint, f"ipc://{setup.socket_directory / name}.relay")
        await serve_engine(engine, _with_relay(relay, streams), relay.through)


@asynccontextmanager
async def _with_relay(
    relay: AbstractContextManager[object], streams: AbstractAsyncContextManager[Streams]
) -> AsyncIterator[Streams]:
    """Open ``relay``, then ``streams``: no socket may be open before vLLM has forked."""
    with relay:
        async with streams as open_streams:
            yield open_streams


def engine_of(recipe: Recipe, plan: ProcessPlan, sockets: Path) -> WatchedEngine:
    """Make the engine of ``plan`` in this process, without starting it."""
    options = engine_options(recipe, plan.index, sockets, gpu_memory_utilization=plan.gpu_memory_utilization)
    return _simulated(options, sockets) if recipe.engines.kind is EngineKind.SIMULATED else _vllm(options)


def _vllm(options: EngineOptions) -> WatchedEngine:
    os.environ.update(options.variables)  # vLLM reads it when it is imported
    from streamrl.engines.vllm.engine import RunEngine

    return RunEngine(options)


def _simulated(options: EngineOptions, sockets: Path) -> WatchedEngine:
    """Make a simulated engine, without importing vllm or torch. Engines of a run share the replica of the weights, like
    engines of vLLM."""
    from streamrl.engines.simulated.engine import SimulatedEngine, SimulationOptions
    from streamrl.engines.simulated.text import sentences_of
    from streamrl.pretrained.tokenizer import load_tokenizer
    from streamrl.weights.pull.shared_replica import shared_replica
    from streamrl.weights.vllm.simulated_engine import SimulatedWeights

    tokenizer = load_tokenizer(options.model_path)
    simulation_options = SimulationOptions(
        name=options.name,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        kv_tokens=max(options.cache_blocks - 1, 0) * options.block_tokens,
        tokenizer_digest=tokenizer.digest,
    )
    replica = shared_replica(os.environ.get(RUN_MARKER, ""), options.model_path, sockets)
    weights = SimulatedWeights(Path(options.model_path), replica)
    return SimulatedEngine(simulation_options, text=sentences_of(tokenizer), weights=weights)


# ---- trainer, rewards, judge -----------------------------------------------------------------------


async def run_trainer(setup: ChildSetup) -> None:
    """Train as one rank until the batches end. A run that resumes goes on from its newest checkpoint."""
    note_phase("imports torch and transformers")
    from streamrl.learning.options import trainer_options
    from streamrl.learning.state.durable_files import newest_checkpoint
    from streamrl.learning.trainer import TorchTrainer
    from streamrl.pretrained.tokenizer import tokenizer_digest
    from streamrl.stages.training import run_training
    from streamrl.weights.publish.torch_tensors import start_publisher

    name = setup.plan.name
    endpoint = setup.topology.endpoint
    recipe = setup.recipe
    newest = newest_checkpoint(setup.run_directory) if setup.resumes else None
    store = recipe.weights.transport
    options = trainer_options(
        recipe,
        setup.plan.index,
        recipe.run.name,
        f"{place_of_run(store, setup.run_directory)}/weights/{name}" if store else endpoint(name, "weights"),
        rendezvous=setup.topology.endpoints[RENDEZVOUS] or f"file://{setup.socket_directory / RENDEZVOUS_FILE}",
        resume_from=str(newest or ""),
    )
    if setup.plan.gpus:
        options = replace(options, device="cuda")  # the only GPU that this process sees
    trainer = TorchTrainer(options, start_publisher, tokenizer_digest)
    streams = controller_streams(setup.topology, name, ("batches", TrainingOrder), ("reports", TrainingEvent))
    note_phase("loads the model")
    async with streams as (batches, reports):
        await run_training(trainer, batches, reports)


async def run_reward(setup: ChildSetup) -> None:
    """Score with the user's functions, in a process that can be killed, until the orders end."""
    note_phase("imports the reward functions")
    from streamrl.pretrained.tokenizer import load_tokenizer
    from streamrl.rewards.calls.worker import run_reward_worker

    os.environ[JUDGE_SOCKET] = str(judge_socket(setup.topology) or "")
    os.environ[JUDGE_MODEL] = setup.recipe.judge.model
    name = setup.plan.name
    streams = controller_streams(setup.topology, name, ("orders", RewardOrder), ("results", RewardResult))
    async with streams as (orders, results):
        tokenizer = load_tokenizer(setup.recipe.model.path)
        await run_reward_worker(setup.recipe, tokenizer, setup.plan.index, orders, results)


async def run_environment(setup: ChildSetup) -> None:
    """Run episodes of the user's code, in a process that can be killed, until the orders end."""
    keep_variables_of_user_code(setup.recipe.environment.variables)
    note_phase("imports the environment")
    from streamrl.pretrained.tokenizer import load_tokenizer
    from streamrl.run.environments.worker import run_environment_worker

    name = setup.plan.name
    recipe = setup.recipe
    streams = controller_streams(setup.topology, name, ("orders", EnvironmentOrder), ("events", EnvironmentEvent))
    async with streams as (orders, events):
        tokenizer = load_tokenizer(recipe.model.path)
        await run_environment_worker(recipe.environment, tokenizer, setup.plan.index, orders, events)


async def run_judge(setup: ChildSetup) -> None:
    """Answer questions of rewards with the run's judge until the orders of the controller end."""
    from streamrl.rewards.judge.options import judge_options

    options = judge_options(setup.recipe, setup.socket_directory)
    os.environ.update(options.variables)  # vLLM reads it when it is imported
    from streamrl.engines.vllm.engine import RunEngine
    from streamrl.rewards.judge.server import serve_judge

    name = setup.plan.name
    path = judge_socket(setup.topology)
    assert path is not None
    streams = controller_streams(setup.topology, name, ("orders", JudgeOrder), ("reports", JudgeEvent))
    async with streams as (orders, reports):
        await serve_judge(RunEngine(options), setup.recipe.judge, path, orders, reports, sleeps=options.sleeps)
