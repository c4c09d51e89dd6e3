"""Engine hosts that are stopped and started again at the same endpoints, over real sockets."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

import anyio
import pytest

from streamrl.base.messages import EngineEvent, EngineOrder, Generate, OrderFailed, WeightAnnouncement
from streamrl.base.run_events import StartEngine, StopEngine, SupervisorOrder
from streamrl.base.types import token_array
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.elastic.hosts import PATIENCE_SECONDS, EngineHosts
from streamrl.engines.engine_host import serve_engine
from streamrl.engines.pool import EnginePool
from streamrl.engines.remote_engine import ENGINE_FAILURE
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.engines.slots import EngineSlot
from streamrl.recipe.scheduling import InFlight
from streamrl.remote.guarded_sockets import KeyGuard
from streamrl.remote.transport_keys import KeyRole
from streamrl.sync.weight_sync import WeightSync

REQUEST = Generate(request_id="r", token_ids=token_array([3]), max_tokens=40, seed=1, temperature=1.0)


async def anchor(policy_version: int) -> WeightAnnouncement:
    return WeightAnnouncement(policy_version=policy_version, base_version=None, state_hash=policy_version, sources=())


class Started:
    """Two engines; a supervisor that starts hosts as tasks, and ends one by cancelling it. ``sleeps``: hosts that
    are stopped go to sleep instead.

    ``host_lives``: what a host does that is started again: it ``serves``, ``loads`` for ever, or ``dies``.
    """

    def __init__(self, directory: str, group: anyio.abc.TaskGroup, *, first_port: int | None, sleeps: bool) -> None:
        self.directory, self.group, self.first_port, self.sleeps = directory, group, first_port, sleeps
        self.ports: dict[str, int] = {}
        guard = KeyGuard(KeyRole.ENGINE)
        self.slots = {
            n: EngineSlot(n, self.at(n, "orders"), self.at(n, "completions"), guard) for n in ("engine-0", "engine-1")
        }
        self.scopes: dict[str, anyio.CancelScope] = {}
        self.told: list[SupervisorOrder] = []
        self.made: list[SimulatedEngine] = []
        self.loading = anyio.Event()
        self.host_lives = "serves"

    def at(self, name: str, stream: str) -> str:
        if self.first_port is not None:
            port = self.ports.setdefault(f"{name}.{stream}", self.first_port + len(self.ports))
            return f"tcp://127.0.0.1:{port}"
        return f"ipc://{self.directory}/{name}.{stream}"

    async def open(self) -> None:
        for slot in self.slots.values():
            self.group.start_soon(slot.run)
        self.pool = EnginePool({name: await slot.open() for name, slot in self.slots.items()})
        self.engines = EngineHosts(self.slots, self.pool, self.order, self.sleeps)
        for name in self.slots:
            self.group.start_soon(self.host, name, "serves")
        await self.pool.start()

    async def stop(self, name: str) -> None:
        """In the order in which control does it."""
        await self.pool.drain(name, "test")
        self.engines.detach(name)
        await self.engines.stop(name)

    async def close(self) -> None:
        await self.pool.aclose()
        await self.engines.aclose()
        for slot in self.slots.values():
            slot.retire()

    async def host(self, name: str, lives: str) -> None:
        guard = KeyGuard(KeyRole.CONTROLLER)
        with anyio.CancelScope() as self.scopes[name]:
            async with (
                zmq_sender(EngineEvent, self.at(name, "completions"), bind=False, guard=guard) as events,
                zmq_receiver(EngineOrder, self.at(name, "orders"), bind=False, guard=guard) as orders,
            ):
                if lives == "serves":
                    lengths = LengthMixture(median=30.0, sigma=0.0, long_share=0.0)
                    self.made.append(SimulatedEngine(SimulationOptions(name=name, lengths=lengths)))
                    return await serve_engine(self.made[-1], nullcontext((orders, events)))
                if lives == "dies":
                    await events.send(OrderFailed(order_id=ENGINE_FAILURE, reason="the model cannot be loaded"))
                    return None
                self.loading.set()
                return await anyio.sleep_forever()

    async def order(self, order: SupervisorOrder) -> None:
        self.told.append(order)
        if isinstance(order, StartEngine):
            self.group.start_soon(self.host, order.engine, self.host_lives)
        elif not order.patience_s:
            self.scopes[order.engine].cancel()


@asynccontextmanager
async def started(*, first_port: int | None = None, sleeps: bool = False) -> AsyncIterator[Started]:
    with tempfile.TemporaryDirectory(prefix="srl") as directory, anyio.fail_after(20):
        async with anyio.create_task_group() as group:
            one = Started(directory, group, first_port=first_port, sleeps=sleeps)
            await one.open()
            yield one
            await one.close()  # what runs beside it ends by itself


@pytest.mark.parametrize("tcp", [False, True])
async def test_a_stopped_host_was_told_of_first_and_its_successor_serves(
    tcp: bool, free_ports: Callable[[int], int]
) -> None:
    async with started(first_port=free_ports(4) if tcp else None) as one:
        await one.stop("engine-1")
        assert one.told == [StopEngine(engine="engine-1", patience_s=PATIENCE_SECONDS)]
        assert sorted(one.pool.attached) == ["engine-0"]
        await one.engines.start("engine-1")
        assert one.told[1:] == [StartEngine(engine="engine-1")]
        one.pool.readmit("engine-1", "test")
        await one.pool.drain("engine-0", "test")
        assert await one.pool.generate(REQUEST)
        one.pool.readmit("engine-0", "test")
        assert len(one.made) == 3 and one.made[2].load().generated_tokens == 30


async def test_a_host_that_is_given_up_while_it_loads_is_no_death_and_the_run_ends_without_it() -> None:
    async with started() as one:
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


async def test_a_host_that_dies_while_it_starts_or_serves_is_an_error_that_names_it() -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        async with started() as one:
            await one.stop("engine-1")
            one.host_lives = "dies"
            await one.engines.start("engine-1")
    assert any("engine-1" in str(e) and "cannot be loaded" in str(e) for e in raised.value.exceptions), raised.value
    with pytest.raises(BaseExceptionGroup) as raised:
        async with started() as one:
            one.made[0].fail("planted")
            await anyio.sleep_forever()
    assert any("engine-0: planted" in str(e) for e in raised.value.exceptions), raised.value


async def test_a_host_that_dies_when_it_is_ordered_to_end_is_gone_all_the_same() -> None:
    async with started() as one:
        await one.pool.drain("engine-1", "test")
        one.engines.detach("engine-1")
        one.scopes["engine-1"].cancel()  # before its orders end
        await one.engines.stop("engine-1")
        await one.engines.start("engine-1")
        assert sorted(one.pool.attached) == ["engine-0", "engine-1"]


async def test_a_host_that_sleeps_wakes_without_being_started_and_takes_the_live_version() -> None:
    async with started(sleeps=True) as one:
        sync = WeightSync(one.pool.attached, anchor, in_flight=InFlight.KEEP, timeout_s=10)
        await sync.push(await anchor(0))
        await one.pool.drain("engine-1", "test")
        sync.remove(one.engines.detach("engine-1"))
        await one.engines.stop("engine-1")
        assert (await one.made[1].start()).policy_version == 0
        await sync.push(await anchor(1))
        await sync.admit("engine-1", await one.engines.start("engine-1"))
        one.pool.readmit("engine-1", "test")
        await one.pool.drain("engine-0", "test")
        assert {span.policy_version for span in (await one.pool.generate(REQUEST)).version_spans} == {1}
        assert one.told == [] and len(one.made) == 2, "no process ended or began"
        one.pool.readmit("engine-0", "test")
        await one.pool.drain("engine-1", "test")
        one.engines.detach("engine-1")
        await one.engines.stop("engine-1")  # the run ends while it sleeps


async def test_a_host_that_there_is_not_yet_is_started() -> None:
    async with started(sleeps=True) as one:
        await one.stop("engine-1")
        await one.engines._asleep.pop("engine-1").aclose()
        await one.slots["engine-1"].wait_closed()
        await one.engines.start("engine-1")
        assert one.told == [StartEngine(engine="engine-1")]
