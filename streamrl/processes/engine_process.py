"""An engine host: one engine, vLLM's or a simulated one, served over streams."""

from __future__ import annotations

import os
from pathlib import Path

from streamrl.config.recipe import EngineKind, Recipe
from streamrl.config.topology import ProcessPlan
from streamrl.engines.engine_host import WatchedEngine, serve_controllers
from streamrl.engines.engine_options import EngineOptions, engine_options
from streamrl.messages import EngineEvent, EngineOrder
from streamrl.processes.child import ChildContext
from streamrl.processes.controller_streams import controller_streams
from streamrl.processes.parent_death import RUN_MARKER


async def run_engine_process(context: ChildContext) -> None:
    """Serve one engine until the orders end. It outlives its controller, for a while."""
    engine = engine_of(context.recipe, context.plan, context.socket_directory)
    name = context.plan.name
    open_controller = controller_streams(context.topology, name, ("orders", EngineOrder), ("completions", EngineEvent))
    await serve_controllers(engine, open_controller)


def engine_of(recipe: Recipe, plan: ProcessPlan, sockets: Path) -> WatchedEngine:
    """The engine of ``plan`` in this process, not started yet."""
    options = engine_options(recipe, plan.index, sockets, gpu_memory_share=plan.gpu_memory_share)
    return _simulated(options, sockets) if recipe.engines.kind is EngineKind.SIMULATED else _vllm(options)


def _vllm(options: EngineOptions) -> WatchedEngine:
    os.environ.update(options.environment)  # vLLM reads it when it is imported
    from streamrl.engines.vllm_engine import VllmEngine

    return VllmEngine(options)


def _simulated(options: EngineOptions, sockets: Path) -> WatchedEngine:
    """Neither vllm nor torch is imported. Engines of a run share the mirror of the weights as real ones do."""
    from streamrl.comm.weights.node_mirror import shared_mirror
    from streamrl.engines.simulated_engine import SimulatedEngine, SimulationOptions
    from streamrl.engines.simulated_text import sentences_of
    from streamrl.engines.simulated_weights import SimulatedWeights
    from streamrl.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(options.model_path)
    chosen = SimulationOptions(
        name=options.name,
        max_running=options.max_running,
        max_context=options.max_context,
        kv_tokens=max(options.cache_blocks - 1, 0) * options.block_tokens,
        tokenizer_digest=tokenizer.digest,
    )
    mirror = shared_mirror(os.environ.get(RUN_MARKER, ""), options.model_path, sockets)
    weights = SimulatedWeights(Path(options.model_path), mirror)
    return SimulatedEngine(chosen, text=sentences_of(tokenizer), weights=weights)
