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

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from msgspec import Struct, ValidationError, convert
from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping, JsonObject, Prompt, TextsByName
from streamrl.recipe.environment import RUN_ENVIRONMENT
from streamrl.recipe.problems import did_you_mean
from streamrl.recipe.sections import Recipe, TrainingSet
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
    ``template_arguments``: variables of the chat template, for rows without these variables;
    ``tools``: JSON schemas of tools as text, for rows without tools."""

    prompt: str = ""
    template: str = ""
    answer: str = ""
    chat: bool = False
    system: str = ""
    template_arguments: JsonMapping = {}
    tools: str = ""


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


def prompt_sources(recipe: Recipe) -> TextsByName:
    """Return every source of ``recipe`` by the path of its key: ``prompts.train`` (``prompts.train.NAME`` for each of
    several sets), then the held-out sets in their order."""
    sources = {training_path(recipe, name): source for name, source in training_sources(recipe).items()}
    one_set = isinstance(recipe.evaluation.prompts, str)
    for name, source in held_out_sources(recipe).items():
        sources["evaluation.prompts" if one_set else f"evaluation.prompts.{name}"] = source
    return sources


def training_path(recipe: Recipe, name: str) -> str:
    """Return the path of the key that names the training set ``name``."""
    return "prompts.train" if isinstance(recipe.prompts.train, str) else f"prompts.train.{name}"


def settings_of_sources(recipe: Recipe) -> dict[str, TrainingSet]:
    """Return the settings of the prompts of each source, by the paths of ``prompt_sources``."""
    settings = [*recipe.prompts.sets.values(), *map(recipe.settings_of_held_out, recipe.evaluation.sets)]
    return dict(zip(prompt_sources(recipe), settings, strict=True))


def environment_writes(recipe: Recipe, settings: TrainingSet) -> bool:
    """Return whether the environment writes the prompts of a set, so that they have no tokens before."""
    return recipe.environment.configured and settings.environment_name is not None


def columns_of_set(
    recipe: Recipe, settings: TrainingSet, columns: Mapping[str, Sequence[str]]
) -> dict[str, Sequence[str]]:
    """Return those of ``columns``, which are by the name of the reward or the path of the environment that needs them,
    that rows of a set need."""
    not_serving = {reward.label for reward in recipe.rewards if not settings.serves(reward)}
    not_serving.update(
        recipe.environment.path_of(name) for name in recipe.environment.by_name if name != settings.environment_name
    )
    return {name: needed for name, needed in columns.items() if name not in not_serving}


def with_settings(prompt: Prompt, settings: TrainingSet) -> Prompt:
    """Return ``prompt`` with the rewards, the limit and the environment of its set."""
    environment = settings.environment_name or RUN_ENVIRONMENT
    return replace(prompt, rewards=settings.rewards, max_tokens=settings.max_tokens, environment=environment)


def training_sources(recipe: Recipe) -> TextsByName:
    """Return the source of each training set by name. ``template``, ``answer`` and ``template_arguments`` of the set or
    of ``[prompts]`` become options of sources that do not have these options; where there are several sets, iterators,
    which make their rows, get the last of the three alone."""
    several = isinstance(recipe.prompts.train, dict)
    return {
        name: _with_keys_of(recipe, settings, settings.prompts, skip_iterators=several)
        for name, settings in recipe.prompts.sets.items()
    }


def imitated_sources(recipe: Recipe) -> TextsByName:
    """Return the source of each set to imitate by name, with the options that ``training_sources`` adds."""
    return {
        name: _with_keys_of(recipe, settings, settings.prompts, skip_iterators=True)
        for name, settings in recipe.prompts.imitated.items()
    }


def held_out_sources(recipe: Recipe) -> TextsByName:
    """Return the source of each held-out set by name, with the options that ``training_sources`` adds."""
    return {
        name: _with_keys_of(recipe, recipe.settings_of_held_out(name), held_out.prompts, skip_iterators=True)
        for name, held_out in recipe.evaluation.sets.items()
    }


def _with_keys_of(recipe: Recipe, settings: TrainingSet, text: str, *, skip_iterators: bool) -> str:
    prompts = recipe.prompts
    keys: JsonObject = {"template_arguments": {**prompts.template_arguments, **settings.template_arguments}}
    if not (skip_iterators and _is_iterator(text.partition("?")[0])):
        template = settings.template or prompts.template
        keys = {"template": template, "answer": settings.answer or prompts.answer, **keys}
    return with_options(text, keys)


def _options(text: str) -> set[str]:
    """Return the names of the options of a source."""
    return {part.partition("=")[0] for part in text.partition("?")[2].split("&")}


def unused_keys(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each key of a training set in whose place another one makes the rows."""
    for name, settings in recipe.prompts.all_sets.items():
        for key in ("template", "answer", "template_arguments"):
            rivals = _options(settings.prompts) & ({"template", "prompt"} if key == "template" else {key})
            problem = f"its source has ?{'= and ?'.join(sorted(rivals))}=, too: remove one of them"
            if key != "template_arguments" and _is_iterator(settings.prompts.partition("?")[0]):
                problem = f"{settings.prompts} is an iterator, whose code makes the rows: remove it"
            elif not rivals:
                continue
            if getattr(settings, key):
                yield f"prompts.train.{name}.{key}: has no effect, because {problem}"


def with_options(text: str, keys: JsonMapping) -> str:
    """Return a source with those of ``keys`` as options that have a value, and are no options of it."""
    options = _options(text)
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
    options = {}
    if question_mark:
        options = dict(_option(text, part) for part in query.split("&"))
    kind = _kind(text, source)
    if kind is SourceKind.ITERATOR and options.keys() - {"template_arguments", "chat", "system", "tools"}:
        keys = "nor prompts.template and prompts.answer"
        raise RecipeError(f'prompts "{source}": an iterator takes no options, {keys}: let its code make the rows')
    form = {key: options.pop(key) for key in RowForm.__struct_fields__ if key in options}
    try:
        row_form = convert(form, RowForm)
    except (ValidationError, UnicodeError) as error:
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
