"""Settings out of a Python script of TRL, by its syntax tree; the functions of its rewards as a file of their own."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.base.errors import RecipeError

CONFIGS = ("GRPOConfig", "RLOOConfig", "LoraConfig", "ModelConfig", "GRPOScriptArguments", "ScriptArguments")
TRAINER = {
    "model": "model_name_or_path",
    "reward_funcs": "reward_funcs",
    "tools": "tools",
    "rollout_func": "rollout_func",
}
DATASET = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
CALLS = {"GRPOTrainer": TRAINER, "RLOOTrainer": TRAINER, "load_dataset": DATASET}
"""Arguments that are read, in the order of their places, and their keys."""
REWARDS = "reward.py"
Unread = dict[str, tuple[str, int]]
"""Expressions with their lines, by their keys."""


def read_trl_script(text: str, path: Path) -> tuple[dict[str, Any], Unread, dict[str, str]]:
    """Read the arguments of ``GRPOConfig``, ``GRPOTrainer``, ``LoraConfig`` and ``load_dataset``: their values, those
    that only running it would tell, and ``reward.py``, where it has rewards. Raises ``RecipeError`` for what is no
    Python, or has none of them."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes: the script's own
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path}: not Python ({error}): give a script with GRPOConfig(...)") from None
    made = {name: node for node in tree.body for name in _names(node)}
    constants = {name: node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) for name in _names(node)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    modules = {alias.asname or alias.name: alias.name for node in imports for alias in node.names}
    settings = dict[str, Any]()
    unread = Unread()
    copied = list[str]()

    def take(key: str, node: ast.expr) -> None:
        try:
            value = ast.literal_eval(constants.get(getattr(node, "id", ""), node))
            settings.update({str(name): one for name, one in dict(value).items()} if key == "**" else {key: value})
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            unread[key] = (ast.unparse(node), node.lineno)

    def reward(node: ast.expr) -> str:
        """The name of a reward function: of this script in ``reward.py``, of a module, or of TRL itself."""
        if isinstance(node, ast.Attribute):
            module = ast.unparse(node.value)
            return f"{modules.get(module, module)}:{node.attr}"
        name = node.id if isinstance(node, ast.Name) else _called(node)
        found = made.get(name)
        if isinstance(found, ast.ImportFrom):
            own = next(alias.name for alias in found.names if name in (alias.asname, alias.name))
            return own if (found.module or "").startswith("trl") else f"{found.module}:{own}"
        if found is None:
            return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
        copied.append(name)
        return f"{REWARDS}:{name}"

    for call in sorted((node for node in ast.walk(tree) if isinstance(node, ast.Call)), key=lambda call: call.lineno):
        keys = CALLS.get(_called(call), {})
        given = dict(zip(keys, call.args, strict=False)) | {one.arg or "**": one.value for one in call.keywords}
        for name, node in given.items() if keys or _called(call) in CONFIGS else ():
            if name == "reward_funcs":
                named = constants.get(getattr(node, "id", ""), node)
                settings[name] = [reward(one) for one in getattr(named, "elts", [node])]
            elif (key := keys.get(name, "") if keys else name) not in ("", *(settings if keys is DATASET else ())):
                take(key, node)
        if _called(call) in ("map", "filter") and isinstance(call.func, ast.Attribute):
            unread.setdefault(f"dataset.{call.func.attr}", (ast.unparse(call), call.lineno))
    if not settings:
        what = "the script that has them, or the command line (.sh) whose arguments the script reads"
        raise RecipeError(f"{path}: no GRPOConfig(...) or GRPOTrainer(...) is in it: give {what}")
    return settings, unread, {REWARDS: _copied_source(text, tree, made, copied, path)} if copied else {}


def _copied_source(text: str, tree: ast.Module, made: Mapping[str, ast.stmt], names: list[str], path: Path) -> str:
    """The functions, with the imports, constants and functions of the script that they name."""
    wanted = set[str]()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in made and name not in wanted:
            wanted.add(name)
            waiting += [node.id for node in ast.walk(made[name]) if isinstance(node, ast.Name)]
    nodes = [node for node in tree.body if wanted & set(_names(node))]
    parts = [ast.get_source_segment(text, node) or ast.unparse(node) for node in nodes]
    return "\n\n".join([f'"""Rewards, copied from {path.name}."""', *parts]) + "\n"


def _called(node: ast.AST) -> str:
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _names(node: ast.stmt) -> list[str]:
    """Names that a statement makes."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
