"""The first item that a process says to its controller, over one of two streams."""

from __future__ import annotations

import anyio
import pytest

from streamrl.base.errors import StreamBroken
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import send_hello


async def test_a_hello_is_said_once_and_the_orders_stay_as_they_are() -> None:
    reports, heard = memory_stream(4)
    orders_in, orders = memory_stream(4)
    await orders_in.send("an order")
    await send_hello(reports, orders, "here I am")
    assert await heard.receive() == "here I am" and await orders.receive() == "an order"
    assert heard.statistics().buffered == 0


async def test_a_process_that_waits_to_say_hello_hears_that_its_orders_are_broken() -> None:
    reports, heard = memory_stream(1)
    await reports.send("nobody takes this")
    orders_in, orders = memory_stream(4)
    raised: list[str] = []

    async def wait() -> None:
        with pytest.raises(StreamBroken, match="the last controller") as broken:
            await send_hello(reports, orders, "here I am")
        raised.append(str(broken.value))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            await orders_in.abort("the last controller is killed")
    assert raised and heard.statistics().buffered == 1, "its successor hears nothing of it"
