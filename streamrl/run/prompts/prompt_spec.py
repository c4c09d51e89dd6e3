"""Parser of ``prompts.train`` and ``evaluation.prompts``: ``SOURCE`` or ``SOURCE?key=value&key=value``.

=====================================  ==============================================================
``rows.jsonl``                         JSON objects, one a line
``rows.parquet``, ``rows.arrow``       a table
``some/directory``                     a Hugging Face dataset: parquet files, or what ``save_to_disk`` wrote
``some/directory?files=a-*|b.jsonl``   its files of these names
``hf:owner/name``                      a data set of the Hub, which is a directory once it was fetched
``reasoning_gym:chain_sum``            a task of reasoning-gym
``module:name``, ``file.py:name``      an (async) iterator of the user's
=====================================  =============================================================="""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.recipe.problems import did_you_mean
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value, value_or_text

LINE_ENDINGS = (".jsonl", ".ndjson")
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
    (or ``messages``); ``template``: makes it of several columns; ``answer``: a column, an expression or a template
    (``row_template``) that makes the column ``answer``; ``chat``: the text is what the user says in a chat; ``system``:
    its system message."""

    prompt: str = ""
    template: str = ""
    answer: str = ""
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

    @property
    def files(self) -> list[Path]:
        """The files of a directory that the option names, by patterns with ``|`` between them; none without it. Raises
        ``RecipeError`` where there are none of these names."""
        patterns = str(self.options.get("files", ""))
        try:
            found = sorted({file for pattern in patterns.split("|") if pattern for file in self.path.glob(pattern)})
        except (NotImplementedError, ValueError):  # of an absolute path, and of "**name"
            found = []
        if patterns and not found:
            raise RecipeError(f"prompts {self.source} has no files {patterns}: correct ?files=")
        return found

    def take(self, *known: str) -> dict[str, Any]:
        """The options, all of which must be ``known``. Raises ``RecipeError``."""
        every = (*known, *RowForm.__struct_fields__)
        for key in self.options:
            if key not in known:
                hint = did_you_mean(key, every, ".")
                raise RecipeError(f'prompts "{self.text}": unknown option "{key}"{hint} Options: {", ".join(every)}')
        return dict(self.options)


def prompt_sources(recipe: Recipe) -> dict[str, str]:
    """Return every source of ``recipe`` by the path of its key: ``prompts.train``, then the held-out sets in their
    order. ``prompts.template`` and ``prompts.answer`` are options of those that have none of their own."""
    found = {"prompts.train": _with_keys(recipe.prompts.train, recipe)}
    for name, one in recipe.evaluation.sets.items():
        path = "evaluation.prompts" if isinstance(recipe.evaluation.prompts, str) else f"evaluation.prompts.{name}"
        source = one.prompts.partition("?")[0]
        found[path] = one.prompts if _is_iterator(source) else _with_keys(one.prompts, recipe)
    return found


def _with_keys(text: str, recipe: Recipe) -> str:
    options = text.partition("?")[2]
    own = {part.partition("=")[0] for part in options.split("&")}
    keys = {"template": "" if "prompt" in own else recipe.prompts.template, "answer": recipe.prompts.answer}
    added = [f"{key}={quote(toml_value(value), safe='')}" for key, value in keys.items() if value and key not in own]
    return "".join([text, *(("&" if options or at else "?") + one for at, one in enumerate(added))])


def read_spec(text: str) -> PromptSpec:
    """Take ``text`` apart. Raises ``RecipeError`` when it names nothing that can be read, or has bad options."""
    source, question, query = text.partition("?")
    options = dict(_option(text, part) for part in query.split("&")) if question else {}
    kind = _kind(text, source)
    if kind is SourceKind.ITERATOR and options:
        keys = "nor prompts.template and prompts.answer"
        raise RecipeError(f'prompts "{source}": an iterator takes no options, {keys}: let its code make the rows')
    form = {key: options.pop(key) for key in RowForm.__struct_fields__ if key in options}
    try:
        row_form = msgspec.convert(form, RowForm)
    except (msgspec.ValidationError, UnicodeError) as error:
        known = "chat is true or false, the others are text"
        raise RecipeError(f'prompts "{text}": {error}: {known}') from error
    if row_form.prompt and row_form.template:
        raise RecipeError(f'prompts "{text}": ?prompt= and ?template= both make the prompt: remove one')
    name = source.removeprefix(_TASKS) if kind is SourceKind.TASK else source
    return PromptSpec(text=text, kind=kind, source=name, form=row_form, options=options)


def _kind(text: str, source: str) -> SourceKind:
    if source.startswith(_TASKS):
        return SourceKind.TASK
    if source.endswith(LINE_ENDINGS):
        return SourceKind.LINES
    if source.endswith(_TABLE_ENDINGS):
        return SourceKind.TABLE
    if source.startswith("hf:"):
        raise RecipeError(f'prompts "{source}" is a data set of the Hub, which was not fetched: name its folder')
    if _is_iterator(source):
        return SourceKind.ITERATOR
    if _is_directory(source):
        return SourceKind.TABLE
    kinds = "neither a .jsonl, .parquet or .arrow file, nor a directory that exists, nor"
    named = '"reasoning_gym:task", nor "module:name" nor "file.py:name", nor of the Hub ("hf:owner/name")'
    raise RecipeError(f'prompts "{source}" is {kinds} {named}: correct it')


def _is_iterator(source: str) -> bool:
    no_module = source.startswith((_TASKS, "hf:")) or source.endswith(LINE_ENDINGS + _TABLE_ENDINGS)
    return ":" in source and not no_module


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
