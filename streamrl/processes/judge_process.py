"""The run's own judge: a vLLM engine that answers the questions of rewards."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamrl.comm.judge_messages import JudgeEvent, JudgeOrder
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.config.topology import judge_socket
from streamrl.engines.judge_options import judge_options
from streamrl.processes.child import ChildContext


async def run_judge_process(context: ChildContext) -> None:
    """Answer until the controller says that nobody will ask any more. It outlives its controller, for a while."""
    options = judge_options(context.recipe, context.socket_directory)
    os.environ.update(options.environment)  # vLLM reads it when it is imported
    from streamrl.engines.judge_server import serve_judge
    from streamrl.engines.vllm_engine import VllmEngine

    name = context.plan.name
    orders_at, reports_at = (context.topology.endpoint(name, stream) for stream in ("orders", "reports"))
    path = judge_socket(context.topology)
    assert path is not None

    @asynccontextmanager
    async def open_controller() -> AsyncIterator[tuple[ReceiveStream[JudgeOrder], SendStream[JudgeEvent]]]:
        async with (
            zmq_sender(JudgeEvent, reports_at, bind=False, name=f"{name}.reports") as reports,
            zmq_receiver(JudgeOrder, orders_at, bind=False, name=f"{name}.orders") as orders,
        ):
            yield orders, reports

    engine = VllmEngine(options)
    await serve_judge(engine, context.recipe.judge, path, open_controller, sleeps=options.sleeps)
