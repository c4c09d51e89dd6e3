"""Text and chats to token ids and back, on the ``tokenizers`` library, without torch and transformers. The controller,
the workers of user code, simulated engines and the dry run use it. Prompts and completions are token ids everywhere
else, and their text is never tokenised again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import tokenizers

from streamrl.base.errors import RecipeError, StreamRLError
from streamrl.base.types import JsonMapping, JsonObject, JsonObjects, TextMapping, TokenArray, token_array
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
    """The tokenizer of a model folder. Truncation and padding in the file are switched off: a prompt that is truncated
    without notice is another prompt.

    ``digest``: SHA-256 of the canonical ``tokenizer.json`` with added tokens, of the end tokens and of the chat
    templates with their tokens. Processes that exchange token ids must have the same;
    ``eos_token_ids``: tokens that end a completion;
    ``end_notice``: sentence about a disagreement of the model's files on the end tokens (empty: they agree);
    ``directory``: folder of the model;
    ``embeddings``: number of tokens with an embedding (0: unknown);
    ``vocabulary_size``: largest token id plus one;
    ``special_token_ids``: special tokens and end tokens, which ``decode`` leaves out."""

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
    def chat_templates(self) -> TextMapping:
        """Jinja sources of the model's chat templates by name; empty: the model has none."""
        return self._chat.templates

    def encode(self, text: str) -> TokenArray:
        """Return the token ids of ``text``, int32, with the tokens that the tokenizer's post-processor adds (such as
        BOS). Added tokens at the start that the text begins with already are written once. Raises ``ChatError``."""
        encoding = self._encoding(text, add_special_tokens=True)
        ids = encoding.ids
        added = encoding.special_tokens_mask
        front = added.index(0) if 0 in added else 0
        return token_array(ids[front:] if self._begins_twice(ids, front) else ids)

    def _begins_twice(self, ids: Sequence[int], front: int) -> bool:
        twice = front > 0 and ids[front : 2 * front] == ids[:front]
        if twice and not self._warned:
            self._warned = True
            prefix = self._backend.decode(ids[:front], skip_special_tokens=False)
            log.warning("prompts begin with %s, which the tokenizer adds as well: it is written once", prefix)
        return twice

    def encode_chat(
        self, messages: JsonObjects, tools: JsonObjects | None = None, arguments: JsonMapping | None = None
    ) -> TokenArray:
        """Return the token ids, int32, of ``messages`` in the model's chat template, after which the assistant's
        message begins, or goes on where the last message is the assistant's.

        The template writes every special token itself (BOS, too), so none is added. ``tools``: JSON schemas;
        ``arguments``: further variables of the template. Raises ``ChatError``."""
        return self.encode_fragment(self.render_chat(messages, tools, arguments))

    def _encoding(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            return _of_library(lambda: self._backend.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # the library has no class for it, as for a vocabulary without its unknown token
            raise ChatError(f"the model's tokenizer cannot take the text ({error}): save the model again") from error

    def render_chat(
        self, messages: JsonObjects, tools: JsonObjects | None = None, arguments: JsonMapping | None = None
    ) -> str:
        """Return the text that ``encode_chat`` tokenises. It equals the text of transformers' ``apply_chat_template``,
        with ``continue_final_message`` where the last message is the assistant's. Raises ``ChatError``."""
        return self._chat.render(messages, tools, arguments)

    def write_chat(
        self,
        messages: JsonObjects,
        tools: JsonObjects | None = None,
        arguments: JsonMapping | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return the text of ``messages`` in the model's chat template, with ``generation_prompt`` followed by the
        begin of the assistant's next message. Raises ``ChatError``."""
        return self._chat.write(messages, tools, arguments, generation_prompt=generation_prompt)

    def encode_fragment(self, text: str) -> TokenArray:
        """Return the token ids of ``text``, int32, with nothing added. A text that begins with a special token gets the
        same ids as within a longer text. Raises ``ChatError``."""
        return token_array(self._encoding(text, add_special_tokens=False).ids)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token in the vocabulary; empty where there is no such token."""
        return self._backend.id_to_token(token_id) or ""

    def first_difference(self, other: Tokenizer) -> str:
        """Return the first token id that stands for another text in ``other``, with both texts; empty: the vocabularies
        are equal. Chat templates and end tokens may differ: they change no meaning of a token id."""
        for token_id in range(max(self.vocabulary_size, other.vocabulary_size)):
            token = self._backend.id_to_token(token_id)
            of_other = other._backend.id_to_token(token_id)
            if token != of_other:
                return f"token {token_id} is {of_other!r} there, and {token!r} in the policy's"
        return ""

    def decode(self, token_ids: TokenArray, skip_special: bool = True) -> str:
        """Return the text of ``token_ids``. Special tokens and the end token are left out unless ``skip_special`` is
        False."""
        ids = token_ids.tolist()
        if skip_special and ids and ids[-1] in self.eos_token_ids:
            ids.pop()
        return str(self._backend.decode(ids, skip_special_tokens=skip_special))

    def messages(self, token_ids: TokenArray, role: str = "") -> list[tuple[str, str, int]]:
        """Return (role, text, number of tokens) of each message with a text in ``token_ids``, which no model sampled.
        Special tokens divide messages; other text cannot. ``role``: role of the text before the first message."""
        messages = [(role, "", 0)]
        names_role = False  # whether the token before opens a message, so that its role comes next
        for special, group in groupby(token_ids, self.special_token_ids.__contains__):
            run = list(group)
            parts = [[token_id] for token_id in run] if special else [run]
            for ids in parts:
                text = self.token_text(ids[0]) if special else self.decode(token_array(ids))
                head, _, body = text.partition("\n")
                if special:
                    head = "".join(filter(str.isalpha, head.lower()))
                new_role = None
                if special or names_role:
                    new_role = _ROLES.get(head.removeprefix("im").removesuffix("token"))
                if new_role is not None:
                    messages.append((new_role, body, len(ids)))
                else:
                    last_role, last_text, tokens = messages.pop()
                    if not special:
                        last_text += text
                    messages.append((last_role, last_text, tokens + len(ids)))
                names_role = special and new_role is None and ("start" in head or head == "turn")
        result = []
        for message_role, message_text, tokens in messages:
            text = message_text.strip()
            if text.startswith("<tool_response>"):
                message_role = "tool"
            if text:
                result.append((message_role, text, tokens))
        return result

    def beyond_model(self, token_ids: TokenArray) -> str:
        """Return why the model has no embedding for ``token_ids``, with the remedy; empty: it has all."""
        largest = max(token_ids, default=0)
        if not self.embeddings or largest < self.embeddings:
            return ""
        return (
            f"the token {largest} ({self._backend.id_to_token(largest)!r}), and the model has {self.embeddings} "
            f"embeddings (0 to {self.embeddings - 1}): resize them (resize_token_embeddings) and save the model again, "
            "or leave the token out"
        )


def _of_library(call: Callable[[], T]) -> T:
    """Return the result of ``call``. Raises ``ValueError`` in place of a panic of the library, which is no
    ``Exception``."""
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
    """Return ``load_tokenizer(model_path).digest`` without making the tokenizer, for a process that only compares
    it."""
    content = _read(Path(model_path))[1]
    special, chat, ends = _configured(Path(model_path), content)
    return _digest(content, ends.ids, special, chat)


def end_tokens(model_path: str | Path) -> EndTokens:
    """Read the tokens that end a completion of the model in a Hugging Face directory. Raises ``RecipeError``."""
    return _configured(Path(model_path), _read(Path(model_path))[1])[2]


def chat_format(model_path: str | Path) -> ChatFormat:
    """Read the chat templates of the model in a Hugging Face directory. Raises ``RecipeError``."""
    return _configured(Path(model_path), _read(Path(model_path))[1])[1]


def _read(directory: Path) -> tuple[str, JsonObject]:
    """Read the text of ``tokenizer.json`` and its JSON object. Raises ``RecipeError``."""
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


def _digest(content: JsonObject, end: tuple[int, ...], special: SpecialTokens, chat: ChatFormat) -> str:
    # transformers rewrites these two whenever a caller pads or truncates; the meaning of tokens stays.
    content["truncation"] = content["padding"] = None
    added = [special.listed, special.further, special.split]
    parts = [content, sorted(end), dict(chat.templates), dict(chat.named_tokens), added]
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def refuse_different_tokenizers(path: str, digests: TextMapping) -> None:
    """Raises ``StreamRLError`` unless all processes loaded the same tokenizer from ``path``. ``digests``: digest by
    process, in words; empty for a process without a tokenizer (a simulated engine)."""
    loaded = {process: digest for process, digest in digests.items() if digest}
    if len(set(loaded.values())) > 1:
        listed = "; ".join(f"{process}: {digest}" for process, digest in loaded.items())
        raise StreamRLError(
            f"different tokenizers, end tokens or chat templates were loaded from {path} ({listed}): "
            "copy one model directory to every machine"
        )


def _configured(directory: Path, content: JsonMapping) -> tuple[SpecialTokens, ChatFormat, EndTokens]:
    """Read the files beside ``tokenizer.json``, which holds ``content``. Raises ``RecipeError``."""
    path = directory / "tokenizer_config.json"
    config = read_json(path)
    try:
        special = read_special_tokens(directory, config)
        ends = read_end_tokens(directory, content, special.named.get("eos_token", ""))
        return special, read_chat_format(directory, config, special.named), ends
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise RecipeError(f"{path} or a template beside it cannot be read ({error!r}): save the model again") from error
