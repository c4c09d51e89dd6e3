"""The first item that a process says to its controller, over one of two streams."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import pytest

from streamrl.base.errors import StreamBroken, StreamEnded
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import send_hello
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.launch.reward_workers import open_worker
from streamrl.recipe.topology import Topology
from streamrl.rewards.reward_messages import RewardOrder, RewardResult, RewardWorkerReady
from streamrl.stages.reward import ORDERS_WINDOW, RewardSettings, RewardStage


async def test_a_hello_is_said_once_and_the_orders_stay_as_they_are() -> None:
    reports, heard = memory_stream(4)
    orders_in, orders = memory_stream(4)
    await orders_in.send("an order")
    await send_hello(reports, orders, "here I am")
    assert await heard.receive() == "here I am" and await orders.receive() == "an order"
    await reports.aclose()
    with pytest.raises(StreamEnded):
        await heard.receive()


async def test_a_process_waiting_for_hello_sees_broken_orders() -> None:
    """A process that waits to say hello gets an error when its stream of orders breaks."""
    reports, heard = memory_stream(1)
    await reports.send("nobody takes this")
    orders_in, orders = memory_stream(4)
    raised: list[str] = []

    async def wait() -> None:
        with pytest.raises(StreamBroken, match="the last controller") as broken:
            await send_hello(reports, orders, "here I am")
        raised.append(str(broken.value))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        await orders_in.abort("the last controller is killed")
    await reports.aclose()
    assert raised and [item async for item in heard] == ["nobody takes this"], "its successor hears nothing of it"


async def test_successors_see_the_end_of_orders(tmp_path: Path) -> None:
    """The successor of a worker that died while it connected sees the end of orders."""
    orders_at, results_at = f"ipc://{tmp_path}/orders", f"ipc://{tmp_path}/results"
    topology = Topology(processes=(), endpoints={"reward-0.orders": orders_at, "reward-0.results": results_at})
    settings = RewardSettings(functions="length", per_group=False, timeout_s=300.0, concurrency=4)
    stage = RewardStage(settings, [partial(open_worker, topology, 0)])
    async with anyio.create_task_group() as group:
        ended = anyio.Event()

        async def run() -> None:
            async with stage.running():
                await ended.wait()

        group.start_soon(run)
        async with zmq_receiver(RewardOrder, orders_at, bind=False) as dying:
            while dying._end.window != ORDERS_WINDOW:  # until it knows the other end
                await anyio.sleep(0.01)
            await dying.abort("killed before it connected for its results")
        async with (
            zmq_sender(RewardResult, results_at, bind=False) as results,
            zmq_receiver(RewardOrder, orders_at, bind=False) as orders,
        ):
            await results.send(RewardWorkerReady(worker=0))
            ended.set()
            with pytest.raises(StreamEnded):
                await orders.receive()
