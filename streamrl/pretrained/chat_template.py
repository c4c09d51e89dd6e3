"""Chats as the author of a model wants them written: the templates of its folder, rendered as transformers does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.pretrained.model_folder import read_bounded

if TYPE_CHECKING:
    import jinja2

TEMPLATE_FOLDER = "additional_chat_templates"
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatError(StreamRLError):
    """Messages that cannot be rendered as a prompt; the message says why and what to do."""


class ChatFormat(msgspec.Struct, frozen=True):
    """The way in which a model wants a chat to be written. ``templates``: jinja sources by name, ``default`` and
    perhaps ``tool_use``; empty: the model has none. ``named_tokens``: texts that templates may write, such as
    ``bos_token``."""

    directory: str
    templates: Mapping[str, str]
    named_tokens: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any] | None,
    ) -> str:
        """The text of ``messages`` up to where the assistant begins, or goes on where the last message is its own.
        Raises ``ChatError``."""
        shown, said = _tagged(messages)
        text = self.write(shown, tools, arguments, generation_prompt=said is None)
        return text if said is None else _before_tag(text, said)

    def write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any] | None,
        *,
        generation_prompt: bool,
    ) -> str:
        """The text of ``messages``; with ``generation_prompt`` the assistant's next message begins behind them. Raises
        ``ChatError``."""
        source = self.templates.get("tool_use") if tools is not None else None
        source = source or self.templates.get("default")
        if source is None:
            raise ChatError(
                f"model directory {self.directory} has no chat template: put its chat_template.jinja there, or "
                'give prompts as text in the column "prompt"'
            )
        own = {"documents": None, "add_generation_prompt": generation_prompt, **self.named_tokens}
        try:
            return _compiled(source).render(own | dict(arguments or {}), messages=messages, tools=tools)
        except Exception as error:  # a template is a program of the model's author
            raise ChatError(
                f"the model's chat template refuses the messages ({type(error).__name__}: {error})"
            ) from error


def _tagged(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str | None]:
    """``messages`` with a tag behind the text that the assistant has begun with, and that text; None: it has not."""
    if not messages or messages[-1].get("role") != "assistant":
        return messages, None
    *earlier, last = deepcopy(list(messages))
    parts = [last] if isinstance(last.get("content"), str) else last.get("content") or ()
    name = "content" if parts == [last] else "text"
    part = next((part for part in reversed(parts) if isinstance(part, dict) and isinstance(part.get(name), str)), None)
    if part is None:
        raise ChatError(
            "the last message is the assistant's and has no text that it could go on with: end with a message of the "
            "user or of a tool, or with the text that the assistant begins with"
        )
    said = part[name]
    part[name] += _TAG
    return [*earlier, last], said


def _before_tag(text: str, said: str) -> str:
    place = text.rfind(_TAG.strip())
    if place < 0 or said.strip() not in text:
        raise ChatError(
            "the last message is the assistant's, and the model's chat template does not show all of it, so that it "
            "cannot be continued: end with a message of the user, or give the prompt as text"
        )
    # A template that strips a message strips the space behind the tag too.
    return text[:place] if text.startswith(_TAG, place) else text[:place].rstrip()


def read_chat_format(directory: Path, config: Mapping[str, Any], named_tokens: Mapping[str, str]) -> ChatFormat:
    """The templates in ``config`` (of ``tokenizer_config.json``), or, as in transformers, those of ``.jinja`` files in
    place of them all. Raises what a broken ``config`` or file makes Python raise."""
    files = sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))
    templates = {file.stem: read_bounded(file).decode() for file in files}
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = read_bounded(file).decode()
    found = config.get("chat_template")
    if "default" not in templates and found is not None:
        ours = {"default": found} if isinstance(found, str) else found
        ours = ours if isinstance(ours, dict) else {entry["name"]: entry["template"] for entry in ours}
        templates = ours | templates
    return ChatFormat(str(directory), templates, named_tokens)


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
