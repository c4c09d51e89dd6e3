"""Where the product touches the outside: each of these names is replaced while a world runs, and nothing else is."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import anyio
import msgspec
from anyio._backends import _asyncio

from campaigns.faults import simulated_parts as parts
from campaigns.faults.simulated_machine import Machine, SimulatedLauncher
from campaigns.faults.simulated_trainer import SimulatedTrainer
from campaigns.faults.stamped_engine import StampedEngine
from campaigns.faults.virtual_time import places_of
from campaigns.faults.world_disk import SimulatedLock, SimulatedOs, SimulatedThread
from campaigns.faults.world_state import WorldState
from streamrl.base.atomic_files import hold_lock
from streamrl.comm import zmq_stream
from streamrl.comm.stream_protocol import Hello
from streamrl.control.actions import Decision
from streamrl.control.machine import Control
from streamrl.engines import engine_process
from streamrl.engines.elastic.engine_sets import SetPlan, SetPlanner
from streamrl.engines.elastic.freeing import Freeing, FreeingSettings
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.engines.simulated.engine import SimulationOptions
from streamrl.engines.step_cost import StepCost
from streamrl.engines.vllm.options import dtype_of_engines, expected_room
from streamrl.engines.vllm.visible_gpus import installed_device
from streamrl.launch import pipeline as run_module
from streamrl.launch import roles, run_controller
from streamrl.launch.control_socket import serving_control
from streamrl.launch.run_directory import refuse_changes
from streamrl.launch.run_record import refuse_lost_journal
from streamrl.learning import options as options_module
from streamrl.learning import trainer as trainer_module
from streamrl.observe.report.run_report import RunReport
from streamrl.observe.telemetry import TelemetryPublisher
from streamrl.prepare.preflight import preflight, with_checkpoint_rewards
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.processes import clean_up, supervisor
from streamrl.processes.crash_bundle import write_crash_bundle
from streamrl.processes.local_launcher import LocalLauncher
from streamrl.processes.watchdog import Watchdog, ask_for_stacks
from streamrl.recipe import topology as topology_module
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.rewards.calls.inspect import RewardInspection, inspect_in_subprocess
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.calls.trusted import open_timer
from streamrl.run.journal import journal_file
from streamrl.run.prompts import open_prompts as prompts_module
from streamrl.stages import training

_ROLES = (run_controller, supervisor)  # imported before anything is looked for
_INIT, _HANDLE, _SNAPSHOT = Control.__init__, Control.handle, Control.snapshot
_PLAN = topology_module.plan_topology

FREED_OFTEN = FreeingSettings(window=(0.05, 0.95), least_lengths=4)
"""Rounds are short here."""
KV_TOKENS = 4000
"""Of one engine: all that a world has under way fits, so that engines can be freed."""


LOOKED_EVERY = {"POLL_S": 1.0, "MEASURING_INTERVAL_S": 20.0}
"""Clockwork that does nothing but look: in virtual time it would be most of the work. In ``Shape.poll_s``."""
LOAD_SECONDS = 5.0


@contextmanager
def patched_product(world: WorldState, machine: Machine) -> Iterator[None]:
    """The product on ``world`` and its ``machine``."""
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        def put_for(original: Any, value: Any) -> None:
            places = places_of(original)
            assert places, original
            for owner, name in places:
                put(owner, name, value)

        def hello(*, window: int, **others: Any) -> Any:
            return Hello(window=min(window, world.shape.window), **others)

        put(anyio, "open_signal_receiver", parts.SimulatedSignals)
        put(zmq_stream, "StreamConnection", world.network.make_connection)
        put(zmq_stream, "Hello", hello)

        def thread(_: str) -> Any:
            return SimpleNamespace(call=partial(world.loop.run_in_executor, object()), close=lambda: None)

        def any_set(planner: SetPlanner, *_: Any) -> SetPlan:
            world.ledger.faulted(40 * world.shape.pace)  # who joins holds the version before, and does not serve yet
            because = Decision(subject="engine_set", reason="any", figures={})
            return SetPlan(engine_set=world.random.choice(sorted(planner.sets)), because=because)

        _walked_in_order(put)
        _files_and_user_code(world, put, put_for)
        put(os, "_exit", machine.leave)
        _processes(world, machine, put, put_for)
        _parts(world, put)
        put(journal_file, "os", SimulatedOs(world))
        put(journal_file, "to_thread", SimulatedThread(world))
        put(training, "DedicatedThread", thread)
        _control(world, put)
        stack.enter_context(mock.patch.dict(RunReport.__init__.__kwdefaults__, {"clock": world.loop.time}))
        stack.enter_context(mock.patch.dict(Freeing.__init__.__kwdefaults__, {"settings": FREED_OFTEN}))
        put(SetPlanner, "plan", any_set)
        yield


class InOrder(dict[Any, None]):
    """A set that is walked in the order in which things came, and not in that of their addresses."""

    def add(self, thing: Any) -> None:
        self[thing] = None

    def remove(self, thing: Any) -> None:
        del self[thing]

    def discard(self, thing: Any) -> None:
        self.pop(thing, None)


def _walked_in_order(put: Any) -> None:
    """Sets of objects whose order is seen from outside: anyio cancels in it, a push goes through it."""
    numbers = itertools.count(1)
    begin = _asyncio.CancelScope.__init__

    def init(scope: Any, *arguments: Any, **named: Any) -> None:
        begin(scope, *arguments, **named)
        scope._child_scopes, scope._tasks = InOrder(), InOrder()

    def number_of(thing: Any) -> int:
        return int(thing.__dict__.setdefault("_number_in_world", next(numbers)))

    put(_asyncio.CancelScope, "__init__", init)
    put(RemoteEngine, "__hash__", number_of)


def _files_and_user_code(world: WorldState, put: Any, put_for: Any) -> None:
    def open_prompts(source: str, tokenizer: Any, **named: Any) -> parts.SimulatedPrompts:
        held_out = "held_out" in source
        limit = 10 if held_out else 10**9
        return parts.SimulatedPrompts(Random(f"{world.shape.seed} {source}"), named.get("start", 0), limit)

    def inspect(rewards: Any, *_: Any) -> list[RewardInspection]:
        return [RewardInspection(signature=load_reward(reward).signature) for reward in rewards]

    tokenizer = parts.StubTokenizer()
    put_for(load_tokenizer, lambda _: tokenizer)
    put_for(open_timer, lambda: None)
    put_for(prompts_module.open_prompts, open_prompts)
    put_for(TelemetryPublisher, parts.SilentSink)
    put_for(installed_device, lambda: "cuda" if world.shape.seed % 2 else "cpu")
    put_for(dtype_of_engines, lambda *_: "bfloat16")
    put_for(expected_room, lambda recipe, _: {one.name: KV_TOKENS for one in topology_module.prepared_sets(recipe)})
    put_for(inspect_in_subprocess, inspect)


def _processes(world: WorldState, machine: Machine, put: Any, put_for: Any) -> None:
    def plan_topology(recipe: Any, sockets: Path) -> Any:
        world.topology = _PLAN(recipe, Path(world.sockets))
        return world.topology

    def make_run_directory(*_: Any) -> Path:
        directory: Path = world.directory / "run"
        directory.mkdir(exist_ok=True)
        (directory / "recipe.toml").touch()
        return directory

    @asynccontextmanager
    async def no_control_socket(*_: Any, **__: Any) -> AsyncIterator[None]:
        yield

    put_for(preflight, lambda *_: None)
    put_for(clean_up.remove_killed_life, lambda *_: [])
    put_for(refuse_changes, lambda *_, **__: [])
    put_for(refuse_lost_journal, lambda *_: None)  # it is on the simulated disk
    put_for(load_recipe, lambda *_: world.recipe)
    put_for(hold_lock, SimulatedLock)
    put_for(ask_for_stacks, lambda _: [])
    put_for(write_crash_bundle, lambda *_, **__: "no crash bundle: simulated")
    put(engine_process, "getpid", machine.getpid)
    put_for(with_checkpoint_rewards, lambda recipe: (recipe, None))
    put_for(_PLAN, plan_topology)
    put(run_module, "_make_run_directory", make_run_directory)
    put_for(serving_control, no_control_socket)
    put(tempfile, "mkdtemp", lambda **_: world.sockets)
    put(Watchdog, "_watch_loop", lambda _: None)  # in simulated time a loop is never blocked
    put(Watchdog, "_beat", lambda _: anyio.sleep_forever())
    put_for(LocalLauncher, lambda _, run_directory, __: SimulatedLauncher(machine, run_directory))
    _named_everywhere(put, "LOAD_SECONDS", LOAD_SECONDS)
    for name, seconds in LOOKED_EVERY.items():
        _named_everywhere(put, name, seconds * world.shape.poll_s)


def _named_everywhere(put: Any, name: str, value: Any) -> None:
    """A constant, wherever it is."""
    owners = [m for n, m in sys.modules.items() if n.split(".")[0] == "streamrl" and name in vars(m)]
    assert owners, name
    for owner in owners:
        put(owner, name, value)


def _control(world: WorldState, put: Any) -> None:
    """Nothing is replaced: the ledger sees what control takes, orders, writes down, and begins with."""

    def init(control: Control, settings: Any, policy: Any, sizer: Any, snapshot: Any = None, *more: Any) -> None:
        began = msgspec.msgpack.encode(snapshot.state) if snapshot is not None else b""
        _INIT(control, settings, policy, sizer, snapshot, *more)
        if began:
            world.ledger.restored(control, began)

    def handle(control: Control, event: Any) -> Any:
        actions = _HANDLE(control, event)
        world.handled(control, event, actions)
        return actions

    def snapshot(control: Control) -> Any:
        world.ledger.recorded(control, msgspec.msgpack.encode(control.state))
        return _SNAPSHOT(control)

    put(Control, "__init__", init)
    put(Control, "handle", handle)
    put(Control, "snapshot", snapshot)


def _parts(world: WorldState, put: Any) -> None:
    def engine(options: Any, *_: Any) -> StampedEngine:
        shape = world.shape
        chosen = SimulationOptions(
            name=options.name,
            step=StepCost(base_s=shape.step_ms / 1e3, per_running_s=shape.step_ms / 1e5),
            max_num_seqs=64,
            kv_tokens=KV_TOKENS,
            vocabulary=50_000,
            tokenizer_digest=parts.TOKENIZER_DIGEST,
            lengths=shape.lengths,
        )
        return StampedEngine(world, options.name, chosen)

    class Named:
        environment: dict[str, str] = {}

        def __init__(self, name: str) -> None:
            self.name = name

    def trainer_options(recipe: Any, rank: int, *_: Any, **named: Any) -> tuple[int, str]:
        return rank, named.get("resume_from") or recipe.checkpoint.resume_from

    def trainer(options: tuple[int, str], *_: Any) -> SimulatedTrainer:
        rank, directory = options
        return SimulatedTrainer(world, rank, world.shape.ranks, Path(directory) if directory else None)

    put(roles, "engine_options", lambda recipe, index, sockets, **_: Named(f"engine-{index}"))
    put(roles, "_vllm", engine)
    put(options_module, "trainer_options", trainer_options)
    put(trainer_module, "TorchTrainer", trainer)
