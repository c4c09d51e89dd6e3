"""An engine host that is stopped and started again at the same endpoints, over real sockets, under a running stage."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import anyio
import pytest

from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineEvent, EngineOrder, Generate, OrderFailed, WeightAnnouncement
from streamrl.base.types import Completion
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.engines.engine_host import serve_engine
from streamrl.engines.engine_pool import EnginePool
from streamrl.engines.engine_seat import PATIENCE_SECONDS, EngineSeat, SeatedEngines, SleepingEngines
from streamrl.engines.remote_engine import ENGINE_FAILURE
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.recipe.scheduling import InFlight
from streamrl.supervise.supervisor_orders import StartEngine, StopEngine, SupervisorOrder
from streamrl.sync.publisher import WeightPublisher

pytestmark = pytest.mark.asyncio

MakeRequest = Callable[..., Generate]


class Hosts:
    """Engine hosts as tasks, each with an engine of its own that holds no committed version."""

    def __init__(self, directory: Path, first_port: int | None = None) -> None:
        self.directory = directory
        self.engines: list[SimulatedEngine] = []
        self.first_port = first_port
        self.ports: dict[str, int] = {}

    def at(self, name: str, stream: str) -> str:
        if self.first_port is not None:
            port = self.ports.setdefault(f"{name}.{stream}", self.first_port + len(self.ports))
            return f"tcp://127.0.0.1:{port}"
        return f"ipc://{self.directory}/{name}.{stream}"

    def seat(self, name: str) -> EngineSeat:
        return EngineSeat(name, self.at(name, "orders"), self.at(name, "completions"))

    async def serve(self, name: str) -> None:
        lengths = LengthMixture(median=30.0, sigma=0.0, long_share=0.0)
        engine = SimulatedEngine(SimulationOptions(name=name, lengths=lengths))
        self.engines.append(engine)
        async with (
            zmq_sender(EngineEvent, self.at(name, "completions"), bind=False, name="completions") as completions,
            zmq_receiver(EngineOrder, self.at(name, "orders"), bind=False, name="orders") as orders,
        ):
            await serve_engine(engine, nullcontext((orders, completions)))


async def anchor(policy_version: int) -> WeightAnnouncement:
    return WeightAnnouncement(policy_version=policy_version, base_version=None, state_hash=policy_version, sources=())


async def test_a_host_is_stopped_and_another_takes_its_seat_at_the_live_version(make_request: MakeRequest) -> None:
    with tempfile.TemporaryDirectory(prefix="srl") as directory, anyio.fail_after(20):
        hosts = Hosts(Path(directory))
        seats = [hosts.seat(f"engine-{index}") for index in range(2)]
        async with anyio.create_task_group() as group:
            for seat in seats:
                group.start_soon(seat.run)
            engines = [await seat.open() for seat in seats]
            for index in range(2):
                group.start_soon(hosts.serve, f"engine-{index}")
            pool = EnginePool(engines)
            publisher = WeightPublisher(engines, anchor, in_flight=InFlight.KEEP, timeout_s=10)
            await pool.start()
            await publisher.push(await anchor(0))
            with pytest.raises(EngineError, match="engine-1 has a host already"):
                await seats[1].open()
            await pool.drain("engine-1")
            await publisher.leave(pool.detach("engine-1"))
            await engines[1].aclose()
            await seats[1].emptied()
            await publisher.push(await anchor(1))
            late = await seats[1].open()
            group.start_soon(hosts.serve, "engine-1")
            await pool.attach("engine-1", late)
            await publisher.admit(late, 1)
            pool.readmit("engine-1")
            await pool.drain("engine-0")  # so that the new one serves
            completion: Completion = await pool.generate(make_request())
            assert {span.policy_version for span in completion.version_spans} == {1}
            assert len(hosts.engines) == 3 and hosts.engines[2].load().generated_tokens == 30
            await pool.aclose()
            for seat in seats:
                await seat.emptied()
            group.cancel_scope.cancel()


async def test_a_host_that_dies_is_named() -> None:
    with tempfile.TemporaryDirectory(prefix="srl") as directory, anyio.fail_after(20):
        hosts = Hosts(Path(directory))
        seat = hosts.seat("engine-0")
        died: list[str] = []

        async def serve() -> None:
            with pytest.raises(EngineError, match="planted"):
                await hosts.serve("engine-0")

        async def take_seat() -> None:
            try:
                await seat.run()
            except EngineError as error:
                died.append(str(error))

        async with anyio.create_task_group() as group:
            group.start_soon(take_seat)
            engine = await seat.open()
            group.start_soon(serve)
            await engine.start()
            hosts.engines[0].fail("planted")
        assert died == ["engine-0: planted"]


# ---- hosts that a supervisor stops and starts as it is told ---------------------------------------------


class Seated:
    """Two seated engines; a supervisor that starts hosts as tasks, and ends one by cancelling it. ``level``: hosts that
    are stopped go to sleep instead.

    ``host_lives``: what becomes of a host that is started again: it ``serves``, ``loads`` for ever, or ``dies``.
    """

    def __init__(self, hosts: Hosts, group: anyio.abc.TaskGroup, level: int = 0) -> None:
        self.hosts, self.group, self.level = hosts, group, level
        self.seats = {name: hosts.seat(name) for name in ("engine-0", "engine-1")}
        self.scopes: dict[str, anyio.CancelScope] = {}
        self.told: list[SupervisorOrder] = []
        self.loading = anyio.Event()
        self.host_lives = "serves"

    async def open(self) -> None:
        for seat in self.seats.values():
            self.group.start_soon(seat.run)
        self.pool = EnginePool([await seat.open() for seat in self.seats.values()])
        self.engines = SeatedEngines(self.seats, self.pool, self.tell)
        if self.level:
            self.engines = SleepingEngines(self.seats, self.pool, self.tell, self.level)
        for name in self.seats:
            self.group.start_soon(self.host, name, "serves")
        await self.pool.start()

    async def stop(self, name: str) -> None:
        """In the order in which control does it."""
        await self.pool.drain(name)
        self.engines.detach(name)
        await self.engines.stop(name)

    async def close(self) -> None:
        await self.pool.aclose()
        await self.engines.aclose()
        for seat in self.seats.values():
            seat.retire()

    async def host(self, name: str, lives: str) -> None:
        with anyio.CancelScope() as self.scopes[name]:
            if lives == "serves":
                await self.hosts.serve(name)
                return
            async with (
                zmq_sender(EngineEvent, self.hosts.at(name, "completions"), bind=False, name="completions") as events,
                zmq_receiver(EngineOrder, self.hosts.at(name, "orders"), bind=False, name="orders"),
            ):
                if lives == "dies":
                    await events.send(OrderFailed(order_id=ENGINE_FAILURE, reason="the model cannot be loaded"))
                    return
                self.loading.set()
                await anyio.sleep_forever()

    async def tell(self, order: SupervisorOrder) -> None:
        self.told.append(order)
        if isinstance(order, StartEngine):
            self.group.start_soon(self.host, order.engine, self.host_lives)
        elif not order.patience_s:
            self.scopes[order.engine].cancel()


@asynccontextmanager
async def seated(*, first_port: int | None = None, level: int = 0) -> AsyncIterator[Seated]:
    with tempfile.TemporaryDirectory(prefix="srl") as directory, anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            one = Seated(Hosts(Path(directory), first_port), group, level)
            await one.open()
            yield one
            await one.close()  # what runs beside it ends by itself


@pytest.mark.parametrize("tcp", [False, True])
async def test_a_stopped_host_was_told_of_first_and_its_successor_serves(
    tcp: bool, make_request: MakeRequest, free_ports: Callable[[int], int]
) -> None:
    async with seated(first_port=free_ports(4) if tcp else None) as one:
        await one.stop("engine-1")
        assert one.told == [StopEngine(engine="engine-1", patience_s=PATIENCE_SECONDS)]
        assert sorted(one.pool.attached) == ["engine-0"]
        await one.engines.start("engine-1")
        assert one.told[1:] == [StartEngine(engine="engine-1")]
        one.pool.readmit("engine-1")
        await one.pool.drain("engine-0")
        assert await one.pool.generate(make_request())
        one.pool.readmit("engine-0")
        assert len(one.hosts.engines) == 3 and one.hosts.engines[2].load().generated_tokens == 30


async def test_a_host_that_is_given_up_while_it_loads_is_no_death_and_the_run_ends_without_it() -> None:
    async with seated() as one:
        await one.stop("engine-1")
        one.host_lives = "loads"
        with anyio.CancelScope() as starting:
            one.group.start_soon(cancel_when, starting, one.loading)
            await one.engines.start("engine-1")
        await one.engines.give_up("engine-1")
        assert one.told[-1] == StopEngine(engine="engine-1")
        assert sorted(one.pool.attached) == ["engine-0"]


async def cancel_when(scope: anyio.CancelScope, event: anyio.Event) -> None:
    await event.wait()
    scope.cancel()


async def test_a_host_that_is_given_up_before_it_ever_connected() -> None:
    async with seated() as one:
        await one.stop("engine-1")
        one.host_lives = "loads"
        with anyio.CancelScope() as starting:
            starting.cancel()
            await one.engines.start("engine-1")
        await one.engines.give_up("engine-1")


async def test_a_host_that_dies_while_it_starts_is_an_error() -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        async with seated() as one:
            await one.stop("engine-1")
            one.host_lives = "dies"
            await one.engines.start("engine-1")
    assert any("engine-1" in str(e) and "cannot be loaded" in str(e) for e in raised.value.exceptions), raised.value


async def test_a_host_that_dies_when_it_is_told_to_end_is_gone_all_the_same() -> None:
    async with seated() as one:
        await one.pool.drain("engine-1")
        one.engines.detach("engine-1")
        one.scopes["engine-1"].cancel()  # before its orders end
        await one.engines.stop("engine-1")
        await one.engines.start("engine-1")
        assert sorted(one.pool.attached) == ["engine-0", "engine-1"]


@pytest.mark.parametrize("level", [1, 2])
async def test_a_host_that_sleeps_wakes_without_being_started_and_takes_the_live_version(
    level: int, make_request: MakeRequest
) -> None:
    async with seated(level=level) as one:
        publisher = WeightPublisher(list(one.pool.attached.values()), anchor, in_flight=InFlight.KEEP, timeout_s=10)
        await publisher.push(await anchor(0))
        await one.pool.drain("engine-1")
        await publisher.leave(one.engines.detach("engine-1"))
        await one.engines.stop("engine-1")
        assert (await one.hosts.engines[1].start()).policy_version == (0 if level == 1 else -1)
        await publisher.push(await anchor(1))
        await publisher.admit(await one.engines.start("engine-1"), 1)
        one.pool.readmit("engine-1")
        await one.pool.drain("engine-0")
        assert {span.policy_version for span in (await one.pool.generate(make_request())).version_spans} == {1}
        assert one.told == [] and len(one.hosts.engines) == 2, "no process ended or began"
        one.pool.readmit("engine-0")
        await one.pool.drain("engine-1")
        one.engines.detach("engine-1")
        await one.engines.stop("engine-1")  # the run ends while it sleeps


async def test_a_host_that_there_is_not_yet_is_started() -> None:
    async with seated(level=1) as one:
        await one.stop("engine-1")
        await one.engines._asleep.pop("engine-1").aclose()
        await one.seats["engine-1"].emptied()
        await one.engines.start("engine-1")
        assert one.told == [StartEngine(engine="engine-1")]
