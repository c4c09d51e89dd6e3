"""The tokens that end a completion, from every file of a model folder that names one, and the size of its embedding.

transformers ends at what ``generation_config.json`` names, else ``config.json``; vLLM at what
``generation_config.json`` and the tokenizer name. Here each file counts, so that a completion ends wherever one of the
two would end it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.pretrained.special_tokens import read_json


class EndTokens(msgspec.Struct, frozen=True):
    """``ids``: tokens that end a completion. ``notice``: where the files disagree, in one sentence; empty: they do not.
    ``embeddings``: tokens that the model has embeddings for (0: ``config.json`` does not say)."""

    ids: tuple[int, ...]
    notice: str
    embeddings: int


def read_end_tokens(directory: Path, content: Mapping[str, Any], eos_token: str) -> EndTokens:
    """The end tokens of a model folder. ``content``: of its ``tokenizer.json``; ``eos_token``: the text that the
    tokenizer's other files give it, '' for none.

    An id that only ``config.json`` names ends nothing where it is an ordinary piece of text: it is a default of the
    model's class then, of another vocabulary. Raises ``RecipeError`` where no token is left."""
    config = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json")
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    size = next((part["vocab_size"] for part in reversed(parts) if isinstance(part.get("vocab_size"), int)), 0)
    texts = {entry["id"]: entry["content"] for entry in content.get("added_tokens") or ()}
    eos = _id_of(eos_token, content, texts)
    named = {
        "generation_config.json": _ids(generation),
        "config.json": [token for part in parts for token in _ids(part)],
        "the tokenizer": [] if eos is None else [eos],
    }
    whole = list(dict.fromkeys(token for tokens in named.values() for token in tokens))
    others = {*named["generation_config.json"], *named["the tokenizer"]}
    ends = [token for token in whole if token in others or not others or token in texts]
    within = [token for token in ends if not size or 0 <= token < size]
    said = "; ".join(f"{file}: {_shown(tokens, texts)}" for file, tokens in named.items() if tokens)
    if not within:
        beyond = f"none that the model has an embedding for ({size} embeddings; {said}): resize them"
        missing = "no eos_token_id: add it to its generation_config.json or config.json"
        raise RecipeError(f"model directory {directory} names {beyond if ends else missing}")
    first = set(next(filter(None, named.values())))
    agree = within == whole and all(first >= set(tokens) for tokens in named.values())
    notice = f"files of the model disagree about what ends a completion ({said}): here {_shown(within, texts)} does"
    return EndTokens(tuple(within), "" if agree else notice, size)


def _ids(config: Mapping[str, Any]) -> list[int]:
    found = config.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return [token for token in ids if type(token) is int]


def _id_of(token: str, content: Mapping[str, Any], texts: Mapping[int, str]) -> int | None:
    """The id of a token by ``tokenizer.json``; None: it has none there."""
    added = {text: token_id for token_id, text in texts.items()}
    if not token or token in added:
        return added.get(token)
    vocabulary = (content.get("model") or {}).get("vocab")
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores, in the order of their ids
        vocabulary = {entry[0]: place for place, entry in enumerate(vocabulary)}
    return (vocabulary or {}).get(token)


def _shown(tokens: list[int], texts: Mapping[int, str]) -> str:
    return ", ".join(f"{token} ({texts[token]})" if token in texts else str(token) for token in tokens)
