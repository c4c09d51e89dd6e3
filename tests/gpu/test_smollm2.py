"""A pretrained model on one card: SmolLM2-135M-Instruct learns sums for 20 steps, with its curves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders.files import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("vllm")

from gpu_cases import ON_A_GPU, steps_of_run

from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import Recipe

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("default")]
FOLDER = ROOT / "examples" / "smollm2"
STEPS = {"cpu": 2, "cuda": 20}


@ON_A_GPU
async def test_steps_of_a_pretrained_model(device: str, tmp_path: Path, record_property: Any) -> None:
    """Each step is trained, and its tokens have nearly the probabilities that the engine gave them. Rewards are
    reported; how they rise is chance."""
    if not (FOLDER / "model").is_dir():
        pytest.skip("examples/smollm2/model is not there: make examples/smollm2/model fetches it (92 MB)")
    recipe, began = short_recipe(device, tmp_path), time.monotonic()
    steps = await steps_of_run(recipe, STEPS[device], record_property, began)
    assert max(abs(event.metrics["policy/kl_rollout"]) for event in steps) < 0.05


def short_recipe(device: str, directory: Path) -> Recipe:
    """The example without evaluation and checkpoints."""
    recipe, replace = load_recipe(FOLDER / "recipe.toml"), msgspec.structs.replace
    return replace(
        recipe,
        run=replace(recipe.run, steps=STEPS[device], directory=str(directory)),
        evaluation=replace(recipe.evaluation, prompts="", every=0, at_start=False, at_end=False),
        checkpoint=replace(recipe.checkpoint, at_end=False),
    )
