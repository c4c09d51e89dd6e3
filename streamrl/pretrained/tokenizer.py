"""Text and chats to token ids, and back, on the ``tokenizers`` library: no torch, no transformers.

Token ids are the only truth from here on: nothing that was tokenised or sampled is ever tokenised again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import tokenizers

from streamrl.base.errors import UNDECODABLE, RecipeError, StreamRLError
from streamrl.base.types import TokenArray, token_array

if TYPE_CHECKING:
    import jinja2

T = TypeVar("T")

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatError(StreamRLError):
    """Messages that cannot be rendered as a prompt; the message says why and what to do."""


class ChatFormat(msgspec.Struct, frozen=True):
    """A model's format of chats. ``templates``: jinja sources by name, ``default`` and perhaps ``tool_use``; empty: the
    model has none. ``named_tokens``: texts that templates may write, such as ``bos_token``."""

    directory: str
    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]


class Tokenizer:
    """The tokenizer of a model directory. Truncation and padding that the file asks for are switched off:
    a prompt that is cut in silence is another prompt.

    ``digest``: SHA-256 of the canonical ``tokenizer.json`` (added tokens among it), of the ids that end a completion
    and of the chat templates with their tokens; equal on every process that may exchange token ids.
    ``eos_token_ids``: what ends a completion, from ``generation_config.json``, else ``config.json``.
    ``vocabulary_size``: one more than the largest token id.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, digest: str, eos_token_ids: tuple[int, ...], chat: ChatFormat
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.digest = digest
        self.eos_token_ids = eos_token_ids
        self._chat = chat
        self.vocabulary_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> TokenArray:
        """Token ids of ``text``, int32, with what the tokenizer's own post-processor adds (a BOS, for example)."""
        return self._ids(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> TokenArray:
        """Token ids, int32, of ``messages`` in the model's own chat template, up to where the assistant begins.

        The template writes every special token itself (BOS too), so none is added. ``tools``: JSON schemas;
        ``arguments``: further variables of the template. Raises ``ChatError``.
        """
        text = self.render_chat(messages, tools, arguments)
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, *, add_special_tokens: bool) -> TokenArray:
        try:
            return token_array(
                _of_library(lambda: self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
            )
        except Exception as error:  # the library has no class for it: an unknown token that is unknown itself, say
            raise ChatError(f"the model's tokenizer cannot take the text ({error}): save the model again") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text that ``encode_chat`` tokenises; the same that transformers' ``apply_chat_template`` gives."""
        templates = self._chat.templates
        source = templates.get("tool_use") if tools is not None else None
        source = source or templates.get("default")
        if source is None:
            raise ChatError(
                f"model directory {self._chat.directory} has no chat template: put its chat_template.jinja there, or "
                'give prompts as text in the column "prompt"'
            )
        variables = {"add_generation_prompt": True, **self._chat.named_tokens, **(arguments or {})}
        try:
            return _compiled(source).render(messages=messages, tools=tools, documents=None, **variables)
        except Exception as error:  # a template is a program of the model's author
            raise ChatError(
                f"the model's chat template refuses the messages ({type(error).__name__}: {error})"
            ) from error

    def decode(self, token_ids: TokenArray, skip_special: bool = True) -> str:
        """Text of ``token_ids``; special tokens such as EOS are left out unless ``skip_special`` is False."""
        return str(self._backend.decode(token_ids.tolist(), skip_special_tokens=skip_special))


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
    end, chat = _eos_token_ids(directory), _chat_format(directory)
    return Tokenizer(backend, _digest(content, end, chat), end, chat)


def tokenizer_digest(model_path: str | Path) -> str:
    """``load_tokenizer(model_path).digest`` without making the tokenizer, for who compares and does not tokenize."""
    directory = Path(model_path)
    _, content = _read(directory)
    return _digest(content, _eos_token_ids(directory), _chat_format(directory))


def _read(directory: Path) -> tuple[str, dict[str, Any]]:
    """Text and content of ``tokenizer.json``."""
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
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        return text, content
    except Exception as error:
        raise _unreadable(directory, error) from error


def _unreadable(directory: Path, error: Exception) -> RecipeError:
    path = directory / "tokenizer.json"
    return RecipeError([f"{path} cannot be read as a tokenizer ({error}): save it again from a good copy"])


def _digest(content: dict[str, Any], end: tuple[int, ...], chat: ChatFormat) -> str:
    # transformers rewrites these two whenever a caller pads or truncates; they do not change what a token means.
    content["truncation"] = content["padding"] = None
    whole = [content, sorted(end), dict(chat.templates), dict(chat.named_tokens)]
    canonical = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()


def refuse_different_tokenizers(path: str, digests: Mapping[str, str]) -> None:
    """Raises ``StreamRLError`` unless all that loaded a tokenizer from ``path`` have the same one.

    ``digests``: by who loaded it, in words; "" for what has none (a simulated engine).
    """
    known = {who: digest for who, digest in digests.items() if digest}
    if len(set(known.values())) > 1:
        listed = "; ".join(f"{who}: {digest}" for who, digest in known.items())
        raise StreamRLError(
            f"different tokenizers, end tokens or chat templates were loaded from {path} ({listed}): "
            "copy one model directory to every machine"
        )


def _chat_format(directory: Path) -> ChatFormat:
    """Read ``tokenizer_config.json`` and the ``.jinja`` files beside it, which win. Either may be missing."""
    path = directory / "tokenizer_config.json"
    config = _json_object(path) if path.is_file() else {}
    try:
        return _chat_format_of(directory, config)
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise RecipeError(
            [f"{path} or a template beside it cannot be read ({error!r}): save the model again"]
        ) from error


def _chat_format_of(directory: Path, config: Mapping[str, Any]) -> ChatFormat:
    found = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(found, str):
        templates["default"] = found
    elif isinstance(found, list):
        templates = {entry["name"]: entry["template"] for entry in found}
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    texts = {name: config.get(name) for name in _NAMED_TOKENS}
    named = {name: str(t["content"] if isinstance(t, dict) else t) for name, t in texts.items() if t is not None}
    return ChatFormat(str(directory), templates, named)


@cache
def _compiled(source: str) -> jinja2.Template:
    """A template in the sandbox and with the extras of transformers. Raises jinja2's errors."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks what an assistant wrote, for training on chats; a prompt only shows it."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes for HTML

    def now_as(layout: str) -> str:
        return datetime.now().strftime(layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now_as}
    return environment.from_string(source)


def _eos_token_ids(directory: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.is_file():
            continue
        found = _json_object(path).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if ids and all(type(token_id) is int for token_id in ids):
            return tuple(ids)
    raise RecipeError(
        [f"model directory {directory} names no eos_token_id: add it to its generation_config.json or config.json"]
    )


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except UNDECODABLE as error:
        raise RecipeError([f"{path} is not JSON ({error}): save the model again"]) from error
