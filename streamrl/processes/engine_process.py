"""An engine host: one vLLM engine, served over streams."""

from __future__ import annotations

import os

from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.engines.engine_host import serve_engine
from streamrl.engines.engine_options import engine_options
from streamrl.messages import EngineEvent, EngineOrder
from streamrl.processes.child import ChildContext


async def run_engine_process(context: ChildContext) -> None:
    """Serve one engine until the orders end."""
    options = engine_options(context.recipe, context.plan.index, context.socket_directory)
    os.environ.update(options.environment)  # vLLM reads it when it is imported
    from streamrl.engines.vllm_engine import VllmEngine

    name = context.plan.name
    orders_at, completions_at = (context.topology.endpoint(name, stream) for stream in ("orders", "completions"))
    async with (
        zmq_sender(EngineEvent, completions_at, bind=False, name=f"{name}.completions") as completions,
        zmq_receiver(EngineOrder, orders_at, bind=False, name=f"{name}.orders") as orders,
    ):
        await serve_engine(VllmEngine(options), orders, completions)
