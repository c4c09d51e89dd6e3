"""Both ends of a stream of every kind, on both event loops."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from streamrl.comm import zmq_stream
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.transport_keys import KeyRole

# Who may connect over tcp: everybody on this host, since no test here has keys.
zmq_sender = partial(zmq_stream.zmq_sender, guard=KeyGuard(KeyRole.CONTROLLER))
zmq_receiver = partial(zmq_stream.zmq_receiver, guard=KeyGuard(KeyRole.CONTROLLER))


OpenEnds = Callable[..., AbstractAsyncContextManager[tuple[Any, Any]]]
KINDS = ["memory", *(f"{transport}-{binder}" for transport in ("ipc", "tcp") for binder in ("sender", "receiver"))]
_numbers = itertools.count()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def new_endpoint(tmp_path: Path) -> Callable[[str], str]:
    """A fresh endpoint to bind; the bound one is the stream's ``endpoint``."""

    def make(transport: str) -> str:
        return {"ipc": f"ipc://{tmp_path}/{next(_numbers)}", "tcp": "tcp://127.0.0.1:*"}[transport]

    return make


@pytest.fixture(params=KINDS)
def open_ends(request: pytest.FixtureRequest, new_endpoint: Callable[[str], str]) -> OpenEnds:
    """``async with open_ends(item_type, window=4) as (sender, receiver)``; leaving closes the receiver first."""
    kind: str = request.param

    @asynccontextmanager
    async def ends(item_type: Any, window: int = 16) -> AsyncIterator[tuple[Any, Any]]:
        if kind == "memory":
            sender, receiver = memory_stream(window)
            async with sender, receiver:
                yield sender, receiver
            return
        transport, binder = kind.split("-")
        if binder == "sender":
            async with (
                zmq_sender(item_type, new_endpoint(transport), bind=True, window=window, name="test") as sends,
                zmq_receiver(item_type, sends.endpoint, bind=False, window=window, name="test") as receives,
            ):
                yield sends, receives
        else:
            async with (
                zmq_receiver(item_type, new_endpoint(transport), bind=True, window=window, name="test") as receives,
                zmq_sender(item_type, receives.endpoint, bind=False, window=window, name="test") as sends,
            ):
                yield sends, receives

    return ends
