"""Text to token ids and back, on the ``tokenizers`` library: no torch, no transformers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from streamrl.errors import RecipeError
from streamrl.types import TokenArray, token_array


class Tokenizer:
    """The tokenizer of a model directory. Truncation and padding that the file asks for are switched off:
    a prompt that is cut in silence is another prompt.

    ``digest``: SHA-256 of the canonical ``tokenizer.json``; equal on every process that may exchange token ids.
    ``eos_token_ids``: what ends a completion, from ``generation_config.json``, else ``config.json``.
    ``vocabulary_size``: one more than the largest token id.
    """

    def __init__(self, backend: tokenizers.Tokenizer, digest: str, eos_token_ids: tuple[int, ...]) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.digest = digest
        self.eos_token_ids = eos_token_ids
        self.vocabulary_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> TokenArray:
        """Token ids of ``text``, int32, with what the tokenizer's own post-processor adds (a BOS, for example)."""
        return token_array(self._backend.encode(text).ids)

    def decode(self, token_ids: TokenArray, skip_special: bool = True) -> str:
        """Text of ``token_ids``; special tokens such as EOS are left out unless ``skip_special`` is False."""
        return str(self._backend.decode(token_ids.tolist(), skip_special_tokens=skip_special))


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face directory. Raises ``RecipeError`` naming the directory and the remedy."""
    directory = Path(model_path)
    if not directory.is_dir():
        raise RecipeError(
            [f"model directory {directory} does not exist: set model.path to a directory in Hugging Face format"]
        )
    path = directory / "tokenizer.json"
    if not path.is_file():
        how = 'transformers.AutoTokenizer.from_pretrained(...).save_pretrained("' + str(directory) + '")'
        raise RecipeError([f"model directory {directory} has no tokenizer.json: save the tokenizer there with {how}"])
    try:
        text = path.read_text(encoding="utf-8")
        digest = _canonical_digest(text)
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:
        raise RecipeError(
            [f"{path} cannot be read as a tokenizer ({error}): save it again from a good copy"]
        ) from error
    return Tokenizer(backend, digest, _eos_token_ids(directory))


def _canonical_digest(text: str) -> str:
    content = json.loads(text)
    # transformers rewrites these two whenever a caller pads or truncates; they do not change what a token means.
    content["truncation"] = content["padding"] = None
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise RecipeError([f"{path} is not JSON ({error}): save the model again"]) from error
        found = content.get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if ids and all(type(token_id) is int for token_id in ids):
            return tuple(ids)
    raise RecipeError(
        [f"model directory {directory} names no eos_token_id: add it to its generation_config.json or config.json"]
    )
