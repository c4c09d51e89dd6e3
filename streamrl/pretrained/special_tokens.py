"""Special tokens that a model folder names outside of ``tokenizer.json``, read as transformers reads them. Called by
``pretrained.tokenizer``.

They are in ``tokenizer_config.json``. Where it has no ``added_tokens_decoder``, they are also in
``special_tokens_map.json`` (which has priority) and ``added_tokens.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from msgspec import Struct, json

from streamrl.base.errors import UNDECODABLE, RecipeError
from streamrl.base.types import JsonMapping, JsonObject, TextMapping
from streamrl.pretrained.model_folder import read_bounded

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SpecialTokens(Struct, frozen=True):
    """Special tokens of a model folder.

    ``named``: texts by the names that chat templates use, such as ``bos_token``;
    ``listed``: tokens with all their flags, which replace those of ``tokenizer.json``;
    ``further``: other tokens that the tokenizer must have;
    ``split``: whether special tokens in a text are split like other text."""

    named: TextMapping = {}
    listed: tuple[JsonMapping, ...] = ()
    further: tuple[JsonMapping, ...] = ()
    split: bool = False

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Add the tokens to ``backend``. A token that it has keeps its id; another gets the next free id."""
        backend.encode_special_tokens = self.split
        by_text = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        new = []
        for fields in self.listed:
            token = tokenizers.AddedToken(**fields)
            present = by_text.get(fields["content"])
            if present is None or any(getattr(token, flag) != getattr(present, flag) for flag in _FLAGS):
                new.append(token)
            by_text[token.content] = token
        for fields in self.further:
            if fields["content"] not in by_text:
                by_text[fields["content"]] = tokenizers.AddedToken(**fields)
                new.append(by_text[fields["content"]])
        backend.add_tokens(new)


def read_special_tokens(directory: Path, config: JsonMapping) -> SpecialTokens:
    """Read the special tokens of a model folder. ``config``: content of its ``tokenizer_config.json``. Raises
    ``RecipeError`` for another file that is not JSON, and the plain errors of Python for a broken ``config``."""
    settings = dict(config)
    listed = config.get("added_tokens_decoder")
    old = {}
    if listed is None:
        settings |= read_json(directory / "special_tokens_map.json")
        old = read_json(directory / "added_tokens.json")
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= settings.get("model_specific_special_tokens") or {}
    if isinstance(extra, dict):
        named |= extra
    named = {name: token for name, value in named.items() if (token := _token(value, special=True))}
    further = list(named.values())
    if isinstance(extra, list):
        further += [token for value in extra if (token := _token(value, special=True))]
    special = {token["content"] for token in further}
    described = listed or {}
    old_texts = sorted(old, key=lambda text: old[text])
    further = [{"content": text, "special": text in special} for text in old_texts] + further
    return SpecialTokens(
        {name: token["content"] for name, token in named.items()},
        tuple(_token(described[index]) for index in sorted(described, key=int)),
        tuple(further),
        settings.get("split_special_tokens") is True,
    )


def _token(value: Any, **flags: bool) -> JsonObject:
    """Fields of a token, which is written as its text or as an object; empty: ``value`` is no token."""
    if isinstance(value, str):
        value = {"content": value}
    if not isinstance(value, dict) or not isinstance(value.get("content"), str) or not value["content"]:
        return {}
    return {"content": value["content"], **{flag: value[flag] for flag in _FLAGS if flag in value}, **flags}


def read_json(path: Path) -> JsonObject:
    """Read the JSON object in a file of a model folder; empty where there is no file. Raises ``RecipeError``."""
    if not path.is_file():
        return {}
    try:
        return json.decode(read_bounded(path), type=JsonObject)
    except (OSError, *UNDECODABLE) as error:
        raise RecipeError(f"{path} is not JSON ({error}): save the model again") from error
