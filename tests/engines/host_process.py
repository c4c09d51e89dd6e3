"""A real engine in its own process, as a run has it: ``host_process.py OPTIONS.json ORDERS COMPLETIONS``."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import msgspec

from streamrl.base.messages import EngineEvent, EngineOrder
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.engines.engine_host import serve_engine
from streamrl.vllm.engine import VllmEngine
from streamrl.vllm.options import EngineOptions


async def serve(options: EngineOptions) -> None:
    async with (
        zmq_sender(EngineEvent, sys.argv[3], bind=False, name="completions") as completions,
        zmq_receiver(EngineOrder, sys.argv[2], bind=False, name="orders") as orders,
    ):
        await serve_engine(VllmEngine(options), orders, completions)


if __name__ == "__main__":  # vLLM spawns processes that import this file again
    given = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineOptions)
    anyio.run(serve, given, backend_options={"use_uvloop": True})
