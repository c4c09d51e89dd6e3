"""Tokens that end a completion, from every file of a model folder that names one, and the size of the embedding. Called
by ``pretrained.tokenizer``.

transformers ends a completion at the tokens of ``generation_config.json``, or else of ``config.json``; vLLM at those of
``generation_config.json`` and of the tokenizer. Here all files count, so that a completion ends where either library
would end it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping
from streamrl.pretrained.special_tokens import read_json


class EndTokens(Struct, frozen=True):
    """End tokens of a model. ``ids``: tokens that end a completion; ``notice``: sentence about a disagreement of the
    files (empty: they agree); ``embeddings``: number of tokens with an embedding (0: not in ``config.json``)."""

    ids: tuple[int, ...]
    notice: str
    embeddings: int


def read_end_tokens(directory: Path, content: JsonMapping, eos_token: str) -> EndTokens:
    """Read the end tokens of a model folder. ``content``: content of its ``tokenizer.json``; ``eos_token``: text of the
    end token by the tokenizer's other files (empty: none).

    An id that only ``config.json`` names is left out where it is an ordinary token: it is a default of the model's
    class, for another vocabulary. Raises ``RecipeError`` where no token remains."""
    config = read_json(directory / "config.json")
    generation = read_json(directory / "generation_config.json")
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    size = next((part["vocab_size"] for part in reversed(parts) if isinstance(part.get("vocab_size"), int)), 0)
    texts = {entry["id"]: entry["content"] for entry in content.get("added_tokens") or ()}
    named = {
        "generation_config.json": _configured_ids(generation),
        "config.json": [token for part in parts for token in _configured_ids(part)],
        "the tokenizer": _tokenizer_ids(eos_token, content, texts),
    }
    all_named = list(dict.fromkeys(token for tokens in named.values() for token in tokens))
    beside_config = {*named["generation_config.json"], *named["the tokenizer"]}
    ends = [token for token in all_named if token in beside_config or not beside_config or token in texts]
    embedded = [token for token in ends if not size or 0 <= token < size]
    by_file = "; ".join(f"{file}: {_with_texts(tokens, texts)}" for file, tokens in named.items() if tokens)
    if not embedded:
        beyond = f"none that the model has an embedding for ({size} embeddings; {by_file}): resize them"
        missing = "no eos_token_id: add it to its generation_config.json or config.json"
        raise RecipeError(f"model directory {directory} names {beyond if ends else missing}")
    first = set(next(filter(None, named.values())))
    notice = ""
    if embedded != all_named or not all(first >= set(tokens) for tokens in named.values()):
        disagreement = f"files of the model disagree about what ends a completion ({by_file})"
        notice = f"{disagreement}: here {_with_texts(embedded, texts)} does"
    return EndTokens(tuple(embedded), notice, size)


def _configured_ids(config: JsonMapping) -> list[int]:
    """Ids in ``eos_token_id`` of a configuration, which is one id or a list."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if type(token) is int]


def _tokenizer_ids(token: str, content: JsonMapping, texts: Mapping[int, str]) -> list[int]:
    """The id of ``token`` in ``tokenizer.json`` as a list; empty: it has no such token."""
    added = {text: token_id for token_id, text in texts.items()}
    if token in added:
        return [added[token]]
    vocabulary = (content.get("model") or {}).get("vocab")
    if isinstance(vocabulary, list):  # Unigram: pieces with their scores, in the order of their ids
        vocabulary = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
    if not token or not vocabulary or token not in vocabulary:
        return []
    return [vocabulary[token]]


def _with_texts(tokens: list[int], texts: Mapping[int, str]) -> str:
    return ", ".join(f"{token} ({texts[token]})" if token in texts else str(token) for token in tokens)
