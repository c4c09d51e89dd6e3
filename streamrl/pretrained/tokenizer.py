"""Text and chats to token ids, and back, on the ``tokenizers`` library: no torch, no transformers. Token ids are the
only truth from here on: nothing that was tokenised or sampled is ever tokenised again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import TokenArray, token_array
from streamrl.pretrained.chat_template import ChatError, ChatFormat, read_chat_format
from streamrl.pretrained.end_tokens import EndTokens, read_end_tokens
from streamrl.pretrained.model_folder import LARGEST_CONFIGURATION, read_bounded
from streamrl.pretrained.special_tokens import SpecialTokens, read_json, read_special_tokens

T = TypeVar("T")

_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {"inst": "user"}
_ROLES |= dict.fromkeys(("ipython", "observation", "toolresults", "toolresponse"), "tool") | {"model": "assistant"}
_LARGEST_TOKENIZER = 4 * LARGEST_CONFIGURATION

log = logging.getLogger(__name__)


class Tokenizer:
    """The tokenizer of a model directory. Truncation and padding that the file asks for are switched off:
    a prompt that is cut in silence is another prompt.

    ``digest``: SHA-256 of the canonical ``tokenizer.json`` (added tokens among it), of the ids that end a completion
    and of the chat templates with their tokens; equal on every process that may exchange token ids.
    ``eos_token_ids``: what ends a completion; ``end_notice``: where files of the model disagree about that, else empty.
    ``directory``: of the model; ``embeddings``: tokens that it can take (0: not known).
    ``vocabulary_size``: one more than the largest token id. ``special_token_ids``: those that ``decode`` leaves out."""

    special_token_ids: frozenset[int] = frozenset()
    end_notice = ""
    embeddings = 0

    def __init__(self, backend: tokenizers.Tokenizer, digest: str, ends: EndTokens, chat: ChatFormat) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.digest = digest
        self.eos_token_ids = ends.ids
        self.end_notice = ends.notice
        self.embeddings = ends.embeddings
        self._chat = chat
        self.directory = chat.directory
        self._warned = False
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special) | {*ends.ids}
        self.vocabulary_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Jinja sources of the model's chat templates by name; empty: it has none."""
        return self._chat.templates

    def encode(self, text: str) -> TokenArray:
        """Token ids of ``text``, int32, with what the tokenizer's own post-processor adds (a BOS, for example). What it
        adds in front and the text begins with already is written once. Raises ``ChatError``."""
        encoding = self._encoding(text, add_special_tokens=True)
        ids = encoding.ids
        added = encoding.special_tokens_mask
        front = added.index(0) if 0 in added else 0
        return token_array(ids[front:] if self._begins_twice(ids, front) else ids)

    def _begins_twice(self, ids: Sequence[int], front: int) -> bool:
        twice = front > 0 and ids[front : 2 * front] == ids[:front]
        if twice and not self._warned:
            self._warned = True
            shown = self._backend.decode(ids[:front], skip_special_tokens=False)
            log.warning("prompts begin with %s, which the tokenizer adds as well: it is written once", shown)
        return twice

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> TokenArray:
        """Token ids, int32, of ``messages`` in the model's own chat template, up to where the assistant begins, or goes
        on where the last message is its own.

        The template writes every special token itself (BOS too), so none is added. ``tools``: JSON schemas;
        ``arguments``: further variables of the template. Raises ``ChatError``."""
        return self.encode_fragment(self.render_chat(messages, tools, arguments))

    def _encoding(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            return _of_library(lambda: self._backend.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # the library has no class for it: an unknown token that is unknown itself, say
            raise ChatError(f"the model's tokenizer cannot take the text ({error}): save the model again") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that ``encode_chat`` tokenises; the same that transformers' ``apply_chat_template`` gives, with
        ``continue_final_message`` where the last message is the assistant's. Raises ``ChatError``."""
        return self._chat.render(messages, tools, arguments)

    def write_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The text of ``messages`` in the model's own chat template; with ``generation_prompt`` the assistant's next
        message begins behind them. Raises ``ChatError``."""
        return self._chat.write(messages, tools, arguments, generation_prompt=generation_prompt)

    def encode_fragment(self, text: str) -> TokenArray:
        """Token ids of ``text``, int32, with nothing added: of text that begins with a special token, those that it has
        inside of a longer one. Raises ``ChatError``."""
        return token_array(self._encoding(text, add_special_tokens=False).ids)

    def token_text(self, token_id: int) -> str:
        """The text of one token as it stands in the vocabulary; empty where there is none."""
        return self._backend.id_to_token(token_id) or ""

    def decode(self, token_ids: TokenArray, skip_special: bool = True) -> str:
        """Text of ``token_ids``; special tokens, and what ends the completion, are left out unless ``skip_special`` is
        False."""
        ids = token_ids.tolist()
        ids = ids[:-1] if skip_special and ids and ids[-1] in self.eos_token_ids else ids
        return str(self._backend.decode(ids, skip_special_tokens=skip_special))

    def messages(self, token_ids: TokenArray, role: str = "") -> list[tuple[str, str, int]]:
        """Role, text and number of tokens of each message in ``token_ids``, which no model sampled: special tokens
        divide them, and no other text can. ``role``: of what is before the first. Those without text are left out."""
        found = [(role, "", 0)]
        opened = False
        for special, group in groupby(token_ids, self.special_token_ids.__contains__):
            for ids in ([one] for one in group) if special else [list(group)]:
                text = self.token_text(ids[0]) if special else self.decode(token_array(ids))
                head, _, rest = text.partition("\n")
                head = "".join(filter(str.isalpha, head.lower())) if special else head
                known = _ROLES.get(head.removeprefix("im").removesuffix("token")) if special or opened else None
                role, before, tokens = (known, "", 0) if known else found.pop()
                found.append((role, before + (rest if known else "" if special else text), tokens + len(ids)))
                opened = special and not known and ("start" in head or head == "turn")
        named = (("tool" if text.lstrip().startswith("<tool_response>") else role, text, n) for role, text, n in found)
        return [(role, text.strip(), tokens) for role, text, tokens in named if text.strip()]

    def beyond_model(self, token_ids: TokenArray) -> str:
        """Return why the model cannot take ``token_ids``, with the remedy; empty: it can."""
        largest = max(token_ids, default=0)
        if not self.embeddings or largest < self.embeddings:
            return ""
        return (
            f"the token {largest} ({self._backend.id_to_token(largest)!r}), and the model has {self.embeddings} "
            f"embeddings (0 to {self.embeddings - 1}): resize them (resize_token_embeddings) and save the model again, "
            "or leave the token out"
        )


def _of_library(call: Callable[[], T]) -> T:
    """Return the result of ``call``. A panic of the library, which is no ``Exception``, is raised as ``ValueError``."""
    try:
        return call()
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise ValueError(f"the library gave up: {error}") from error
        raise


def load_tokenizer(model_path: str | Path) -> Tokenizer:
    """Read the tokenizer of a Hugging Face directory. Raises ``RecipeError`` naming the directory and the remedy."""
    directory = Path(model_path)
    text, content = _read(directory)
    try:
        backend = _of_library(lambda: tokenizers.Tokenizer.from_str(text))
    except Exception as error:
        raise _unreadable(directory, error) from error
    special, chat, ends = _configured(directory, content)
    special.add_to(backend)
    return Tokenizer(backend, _digest(content, ends.ids, special, chat), ends, chat)


def tokenizer_digest(model_path: str | Path) -> str:
    """``load_tokenizer(model_path).digest`` without making the tokenizer, for who compares and does not tokenize."""
    content = _read(Path(model_path))[1]
    special, chat, ends = _configured(Path(model_path), content)
    return _digest(content, ends.ids, special, chat)


def end_tokens(model_path: str | Path) -> EndTokens:
    """The tokens that end a completion of the model in a Hugging Face directory. Raises ``RecipeError``."""
    return _configured(Path(model_path), _read(Path(model_path))[1])[2]


def chat_format(model_path: str | Path) -> ChatFormat:
    """The way in which the model in a Hugging Face directory wants chats. Raises ``RecipeError``."""
    return _configured(Path(model_path), _read(Path(model_path))[1])[1]


def _read(directory: Path) -> tuple[str, dict[str, Any]]:
    """Text and content of ``tokenizer.json``."""
    if not directory.is_dir():
        raise RecipeError(
            f"model directory {directory} does not exist: set model.path to a directory in Hugging Face format"
        )
    path = directory / "tokenizer.json"
    if not path.is_file():
        how = 'transformers.AutoTokenizer.from_pretrained(...).save_pretrained("' + str(directory) + '")'
        raise RecipeError(f"model directory {directory} has no tokenizer.json: save the tokenizer there with {how}")
    try:
        text = read_bounded(path, _LARGEST_TOKENIZER).decode()
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        return text, content
    except Exception as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: Exception) -> RecipeError:
    path = directory / "tokenizer.json"
    return RecipeError(f"{path} cannot be read as a tokenizer ({error}): save it again from a good copy")


def _digest(content: dict[str, Any], end: tuple[int, ...], special: SpecialTokens, chat: ChatFormat) -> str:
    # transformers rewrites these two whenever a caller pads or truncates; they do not change what a token means.
    content["truncation"] = content["padding"] = None
    added = [special.listed, special.further, special.split]
    whole = [content, sorted(end), dict(chat.templates), dict(chat.named_tokens), added]
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def refuse_different_tokenizers(path: str, digests: Mapping[str, str]) -> None:
    """Raises ``StreamRLError`` unless all that loaded a tokenizer from ``path`` have the same one. ``digests``: by who
    loaded it, in words; "" for what has none (a simulated engine)."""
    known = {who: digest for who, digest in digests.items() if digest}
    if len(set(known.values())) > 1:
        listed = "; ".join(f"{who}: {digest}" for who, digest in known.items())
        raise StreamRLError(
            f"different tokenizers, end tokens or chat templates were loaded from {path} ({listed}): "
            "copy one model directory to every machine"
        )


def _configured(directory: Path, content: Mapping[str, Any]) -> tuple[SpecialTokens, ChatFormat, EndTokens]:
    """Read the files beside ``tokenizer.json``, which holds ``content``. Raises ``RecipeError``."""
    path = directory / "tokenizer_config.json"
    config = read_json(path)
    try:
        special = read_special_tokens(directory, config)
        ends = read_end_tokens(directory, content, special.named.get("eos_token", ""))
        return special, read_chat_format(directory, config, special.named), ends
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise RecipeError(f"{path} or a template beside it cannot be read ({error!r}): save the model again") from error
