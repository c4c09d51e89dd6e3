"""What autograd keeps of a forward in bfloat16, by family, is what the memory of a rank is predicted with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from streamrl.learning.rank_memory import activation_bytes  # noqa: E402
from streamrl.pretrained.model_facts import read_model_facts  # noqa: E402
from streamrl.recipe.sections import Training  # noqa: E402

pytestmark = pytest.mark.torch
TOKENS = 500
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def model_of(family: str, layers: int) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, num_hidden_layers=layers)
    kind = "Gemma3ForCausalLM" if family == "Gemma3Text" else f"{family}ForCausalLM"
    return getattr(transformers, kind)._from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def kept_bytes(model: Any) -> int:
    """Bytes of the activations that a forward keeps, without weights and their copies in bfloat16."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    shapes = {tuple(parameter.shape) for parameter in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and tuple(tensor.shape) not in shapes:
            kept[storage._cdata] = storage
        return tensor

    ids = torch.randint(0, 60, (1, TOKENS))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        output = model.model(input_ids=ids, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text", "Mistral"])
def test_a_layer_keeps_what_is_predicted(family: str, tmp_path: Path) -> None:
    kept = []
    predicted = []
    for layers in (1, 3):
        model = model_of(family, layers)
        model.save_pretrained(tmp_path / str(layers))
        facts = read_model_facts(tmp_path / str(layers))
        kept.append(kept_bytes(model))
        predicted.append(activation_bytes(facts, Training(), TOKENS, 0, sixteen_bit=True))
    assert predicted[1] - predicted[0] == pytest.approx(kept[1] - kept[0], rel=0.1)
