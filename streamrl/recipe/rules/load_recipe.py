"""Reads a recipe (a TOML file, or Python objects) and its overrides, checks it, and makes its paths absolute; writes a
recipe as TOML. All errors are reported at once, each with its place, its value and the allowed values. Every command
that gets a recipe calls ``load_recipe``, and so does each process of a run, for the ``recipe.toml`` in the run's
directory."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import convert
from msgspec.structs import asdict, replace

from streamrl.base.errors import RecipeError, raise_problems
from streamrl.base.types import JsonMapping, JsonObject
from streamrl.recipe.cells.python_recipe import python_table
from streamrl.recipe.check_fields import CheckedTable
from streamrl.recipe.environment import ENVIRONMENT_REWARD, MCP, EnvironmentCode, command_of
from streamrl.recipe.field_types import as_table
from streamrl.recipe.objectives.distillation import DISTILLATION, NO_REWARD
from streamrl.recipe.problems import Origin, problem
from streamrl.recipe.remote_names import HUB, is_bare_name, is_url
from streamrl.recipe.rewards import Reward, reward_traits, with_current_keys
from streamrl.recipe.rules.rules import apply_system, broken_rules, foreign_answer
from streamrl.recipe.sections import EvaluationSet, Recipe, TrainingSet
from streamrl.recipe.toml_text import TOML_REMEDIES, key_lines, parse_toml, toml_document, value_or_text

Code = TypeVar("Code", bound=EnvironmentCode)
_MARKED_PATHS = ("./", "../")
_LINE = re.compile(r"at line (\d+)")
RETIRED = frozenset({"transport.engines", "transport.training"})
"""Settings that every run before 2026-11-28 recorded as "local", which is what all runs are now."""

# Values in place of a required section that is wrong, so that the rules about the other sections are still checked.
_PLACEHOLDERS: dict[str, Any] = {
    "model": {"path": "missing"},
    "prompts": {"train": "missing.jsonl"},
    "rewards": [{"function": "missing:missing"}],
}


def load_recipe(source: str | Path | JsonMapping, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file, or a recipe of Python objects (``cells.python_recipe.python_table``), and apply ``--set``
    overrides such as ``rollout.group_size=4`` or ``rewards.0.weight=2``.

    Relative paths are resolved against the directory of the file (for Python objects: the current directory), except
    ``run.directory`` and ``checkpoint.resume_from``, which are relative to the current directory. Raises
    ``RecipeError`` with all problems."""
    return read_recipe(source, overrides)[0]


def read_recipe(source: str | Path | JsonMapping, overrides: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """Read a recipe as ``load_recipe`` does. Returns also the keys that ``rollout.system`` sets, one line for each."""
    if isinstance(overrides, str):
        raise RecipeError(f"overrides is one text: write load_recipe(..., [{overrides!r}])")
    if isinstance(source, Mapping):
        return _check(python_table(source), Origin(file="recipe", lines={}), overrides, Path.cwd())
    path = Path(source)
    text = _read(path)
    try:
        table = parse_toml(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # tomllib raises both, for a number of 5,000 digits or endless nesting
        line = _LINE.search(str(error))
        place = f"{path}:{line[1] if line else len(text.splitlines())}"
        remedy = next((remedy for words, remedy in TOML_REMEDIES.items() if words in str(error)), "correct it")
        if path.suffix in (".yaml", ".yml"):
            remedy = f"a recipe is TOML; `streamrl init FOLDER --from {path}` translates settings of other systems"
        raise RecipeError(f"{place}: not valid TOML: {error}: {remedy}") from error
    transport = table.get("transport")
    if isinstance(transport, dict):
        for key in RETIRED:
            name = key.removeprefix("transport.")
            if transport.get(name) == "local":
                del transport[name]
    rewards = table.get("rewards")
    if isinstance(rewards, list):
        table["rewards"] = [with_current_keys(reward) for reward in rewards]
    return _check(table, Origin(file=str(path), lines=key_lines(text)), overrides, path.parent)


def check_recipe(recipe: Recipe, source: str = "recipe") -> None:
    """Check the fields of a ``Recipe`` that was made in Python, and the rules between them. ``source``: name of the
    recipe in problems. Raises ``RecipeError``."""
    origin = Origin(file=source, lines={})
    checked = CheckedTable(as_table(asdict(recipe)), origin, foreign_answer)
    rules = broken_rules(_recipe(checked), checked.bad_paths)
    problems = checked.problems + [problem(origin, path, text) for path, text in rules]
    raise_problems(problems)


def overridden_recipe(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Return ``recipe`` with ``overrides``, checked like a recipe that is read. Raises ``RecipeError`` with all
    problems."""
    if not overrides:
        return recipe
    table = as_table(asdict(recipe))
    return _check(table, Origin(file="recipe", lines={}), overrides, Path.cwd())[0]


def dump_recipe(recipe: Recipe) -> str:
    """Return ``recipe`` as TOML, from which ``load_recipe`` reads an equal recipe (where its paths are absolute)."""
    return toml_document(recipe)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file; give the path of a recipe (TOML)") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None


def _override(table: JsonObject, text: str, problems: list[str]) -> str | None:
    """Apply an override ``a.b=value`` to ``table`` and return its path; or add a problem and return None."""
    path, equals, raw = text.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        problems.append(f"--set {text}: write --set section.key=value, such as --set rollout.group_size=4")
        return None
    target: Any = table
    for depth, key in enumerate(keys[:-1]):
        if isinstance(target, list):
            target = _item(target, key)
        elif isinstance(target, dict):
            if _is_index(keys[depth + 1]):
                target.setdefault(key, [])
            target = target.setdefault(key, {})
        if not isinstance(target, dict | list):
            remedy = "it holds no keys"
            if isinstance(table.get(keys[0]), list):
                remedy = f"write {keys[0]}.N, from {keys[0]}.0"
            problems.append(f"--set {text}: {'.'.join(keys[: depth + 1])} is not there to be set: {remedy}")
            return None
    if isinstance(target, list):
        problems.append(f"--set {text}: name a key of the item, such as {'.'.join(keys[:-1])}.0.{keys[-1]}=2")
        return None
    target[keys[-1]] = value_or_text(raw.strip())
    return ".".join(keys)


def _is_index(key: str) -> bool:
    return key.isascii() and key.isdigit()


def _item(items: list[Any], key: str) -> Any:
    """Return item ``key`` of a list of tables; an index just past the end appends a new table. None: no such item."""
    if not _is_index(key) or int(key) > len(items):
        return None
    if int(key) == len(items):
        items.append({})
    return items[int(key)]


def _check(table: JsonObject, origin: Origin, overrides: Sequence[str], directory: Path) -> tuple[Recipe, list[str]]:
    """Apply ``overrides`` and ``rollout.system``, check the fields and rules, and make paths absolute. Returns the
    recipe, and the keys that ``rollout.system`` sets, one line for each. Raises ``RecipeError`` with all problems."""
    problems: list[str] = []
    if "environment" in table:
        table = {"rewards": [{"function": ENVIRONMENT_REWARD}]} | table
    overridden = [_override(table, text, problems) for text in overrides]
    objective = table.get("objective")
    if isinstance(objective, dict) and objective.get("algorithm") == DISTILLATION.name and not table.get("rewards"):
        table = table | {"rewards": [{"function": NO_REWARD}]}
    origin = replace(origin, overridden=frozenset(path for path in overridden if path))
    origin, contradictions, system = apply_system(table, origin)
    checked = CheckedTable(table, origin, foreign_answer)
    problems += contradictions + checked.problems
    recipe = _recipe(checked)
    problems += [problem(origin, path, text) for path, text in broken_rules(recipe, checked.bad_paths)]
    raise_problems(problems)
    return _resolve_paths(recipe, directory.absolute()), system


def _recipe(checked: CheckedTable) -> Recipe:
    """Return a recipe of the valid values, with placeholders and defaults for values that are missing or wrong."""
    values = dict(checked.values)
    for name, placeholder in _PLACEHOLDERS.items():
        if isinstance(placeholder, dict):
            values[name] = placeholder | values.get(name, {})
        else:
            values[name] = [placeholder[0] | item for item in values.get(name, placeholder)]
    return convert(values, Recipe)


def _resolved_code(code: Code, directory: Path) -> Code:
    return replace(
        code,
        episode=resolve_function(code.episode, directory),
        env=resolve_function(code.env, directory),
        tools=tuple(_resolved_tool(tool, directory) for tool in code.tools),
        agent=tuple(_file_of_agent(word, directory) for word in code.agent),
    )


def _resolve_paths(recipe: Recipe, directory: Path) -> Recipe:
    """Return ``recipe`` with absolute paths, relative to ``directory``."""
    # Absolute now, because ``runs/latest`` is another run once this run has begun.
    resume_from = recipe.checkpoint.resume_from
    if not is_url(resume_from):
        resume_from = _absolute_if_set(resume_from, Path.cwd())
    environment = _resolved_code(recipe.environment, directory)
    further = tuple(_resolved_code(other, directory) for other in environment.further)
    observers = tuple(resolve_function(observer, directory) for observer in recipe.run.observers)
    return replace(
        recipe,
        run=replace(recipe.run, observers=observers),
        model=replace(recipe.model, path=resolve_model(recipe.model.path, directory)),
        prompts=replace(recipe.prompts, train=_resolved_sets(recipe.prompts.train, directory)),
        rollout=replace(recipe.rollout, policy=resolve_function(recipe.rollout.policy, directory)),
        rewards=tuple(resolved_reward(reward, directory) for reward in recipe.rewards),
        environment=replace(environment, further=further),
        engines=replace(
            recipe.engines,
            args=_arguments(recipe.engines.args, directory),
            sets=tuple(replace(shape, args=_arguments(shape.args, directory)) for shape in recipe.engines.sets),
        ),
        objective=replace(
            recipe.objective,
            reference=resolve_model(recipe.objective.reference, directory),
            function=resolve_function(recipe.objective.function, directory),
        ),
        judge=replace(recipe.judge, model=resolve_model(recipe.judge.model, directory)),
        teacher=replace(
            recipe.teacher,
            model=resolve_model(recipe.teacher.model, directory) if recipe.teacher.is_own else recipe.teacher.model,
            tokenizer=_absolute_if_set(recipe.teacher.tokenizer, directory),
            further=tuple(
                replace(other, tokenizer=_absolute_if_set(other.tokenizer, directory))
                for other in recipe.teacher.further
            ),
        ),
        reward_limits=replace(recipe.reward_limits, combine=resolve_function(recipe.reward_limits.combine, directory)),
        evaluation=replace(recipe.evaluation, prompts=_resolved_sets(recipe.evaluation.prompts, directory)),
        transport=replace(recipe.transport, keys=_absolute_if_set(recipe.transport.keys, directory)),
        checkpoint=replace(recipe.checkpoint, resume_from=resume_from),
    )


def resolved_reward(reward: Reward, directory: Path) -> Reward:
    """Return ``reward`` with absolute paths of the function's file and in its options."""
    options = dict(reward.options)
    for name, value in reward.options.items():
        if _is_path(reward.function, name, value):
            resolve = resolve_model if name == "path" else _absolute_if_set
            options[name] = resolve(value, directory)
    return replace(reward, function=resolve_function(reward.function, directory), options=options)


def _resolved_tool(tool: str, directory: Path) -> str:
    words = [_file_of_agent(word, directory) for word in command_of(tool)]
    return f"{MCP}{shlex.join(words)}" if words else resolve_function(tool, directory)


def _file_of_agent(word: str, directory: Path) -> str:
    """Return a word of a command, or the absolute path of the file beside the recipe that it names."""
    return str(directory / word) if (directory / word).is_file() else word


def _arguments(arguments: JsonObject, directory: Path) -> JsonObject:
    """Return vLLM's ``arguments`` with an absolute path of the draft model, where ``./`` or ``../`` marks a path."""
    drafts = arguments.get("speculative_config")
    if isinstance(drafts, dict) and str(drafts.get("model", "")).startswith(_MARKED_PATHS):
        return arguments | {"speculative_config": {**drafts, "model": str(_absolute(drafts["model"], directory))}}
    return arguments


def _is_path(function: str, option: str, value: Any) -> bool:
    """Return whether an option of a reward is a path: a trait of a built-in reward, a value with
    ``./`` or ``../`` for a user's function."""
    if not isinstance(value, str):
        return False  # the reward itself refuses a value of a wrong type
    if ":" in function:
        return value.startswith(_MARKED_PATHS)
    traits = reward_traits(function)
    return option in (traits.file, traits.model)


def resolve_model(path: str, directory: Path) -> str:
    """Return the absolute path of a model. Where the path does not exist and may be a name of the Hub, return the name
    with ``hf:``, which ``prepare.hub`` replaces by a folder."""
    if not path or path.startswith(HUB):
        return path
    absolute = _absolute(path, directory)
    return f"{HUB}{path}" if is_bare_name(path) and not absolute.exists() else str(absolute)


def _absolute_if_set(path: str, directory: Path) -> str:
    return str(_absolute(path, directory)) if path else path


def _absolute(path: str, directory: Path) -> Path:
    try:
        resolved = Path(directory, Path(path).expanduser()).resolve()
        str(resolved).encode()
        return resolved
    except UnicodeEncodeError:
        raise RecipeError(f"the path {path[:200]!r} below {directory!a} is not UTF-8: choose another") from None
    except (OSError, ValueError, RuntimeError) as error:  # a NUL character, the home of an unknown user, circular links
        raise RecipeError(f"the path {path[:200]!r} cannot be resolved ({error}): correct it") from error


def resolve_function(spec: str, directory: Path) -> str:
    """Return the name of a function with the absolute path of its file; a name without a colon has no path."""
    return resolve_spec(spec, directory) if ":" in spec else spec


def _resolved_sets(prompts: Any, directory: Path) -> Any:
    """Return ``prompts.train`` or ``evaluation.prompts``, in any of their forms, with absolute paths."""
    if isinstance(prompts, dict):
        return {name: _resolved_sets(named, directory) for name, named in prompts.items()}
    if isinstance(prompts, EvaluationSet | TrainingSet):
        return replace(prompts, prompts=resolve_spec(prompts.prompts, directory))
    return resolve_spec(prompts, directory)


def resolve_spec(spec: str, directory: Path) -> str:
    """Return a spec with an absolute path: ``rows.jsonl`` or ``task.py:reward``; ``module:name`` has none."""
    if not spec:
        return spec
    source, question, options = spec.partition("?")  # a prompt source may have options after its path
    file, colon, name = source.rpartition(":")
    if not colon:
        return f"{_absolute(source, directory)}{question}{options}"
    return f"{_absolute(file, directory)}:{name}{question}{options}" if file.endswith(".py") else spec
