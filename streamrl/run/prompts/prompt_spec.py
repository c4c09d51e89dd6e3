"""Parser of ``prompts.train`` and ``evaluation.prompts``: ``SOURCE`` or ``SOURCE?key=value&key=value``.

=====================================  ==============================================================
``rows.jsonl``                         JSON objects, one a line
``rows.parquet``, ``rows.arrow``       a table
``some/directory``                     a Hugging Face dataset: parquet files, or what ``save_to_disk`` wrote
``reasoning_gym:chain_sum``            a task of reasoning-gym
``module:name``, ``file.py:name``      an (async) iterator of the user's
=====================================  =============================================================="""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.recipe.problems import did_you_mean
from streamrl.recipe.toml_text import value_or_text

_LINE_ENDINGS = (".jsonl", ".ndjson")
_TABLE_ENDINGS = (".parquet", ".arrow")
_TASKS = "reasoning_gym:"


class SourceKind(Enum):
    """Kinds of readers of rows."""

    LINES = "lines"
    TABLE = "table"
    TASK = "task"
    ITERATOR = "iterator"


class RowForm(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a row that make its prompt. ``prompt``: the column that holds the text, where that is not ``prompt``
    (or ``messages``); ``chat``: the text is what the user says in a chat; ``system``: its system message."""

    prompt: str = ""
    chat: bool = False
    system: str = ""


class PromptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``source``: path, ``module:name``, or the name of a task. ``options``: those that are not of ``form``."""

    text: str
    kind: SourceKind
    source: str
    form: RowForm = RowForm()
    options: Mapping[str, Any] = {}

    @property
    def path(self) -> Path:
        """The file or directory."""
        return Path(self.source)

    def take(self, *known: str) -> dict[str, Any]:
        """The options, all of which must be ``known``. Raises ``RecipeError``."""
        every = (*known, *RowForm.__struct_fields__)
        for key in self.options:
            if key not in known:
                hint = did_you_mean(key, every, ".")
                raise RecipeError(f'prompts "{self.text}": unknown option "{key}"{hint} Options: {", ".join(every)}')
        return dict(self.options)


def read_spec(text: str) -> PromptSpec:
    """Take ``text`` apart. Raises ``RecipeError`` when it names nothing that can be read, or has bad options."""
    source, question, query = text.partition("?")
    options = dict(_option(text, part) for part in query.split("&")) if question else {}
    kind = _kind(text, source)
    if kind is SourceKind.ITERATOR and options:
        raise RecipeError(f'prompts "{text}": an iterator takes no options: give it what it needs in its own code')
    form = {key: options.pop(key) for key in RowForm.__struct_fields__ if key in options}
    try:
        row_form = msgspec.convert(form, RowForm)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise RecipeError(f'prompts "{text}": {error}: prompt and system are text, chat is true or false') from error
    name = source.removeprefix(_TASKS) if kind is SourceKind.TASK else source
    return PromptSpec(text=text, kind=kind, source=name, form=row_form, options=options)


def _kind(text: str, source: str) -> SourceKind:
    if source.startswith(_TASKS):
        return SourceKind.TASK
    if source.endswith(_LINE_ENDINGS):
        return SourceKind.LINES
    if source.endswith(_TABLE_ENDINGS):
        return SourceKind.TABLE
    if ":" in source:
        return SourceKind.ITERATOR
    if _is_directory(source):
        return SourceKind.TABLE
    kinds = "neither a .jsonl, .parquet or .arrow file, nor a directory that exists, nor"
    named = '"reasoning_gym:task", nor "module:name" nor "file.py:name"'
    raise RecipeError(f'prompts "{text}" is {kinds} {named}: correct it')


def _is_directory(source: str) -> bool:
    try:
        return Path(source).is_dir()
    except (OSError, ValueError):  # too long, or with a NUL
        return False


def _option(text: str, part: str) -> tuple[str, Any]:
    key, equals, raw = part.partition("=")
    if not key.isidentifier() or not equals:
        raise RecipeError(f'prompts "{text}": "{part}" is no option: write ?key=value&key=value')
    return key, value_or_text(unquote(raw))
