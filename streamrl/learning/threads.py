"""Sharing of the cores of one CPU host. Spinning threads of a trainer cost its engine more than they bring."""

from __future__ import annotations

from streamrl.recipe.judge import Judge
from streamrl.recipe.sections import Engines, Recipe, Run


def engine_threads(engines: Engines, run: Run, cores: int) -> int:
    """OpenMP threads of one CPU engine: half of the host's ``cores`` for all engines that this run starts here. With
    more than one, what it samples is not the same again."""
    return 1 if run.deterministic else max(cores // (2 * engines.count), 1)


def judge_threads(judge: Judge, cores: int) -> int:
    """OpenMP threads of the run's own judge on a CPU: ``judge.advanced.threads``, or a quarter of the host's (0: no
    judge)."""
    return (judge.threads or max(cores // 4, 1)) if judge.model else 0


def trainer_threads(recipe: Recipe, cores: int, *, engines_on_cpu: bool, freed: int = 0) -> int:
    """Torch threads of one rank: ``training.advanced.threads``, or what engines and judge of this host leave, shared by
    the ranks. ``freed``: so many of the engines do nothing until the next round. Without ``engines_on_cpu`` all cores
    are theirs, as while nothing else computes."""
    if recipe.training.threads or recipe.run.deterministic:
        return recipe.training.threads or 1
    engines = recipe.engines.count - freed if recipe.starts_engines_here else 0
    taken = engines * engine_threads(recipe.engines, recipe.run, cores) + judge_threads(recipe.judge, cores)
    return max((cores - taken * engines_on_cpu) // recipe.training.ranks, 1)
