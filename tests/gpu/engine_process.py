"""An engine as a run has it. As a program: writes what a fresh engine chooses, greedily, to a file."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.messages import Generate
from streamrl.base.types import token_array
from streamrl.engines.vllm.engine import RunEngine
from streamrl.engines.vllm.options import engine_options
from streamrl.recipe.sections import Engines, Model, Prompts, Recipe, Reward, Sampling

SETTINGS: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 512, "dtype": "bfloat16", "count": 2}


def engine_of(directory: Path, sockets: Path, device: str, index: int, **engines: Any) -> RunEngine:
    recipe = Recipe(
        model=Model(path=str(directory)),
        prompts=Prompts(train=""),
        rewards=(Reward(function=""),),
        sampling=Sampling(max_tokens=480),
        engines=Engines(**{"gpu_memory_utilization": 0.3} | SETTINGS | engines),
    )
    options = engine_options(recipe, index, sockets, device=device)
    return RunEngine(msgspec.structs.replace(options, sleeps=device == "cuda"))


def request(seed: int, tokens: int, temperature: float = 1.0) -> Generate:
    name, prompt = f"{seed}-{time.monotonic_ns()}", token_array([5, 9, 13, 3 + seed % 40])
    return Generate(request_id=name, token_ids=prompt, max_tokens=tokens, seed=seed + 2**40, temperature=temperature)


async def greedy_tokens(engine: RunEngine) -> list[list[int]]:
    return [list((await engine.generate(request(seed, 40, 0.0))).token_ids) for seed in range(2)]


async def fresh(directory: str, sockets: str, device: str, settings: str) -> list[list[int]]:
    engine = engine_of(Path(directory), Path(sockets), device, 1, **json.loads(settings))
    await engine.start()
    try:
        return await greedy_tokens(engine)
    finally:
        await engine.aclose()


if __name__ == "__main__":
    *arguments, answer = sys.argv[1:]
    Path(answer).write_text(json.dumps(asyncio.run(fresh(*arguments))))
