"""The host and the controller's end of it: loads, refusals, and what is known after a death."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext

import anyio
import pytest

from streamrl.base.errors import EngineError, RequestRefused, WeightError
from streamrl.base.messages import EngineReady, Generate, PauseMode, WeightAnnouncement
from streamrl.base.types import token_array
from streamrl.comm.memory_stream import memory_stream
from streamrl.engines.engine_process import serve_engine
from streamrl.engines.remote_engine import RemoteEngine
from streamrl.engines.simulated.engine import SimulatedEngine, SimulationOptions

MakeRequest = Callable[..., Generate]


def engine() -> SimulatedEngine:
    return SimulatedEngine(SimulationOptions(name="engine-0", max_model_len=64, policy_version=2))


async def test_readiness_and_refusals_travel(served: Callable, make_request: MakeRequest) -> None:
    async with served(engine()) as remote:
        ready = EngineReady(engine="engine-0", policy_version=2, max_model_len=64, max_num_seqs=256, pid=os.getpid())
        assert await remote.start() == ready
        with pytest.raises(RequestRefused, match="prompt of 70 tokens does not fit the context of 64"):
            await remote.generate(make_request(token_ids=token_array([3] * 70)))
        with pytest.raises(WeightError, match="delta to version 9 starts from 8"):
            await remote.stage(WeightAnnouncement(policy_version=9, base_version=8, state_hash=1, sources=()))
        assert len((await remote.generate(make_request(max_tokens=5))).token_ids) > 0
        assert (await remote.checksums()).keys() == {"simulated.weight"}


async def test_load_is_reported_after_a_change_of_state(served: Callable, make_request: MakeRequest) -> None:
    async with served(engine()) as remote, anyio.create_task_group() as group:
        await remote.pause(PauseMode.KEEP, clear_cache=False)
        for _ in range(3):
            group.start_soon(remote.generate, make_request(max_tokens=8))
        while remote.load().waiting != 3:
            await anyio.sleep(0.01)
        await remote.resume()


async def test_the_cause_of_death_reaches_every_pending_call(served: Callable, make_request: MakeRequest) -> None:
    dying = engine()
    errors: list[str] = []

    async with served(dying) as remote, anyio.create_task_group() as group:
        await remote.pause(PauseMode.KEEP, clear_cache=False)

        async def expect_death(request: Generate) -> None:
            try:
                await remote.generate(request)
            except EngineError as error:
                errors.append(str(error))

        for _ in range(4):
            group.start_soon(expect_death, make_request())
        while dying.load().waiting < 4:
            await anyio.sleep(0.01)
        dying.fail("its process VLLM::Worker (pid 7) died")
    assert errors == ["engine-0: its process VLLM::Worker (pid 7) died"] * 4


async def test_a_broken_stream_names_the_engine(make_request: MakeRequest) -> None:
    order_sender, _orders = memory_stream(8)
    event_sender, event_receiver = memory_stream(8)
    remote = RemoteEngine("engine-3", order_sender, event_receiver)
    await event_sender.send(EngineReady(engine="engine-3", policy_version=0, max_model_len=8, max_num_seqs=8))

    async def expect_death() -> None:
        with pytest.raises(EngineError, match="engine-3: its process is gone"):
            await remote.generate(make_request())

    async def pump() -> None:
        with pytest.raises(EngineError, match="engine-3: its process is gone"):
            await remote.run()

    async with anyio.create_task_group() as group:
        group.start_soon(pump)
        await remote.start()
        group.start_soon(expect_death)
        await anyio.lowlevel.checkpoint()
        await event_sender.abort("connection lost")
    with pytest.raises(EngineError, match="engine-3"):
        await remote.pause(PauseMode.KEEP, clear_cache=False)


async def test_the_host_ends_with_its_orders_and_closes_the_engine() -> None:
    served_engine = engine()
    order_sender, order_receiver = memory_stream(8)
    event_sender, event_receiver = memory_stream(8)
    async with anyio.create_task_group() as group:
        group.start_soon(serve_engine, served_engine, nullcontext((order_receiver, event_sender)))
        assert isinstance(await event_receiver.receive(), EngineReady)
        await order_sender.aclose()
        async for _ in event_receiver:
            pass
    with pytest.raises(EngineError, match="closed"):
        await served_engine.resume()
