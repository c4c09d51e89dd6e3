"""An engine host: one engine, vLLM's or a simulated one, served over streams."""

from __future__ import annotations

import os
from pathlib import Path

from streamrl.base.messages import EngineEvent, EngineOrder
from streamrl.base.run_process import RUN_MARKER
from streamrl.engines.engine_host import WatchedEngine, serve_engine
from streamrl.plan.topology import ProcessPlan
from streamrl.recipe.sections import EngineKind, Recipe
from streamrl.run.controller_streams import controller_streams
from streamrl.supervise.child import ChildContext
from streamrl.vllm.options import EngineOptions, engine_options


async def run_engine_process(context: ChildContext) -> None:
    """Serve one engine until the orders end."""
    engine = engine_of(context.recipe, context.plan, context.socket_directory)
    name = context.plan.name
    streams = controller_streams(context.topology, name, ("orders", EngineOrder), ("completions", EngineEvent))
    await serve_engine(engine, streams)


def engine_of(recipe: Recipe, plan: ProcessPlan, sockets: Path) -> WatchedEngine:
    """The engine of ``plan`` in this process, not started yet."""
    options = engine_options(recipe, plan.index, sockets, gpu_memory_utilization=plan.gpu_memory_utilization)
    return _simulated(options, sockets) if recipe.engines.kind is EngineKind.SIMULATED else _vllm(options)


def _vllm(options: EngineOptions) -> WatchedEngine:
    os.environ.update(options.environment)  # vLLM reads it when it is imported
    from streamrl.vllm.engine import VllmEngine

    return VllmEngine(options)


def _simulated(options: EngineOptions, sockets: Path) -> WatchedEngine:
    """Neither vllm nor torch is imported. Engines of a run share the mirror of the weights as real ones do."""
    from streamrl.engines.simulated.engine import SimulatedEngine, SimulationOptions
    from streamrl.engines.simulated.text import sentences_of
    from streamrl.engines.simulated.weights import SimulatedWeights
    from streamrl.prompts.tokenizer import load_tokenizer
    from streamrl.weights.pull.node_mirror import shared_mirror

    tokenizer = load_tokenizer(options.model_path)
    chosen = SimulationOptions(
        name=options.name,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        kv_tokens=max(options.cache_blocks - 1, 0) * options.block_tokens,
        tokenizer_digest=tokenizer.digest,
    )
    mirror = shared_mirror(os.environ.get(RUN_MARKER, ""), options.model_path, sockets)
    weights = SimulatedWeights(Path(options.model_path), mirror)
    return SimulatedEngine(chosen, text=sentences_of(tokenizer), weights=weights)
