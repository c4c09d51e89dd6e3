"""Tiny checkpoints of model families are laid out as the published ones, and are the same each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from streamrl.learning.families.family import read_families  # noqa: E402
from streamrl.learning.families.tiny_checkpoint import SPECIAL_TOKENS, write_tiny_checkpoint  # noqa: E402
from streamrl.pretrained.tokenizer import load_tokenizer  # noqa: E402
from streamrl.pretrained.weight_files import stored_tensors  # noqa: E402

FAMILIES = read_families()


def test_tables_of_families_extend_each_other() -> None:
    """A table has the values of the one that it is like, of the parts that it uses, and then its own."""
    assert len(FAMILIES) >= 36
    text = FAMILIES["qwen3_5_moe"].config["text_config"]
    assert isinstance(text, dict)
    assert (text["num_experts"], text["linear_key_head_dim"], text["tie_word_embeddings"]) == (4, 64, False)
    assert text["rope_parameters"]["mrope_section"] == [4, 2, 2]
    assert "intermediate_size" not in text
    assert FAMILIES["qwen3_5_moe"].engine_dtype == "bfloat16"
    assert FAMILIES["qwen3_5"].config["text_config"]["intermediate_size"] == 128


@pytest.mark.parametrize(
    ("family", "dtypes"),
    [
        (
            "qwen3_5",
            {
                "model.language_model.layers.0.linear_attn.A_log": "F32",
                "model.language_model.layers.3.self_attn.q_proj.weight": "BF16",
                "model.visual.patch_embed.proj.weight": "BF16",
                "mtp.fc.weight": "BF16",
            },
        ),
        (
            "glm4_moe",
            {
                "model.layers.1.mlp.gate.e_score_correction_bias": "F32",
                "model.layers.1.mlp.experts.3.up_proj.weight": "BF16",
                "model.layers.4.mlp.experts.3.up_proj.weight": "BF16",
                "model.layers.4.eh_proj.weight": "BF16",
            },
        ),
        (
            "gemma4_e2b",
            {
                "model.language_model.layers.0.layer_scalar": "BF16",
                "model.language_model.layers.5.self_attn.k_proj.weight": "BF16",
                "model.audio_tower.layers.0.feed_forward1.ffw_layer_1.linear.weight": "BF16",
            },
        ),
    ],
)
def test_tiny_checkpoints_have_published_tensors(family: str, dtypes: dict[str, str], tmp_path: Path) -> None:
    """Names and dtypes of tensors are the published ones, those of towers and prediction heads among them; special
    tokens of images are in the vocabulary; equal seeds give equal files."""
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        write_tiny_checkpoint(FAMILIES[family], tmp_path / name, seed=seed)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "same", "other"))
    assert one == same and one != other

    tensors = stored_tensors(tmp_path / "one")
    assert {name: tensors[name].dtype for name in dtypes} == dtypes
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["architectures"] == [FAMILIES[family].model_class] and config["dtype"] == "bfloat16"
    tokenizer = load_tokenizer(tmp_path / "one")
    assert tokenizer.decode(tokenizer.encode("3+4=7")[1:]) == "3+4=7"
    vocabulary = json.loads((tmp_path / "one" / "tokenizer.json").read_text())
    assert [token["content"] for token in vocabulary["added_tokens"]][-len(SPECIAL_TOKENS) :] == list(SPECIAL_TOKENS)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_checkpoint_of_every_family_is_made(family: str, tmp_path: Path) -> None:
    """Each table makes a checkpoint whose values of norms, biases and saved buffers are not those that a fresh model
    has."""
    from safetensors.torch import load_file

    write_tiny_checkpoint(FAMILIES[family], tmp_path / family)
    tensors = load_file(tmp_path / family / "model.safetensors")
    assert sum(tensor.numel() for tensor in tensors.values()) < 3_000_000
    flat = [n for n, tensor in tensors.items() if tensor.numel() > 1 and tensor.float().std() == 0]
    assert not [name for name in flat if "norm" in name and "layers." in name], flat
