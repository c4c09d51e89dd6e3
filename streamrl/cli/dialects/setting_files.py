"""Settings out of the files of other systems, and out of their command lines. Nothing is executed."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.cli.dialects.trl_script import read_trl_script
from streamrl.recipe.check_fields import leaves
from streamrl.recipe.toml_text import is_nested_deeper, parse_toml, value_or_text

FORMS = "a script with GRPOConfig(...), a .yaml of TRL, verl or AReaL, an rl.toml, or a command line of theirs (.sh)"
MARKS = {
    "AReaL": ("gconfig", "train_dataset", "total_train_epochs"),
    "verl": ("actor_rollout_ref", "algorithm", "data", "critic"),
}
"""First parts of the keys of a YAML file that tell a system."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
_PAIR = re.compile(r"\+*([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_COMPUTED = re.compile(r"\$\([^)]*\)+")
_COMMANDS = re.compile(r"(.*\.)?main_ppo|trl|rl|accelerate|[^=]*\.py")


class Foreign(msgspec.Struct, frozen=True):
    """Settings of a system by their dotted keys. ``unread``: expressions that only running it would tell, with their
    lines. ``files``: texts of files to write beside the recipe. ``directory``: of the settings."""

    dialect: str
    name: str
    settings: Mapping[str, Any]
    unread: Mapping[str, tuple[str, int]] = {}
    files: Mapping[str, str] = {}
    directory: Path = Path()


def read_foreign(source: str | Path) -> Foreign:
    """Read a file of another system, or its command line. Raises ``RecipeError`` for what cannot be read, or belongs to
    no system that is known."""
    path = Path(source)
    if " " in str(source).strip() and not os.path.exists(source):  # of a long line Path.exists raises
        return _read_command(str(source), Path(), "the command line")
    text = _read(path)
    if path.suffix == ".py":
        settings, unread, files = read_trl_script(text, path)
        return Foreign("TRL", path.name, dict(leaves("", settings)), unread, files, path.parent)
    if path.suffix in (".toml", ".yaml", ".yml"):
        settings = _read_table(path, text)
        return Foreign(_dialect_of(settings, path), path.name, settings, directory=path.parent)
    return _read_command(text, path.parent, path.name)


def _read(path: Path, named: str = "") -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise RecipeError(f"{path}: {why}{named}: give {FORMS}") from None


def _read_table(path: Path, text: str) -> dict[str, Any]:
    """Dotted keys of a TOML or YAML file, with what they refer to."""
    table: Any = None
    try:
        table = parse_toml(text) if path.suffix == ".toml" else _yaml(path, text)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not valid {path.suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    if not isinstance(table, Mapping) or not table:
        raise RecipeError(f"{path}: has no settings: give {FORMS}")
    pairs = [pair for key, value in leaves("", table) for pair in leaves(key, _scalar(value))]
    flat = {key: value for key, value in pairs if not key.startswith(("defaults", "hydra."))}
    return {key: _referred(one, flat) for key, one in flat.items()}


def _yaml(path: Path, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise RecipeError(f"{path}: reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    if is_nested_deeper(table):
        raise ValueError("values inside of values, more than 64 deep")
    return table


def _referred(value: Any, flat: Mapping[str, Any], depth: int = 0) -> Any:
    """``value``, or the setting that it is as ``${a.b}``."""
    found = _REFERENCE.fullmatch(value) if isinstance(value, str) and depth < 8 else None
    if found is None:
        return value
    return _referred(flat.get(found[1], _scalar(found[2]) if found[2] else None), flat, depth + 1)


def _scalar(value: Any) -> Any:
    """A number, a list, a truth value or JSON's object that YAML or a shell has as text; ``null`` as None, an empty
    table as true."""
    if value == {}:
        return True
    words = {"true": True, "false": False, "null": None}
    if not isinstance(value, str) or value.lower() in words:
        return words[value.lower()] if isinstance(value, str) else value
    if _NUMBER.fullmatch(value):
        return float(value) if set(value) & set(".eE") else int(value)
    if value[:1] == "{":
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(value)
    return value_or_text(value.replace("'", '"')) if value[:1] == "[" else value


def _dialect_of(settings: Mapping[str, Any], path: Path) -> str:
    firsts = {key.partition(".")[0] for key in settings}
    if path.suffix == ".toml":
        if firsts & {"prompts", "rewards", "sampling"}:
            raise RecipeError(f"{path} is a recipe of streamrl already: streamrl train {path}")
        return "prime-rl"
    return next((name for name, parts in MARKS.items() if firsts & set(parts)), "TRL")


def _read_command(text: str, directory: Path, name: str) -> Foreign:
    """Settings of the last command that names a trainer: ``a.b=c``, ``+a.b=c``, ``--a-b c``, ``--a``, ``@ FILE``."""
    variables = {"HOME": "~"}
    settings = dict[str, Any]()
    files = list[str]()
    dialect = ""
    flag = ""
    inside = False
    try:
        lines = re.sub(r"(?m)(^|\s)#.*", "", text).replace("\\\n", " ").replace("\n", " ; ")
        words = shlex.split(_COMPUTED.sub(lambda found: found[0].replace(" ", ""), lines))
    except ValueError as error:
        raise RecipeError(f"{name}: not a command of a shell ({error}): give {FORMS}") from None
    for one in words:
        word = _expanded(one, variables)
        pair = _PAIR.fullmatch(word.rstrip(","))
        if word == ";":
            inside = False
            flag = ""
        elif _COMMANDS.fullmatch(word) and (not flag or word.endswith(".py")):
            settings, files = (settings, files) if inside else ({}, [])
            dialect = "verl" if word.endswith("main_ppo") else "TRL" if word in ("trl", "accelerate") else dialect
            inside = True
            flag = ""
        elif flag in ("@", "config"):
            files.append(word)
            flag = ""
        elif inside and word.startswith(("@", "--")):
            flag, _, value = ("@", "", word[1:]) if word[0] == "@" else word[2:].replace("-", "_").partition("=")
            if flag not in ("@", "config"):
                settings[flag.removeprefix("no_")] = _scalar(value) if value else not flag.startswith("no_")
            elif value:
                files.append(value)
            flag = "" if value or flag.startswith("no_") else flag
        elif pair and not flag:
            (settings if inside else variables)[pair[1]] = _scalar(pair[2]) if inside else pair[2]
        elif flag and word[:1] not in "$|&>":
            before = settings[flag]
            value = _scalar(word.rstrip(","))
            settings[flag] = value if before is True else [*(before if isinstance(before, list) else [before]), value]
    for file in files:
        path = directory / file
        table = _read_table(path, _read(path, f", which {name} names"))
        dialect = dialect or _dialect_of(table, path)
        settings = table | settings
    if not settings:
        raise RecipeError(f"{name}: no command of TRL, verl, prime-rl or AReaL is in it: give {FORMS}")
    return Foreign(dialect or "TRL", name, dict(leaves("", settings)), directory=directory)


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """``word`` with the variables that the script sets, or their defaults, and the sums and products of them."""

    def computed(found: re.Match[str]) -> str:
        inside = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), found[1])
        try:
            return str(sum(math.prod(map(int, term.split("*"))) for term in inside.split("+")))
        except ValueError:
            return found[0]

    word = _VARIABLE.sub(lambda found: variables.get(found[1] or found[3], found[2] or found[0]), word)
    return re.sub(r"\$\(\(([\w+*]+)\)\)", computed, word)
