"""Stores of rows, and the conversion of a row to a ``Prompt``, with the reason where a row is no prompt.

``open_prompts`` reads stored rows with it and ``prompt_iterator`` rows of a user's iterator, in the controller process
and in commands that check or sample prompts."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping
from typing import Any

from msgspec import json, msgpack

from streamrl.base.errors import UNDECODABLE, UNENCODABLE, StreamRLError
from streamrl.base.types import JsonMapping, JsonObject, Prompt, TokenArray, token_array
from streamrl.comm.decoded_size import SPARE_BYTES, takes_more
from streamrl.comm.wire import WireLimits
from streamrl.pretrained.chat_template import ARGUMENTS_COLUMN, ChatError
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.run.prompts.prompt_spec import PLAIN, RowForm
from streamrl.run.prompts.row_template import TemplateFailed, value_of

_NO_TEXT = re.compile(r"image|video|audio")
"""In the type of a part of a message that is no text."""
_TOKEN_COLUMN = "prompt_token_ids"
_ID_COLUMN = "prompt_id"
# A prompt travels in one message with its completions, which have the other half of the message's size.
_LARGEST_ROW = WireLimits().body_bytes // 2
_SPARE_BYTES = SPARE_BYTES * 3 // 4


class BadRow(StreamRLError):
    """A row that is no prompt. The message has the reason and the remedy, without the place of the row."""


class OtherFormat(BadRow):
    """A row of a file that has another format than its name says."""


class RowStore:
    """Rows that can be read by index, in any order and from any thread. ``columns``: names of the columns of all rows
    (None: they are not known before the rows are read)."""

    size: int
    columns: frozenset[str] | None = None

    def number(self, index: int) -> int:
        """Return the number of a row as a user counts it, which is part of the default id."""
        return index + 1

    def place(self, index: int) -> str:
        """Return the place of a row, for messages."""
        return f"row {self.number(index)}"

    def row(self, index: int) -> JsonObject:
        """Return the columns of a row. Raises ``BadRow``."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files."""


class SelectedRows(RowStore):
    """The rows of ``store`` for which ``where``, the name of a column or a jinja expression, is true. All rows are read
    once. Raises ``BadRow``, which begins with the place of the row."""

    def __init__(self, store: RowStore, where: str) -> None:
        self._store = store
        self._where = where
        self._indices = array("q", filter(self._is_selected, range(store.size)))
        self.size = len(self._indices)
        self.columns = store.columns

    def number(self, index: int) -> int:
        return self._store.number(self._indices[index])

    def place(self, index: int) -> str:
        return self._store.place(self._indices[index])

    def row(self, index: int) -> JsonObject:
        return self._store.row(self._indices[index])

    def close(self) -> None:
        self._store.close()

    def _is_selected(self, index: int) -> bool:
        try:
            return bool(value_of(self._where, self._store.row(index)))
        except (BadRow, TemplateFailed) as error:
            place = self._store.place(index)
            raise BadRow(f"{place}: ?where={self._where} has no value ({error}): correct it") from error


def to_form(row: JsonObject, form: RowForm) -> JsonObject:
    """Return ``row`` with its prompt and the variables of the chat template in the columns that ``read_prompt`` reads.
    Raises ``BadRow``."""
    if form == PLAIN or not isinstance(row, Mapping):  # ``read_prompt`` refuses rows of other types
        return row
    if form.template_arguments:
        own_arguments = _json_column(row, ARGUMENTS_COLUMN, dict) or {}
        row = {**row, ARGUMENTS_COLUMN: {**form.template_arguments, **own_arguments}}
    if form.tools and not row.get("tools"):
        row = {**row, "tools": form.tools}
    answer = {}
    if form.answer:
        answer["answer"] = _column_value(row, "answer", form.answer)
    if form.template:  # replaces a prompt in any other column
        text = _column_value(row, "template", form.template)
        if not isinstance(text, str):
            raise BadRow(f"has a {type(text).__name__} as what prompts.template names: it must be text")
        row = {name: row[name] for name in row if name not in ("messages", _TOKEN_COLUMN)} | {"prompt": text}
    row = row | answer
    if form.prompt:  # replaces messages
        if form.prompt not in row:
            raise BadRow(f'has no column "{form.prompt}", which ?prompt= names: correct it')
        row["prompt"] = row[form.prompt]
        row.pop("messages", None)
    if form.chat or form.system:
        _make_chat(row, form.system)
    return row


def _make_chat(row: JsonObject, system: str) -> None:
    """Make the prompt of ``row`` a chat, with the message ``system`` unless that is empty. Raises ``BadRow``."""
    name = "prompt" if row.get("messages") is None else "messages"
    chat = as_chat(row.get(name))
    if chat is None:
        if "prompt" not in row:
            raise BadRow(f'has no column "prompt" (it has {", ".join(row)}): name the one with ?prompt=COLUMN')
        text = row.pop("prompt")
        if not isinstance(text, str):
            raise BadRow(f'has a {type(text).__name__} as "prompt": it must be text to become a chat')
        # A verifier may need the text, too, and a row has either a prompt or messages.
        row.setdefault("question", text)
        name = "messages"
        chat = [{"role": "user", "content": text}]
    if system:
        if any(isinstance(message, dict) and message.get("role") == "system" for message in chat):
            raise BadRow("has a system message, and ?system= gives another one: remove ?system=, or that message")
        chat = [{"role": "system", "content": system}, *chat]
    row[name] = chat


def _column_value(row: JsonMapping, key: str, source: str) -> Any:
    try:
        return value_of(source, row)
    except TemplateFailed as error:
        reason = f"{error}; the row has {', '.join(row)}"
        raise BadRow(f"cannot be put into prompts.{key} ({reason}): correct one of them") from error


def as_chat(value: object) -> list[Any] | None:
    """Return ``value`` as messages, if it is a list or the JSON text of a list of messages; else None. Raises
    ``BadRow`` for Python's text of messages, which is a frequent mistake."""
    if isinstance(value, str) and value.startswith(("[{'role'", "[{'content'")):
        raise BadRow("has Python's text of messages: write it as JSON")
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.decode(value, type=list[JsonObject])
        except UNDECODABLE:
            return None
        return value if value and all("role" in message for message in value) else None
    return value if isinstance(value, list) else None


def without_nulls(value: Any) -> Any:
    """Return ``value`` without the nulls in its objects, except those of ``content``. A table has null for each field
    that only other objects of the column have."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def encode_row(row: object) -> bytes:
    """Return ``row`` as MessagePack, with lists in place of NumPy's arrays. Raises ``UNENCODABLE``."""
    return msgpack.encode(row, enc_hook=_plain_list)


def _plain_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"values of type {type(value).__name__} are not supported")


def read_prompt(row: object, number: int, tokenizer: Tokenizer | None, max_tokens: int | None = None) -> Prompt:
    """Return the prompt of a row. Its ``columns`` have everything in the row except ids, so also the prompt's text, or
    its chat as ``messages``. Values must be of JSON's types, because they travel to other processes. Raises ``BadRow``.

    ``number``: number of the row from 1, which is part of the default id;
    ``tokenizer``: tokenizer of the model (None: an environment writes the prompt, and a row need not have one);
    ``max_tokens``: largest number of tokens of the prompt (None: no limit)."""
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise BadRow(f"is a {type(row).__name__}: a row is a mapping from column name to value")
    try:
        content = encode_row(dict(row))
    except UNENCODABLE as error:
        raise BadRow(
            f"has a value that cannot be sent ({error}): use plain text, numbers, lists and objects"
        ) from error
    columns = msgpack.decode(content, type=JsonObject)
    if tokenizer is None:
        token_ids = token_array()
        if _TOKEN_COLUMN in columns:
            raise BadRow(f'has "{_TOKEN_COLUMN}", and an environment writes the prompt: give "prompt" or "messages"')
        chat = as_chat(columns.get("prompt"))
        if chat is not None and "messages" not in columns:
            columns["messages"] = chat
            del columns["prompt"]
        if arguments := _json_column(columns, ARGUMENTS_COLUMN, dict):
            columns[ARGUMENTS_COLUMN] = arguments
    else:
        token_ids = _checked_token_ids(columns, tokenizer, max_tokens)
    if columns.pop(_TOKEN_COLUMN, None) is not None:
        _check_size(msgpack.encode(columns))
    else:
        _check_size(content)
    prompt_id = columns.pop(_ID_COLUMN, None)
    if prompt_id is None:
        prompt_id = hashlib.blake2b(content + number.to_bytes(8, "big"), digest_size=8).hexdigest()
    elif not isinstance(prompt_id, (str, int)) or prompt_id == "":
        raise BadRow(f"has the prompt_id {prompt_id!r}: use text or an integer")
    return Prompt(prompt_id=str(prompt_id), token_ids=token_ids, columns=columns)


def _checked_token_ids(columns: JsonObject, tokenizer: Tokenizer, max_tokens: int | None) -> TokenArray:
    token_ids = _token_ids(columns, tokenizer)
    if not token_ids:
        raise BadRow("has an empty prompt: remove the row")
    if beyond := tokenizer.beyond_model(token_ids):
        raise BadRow(f"has a prompt with {beyond}")
    if max_tokens is not None and len(token_ids) > max_tokens:
        raise BadRow(
            f"has a prompt of {len(token_ids)} tokens, at most {max_tokens} fit: shorten it, "
            "lower sampling.max_tokens or raise engines.max_model_len"
        )
    return token_ids


def _check_size(content: bytes) -> None:
    """Raise ``BadRow`` for columns that no stream transports: they would end a run in the middle."""
    size = len(content)
    growth = WireLimits().body_growth
    if size > _LARGEST_ROW:
        raise BadRow(
            f"has columns of {size} bytes, at most {_LARGEST_ROW} travel with a prompt: keep large data in files that "
            "the reward opens"
        )
    if takes_more(content, growth * size + _SPARE_BYTES):
        raise BadRow(
            f"has columns of {size} bytes that take more than {growth} times that in memory: they are made of very "
            "many small values; keep them in fewer and longer texts, such as one text of JSON"
        )


def _token_ids(columns: JsonObject, tokenizer: Tokenizer) -> TokenArray:
    """Return the token ids of the prompt. A chat in the column ``prompt`` is moved to ``messages``."""
    token_ids = columns.get(_TOKEN_COLUMN)
    text = columns.get("prompt")
    messages = columns.get("messages")
    if token_ids is not None:
        size = tokenizer.vocabulary_size
        if not isinstance(token_ids, list) or not all(type(token) is int and 0 <= token < size for token in token_ids):
            raise BadRow(f'has a wrong "prompt_token_ids": a list of integers from 0 to {size - 1}')
        return token_array(token_ids)
    if text == "" and messages is None:
        raise BadRow("has an empty prompt: remove the row")
    if text is None and messages is None:
        if "prompt" in columns or "messages" in columns:
            raise BadRow("has null as its prompt: remove the row, or name another column with ?prompt=COLUMN")
        names = f"(it has {', '.join(columns) or 'none'})"
        raise BadRow(f'has no column "prompt", "messages" or "prompt_token_ids" {names}: add one, or ?prompt=COLUMN')
    if text is not None and messages is not None:
        raise BadRow('has both "prompt" and "messages": name the one that the model shall see with ?prompt=')
    name = "messages" if text is None else "prompt"
    chat = as_chat(columns[name])
    if chat is not None or messages is not None:
        columns["messages"] = chat  # the column in which rewards look for a chat
        columns.pop("prompt", None)
        return _chat_token_ids(chat, name, columns, tokenizer)
    if not isinstance(text, str):
        raise BadRow(f'has a {type(text).__name__} as "prompt": it must be text, or a list of messages')
    try:
        return tokenizer.encode(text)
    except ChatError as error:
        raise BadRow(f'has a "prompt" that cannot be tokenised: {error}') from error


def _chat_token_ids(messages: object, name: str, columns: JsonMapping, tokenizer: Tokenizer) -> TokenArray:
    """Return the token ids of the chat in the column ``name``, with the optional columns ``tools`` and
    ``chat_template_kwargs`` (variables of the template)."""
    if not isinstance(messages, list) or not messages:
        raise BadRow(f'has wrong "{name}": a list of objects with "role" and "content", at least one')
    for place, message in enumerate(messages, start=1):
        problem = _message_problem(message)
        if problem:
            raise BadRow(f"has a wrong message {place}: {problem}")
    # Templates treat a null like a value. A message whose content is null has tool calls.
    messages = [
        {key: value for key, value in message.items() if value is not None or key == "content"} for message in messages
    ]
    tools = _json_column(columns, "tools", list)
    arguments = _json_column(columns, ARGUMENTS_COLUMN, dict)
    try:
        return tokenizer.encode_chat(messages, tools, arguments)
    except ChatError as error:
        raise BadRow(f'has "{name}" without a prompt: {error}') from error


def _json_column(columns: JsonMapping, name: str, kind: type[Any]) -> Any:
    """Return the list or object in an optional column, which may be there as JSON text: a table has no type for objects
    of several shapes. None for an absent, null or empty one. Raises ``BadRow``."""
    value = columns.get(name)
    try:
        if isinstance(value, str):
            value = json.decode(value, type=kind) if value.strip() else None
    except UNDECODABLE:
        pass
    if not isinstance(value, kind | None):
        form = "a list of JSON schemas" if kind is list else "an object of variables"
        raise BadRow(f'has wrong "{name}": {form}, or the JSON text of one')
    return value


def _message_problem(message: object) -> str:
    """Return the reason for which ``message`` is no message; empty: it is a message."""
    if not isinstance(message, dict):
        return f"it is a {type(message).__name__}, not an object"
    if not isinstance(message.get("role"), str):
        return 'its "role" must be text, such as "system", "user" or "assistant"'
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict)]
        kinds = [str(part.get("type")) for part in parts if _NO_TEXT.search(str(part.get("type")))]
        if kinds:
            return (
                f'its "content" has a part of type {kinds[0]!r}: models are trained on text alone; leave such rows out'
            )
    if isinstance(content, str | list) or (content is None and message.get("tool_calls")):
        return ""
    return 'its "content" must be text'
