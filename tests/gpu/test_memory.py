"""The peak of a training step is what placement counts on (``device_bytes``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_cases import HALF_B, ON_BOTH, ONE_AND_A_HALF_B, TINY, samples_of, shared_model  # noqa: E402
from training_steps import train_steps  # noqa: E402

from streamrl.learning.model.policy import card_bytes  # noqa: E402
from streamrl.prepare.memory import device_bytes  # noqa: E402
from streamrl.pretrained.model_facts import read_model_facts  # noqa: E402
from streamrl.recipe.sections import Lora, Model, OptimizerKind, Prompts, Recipe, Reward, Training  # noqa: E402

pytestmark = pytest.mark.torch
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "offloaded": {"optimizer": OptimizerKind.ADAMW_OFFLOADED},
    "checkpointing": {"activation_checkpointing": True},
    "lora": {"lora": Lora(rank=8)},
    "adamw of 1.5B": {},
}


@ON_BOTH
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_peak_of_a_step_is_as_predicted(
    device: str, variant: str, tmp_path_factory: pytest.TempPathFactory, socket_directory: Path, record_property: Any
) -> None:
    sizes = TINY if device == "cpu" else ONE_AND_A_HALF_B if "1.5B" in variant else HALF_B
    path = shared_model(tmp_path_factory, sizes)
    options = VARIANTS[variant] | {"micro_batch_tokens": 256}
    done = train_steps(path, device, socket_directory, [samples_of([64] * 4, batch=b) for b in range(2)], **options)
    recipe = Recipe(
        model=Model(path=path),
        prompts=Prompts(train=""),
        rewards=(Reward(function=""),),
        training=Training(micro_batch_tokens=256, **{n: v for n, v in VARIANTS[variant].items() if n != "lora"}),
        lora=VARIANTS[variant].get("lora", Lora()),
    )
    predicted = device_bytes(recipe, read_model_facts(Path(path)), 256, card_bytes(torch.device(device)))
    record_property("parameters", done.parameters)
    record_property("peak_gib", done.peak / 2**30)
    record_property("predicted_gib", predicted / 2**30)
    assert predicted > 4 * done.parameters and done.steps == 2
    if device == "cuda":
        assert abs(done.peak / predicted - 1) < 0.1
