"""Chat templates of a model folder, rendered as transformers renders them. ``pretrained.tokenizer`` calls this for
prompts of chats (controller) and for conversations (environment workers)."""

from __future__ import annotations

import json
from copy import deepcopy
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct

from streamrl.base.errors import StreamRLError
from streamrl.base.types import JsonMapping, JsonObjects, TextMapping
from streamrl.pretrained.model_folder import read_bounded

if TYPE_CHECKING:
    import jinja2

    from streamrl.pretrained.bounded_templates import BoundedEnvironment

ARGUMENTS_COLUMN = "chat_template_kwargs"
"""Column of a row with variables of the chat template."""
TEMPLATE_FOLDER = "additional_chat_templates"
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatError(StreamRLError):
    """Messages cannot be rendered as a prompt, or a text cannot be tokenised; the message has the reason and the
    remedy."""


class ChatFormat(Struct, frozen=True):
    """Chat templates of a model. ``directory``: folder of the model; ``templates``: jinja sources by name, ``default``
    and perhaps ``tool_use`` (empty: the model has none); ``named_tokens``: texts of special tokens that a template may
    use, by name, such as ``bos_token``."""

    directory: str
    templates: TextMapping
    named_tokens: TextMapping

    def render(self, messages: JsonObjects, tools: JsonObjects | None, arguments: JsonMapping | None) -> str:
        """Return the text of ``messages``, after which the assistant's message begins, or goes on where the last
        message is the assistant's.

        ``tools``: JSON schemas; ``arguments``: further variables of the template. Raises ``ChatError``."""
        tagged_messages, begin_of_message = _tagged(messages)
        if begin_of_message is None:
            return self.write(messages, tools, arguments, generation_prompt=True)
        text = self.write(tagged_messages, tools, arguments, generation_prompt=False)
        return _before_tag(text, begin_of_message)

    def write(
        self,
        messages: JsonObjects,
        tools: JsonObjects | None,
        arguments: JsonMapping | None,
        *,
        generation_prompt: bool,
    ) -> str:
        """Return the text of ``messages``, with ``generation_prompt`` followed by the begin of the assistant's next
        message. Raises ``ChatError``."""
        source = self.templates.get("default")
        if tools is not None:
            source = self.templates.get("tool_use") or source
        if source is None:
            raise ChatError(
                f"model directory {self.directory} has no chat template: put its chat_template.jinja there, or "
                'give prompts as text in the column "prompt"'
            )
        variables = {"documents": None, "add_generation_prompt": generation_prompt, **self.named_tokens}
        try:
            environment, template = _compiled(source)
            environment.begin_rendering()
            return template.render(variables | dict(arguments or {}), messages=messages, tools=tools)
        except Exception as error:  # a template is a program of the model's author
            raise ChatError(
                f"the model's chat template refuses the messages ({type(error).__name__}: {error})"
            ) from error


def _tagged(messages: JsonObjects) -> tuple[JsonObjects, str | None]:
    """Return ``messages`` with a tag after the text of the last message, and this text; None: the last message is not
    the assistant's."""
    if not messages or messages[-1].get("role") != "assistant":
        return messages, None
    *earlier, last = deepcopy(list(messages))
    parts = last.get("content") or ()
    name = "text"
    if isinstance(last.get("content"), str):
        parts = [last]
        name = "content"
    part = next((part for part in reversed(parts) if isinstance(part, dict) and isinstance(part.get(name), str)), None)
    if part is None:
        raise ChatError(
            "the last message is the assistant's and has no text that it could go on with: end with a message of the "
            "user or of a tool, or with the text that the assistant begins with"
        )
    begin_of_message = part[name]
    part[name] += _TAG
    return [*earlier, last], begin_of_message


def _before_tag(text: str, begin_of_message: str) -> str:
    """Return ``text`` up to the tag. Raises ``ChatError`` where the template left out a part of the last message."""
    place = text.rfind(_TAG.strip())
    if place < 0 or begin_of_message.strip() not in text:
        raise ChatError(
            "the last message is the assistant's, and the model's chat template does not show all of it, so that it "
            "cannot be continued: end with a message of the user, or give the prompt as text"
        )
    if text.startswith(_TAG, place):
        return text[:place]
    return text[:place].rstrip()  # the template strips a message: it removed the space at the end of the tag


def read_chat_format(directory: Path, config: JsonMapping, named_tokens: TextMapping) -> ChatFormat:
    """Read the chat templates of a model folder: the ``.jinja`` files, or else the templates in ``config``, as
    transformers does.

    ``config``: content of ``tokenizer_config.json``; ``named_tokens``: texts for ``ChatFormat.named_tokens``. Raises
    the plain errors of Python for a broken ``config`` or file."""
    files = sorted((directory / TEMPLATE_FOLDER).glob("*.jinja"))
    templates = {file.stem: read_bounded(file).decode() for file in files}
    file = directory / "chat_template.jinja"
    if file.is_file():
        templates["default"] = read_bounded(file).decode()
    configured = config.get("chat_template")
    if "default" not in templates and configured is not None:
        if isinstance(configured, str):
            configured = {"default": configured}
        elif not isinstance(configured, dict):
            configured = {entry["name"]: entry["template"] for entry in configured}
        templates = configured | templates
    return ChatFormat(str(directory), templates, named_tokens)


@cache
def _compiled(source: str) -> tuple[BoundedEnvironment, jinja2.Template]:
    """Compile a template in a bounded sandbox, with the extensions of transformers. Raises jinja2's errors."""
    import jinja2.ext

    from streamrl.pretrained.bounded_templates import BoundedEnvironment

    class Generation(jinja2.ext.Extension):
        """The block ``{% generation %}``, which marks the assistant's text for training on chats. A prompt has its text
        alone."""

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

    jinja = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    jinja.filters["tojson"] = to_json
    jinja.globals |= {"raise_exception": raise_exception, "strftime_now": now_as}
    return jinja, jinja.from_string(source)
