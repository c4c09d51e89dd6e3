"""Numbers of threads of engines, served models and trainer ranks that share the cores of one CPU host.

The modules that make the options of these processes call it. The trainer does not get all cores while engines
sample: its spinning threads would slow the engines down by more than they speed the trainer up."""

from __future__ import annotations

from streamrl.recipe.sections import Engines, Recipe, Run
from streamrl.recipe.served_models import ServedModel


def engine_threads(engines: Engines, run: Run, cores: int) -> int:
    """OpenMP threads of one CPU engine: all engines that this run starts on the host share half of its ``cores``.

    A deterministic run has one thread: with more, sampled tokens do not repeat."""
    return 1 if run.deterministic else max(cores // (2 * engines.count), 1)


def served_threads(served_model: ServedModel, cores: int) -> int:
    """OpenMP threads of a judge or teacher on a CPU: those of its section, or a quarter of the host's ``cores``.

    0: the run does not serve it."""
    if not served_model.is_own:
        return 0
    return served_model.threads or max(cores // 4, 1)


def trainer_threads(recipe: Recipe, cores: int, *, engines_on_cpu: bool, freed: int = 0) -> int:
    """Torch threads of one rank: ``training.advanced.threads``, or a share of the cores that engines, judge and
    teacher of this host do not use. Without ``engines_on_cpu``, the ranks share all cores.

    ``freed``: number of engines that are idle until the next round."""
    if recipe.training.threads or recipe.run.deterministic:
        return recipe.training.threads or 1
    engines = recipe.engines.count - freed if recipe.on_one_host else 0
    if engines_on_cpu:
        sampling = engines * engine_threads(recipe.engines, recipe.run, cores)
        cores -= sampling + served_threads(recipe.judge, cores) + served_threads(recipe.teacher, cores)
    return max(cores // recipe.training.ranks, 1)
