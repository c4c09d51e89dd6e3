"""The demo on one card, engine and trainer beside each other; the engine's core is killed once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("vllm")

from gpu_cases import ON_A_GPU, record_figures, steps_of_run

from campaigns.chaos.kill_engine import host_of, short_demo
from streamrl.base.run_events import EngineBack, EngineLost, RunFinished, StepFinished
from streamrl.launch.pipeline import Pipeline
from streamrl.recipe.sections import EngineKind, GpuSharing, Recipe

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("default")]
STEPS = 10
TURNS = 5


@ON_A_GPU
async def test_ten_steps_of_the_demo_with_a_killed_core(device: str, tmp_path: Path, record_property: Any) -> None:
    """Side by side: the engine's core is killed after three steps, and no step is lost."""
    recipe, began = side_by_side(device, tmp_path), time.monotonic()
    seen: list[Any] = []
    async with Pipeline(recipe) as pipeline:
        async for event in pipeline.events():
            seen.append(event)
            if isinstance(event, StepFinished) and len(rewards(seen)) == 3:
                host_of("engine-0").children(recursive=True)[0].kill()
    steps = [event for event in seen if isinstance(event, StepFinished)]
    record_figures(record_property, steps)
    back = [event.seconds for event in seen if isinstance(event, EngineBack)]
    record_property("missed_s", back)
    record_property("seconds", time.monotonic() - began)
    assert [event.step for event in steps] == list(range(1, STEPS + 1)), "no step was lost"
    assert [type(event) for event in seen if isinstance(event, EngineLost | EngineBack)] == [EngineLost, EngineBack]
    assert isinstance(seen[-1], RunFinished) and seen[-1].reason == "finished"


@ON_A_GPU
async def test_the_demo_in_turns(device: str, tmp_path: Path, record_property: Any) -> None:
    """In turns: the engine gives its memory to the trainer for each step, and has it again for the next round."""
    if device == "cpu":
        pytest.skip("vLLM sleeps on CUDA only")
    recipe, began = in_turns(device, tmp_path), time.monotonic()
    await steps_of_run(recipe, TURNS, record_property, began)


def side_by_side(device: str, directory: Path) -> Recipe:
    return of_one_engine(short_demo(EngineKind.VLLM, STEPS, str(directory)), device, gpu_memory_utilization=0.4)


def in_turns(device: str, directory: Path) -> Recipe:
    recipe = short_demo(EngineKind.VLLM, TURNS, str(directory))
    return of_one_engine(recipe, device, gpu_sharing=GpuSharing.IN_TURNS)


def of_one_engine(recipe: Recipe, device: str, **engines: Any) -> Recipe:
    replace = msgspec.structs.replace
    return replace(
        recipe,
        engines=replace(recipe.engines, count=1, **engines),
        sampling=replace(recipe.sampling, max_tokens=448 if device == "cuda" else 64),
    )


def rewards(seen: list[Any]) -> list[float]:
    return [event.metrics["reward/mean"] for event in seen if isinstance(event, StepFinished)]
