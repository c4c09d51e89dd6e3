"""An engine host that is stopped and started again at the same endpoints, over real sockets, under a running stage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.config.scheduling import InFlight
from streamrl.control.publisher import WeightPublisher
from streamrl.engines.engine_host import serve_engine
from streamrl.engines.engine_pool import EnginePool
from streamrl.engines.engine_seat import EngineSeat
from streamrl.engines.simulated_engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.errors import EngineError
from streamrl.messages import EngineEvent, EngineOrder, Generate, WeightAnnouncement
from streamrl.types import Completion

pytestmark = pytest.mark.asyncio

MakeRequest = Callable[..., Generate]


class Hosts:
    """Engine hosts as tasks, each with an engine of its own that holds no committed version."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.engines: list[SimulatedEngine] = []

    def at(self, name: str, stream: str) -> str:
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
            await serve_engine(engine, orders, completions)


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
