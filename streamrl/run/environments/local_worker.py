"""An environment worker in the caller's own process. ``cli/trained_models/model_evaluation.py`` opens one to evaluate a
model without a run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio.abc

from streamrl.base.messages import EnvironmentEvent, EnvironmentOrder
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import ReceiveStream, SendStream, exchange_hello
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.environment import Environment
from streamrl.run.environments.worker import run_environment_worker

_WINDOW = 64


@asynccontextmanager
async def local_worker(
    environment: Environment, tokenizer: Tokenizer, nursery: anyio.abc.TaskGroup
) -> AsyncIterator[tuple[SendStream[EnvironmentOrder], ReceiveStream[EnvironmentEvent]]]:
    """Open streams to a worker that runs as a task of ``nursery``. Blocking user code blocks the caller."""
    send_orders, receive_orders = memory_stream(_WINDOW)
    send_events, receive_events = memory_stream(_WINDOW)

    async def work() -> None:
        async with receive_orders, send_events:
            await run_environment_worker(environment, tokenizer, 0, receive_orders, send_events, owns_process=False)

    nursery.start_soon(work)
    async with send_orders, receive_events:
        await exchange_hello(receive_events.receive, send_orders)
        yield send_orders, receive_events
