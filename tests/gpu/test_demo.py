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

from gpu_cases import ON_A_GPU

from campaigns.chaos.kill_engine import host_of, short_demo
from streamrl.base.run_events import EngineBack, EngineLost, RunFinished, StepFinished
from streamrl.launch.pipeline import Pipeline
from streamrl.recipe.sections import EngineKind

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("default")]
STEPS = 10


@ON_A_GPU
async def test_ten_steps_of_the_demo_with_a_killed_core(device: str, tmp_path: Path, record_property: Any) -> None:
    recipe, began = short_demo(EngineKind.VLLM, STEPS, str(tmp_path)), time.monotonic()
    recipe = msgspec.structs.replace(
        recipe,
        engines=msgspec.structs.replace(recipe.engines, count=1, gpu_memory_utilization=0.4),
        sampling=msgspec.structs.replace(recipe.sampling, max_tokens=448 if device == "cuda" else 64),
    )
    seen: list[Any] = []
    async with Pipeline(recipe) as pipeline:
        async for event in pipeline.events():
            seen.append(event)
            if isinstance(event, StepFinished) and len(rewards(seen)) == 3:
                host_of("engine-0").children(recursive=True)[0].kill()
    steps = [event for event in seen if isinstance(event, StepFinished)]
    back = [event.seconds for event in seen if isinstance(event, EngineBack)]
    record_property("first_and_last_reward", [rewards(seen)[0], rewards(seen)[-1]])
    record_property("missed_s", back)
    record_property("seconds", time.monotonic() - began)
    assert [event.step for event in steps] == list(range(1, STEPS + 1)), "no step was lost"
    assert [type(event) for event in seen if isinstance(event, EngineLost | EngineBack)] == [EngineLost, EngineBack]
    assert isinstance(seen[-1], RunFinished) and seen[-1].reason == "finished"


def rewards(seen: list[Any]) -> list[float]:
    return [event.metrics["reward/mean"] for event in seen if isinstance(event, StepFinished)]
