"""Files of a model folder that contradict each other: one model is taken, and all else is refused in words."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from streamrl.base.errors import RecipeError
from streamrl.base.types import token_array
from streamrl.pretrained.model_facts import read_model_facts
from streamrl.pretrained.tokenizer import end_tokens, load_tokenizer, tokenizer_digest
from streamrl.pretrained.trainable_models import refuse_untrainable, row_split_problems, split_problems
from streamrl.pretrained.weight_files import ModelDirectoryError, stored_tensors, weight_files
from streamrl.run.prompts.open_prompts import check_prompts

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
CONFIG = {"hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 2, "vocab_size": 8}


def write_weights(
    file: Path, *names: str, shape: tuple[int, ...] = (2,), more: bytes = b"", dtype: str = "F32"
) -> None:
    size = 4 * math.prod(shape)
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [place * size, (place + 1) * size]}
        for place, name in enumerate(names)
    }
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(size * len(names)) + more)


def folder_of(directory: Path, files: dict[str, str], index: dict[str, str] | None) -> Path:
    (directory / "config.json").write_text(json.dumps(CONFIG))
    for file, names in files.items():
        write_weights(directory / file, *names.split())
    if index is not None:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return directory


SHARDS = {FIRST: "a", SECOND: "b"}
OF_SHARDS = {"a": FIRST, "b": SECOND}
TAKEN: dict[str, tuple[dict[str, str], dict[str, str] | None, int]] = {
    "one file": ({"model.safetensors": "a b"}, None, 1),
    "one file of another name": ({"pytorch_model.safetensors": "a"}, None, 1),
    "one file that the index names": ({"model.safetensors": "a"}, {"a": "model.safetensors"}, 1),
    "shards and their index": (SHARDS, OF_SHARDS, 2),
    "shards of one save without their index": (SHARDS, None, 2),
    "shards beside the original format": ({**SHARDS, "consolidated.safetensors": "x"}, OF_SHARDS, 2),
    "shards beside those of an older save": ({**SHARDS, "model-00001-of-00003.safetensors": "a"}, OF_SHARDS, 2),
}
REFUSED: dict[str, tuple[dict[str, str], dict[str, str] | None, str]] = {
    "an index left behind": ({"model.safetensors": "a"}, OF_SHARDS, f"no {FIRST}, .*remove {INDEX} if model.safe"),
    "an index of other shards that are there": (
        {"model.safetensors": "a", **SHARDS},
        OF_SHARDS,
        "one of the two saves",
    ),
    "a shard that is missing": ({FIRST: "a"}, OF_SHARDS, f"has no {SECOND}, which {INDEX} names: copy or save"),
    "a shard that is missing, without an index": ({FIRST: "a"}, None, f"has no {SECOND}, a part of the same save"),
    "an index into another folder": ({FIRST: "a"}, {"a": f"other/{FIRST}"}, "has no other/"),
    "two saves": ({"model.safetensors": "a", "adapter_model.safetensors": "b"}, None, r"more than one save \(adapter"),
    "shards of two saves": ({**SHARDS, "model-00001-of-00003.safetensors": "c"}, None, "more than one save"),
    "the original format": ({"model.safetensors": "a", "consolidated.safetensors": "x"}, None, "more than one save"),
    "a tensor in two shards": ({FIRST: "a", SECOND: "a b"}, OF_SHARDS, f"'a' in two files .{FIRST} and {SECOND}"),
    "an index of another save": (SHARDS, OF_SHARDS | {"c": SECOND}, f"has no 'c' in {SECOND}, where {INDEX} says"),
    "an index without a tensor": (SHARDS, {}, f"a broken {INDEX}"),
    "nothing": ({}, None, r"no \*\.safetensors weights"),
}
UNTRAINABLE: dict[str, tuple[dict[str, Any], str, str]] = {
    "towers alone": (
        {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {}, "hidden_size": None},
        "a",
        r"has towers .vision_config in config.json. and no language model .text_config.: .* give the model that the",
    ),
    "a model of pairs": ({"architectures": ["CLIPModel"], "vision_config": {}}, "a", r"is a CLIPModel: only language"),
    "an encoder and a decoder": ({"architectures": ["T5ForConditionalGeneration"]}, "a", "only language models"),
    "experts of four bits": (
        {"quantization_config": {"quant_method": "mxfp4"}},
        "a",
        r"with Mxfp4Config.dequantize=True",
    ),
    "a model without a head": ({"architectures": ["Qwen2Model"]}, "a", "is a Qwen2Model: only language models"),
    "quantised weights": ({"quantization_config": {"quant_method": "awq"}}, "a", r"is quantised .awq.: training needs"),
    "padding beyond the embedding": ({"pad_token_id": 8}, "a", r"pad_token_id = 8 in .* 8 embeddings .0 to 7.: resize"),
    "another vocabulary": (
        {},
        "model.embed_tokens.weight",
        "has 2 rows of model.embed_tokens.weight, and vocab_size = 8",
    ),
    "a layer too few": ({}, "model.layers.0.a", "has 1 layers in its weights, and num_hidden_layers = 2"),
}


SPLIT: list[tuple[dict[str, Any], int, int, list[str]]] = [
    ({"num_attention_heads": 6}, 2, 1, []),
    ({"num_attention_heads": 6}, 4, 1, ["tensor: num_attention_heads = 6 (6 = 1 x 4 + 2): set it to 2"]),
    ({"num_key_value_heads": 1}, 2, 1, ["tensor: num_key_value_heads = 1 (1 = 0 x 2 + 1): set it to 1"]),
    ({"intermediate_size": 9}, 2, 1, ["tensor: intermediate_size = 9 (9 = 4 x 2 + 1): set it to 1"]),
    ({"vocab_size": 9}, 2, 1, ["tensor: vocab_size = 9 (9 = 4 x 2 + 1): set it to 1"]),
    ({"vocab_size": 9, "tie_word_embeddings": True}, 2, 1, []),
    ({"num_experts": 6, "moe_intermediate_size": 5}, 2, 2, []),
    ({"num_experts": 7, "moe_intermediate_size": 4}, 2, 1, []),
    ({"num_experts": 7}, 2, 2, ["expert: num_experts = 7 (7 = 3 x 2 + 1): set it to 1"]),
    ({"moe_intermediate_size": 5}, 2, 1, ["tensor: moe_intermediate_size = 5 (5 = 2 x 2 + 1): set it to 1"]),
]  # fmt: skip
CUT: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": ["sliding_attention", "full_attention"]}, ""),
    ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ({"layers_block_type": ["mamba", "attention"]}, "mamba"),
    ({"num_attention_heads": None, "n_head": 2}, ""),
    ({"num_attention_heads": None, "model_type": "rwkv"}, "rwkv"),
    ({"full_attn_idxs": [1], "model_type": "lfm2"}, "lfm2"),
]


@pytest.mark.parametrize(("config", "tensor", "expert", "said"), SPLIT)
def test_sizes_that_ranks_cannot_share_come_with_the_arithmetic(
    tmp_path: Path, config: dict[str, Any], tensor: int, expert: int, said: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_attention_heads": 8} | config))
    words = f" of the model does not divide into {tensor} equal parts"
    assert [one.replace(words, "") for one in split_problems(tmp_path, tensor, expert)] == [
        f"training.advanced.{one.replace(':', '_parallel_size:', 1)}" for one in said
    ]
    assert split_problems(tmp_path, 1, 1) == []


@pytest.mark.parametrize(("config", "kind"), CUT)
def test_rows_of_layers_that_carry_a_state_are_not_cut(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | config))
    assert row_split_problems(tmp_path, 1) == []
    found = row_split_problems(tmp_path, 2)
    assert len(found) == bool(kind) and all(f"layers of type {kind}, which" in one for one in found)
    assert all(one.endswith("set it to 1, or give a model of attention layers alone") for one in found)


@pytest.mark.parametrize("name", TAKEN)
def test_the_files_that_are_one_model_are_taken(tmp_path: Path, name: str) -> None:
    files, index, count = TAKEN[name]
    folder = folder_of(tmp_path, files, index)
    assert len(weight_files(folder)) == count
    assert len(stored_tensors(folder)) == len(
        (set(index or {})) or {n for names in files.values() for n in names.split()}
    )


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_not_one_model_are_refused_by_name(tmp_path: Path, name: str) -> None:
    files, index, said = REFUSED[name]
    with pytest.raises(ModelDirectoryError, match=said):
        read_model_facts(folder_of(tmp_path, files, index))


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_configurations_of_other_models_are_refused(tmp_path: Path, name: str) -> None:
    """A model that is no causal language model of text is refused by its configuration."""
    config, tensor, said = UNTRAINABLE[name]
    folder = folder_of(tmp_path, {}, None)
    write_weights(folder / "model.safetensors", tensor, shape=(2, 4))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises(ModelDirectoryError, match=said):
        refuse_untrainable(folder)


@pytest.mark.parametrize(
    ("beside", "said"), [(False, "is an adapter and no model: merge"), (True, "beside config.json")]
)
def test_an_adapter_is_no_model(tmp_path: Path, beside: bool, said: str) -> None:
    folder = folder_of(tmp_path, {"model.safetensors": "a"}, None)
    (folder / "adapter_config.json").write_text("{}")
    if not beside:
        (folder / "config.json").unlink()
    with pytest.raises(ModelDirectoryError, match=said):
        refuse_untrainable(folder)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut": (cut, "it is cut"),
    "with a tail": (lambda file: write_weights(file, "a", more=b"tail"), "it is too long: .* copy or save it again"),
    "with too few bytes": (lambda file: write_weights(file, "a", dtype="F64"), r"'a' .F64, \[2\]. cannot lie in"),
    "with no bytes": (lambda file: file.write_bytes(b""), "broken model.safetensors"),
    "a pointer of git": (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), "broken model"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_no_library_opens_is_refused(tmp_path: Path, name: str) -> None:
    spoil, said = BROKEN[name]
    folder = folder_of(tmp_path, {"model.safetensors": "a"}, None)
    spoil(folder / "model.safetensors")
    with pytest.raises(ModelDirectoryError, match=said):
        read_model_facts(folder)


def test_sizes_are_those_of_the_language_model(tmp_path: Path) -> None:
    """Towers are not counted, and layers that a configuration only lists are; those with a state keep no keys."""
    folder = folder_of(tmp_path, {}, None)
    layers = [f"model.language_model.layers.{layer}.a" for layer in range(4)]
    towers = [f"model.visual.blocks.{layer}.a" for layer in range(9)]
    write_weights(folder / "model.safetensors", *layers, *towers, "model.embed_vision.b.weight")
    text = {**CONFIG, "num_hidden_layers": None, "layer_types": ["linear_attention", "full_attention"] * 2}
    classes = {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {"depth": 9}}
    (folder / "config.json").write_text(json.dumps({**classes, "text_config": text | {"architectures": None}}))
    refuse_untrainable(folder)
    facts = read_model_facts(folder)
    assert (facts.parameters, facts.layers, facts.key_value_bytes) == (8, 4, 2 * 2 * 4 * 4)
    (folder / "config.json").write_text(json.dumps({**classes, **text, "layer_types": None}))
    assert read_model_facts(folder).layers == 4, "counted among the weights"


def test_sizes_that_a_class_has_by_default_are_in_the_weights(tmp_path: Path) -> None:
    """Published configurations of Gemma 3 leave out what is the default of their class."""
    folder = folder_of(tmp_path, {}, None)
    shapes = {"embed_tokens": (96, 8), "q_norm": (4,), "q_proj": (24, 8), "k_proj": (8, 8)}
    for place, (name, shape) in enumerate(shapes.items(), 1):
        part = "" if name == "embed_tokens" else "layers.0.self_attn."
        name = f"language_model.model.{part}{name}.weight"
        write_weights(folder / f"model-0000{place}-of-00004.safetensors", name, shape=shape)
    classes = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"hidden_size": 7}}
    text = {"hidden_size": 8, "num_hidden_layers": 1, "model_type": "gemma3_text"}
    (folder / "config.json").write_text(json.dumps({**classes, "text_config": text}))
    facts = read_model_facts(folder)
    assert (facts.vocabulary, facts.queries, facts.key_value_bytes) == (96, 24, 2 * 2 * 4 * 4)
    assert not row_split_problems(folder, 2), "heads that are not named do not make layers of attention recurrent"


# ---- what ends a completion, and what the model can take -------------------------------------------


WORDS = ("<pad>", "a", "<eos>", "<turn>", "#", "b", "c", "d")


def tokens_of(folder: Path, *, config: Any = None, generation: Any = None, eos: str = "", text: Any = None) -> Path:
    """A folder whose files name these end tokens; <eos> is 2, <turn> is 3, # is 4 and no special token, <new> is 8."""
    named = {} if config is None else {"eos_token_id": config}
    nested = {} if text is None else {"text_config": {"eos_token_id": text}}
    (folder / "config.json").write_text(json.dumps(CONFIG | named | nested))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    words = tokenizers.models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>")
    backend = tokenizers.Tokenizer(words)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<eos>", "<turn>"])
    content = json.loads(backend.to_str())
    content["added_tokens"].append(content["added_tokens"][0] | {"id": 8, "content": "<new>", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    return folder


@pytest.mark.parametrize(
    ("files", "ids", "disagree"),
    [
        ({"config": 2, "generation": {}}, (2,), False),
        ({"config": 2, "generation": {"eos_token_id": [2]}, "eos": "<eos>"}, (2,), False),
        ({"generation": {"eos_token_id": [3, 2]}, "config": 2, "eos": "<turn>"}, (3, 2), False),
        ({"generation": {"eos_token_id": 2}, "config": 3}, (2, 3), True),
        ({"config": 2, "eos": "<turn>"}, (2, 3), True),
        ({"eos": "<turn>"}, (3,), False),
        ({"eos": "#"}, (4,), False),
        ({"text": [2, 3]}, (2, 3), False),
        ({"config": 4, "eos": "<eos>"}, (2,), True),  # the default of a class, of another vocabulary
        ({"config": 4}, (4,), False),
        ({"generation": {"eos_token_id": [2, 9]}}, (2,), True),  # 9 has no embedding
    ],
)
def test_every_file_that_names_an_end_token_counts(
    tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...], disagree: bool
) -> None:
    tokenizer = load_tokenizer(tokens_of(tmp_path, **files))
    assert tokenizer.eos_token_ids == ids and end_tokens(tmp_path).ids == ids
    assert bool(tokenizer.end_notice) == disagree, tokenizer.end_notice
    assert tokenizer.digest == tokenizer_digest(tmp_path)
    assert tokenizer.decode(token_array([1, 1, ids[-1]])) == "a a", "also where it is no special token"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"eos": "<none>"}, "names no eos_token_id: add it"),
        ({"config": "2"}, "names no eos_token_id: add it"),
        ({"eos": "<new>"}, r"no.*embedding for \(8 embeddings; the tokenizer: 8 \(<new>\)\): resize"),
    ],
)
def test_a_model_that_could_never_end_a_completion_is_refused(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_tokenizer(tokens_of(tmp_path, **files))


def test_a_token_without_embedding_is_found_in_its_line(tmp_path: Path) -> None:
    """A token for which the model has no embedding is found in its line."""
    tokenizer = load_tokenizer(tokens_of(tmp_path, config=2))
    rows = [{"prompt": "a"}, {"prompt": "a <new>"}, {"prompt_token_ids": [1, 8]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = check_prompts(f"{tmp_path}/rows.jsonl", tokenizer, {})
    assert "line 2 has a prompt with the token 8 ('<new>'), and the model has 8 embeddings (0 to 7): resize" in found
    assert "(so with 1 of the other 2 rows)" in found
