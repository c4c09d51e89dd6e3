"""Parser of ``prompts.train`` and ``evaluation.prompts``: ``SOURCE`` or ``SOURCE?key=value&key=value``. Every process
that opens or checks prompts calls it: the controller, and the commands before and without a run.

=====================================  ==============================================================
``rows.jsonl``, ``rows.json``          JSON objects, one on each line, or an array of them
``rows.parquet``, ``.arrow``, ``.csv``  a table
``some/directory``                     a Hugging Face dataset: files of rows, or the output of ``save_to_disk``
``some/directory?files=a-*|b.jsonl``   files of a directory with these names
``hf:owner/name``                      a data set of the Hub; this parser gets its directory, after it is fetched
``reasoning_gym:chain_sum``            a task of reasoning-gym
``module:name``, ``file.py:name``      an (async) iterator of the user's
=====================================  =============================================================="""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
from msgspec import Struct

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping, JsonObject
from streamrl.recipe.problems import did_you_mean
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value, value_or_text

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_FILE_ENDINGS = (*JSON_ENDINGS, ".parquet", ".arrow", ".csv", ".tsv")
_TASKS = "reasoning_gym:"


class SourceKind(Enum):
    """Kinds of readers of rows."""

    FILES = "files"
    TASK = "task"
    ITERATOR = "iterator"


class RowForm(Struct, frozen=True, kw_only=True):
    """Options that say how a row becomes a prompt.

    ``prompt``: column with the text, if its name is neither ``prompt`` nor ``messages``;
    ``template``: template (``row_template``) that makes the text of several columns;
    ``answer``: column, expression or template that makes the column ``answer``;
    ``chat``: whether the text becomes the user's message in a chat;
    ``system``: system message of that chat;
    ``template_arguments``: variables of the chat template, for rows without these variables."""

    prompt: str = ""
    template: str = ""
    answer: str = ""
    chat: bool = False
    system: str = ""
    template_arguments: JsonMapping = {}


PLAIN = RowForm()
"""The form of rows without options."""


class PromptSpec(Struct, frozen=True, kw_only=True):
    """A parsed source.

    ``text``: source and options as written in the recipe;
    ``source``: path, ``module:name``, or the name of a task;
    ``form``: options of the form of prompts;
    ``options``: all other options, as written."""

    text: str
    kind: SourceKind
    source: str
    form: RowForm = PLAIN
    options: JsonMapping = {}

    @property
    def path(self) -> Path:
        """File or directory of the source."""
        return Path(self.source)

    @property
    def files(self) -> list[Path]:
        """Files of a directory that match the patterns of the option ``files`` (with ``|`` between them); empty without
        the option. Raises ``RecipeError`` where no file matches."""
        patterns = str(self.options.get("files", ""))
        try:
            matches = sorted({file for pattern in patterns.split("|") if pattern for file in self.path.glob(pattern)})
        except (NotImplementedError, ValueError):  # an absolute path, or "**name"
            matches = []
        if patterns and not matches:
            raise RecipeError(f"has no files {patterns}: correct ?files=")
        return matches

    def checked_options(self, *names: str) -> JsonObject:
        """Return the options. Raises ``RecipeError`` for an option that is none of ``names``."""
        all_names = (*names, *RowForm.__struct_fields__)
        for key in self.options:
            if key not in names:
                hint = did_you_mean(key, all_names, ".")
                listed = ", ".join(all_names)
                raise RecipeError(f'prompts "{self.text}": unknown option "{key}"{hint} Options: {listed}')
        return dict(self.options)


def prompt_sources(recipe: Recipe) -> dict[str, str]:
    """Return every source of ``recipe`` by the path of its key: ``prompts.train``, then the held-out sets in their
    order. ``prompts.template``, ``prompts.answer`` and ``prompts.template_arguments`` become options of sources that do
    not have these options; held-out iterators, which make their rows, get the last of the three alone."""
    prompts = recipe.prompts
    of_iterators = {"template_arguments": prompts.template_arguments}
    keys = {"template": prompts.template, "answer": prompts.answer, **of_iterators}
    sources = {"prompts.train": _with_keys(prompts.train, keys)}
    for name, settings in recipe.evaluation.sets.items():
        path = "evaluation.prompts" if isinstance(recipe.evaluation.prompts, str) else f"evaluation.prompts.{name}"
        makes_rows = _is_iterator(settings.prompts.partition("?")[0])
        sources[path] = _with_keys(settings.prompts, of_iterators if makes_rows else keys)
    return sources


def _with_keys(text: str, keys: JsonMapping) -> str:
    """Return ``text`` with ``keys`` of ``[prompts]`` as options."""
    query = text.partition("?")[2]
    options = {part.partition("=")[0] for part in query.split("&")}
    if "prompt" in options:  # it names the prompt already
        options.add("template")
    missing = {key: value for key, value in keys.items() if value and key not in options}
    if not missing:
        return text
    added = "&".join(f"{key}={quote(toml_value(value), safe='')}" for key, value in missing.items())
    separator = "&" if "?" in text else "?"
    return f"{text}{separator}{added}"


def read_spec(text: str) -> PromptSpec:
    """Parse ``text``. Raises ``RecipeError`` when it names no source that can be read, or has bad options."""
    source, question_mark, query = text.partition("?")
    options: JsonObject = {}
    if question_mark:
        options = dict(_option(text, part) for part in query.split("&"))
    kind = _kind(text, source)
    if kind is SourceKind.ITERATOR and options.keys() - {"template_arguments"}:
        keys = "nor prompts.template and prompts.answer"
        raise RecipeError(f'prompts "{source}": an iterator takes no options, {keys}: let its code make the rows')
    form = {key: options.pop(key) for key in RowForm.__struct_fields__ if key in options}
    try:
        row_form = msgspec.convert(form, RowForm)
    except (msgspec.ValidationError, UnicodeError) as error:
        types = "chat is true or false, template_arguments a table, the others are text"
        raise RecipeError(f'prompts "{text}": {error}: {types}') from error
    if row_form.prompt and row_form.template:
        raise RecipeError(f'prompts "{text}": ?prompt= and ?template= both make the prompt: remove one')
    name = source.removeprefix(_TASKS) if kind is SourceKind.TASK else source
    return PromptSpec(text=text, kind=kind, source=name, form=row_form, options=options)


def _kind(text: str, source: str) -> SourceKind:
    if source.startswith(_TASKS):
        return SourceKind.TASK
    if source.endswith(_FILE_ENDINGS):
        return SourceKind.FILES
    if source.startswith("hf:"):
        raise RecipeError(f'prompts "{source}" is a data set of the Hub, which was not fetched: name its folder')
    if _is_iterator(source):
        return SourceKind.ITERATOR
    if _is_directory(source):
        return SourceKind.FILES
    raise RecipeError(
        f'prompts "{source}" is neither a .jsonl, .json, .csv, .parquet or .arrow file, nor a directory that exists, '
        'nor "reasoning_gym:task", nor "module:name" nor "file.py:name", nor of the Hub ("hf:owner/name"): correct it'
    )


def _is_iterator(source: str) -> bool:
    if source.startswith((_TASKS, "hf:")) or source.endswith(_FILE_ENDINGS):
        return False
    return ":" in source


def _is_directory(source: str) -> bool:
    try:
        return Path(source).is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a NUL
        return False


def _option(text: str, part: str) -> tuple[str, Any]:
    key, equals, raw = part.partition("=")
    if not key.isidentifier() or not equals:
        raise RecipeError(f'prompts "{text}": "{part}" is no option: write ?key=value&key=value')
    return key, value_or_text(unquote(raw))
