"""The special tokens that a model folder names beside ``tokenizer.json``, read as transformers reads them.

They are in ``tokenizer_config.json`` and, where that has no ``added_tokens_decoder``, in ``special_tokens_map.json``
(which wins) and ``added_tokens.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from streamrl.base.errors import UNDECODABLE, RecipeError
from streamrl.pretrained.model_folder import read_bounded

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SpecialTokens(msgspec.Struct, frozen=True):
    """``named``: texts by the names that chat templates use, such as ``bos_token``. ``listed``: tokens with all flags,
    which win over those of ``tokenizer.json``. ``further``: tokens that the tokenizer must know. ``split``: special
    tokens in a text are split like other text."""

    named: Mapping[str, str] = {}
    listed: tuple[Mapping[str, Any], ...] = ()
    further: tuple[Mapping[str, Any], ...] = ()
    split: bool = False

    def add_to(self, backend: tokenizers.Tokenizer) -> None:
        """Let ``backend`` know the tokens. One that it has keeps its id; another gets the next free id."""
        backend.encode_special_tokens = self.split
        known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        new = []
        for described in self.listed:
            token = tokenizers.AddedToken(**described)
            present = known.get(described["content"])
            if present is None or any(getattr(token, flag) != getattr(present, flag) for flag in _FLAGS):
                new.append(token)
            known[token.content] = token
        for described in self.further:
            if described["content"] not in known:
                known[described["content"]] = tokenizers.AddedToken(**described)
                new.append(known[described["content"]])
        backend.add_tokens(new)


def read_special_tokens(directory: Path, config: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens of a model folder, whose ``tokenizer_config.json`` holds ``config``. Raises ``RecipeError``
    for another file that is not JSON, and what a broken ``config`` makes Python raise."""
    settings = dict(config)
    listed = config.get("added_tokens_decoder")
    old = {}
    if listed is None:
        settings |= read_json(directory / "special_tokens_map.json")
        old = read_json(directory / "added_tokens.json")
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or ()
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= settings.get("model_specific_special_tokens") or {}
    named |= extra if isinstance(extra, dict) else {}
    named = {name: token for name, value in named.items() if (token := _token(value, special=True))}
    further = list(named.values())
    further += [token for value in extra if (token := _token(value, special=True))] if isinstance(extra, list) else []
    special = {token["content"] for token in further}
    further = [
        {"content": text, "special": text in special} for text in sorted(old, key=lambda text: old[text])
    ] + further
    return SpecialTokens(
        {name: token["content"] for name, token in named.items()},
        tuple(_token(listed[index]) for index in sorted(listed, key=int)) if listed else (),
        tuple(further),
        settings.get("split_special_tokens") is True,
    )


def _token(value: Any, **flags: bool) -> dict[str, Any]:
    """The fields of a token that is written as its text or as an object; empty: it is no token."""
    fields = {"content": value} if isinstance(value, str) else value if isinstance(value, dict) else {}
    if not isinstance(fields.get("content"), str) or not fields["content"]:
        return {}
    return {"content": fields["content"], **{flag: fields[flag] for flag in _FLAGS if flag in fields}, **flags}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of a model folder; empty where there is no such file. Raises ``RecipeError``."""
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(read_bounded(path), type=dict[str, Any])
    except (OSError, *UNDECODABLE) as error:
        raise RecipeError(f"{path} is not JSON ({error}): save the model again") from error
