"""Tokenizers of many families with their published templates, which the wheel of trl has. Their words are a small
byte-level BPE: ``encode(decode(ids))`` is not ``ids`` for most ids that a model may sample."""
# ruff: noqa: RUF001 (tokens of DeepSeek have a wide bar)

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from streamrl.pretrained.tokenizer import Tokenizer, load_tokenizer

WHEEL = importlib.util.find_spec("trl")
assert WHEEL is not None and WHEEL.submodule_search_locations, "make venv installs trl, whose wheel has the templates"
TEMPLATES = Path(WHEEL.submodule_search_locations[0]) / "chat_templates"

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two integers.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "description": name} for name in "ab"},
            "required": ["a", "b"],
        },
    },
}


class Family(NamedTuple):
    """``stops``: what ends a completion by its ``generation_config.json``; ``special``: further special tokens."""

    template: str
    stops: tuple[str, ...]
    special: tuple[str, ...] = ()
    bos: str = ""
    arguments: dict[str, Any] = {}


CHATML = ("<|im_end|>", "<|endoftext|>")
IM = ("<|im_start|>", "<tool_call>", "</tool_call>", "<think>", "</think>")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|begin_of_text|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
DEEPSEEK = tuple(f"<｜{name}｜>" for name in ("begin▁of▁sentence", "User", "Assistant", "tool▁calls▁begin", "tool▁sep"))
FAMILIES = {
    "qwen2.5": Family("qwen2_5", CHATML, IM),
    "qwen3": Family("qwen3", CHATML, IM),
    "qwen3 without thinking": Family("qwen3", CHATML, IM, arguments={"enable_thinking": False}),
    "qwen3-2507": Family("qwen3_instruct_2507", CHATML, IM),
    "qwen3.5": Family("qwen3_5_think", CHATML, IM),
    "qwen3.5 nothink": Family("qwen3_5_nothink", CHATML, IM),
    "qwen3.6": Family("qwen3_6", CHATML, IM),
    "qwen3.6 preserving": Family("qwen3_6", CHATML, IM, arguments={"preserve_thinking": True}),
    "llama3": Family("llama3", ("<|eot_id|>",), LLAMA, "<|begin_of_text|>"),
    "llama3.1": Family("llama3_1", ("<|eot_id|>", "<|eom_id|>"), LLAMA, "<|begin_of_text|>"),
    "llama3.2": Family("llama3_2", ("<|eot_id|>", "<|eom_id|>"), LLAMA, "<|begin_of_text|>"),
    "gemma": Family("gemma", ("<end_of_turn>", "<eos>"), ("<start_of_turn>", "<bos>"), "<bos>"),
    "gemma3": Family("gemma3", ("<end_of_turn>", "<eos>"), ("<start_of_turn>", "<bos>"), "<bos>"),
    "phi3": Family("phi3", ("<|end|>", "<|endoftext|>"), ("<|user|>", "<|assistant|>", "<|system|>")),
    "phi3.5": Family("phi3_5", ("<|end|>", "<|endoftext|>"), ("<|user|>", "<|assistant|>", "<|system|>")),
    "deepseek-v3": Family("deepseekv3", ("<｜end▁of▁sentence｜>",), DEEPSEEK, DEEPSEEK[0]),
    "deepseek-r1 distilled": Family("deepseek_r1_distill", ("<｜end▁of▁sentence｜>",), DEEPSEEK, DEEPSEEK[0]),
    "glm-4.5": Family("glm4moe", ("<|endoftext|>", "<|user|>", "<|observation|>"), GLM),
    "gpt-oss": Family(
        "gptoss", ("<|return|>", "<|call|>"), ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
    ),
    "lfm2": Family("lfm2_2_5", ("<|im_end|>",), ("<|im_start|>", "<|startoftext|>"), "<|startoftext|>"),
    "nemotron-3": Family("nemotron_3_nano", ("<|im_end|>",), IM),
    "command-r": Family(
        "cohere", ("<|END_OF_TURN_TOKEN|>",), ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"), "<BOS_TOKEN>"
    ),
}


@cache
def words() -> str:
    """A byte-level BPE without special tokens: ``encode(decode(ids))`` is not ``ids`` of it for most ids."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [path.read_text() for path in sorted(TEMPLATES.glob("qwen*.jinja"))]
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    )
    return str(backend.to_str())


@cache
def tokenizer_of(name: str, folder: Path) -> Tokenizer:
    family = FAMILIES[name]
    backend = tokenizers.Tokenizer.from_str(words())
    texts = dict.fromkeys((*family.stops, *family.special, *([family.bos] if family.bos else ())))
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in texts])
    directory = folder / name.replace(" ", "_")
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text((TEMPLATES / f"{family.template}.jinja").read_text())
    ids = [backend.token_to_id(text) for text in family.stops]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    config = {"bos_token": family.bos} if family.bos else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": family.stops[0]}))
    return load_tokenizer(directory)
