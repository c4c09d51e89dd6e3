"""A real engine in its own process, as a run has it: ``serving_process.py OPTIONS.json ORDERS COMPLETIONS``."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import msgspec

from streamrl.base.messages import EngineEvent, EngineOrder
from streamrl.engines.engine_process import serve_engine
from streamrl.engines.vllm.engine import RunEngine
from streamrl.engines.vllm.options import EngineOptions
from streamrl.launch.roles import controller_streams
from streamrl.recipe.topology import Topology


async def serve(options: EngineOptions) -> None:
    endpoints = {"engine.orders": sys.argv[2], "engine.completions": sys.argv[3]}
    topology = Topology(processes=(), endpoints=endpoints)
    streams = controller_streams(topology, "engine", ("orders", EngineOrder), ("completions", EngineEvent))
    await serve_engine(RunEngine(options), streams)


if __name__ == "__main__":  # vLLM spawns processes that import this file again
    given = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineOptions)
    anyio.run(serve, given, backend_options={"use_uvloop": True})
