"""Hosts of a set of engines stop, or sleep, and those of another one start or wake, over real sockets."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import anyio
import pytest
from builders.weights import anchor
from msgspec.structs import replace

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import EngineEvent, EngineOrder, Generate, OrderFailed
from streamrl.base.run_events import EngineBack, EngineLost, StartEngine, StopEngine, SupervisorOrder
from streamrl.base.types import Completion, FinishReason, token_array
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.transport_keys import KeyRole
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.control.events import UserOrder
from streamrl.engines.elastic.engine_processes import PATIENCE_SECONDS, EngineProcesses
from streamrl.engines.elastic.turns import EngineTurns
from streamrl.engines.engine_process import serve_engine
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.remote_engine import ENGINE_FAILURE
from streamrl.engines.resumption import resumed_request
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.processes.exit_reason import failures
from streamrl.recipe.scheduling import InFlight
from streamrl.recipe.sections import Engines

REQUEST = Generate(request_id="r", token_ids=token_array([3]), max_tokens=40, seed=1, temperature=1.0)
STOP_0, START_1 = StopEngine(engine="engine-0", patience_s=PATIENCE_SECONDS), StartEngine(engine="engine-1")


class Started:
    """Two sets of one engine, the first in use; a supervisor that starts processes as tasks and ends them by
    cancelling.

    ``host_lives``: what a host does that is ordered to start: it ``serves``, ``dies``, or ``loads`` until ``loaded``.
    """

    def __init__(
        self, directory: str, group: anyio.abc.TaskGroup, settings: Engines, *, first_port: int | None, sleeps: bool
    ) -> None:
        self.directory, self.group, self.first_port = directory, group, first_port
        self.ports: dict[str, int] = {}
        guard = KeyGuard(KeyRole.ENGINE)
        endpoints = {n: (self.at(n, "orders"), self.at(n, "completions")) for n in ("engine-0", "engine-1")}
        self.scopes: dict[str, anyio.CancelScope] = {}
        self.running: set[str] = set()
        self.told: list[SupervisorOrder] = []
        self.events: list[EngineLost | EngineBack] = []
        self.made: list[SimulatedEngine] = []
        self.loading, self.loaded = anyio.Event(), anyio.Event()
        self.host_lives = "serves"
        self.length = 30.0
        self.processes = EngineProcesses(
            endpoints, settings, order=self.order, emit=self.emit, guard=guard, sleeps=sleeps
        )

    def at(self, name: str, stream: str) -> str:
        if self.first_port is not None:
            port = self.ports.setdefault(f"{name}.{stream}", self.first_port + len(self.ports))
            return f"tcp://127.0.0.1:{port}"
        return f"ipc://{self.directory}/{name}.{stream}"

    async def open(self) -> None:
        await self.group.start(self.processes.run)
        self.group.start_soon(self.host, "engine-0", "serves")
        self.pool, _ = await self.processes.start(["engine-0"])
        self.sync = WeightSync(
            self.pool.attached, anchor, in_flight=InFlight.KEEP, timeout_s=300, on_failure=self.processes.on_failure
        )
        self.processes.set_weight_sync(self.sync)
        await self.sync.push(await anchor(0))

    async def close(self) -> None:
        await self.processes.aclose()
        await self.pool.aclose()

    async def host(self, name: str, lives: str) -> None:
        guard = KeyGuard(KeyRole.CONTROLLER)
        self.running.add(name)
        with anyio.CancelScope() as self.scopes[name]:
            async with (
                zmq_sender(EngineEvent, self.at(name, "completions"), bind=False, guard=guard) as events,
                zmq_receiver(EngineOrder, self.at(name, "orders"), bind=False, guard=guard) as orders,
            ):
                if lives == "dies":
                    await events.send(OrderFailed(order_id=ENGINE_FAILURE, reason="the model cannot be loaded"))
                else:
                    if lives == "loads":
                        self.loading.set()
                        await self.loaded.wait()
                    lengths = LengthMixture(median=self.length, sigma=0.0, long_share=0.0)
                    self.made.append(SimulatedEngine(SimulationOptions(name=name, lengths=lengths)))
                    await serve_engine(self.made[-1], nullcontext((orders, events)))
        self.running.discard(name)

    async def order(self, order: SupervisorOrder) -> None:
        self.told.append(order)
        await anyio.sleep(0.05)  # it reaches another process
        if isinstance(order, StartEngine) and order.engine not in self.running:
            self.group.start_soon(self.host, order.engine, self.host_lives)
        elif isinstance(order, StopEngine) and not order.patience_s and not order.sleeps:
            self.scopes[order.engine].cancel()

    async def emit(self, event: EngineLost | EngineBack) -> None:
        self.events.append(event)

    def orders(self) -> list[SupervisorOrder]:
        """Since it was asked before."""
        told, self.told = self.told, []
        return told

    async def assert_serves(self, name: str, version: int) -> None:
        assert self.pool.serving == (name,)
        completion = await self.pool.generate(REQUEST)
        assert {span.policy_version for span in completion.version_spans} == {version}


@asynccontextmanager
async def started(
    *, first_port: int | None = None, sleeps: bool = False, restarts: int = 3, start_timeout_s: float = 300.0
) -> AsyncIterator[Started]:
    settings = Engines(restarts=restarts, start_timeout_s=start_timeout_s)
    with tempfile.TemporaryDirectory(prefix="srl") as directory:
        async with anyio.create_task_group() as group:
            one = Started(directory, group, settings, first_port=first_port, sleeps=sleeps)
            await one.open()
            yield one
            await one.close()  # what runs beside it ends by itself


@pytest.mark.parametrize("tcp", [False, True])
async def test_a_set_stops_before_the_next_one_starts(tcp: bool, free_ports: Callable[[int], int]) -> None:
    """A set stops before the next one is started, which serves with the live version."""
    async with started(first_port=free_ports(4) if tcp else None) as one:
        await one.assert_serves("engine-0", 0)
        await one.processes.use(["engine-1"])
        assert one.orders() == [STOP_0, START_1] and sorted(one.pool.attached) == ["engine-1"]
        await one.assert_serves("engine-1", 0)
        await one.sync.push(await anchor(1))
        await one.processes.use(["engine-0"])
        await one.assert_serves("engine-0", 1)
        assert len(one.made) == 3 and one.events == []


@pytest.mark.parametrize("pushed_first", [False, True])
async def test_advance_requests_wait_for_set_and_version(pushed_first: bool) -> None:
    """Requests submitted in advance wait for their set and for their version."""
    completions = []

    async def sample() -> None:
        completions.append(await one.pool.generate(REQUEST))

    async with started() as one, anyio.create_task_group() as group:
        await one.sync.pause()
        one.pool.withdraw(["engine-0"], "away")
        group.start_soon(sample)
        one.host_lives = "loads"
        group.start_soon(one.processes.use, ["engine-1"])
        await one.loading.wait()
        if pushed_first:  # no engine holds it then
            await one.sync.push(await anchor(1))
        one.loaded.set()
        if not pushed_first:
            while one.pool.serving != ("engine-1",):
                await anyio.sleep(0.01)
            assert not completions, "it is paused for the version"
            await one.sync.push(await anchor(1))
    assert {span.policy_version for span in completions[0].version_spans} == {1}


async def reached(condition: Callable[[], object]) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.sleep(0.01)


@pytest.mark.parametrize("order", ["pause_engine", "withdraw_engine"])
async def test_a_host_takes_its_engine_back_and_gives_it_again(order: UserOrder) -> None:
    """Requests of the engine go on on the other one at once. A withdrawn engine has no process, a paused one keeps it
    and gets the versions that are made meanwhile."""
    async with started() as one, anyio.create_task_group() as group:
        one.length = 4000.0
        await one.processes.use(["engine-0", "engine-1"])
        one.orders()
        completions: list[Completion] = []

        async def sample(number: int) -> None:
            request = replace(REQUEST, request_id=f"{number}/0", token_ids=token_array([number]), max_tokens=4000)
            while True:
                completion = await one.pool.generate(request)
                if completion.finish_reason is not FinishReason.ABORT:
                    completions.append(completion)
                    return
                request = resumed_request(request, completion, seed=2)

        for number in range(4):
            group.start_soon(sample, number)
        await reached(lambda: all(one.pool.open_requests().values()))
        one.processes.set_availability("engine-1", order)
        await reached(lambda: one.pool.serving == ("engine-0",) and not one.pool.open_requests().get("engine-1"))
        await reached(lambda: len(completions) == 4)
        if order == "withdraw_engine":
            await reached(lambda: "engine-1" not in one.pool.attached and one.orders())
            await reached(lambda: "engine-1" not in one.running)
        await one.sync.push(await anchor(1))
        assert one.pool.serving == ("engine-0",)
        one.processes.set_availability("engine-1", "return_engine")
        await reached(lambda: one.pool.serving == ("engine-0", "engine-1"))
        assert [type(told) for told in one.orders()] == ([StartEngine] if order == "withdraw_engine" else [])
        one.pool.withdraw(["engine-0"], "test")
        await one.assert_serves("engine-1", 1)


@pytest.mark.parametrize("pause_s", [0.0, 0.01, 0.06, 0.2])
async def test_an_engine_that_is_returned_at_once_serves(pause_s: float) -> None:
    async with started() as one:
        await one.processes.use(["engine-0", "engine-1"])
        for _ in range(3):
            one.processes.set_availability("engine-1", "withdraw_engine")
            await anyio.sleep(pause_s)
            one.processes.set_availability("engine-1", "return_engine")
            await reached(lambda: one.pool.serving == ("engine-0", "engine-1"))


async def test_a_withdrawn_engine_is_not_started_with_its_set() -> None:
    async with started() as one:
        one.processes.set_availability("engine-1", "withdraw_engine")
        with anyio.fail_after(30):
            await one.processes.use(["engine-0", "engine-1"])
        await one.assert_serves("engine-0", 0)
        one.processes.set_availability("engine-1", "return_engine")
        await reached(lambda: one.pool.serving == ("engine-0", "engine-1"))


@pytest.mark.parametrize("lives", ["loads", "dies"])
async def test_an_engine_that_is_returned_during_a_switch_serves(lives: str) -> None:
    """It may be ready before the other engine of its set, which may also die."""
    async with started() as one, anyio.create_task_group() as group:
        await one.processes.use(["engine-0", "engine-1"])
        one.processes.set_availability("engine-1", "withdraw_engine")
        await reached(lambda: "engine-1" not in one.running)
        one.host_lives = lives
        group.start_soon(one.processes.use, ["engine-0", "engine-1"])
        await reached(lambda: one.loading.is_set() or one.processes._lifecycles["engine-0"].late)
        one.host_lives = "serves"
        one.processes.set_availability("engine-1", "return_engine")
        await reached(lambda: one.processes._lifecycles["engine-1"].has_live_version)
        one.loaded.set()
        await reached(lambda: "engine-1" in one.pool.serving and not one.processes.switching)


async def test_an_engine_that_is_returned_while_it_joins_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was withdrawn while it waited for the weights, and returned before they came."""
    async with started() as one:
        joining, weights_come = anyio.Event(), anyio.Event()
        admit = one.sync.admit

        async def admit_late(*arguments: Any) -> None:
            joining.set()
            with anyio.CancelScope(shield=True):
                await weights_come.wait()
            await admit(*arguments)

        await one.processes.use(["engine-0", "engine-1"])
        one.processes.set_availability("engine-1", "withdraw_engine")
        await reached(lambda: "engine-1" not in one.running)
        monkeypatch.setattr(one.sync, "admit", admit_late)
        orders: list[UserOrder] = ["return_engine", "withdraw_engine", "return_engine"]
        for order in orders:
            one.processes.set_availability("engine-1", order)
            await joining.wait()
            await anyio.sleep(0.05)
        weights_come.set()
        await reached(lambda: "engine-1" in one.pool.serving)


async def test_a_dead_engine_restarts_within_its_set_only() -> None:
    """An engine that dies is started again within its set, and not when another set is used."""
    async with started() as one:
        one.scopes["engine-0"].cancel()
        while not one.events:
            await anyio.sleep(0.01)
        await one.processes.use(["engine-1"])  # while the supervisor is about to start it again
        assert one.orders() == [StopEngine(engine="engine-0"), START_1]
        await one.assert_serves("engine-1", 0)
        one.scopes["engine-1"].cancel()
        while len(one.events) < 2:
            await anyio.sleep(0.01)
        one.group.start_soon(one.host, "engine-1", "serves")  # as the supervisor does
        while not one.pool.serving:
            await anyio.sleep(0.01)
        await one.assert_serves("engine-1", 0)
        assert [type(event) for event in one.events] == [EngineLost, EngineLost, EngineBack] and one.orders() == []
        one.scopes["engine-1"].cancel()  # this moment
        await one.processes.use(["engine-0"])
        await one.assert_serves("engine-0", 0)


async def test_an_engine_that_dies_starting_serves_once_back() -> None:
    """An engine that dies while its set is started serves when it is back."""
    async with started() as one, anyio.create_task_group() as group:
        one.host_lives = "dies"
        group.start_soon(one.processes.use, ["engine-1"])
        while not one.processes._lifecycles["engine-1"].late:
            await anyio.sleep(0.01)
        one.group.start_soon(one.host, "engine-1", "serves")
        while not one.pool.serving:
            await anyio.sleep(0.01)
        await one.assert_serves("engine-1", 0)


@pytest.mark.long
@pytest.mark.parametrize("lives", ["loads", "dies"])
async def test_a_start_has_its_whole_time_after_one_that_failed(lives: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.engines.elastic.engine_processes.LONGEST_PAUSE_S", 0.0)
    async with started(start_timeout_s=5.0) as one:
        if lives == "loads":  # the first start of another set: too long
            one.host_lives, name = "loads", "engine-1"
            one.group.start_soon(one.processes.use, [name])
            while not one.processes._lifecycles[name].late:
                await anyio.sleep(0.01)
        else:  # the only engine in use is started again, which fails
            name = "engine-0"
            one.scopes[name].cancel()
            await anyio.sleep(3.5)
            await one.host(name, "dies")
        if name in one.running:
            one.scopes[name].cancel()
        await anyio.sleep(3.5)
        one.group.start_soon(one.host, name, "serves")
        while not one.pool.serving:
            await anyio.sleep(0.01)
        await one.assert_serves(name, 0)


async def test_a_run_that_ends_while_a_set_starts_ends_its_hosts() -> None:
    async with started() as one:
        one.host_lives = "loads"
        with anyio.CancelScope() as switching:
            one.group.start_soon(cancel_when, switching, one.loading)
            await one.processes.use(["engine-1"])
        one.orders()
        await one.processes.aclose()
        assert one.orders() == [StopEngine(engine="engine-1")] and not one.pool.attached


async def cancel_when(scope: anyio.CancelScope, event: anyio.Event) -> None:
    await event.wait()
    scope.cancel()


@pytest.mark.parametrize("lives", ["dies", "loads"])
async def test_an_unready_engine_ends_a_run_without_restarts(lives: str) -> None:
    """Where no engine is started again, an engine that does not become ready ends the run."""
    with pytest.raises(BaseExceptionGroup) as raised:
        async with started(restarts=0) as one:
            one.host_lives = lives
            one.processes._lifecycles["engine-1"]._settings = Engines(restarts=0, start_timeout_s=0.5)
            await one.processes.use(["engine-1"])
    reason = "cannot be loaded" if lives == "dies" else "not ready within 0.5 s of being started"
    assert any("engine-1" in str(error) and reason in str(error) for error in failures(raised.value))


async def test_engines_sleep_while_ranks_have_their_turn() -> None:
    """Engines sleep in the turn of the ranks, and wake with the version that was pushed meanwhile; not before the ranks
    have given their memory back. One that died asleep is started in its next turn."""
    async with started(sleeps=True) as one:
        holds = True
        turns = EngineTurns(one.processes, ["engine-0"], lambda: holds)
        await turns.train()
        await turns.train()
        assert one.orders() == [StopEngine(engine="engine-0", sleeps=True)] and not one.pool.serving
        await one.sync.push(await anchor(1))
        with pytest.raises(StreamRLError, match="while trainer ranks hold the memory"):
            await turns.sample()
        holds = False
        await turns.sample()
        await turns.sample()
        assert one.orders() == [StartEngine(engine="engine-0")]
        await one.assert_serves("engine-0", 1)
        assert min(turns.figures.values()) > 0 and len(one.made) == 1, "the same process"
        await turns.train()
        one.scopes["engine-0"].cancel()
        while not one.processes._lifecycles["engine-0"].stopped:
            await anyio.sleep(0.01)
        await one.sync.push(await anchor(2))
        assert StartEngine(engine="engine-0") not in one.orders(), "the ranks have the memory"
        await turns.sample()
        await one.assert_serves("engine-0", 2)
        assert len(one.made) == 2 and one.events == []


@pytest.mark.parametrize("restarts", [0, 3])
async def test_sleeping_engines_wake_with_the_live_version(restarts: int) -> None:
    """A sleeping engine wakes with the live version, and is started at its next use where it died asleep."""
    async with started(sleeps=True, restarts=restarts) as one:
        await one.processes.use(["engine-1"])
        assert one.orders() == [StopEngine(engine="engine-0", sleeps=True), START_1]
        await one.sync.push(await anchor(1))
        assert (await one.made[0].start()).policy_version == 0
        await one.processes.use(["engine-0"])
        await one.assert_serves("engine-0", 1)
        assert len(one.made) == 2, "no process began"
        one.orders()
        one.scopes["engine-1"].cancel()
        while not one.processes._lifecycles["engine-1"].stopped:
            await anyio.sleep(0.01)
        await one.processes.use(["engine-1"])
        assert one.orders() == [StopEngine(engine="engine-1"), StopEngine(engine="engine-0", sleeps=True), START_1]
        await one.assert_serves("engine-1", 1)
        assert len(one.made) == 3 and one.events == []
