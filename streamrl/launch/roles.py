"""Entry points of the processes of a run, by role. ``launch.__main__`` calls them in their process. Each imports only
the modules of its role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

from anyio import move_on_after, sleep
from msgspec.structs import replace

from streamrl.base.errors import EngineError
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
from streamrl.launch.weight_movers import movers_of
from streamrl.processes.run_role import ChildSetup, RoleMain
from streamrl.recipe.remote_names import place_of_run
from streamrl.recipe.sections import EngineKind, Recipe
from streamrl.recipe.served_models import JUDGE_MODEL, JUDGE_SOCKET
from streamrl.recipe.topology import (
    RENDEZVOUS,
    RENDEZVOUS_FILE,
    ProcessPlan,
    Role,
    Topology,
    model_socket,
    served_models,
)
from streamrl.rewards.reward_messages import RewardOrder, RewardResult
from streamrl.rewards.served.gate import ModelEvent, ModelOrder
from streamrl.rewards.user_variables import keep_variables_of_user_code

LOADED_POLL_S = 0.05
LOAD_TIMEOUT_S = 3600.0
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
        Role.JUDGE: run_served_model,
        Role.TEACHER: run_served_model,
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
    await _ranks_have_loaded(setup)
    streams = controller_streams(setup.topology, name, ("orders", EngineOrder), ("completions", EngineEvent))
    endpoint = relay_endpoint(setup.topology, name)
    if not endpoint:
        await serve_engine(engine, streams)
    else:
        from streamrl.weights.relay.relay import Relay  # takes a second, for numba

        relay = Relay(endpoint, f"ipc://{setup.socket_directory / name}.relay")
        await serve_engine(engine, _with_relay(relay, streams), relay.through)


async def _ranks_have_loaded(setup: ChildSetup) -> None:
    """Wait for the trainer ranks that share a GPU with this engine: vLLM counts what they take meanwhile as its own.
    Raises ``EngineError`` after ``LOAD_TIMEOUT_S``."""
    engine = setup.plan
    ranks = [
        plan
        for plan in setup.topology.processes
        if plan.role is Role.TRAINER and plan.host == engine.host and set(plan.gpus) & set(engine.gpus)
    ]
    with move_on_after(LOAD_TIMEOUT_S):
        for plan in ranks:
            note_phase(f"waits until {plan.name}, on the same GPU, has loaded")
            while not _loaded_file(setup, plan.name).exists():  # noqa: ASYNC110 - another process makes the file
                await sleep(LOADED_POLL_S)
        return
    raise EngineError(
        f"{engine.name} shares a GPU with {', '.join(plan.name for plan in ranks)}, which had not loaded within "
        f"{LOAD_TIMEOUT_S:g} s: look at its log, and at the disk of the model"
    )


def _loaded_file(setup: ChildSetup, rank: str) -> Path:
    """File that a trainer rank makes when it has loaded. It is removed with the sockets before a run is resumed."""
    return setup.socket_directory / f"{rank}.loaded"


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
    options = engine_options(
        recipe,
        plan.index,
        sockets,
        gpu_memory_utilization=plan.gpu_memory_utilization,
        keeps_weights=plan.keeps_weights,
    )
    return _simulated(options, sockets) if recipe.engines.kind is EngineKind.SIMULATED else _vllm(options)


def _vllm(options: EngineOptions) -> WatchedEngine:
    environ.update(options.variables)  # vLLM reads it when it is imported
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
        kv_tokens=options.cache_tokens,
        tokenizer_digest=tokenizer.digest,
    )
    replica = shared_replica(environ.get(RUN_MARKER, ""), options.model_path, sockets)
    weights = SimulatedWeights(Path(options.model_path), replica)
    return SimulatedEngine(simulation_options, text=sentences_of(tokenizer), weights=weights)


# ---- trainer, rewards, served models ---------------------------------------------------------------


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
    movers = movers_of(recipe, setup.topology).values()
    trainer = TorchTrainer(options, partial(start_publisher, movers=set(movers)), tokenizer_digest)
    streams = controller_streams(setup.topology, name, ("batches", TrainingOrder), ("reports", TrainingEvent))
    note_phase("loads the model")
    async with streams as (batches, reports):
        await run_training(trainer, batches, reports, _loaded_file(setup, name).touch)


async def run_reward(setup: ChildSetup) -> None:
    """Score with the user's functions, in a process that can be killed, until the orders end."""
    note_phase("imports the reward functions")
    from streamrl.pretrained.tokenizer import load_tokenizer
    from streamrl.rewards.calls.worker import run_reward_worker

    environ[JUDGE_SOCKET] = str(model_socket(setup.topology, Role.JUDGE) or "")
    environ[JUDGE_MODEL] = setup.recipe.judge.model
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


async def run_served_model(setup: ChildSetup) -> None:
    """Answer questions with the judge or teacher of the run until the orders of the controller end."""
    from streamrl.rewards.served.options import served_options

    role = setup.plan.role
    options = served_options(setup.recipe, role, setup.socket_directory)
    environ.update(options.variables)  # vLLM reads it when it is imported
    from streamrl.engines.vllm.engine import RunEngine
    from streamrl.rewards.served.server import serve_model

    name = setup.plan.name
    settings = served_models(setup.recipe)[role]
    path = model_socket(setup.topology, role)
    assert path is not None
    streams = controller_streams(setup.topology, name, ("orders", ModelOrder), ("reports", ModelEvent))
    async with streams as (orders, reports):
        await serve_model(RunEngine(options), settings, path, orders, reports, sleeps=options.sleeps)
