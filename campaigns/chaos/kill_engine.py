"""A short demo whose engine processes can be found, to be killed: a test on a GPU kills them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil

from campaigns.chaos.chaos_processes import log_name
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.sections import EngineKind, Recipe

DEMO = Path(__file__).parents[2] / "examples" / "sort" / "recipe.toml"


def short_demo(kind: EngineKind, steps: int, directory: str) -> Recipe:
    """The demo with two engines and small batches, without evaluation and checkpoints."""
    recipe, replace = load_recipe(DEMO), msgspec.structs.replace
    return replace(
        recipe,
        run=replace(recipe.run, steps=steps, directory=directory),
        engines=replace(recipe.engines, kind=kind, count=2, restarts=5),
        rollout=replace(recipe.rollout, prompts_per_batch=16, group_size=8),
        evaluation=replace(recipe.evaluation, prompts="", at_start=False, at_end=False),
        checkpoint=replace(recipe.checkpoint, at_end=False),
    )


def host_of(name: str) -> psutil.Process:
    """The process of an engine process, which is a child of this one."""
    for process in psutil.Process().children():
        if log_name(process.pid) == name:
            return process
    raise SystemExit(f"{name} has no process")
