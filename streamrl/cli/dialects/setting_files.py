"""Reads files of settings of other systems: YAML of TRL, verl (composed by ``--cfg job``) and AReaL, TOML of prime-rl.
``translation`` makes a recipe of them. Runs in the process of ``streamrl init --from``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonMapping
from streamrl.recipe.check_fields import leaves
from streamrl.recipe.toml_text import is_nested_deeper, parse_toml, value_or_text

VERL_CONFIG = "python3 -m verl.trainer.main_ppo ... --cfg job > verl.yaml"
FORMS = f"a Python script of TRL, a .yaml of TRL or AReaL, verl's own ({VERL_CONFIG}), or an rl.toml of prime-rl"
SECTIONS = {
    "AReaL": {"gconfig", "train_dataset", "total_train_epochs"},
    "verl": {"actor_rollout_ref", "algorithm", "data", "critic"},
}
"""First parts of keys, one of which tells the system of a YAML file."""
_ACCELERATE = {"compute_environment", "distributed_type"}
"""Keys that every file of ``accelerate config`` has."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.?[\w.]+)(?:,\s*([^}]*))?\}")
_LINE = re.compile(r".*\bline (\d+)", re.DOTALL)
"""The last line that an error names: PyYAML names the start of the value before the place of the error."""
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_REFERENCES_DEEP = 8


class Foreign(Struct, frozen=True):
    """Settings of another system.

    ``dialect``: name of the system;
    ``name``: name of the file, or of the script, for the recipe's first line;
    ``settings``: values by their dotted keys;
    ``directory``: directory below which paths of the settings are looked for;
    ``method``: method whose defaults differ from the others' of the system, such as RLOO."""

    dialect: str
    name: str
    settings: JsonMapping
    directory: Path = Path()
    method: str = ""


def read_settings(path: Path) -> Foreign:
    """Read a file of settings. Raises ``RecipeError`` for a file that cannot be read, or is of no known system."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise RecipeError(f"{path}: {reason}: give {FORMS}") from None
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise RecipeError(f"{path}: command lines and shell scripts are not read: give {FORMS}")
    table = None
    try:
        table = parse_toml(text) if path.suffix == ".toml" else _yaml(path, text)
    except (ValueError, RecursionError) as error:
        line = _LINE.search(str(error))
        place = f"{path}:{line[1]}" if line else f"{path}"
        raise RecipeError(f"{place}: not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    if not isinstance(table, Mapping) or not table:
        raise RecipeError(f"{path}: has no settings: give {FORMS}")
    pairs = [pair for key, value in leaves("", table) for pair in leaves(key, _scalar(value))]
    flat = {key: value for key, value in pairs if not key.startswith(("defaults", "hydra."))}
    settings = {key: _referred(key, value, flat) for key, value in flat.items() if not key.endswith("._target_")}
    return Foreign(_dialect_of(settings, path), path.name, settings, path.parent)


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise RecipeError(f"{path}: reading YAML needs PyYAML: pip install pyyaml") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Refuses a key that is there twice: PyYAML would take the last, and OmegaConf refuses it."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            for name, count in Counter(str(key.value) for key, _ in node.value).most_common(1):
                if count > 1:
                    line = node.start_mark.line + 1
                    raise ValueError(f'line {line}: the key "{name}" is there {count} times from here on: leave one')
            return super().construct_mapping(node, deep)

    try:
        table = Loader(text).get_single_data()  # as yaml.safe_load does, with the loader above
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    if is_nested_deeper(table):
        raise ValueError("values inside of values, more than 64 deep")
    return table


def _referred(key: str, value: Any, flat: JsonMapping, depth: int = 0) -> Any:
    """Return ``value``, or the setting to which it refers as ``${a.b}`` or ``${.b}``, a key beside ``key``."""
    match = _REFERENCE.fullmatch(value) if isinstance(value, str) and depth < _REFERENCES_DEEP else None
    if match is None:
        return value
    name = match[1]
    if name.startswith("."):
        name = f"{key.rpartition('.')[0]}{name}"
    default = None if match[2] in (None, "null") else value_or_text(match[2])
    return _referred(name, flat.get(name, default), flat, depth + 1)


def _scalar(value: Any) -> Any:
    """Return the number that YAML has as text, such as 1e-6; an empty table as true."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return True if value == {} else value


def _dialect_of(settings: JsonMapping, path: Path) -> str:
    firsts = {key.partition(".")[0] for key in settings}
    if path.suffix == ".toml":
        if firsts & {"prompts", "rewards", "sampling"}:
            raise RecipeError(f"{path} is a recipe of streamrl already: streamrl train {path}")
        return "prime-rl"
    if firsts >= _ACCELERATE and not firsts & {"model_name_or_path", "dataset_name"}:
        raise RecipeError(
            f"{path} is a configuration of accelerate, which says where a script runs and not what it trains (its "
            f"num_processes is training.ranks): give {FORMS}"
        )
    return next((dialect for dialect, sections in SECTIONS.items() if firsts & sections), "TRL")
