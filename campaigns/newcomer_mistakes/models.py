"""Folders of models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from campaigns.front_door.folders import edit_json
from campaigns.newcomer_mistakes.mistake import Change, Mistake, each, recipe, removed, written

WEIGHTS = "model/model.safetensors"


def _config(**values: object) -> Change:
    """The model with these values in its config.json."""

    def change(folder: Path) -> None:
        edit_json(folder / "model/config.json", lambda content: content.update(values))

    return change


def _cut(folder: Path) -> None:
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:1000])


def _only(**files: Any) -> Change:
    """A folder of these files in place of the model."""

    def change(folder: Path) -> None:
        shutil.rmtree(folder / "model")
        (folder / "model").mkdir()
        for name, content in files.items():
            (folder / "model" / name.replace("__", ".")).write_text(content)

    return change


def _named(path: str, *said: str) -> Mistake:
    return recipe('path = "model"', f'path = "{path}"', *said)


def _model(change: Change, *said: str) -> Mistake:
    return Mistake(change, ("model.path:", *said))


MISTAKES: dict[str, Mistake] = {
    "a folder that is not there": _named("modle", "model.path:", "modle is not a directory", "give a Hugging Face"),
    "a file for a folder": _named(WEIGHTS, "model.path:", WEIGHTS, "give a Hugging Face model directory"),
    "a folder of other things": _named(".", "model.path:", "has no config.json", "give the whole folder"),
    "a name of the Hub, without a network": _named("no-such/model", "model.path:", "no-such/model", "hf download"),
    "an address of the Hub": _named(
        "https://huggingface.co/Qwen/Qwen3-0.6B", "recipe.toml:6: model.path:", 'write "hf:Qwen/Qwen3-0.6B"'
    ),
    "a name of ollama": _named("qwen3:0.6b", "model.path:", "qwen3:0.6b", "by its name (owner/name)"),
    "no config": _model(removed("model/config.json"), "no config.json", "give the whole folder"),
    "a config that is cut": _model(written("model/config.json", '{"model_type": "qwen2", '), "config.json", "copy it"),
    "a config of nothing": _model(written("model/config.json", "{}"), "empty", "copy it again"),
    "no tokenizer": _model(removed("model/tokenizer.json"), "no tokenizer.json", "save the tokenizer there"),
    "a tokenizer that is cut": _model(written("model/tokenizer.json", '{"version"'), "tokenizer.json", "save it again"),
    "no weights": _model(removed(WEIGHTS), "no *.safetensors", "copy the whole folder"),
    "weights that are cut": _model(_cut, "broken model.safetensors", "copy or save it again"),
    "a pointer of git-lfs": _model(
        written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n"),
        "git-lfs", "git lfs pull"
    ),
    "an index without its files": _model(
        each(removed(WEIGHTS), written(f"{WEIGHTS}.index.json", '{"weight_map": {"a": "model-1-of-2.safetensors"}}')),
        "no model-1-of-2.safetensors", "copy or save the model again",
    ),
    "weights of pickle": _model(
        each(removed(WEIGHTS), written("model/pytorch_model.bin", b"PK")), "pytorch_model.bin",
        "safe_serialization=True"
    ),
    "an adapter": _model(_only(adapter_config__json='{"r": 8}'), "is an adapter", "merge the adapter"),
    "a GGUF file": _model(_only(model__gguf="GGUF"), "GGUF", "give the model that it was made of"),
    "a quantized model": _model(
        _config(quantization_config={"quant_method": "awq", "bits": 4}), "awq", "give the original model"
    ),
    "an encoder": _model(
        _config(model_type="bert", architectures=["BertForMaskedLM"]), "BertForMaskedLM", "ForCausalLM"
    ),
    "code of its own": _model(
        _config(auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}), "auto_map in config.json", "take the key out"
    ),
    "a config of other sizes": _model(_config(hidden_size=64), "[32, 64] by config.json", "copy or save it again"),
}  # fmt: skip
