"""Rules of ``[engines]``, of its sets, and of what vLLM samples with. ``plan.preflight`` asks the machine."""

from __future__ import annotations

import re
from collections import Counter

from streamrl.recipe.problems import shown
from streamrl.recipe.rules.rule import Broken, Problem, rule
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import EngineKind, LaunchedBy, Recipe, ReleaseKind
from streamrl.recipe.topology import prepared_sets

COLDEST = 0.01
HOTTEST = 2.0
"""Temperatures that vLLM samples with as they are."""
KINDS_OF_ROUNDS = {RoundKind.SYNCHRONOUS: {"synchronous"}, RoundKind.TAIL_BATCHING: {"short", "long"}}
"""Rounds whose kinds are known; others may call theirs what they like."""


_CORES = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def are_cores(text: str) -> bool:
    """Return whether ``text`` is such as ``0``, ``0-3`` or ``0,2,4-7``."""
    ranges = [_CORES.fullmatch(part) for part in text.split(",")]
    return all(found and int(found[1]) <= int(found[2] or found[1]) for found in ranges)


@rule("rollout.rounds", "engines", "transport.engines")
def prepared_engine_sets(recipe: Recipe) -> Broken:
    """One set is in use: there must be something to choose from, and somebody who starts its processes."""
    engines = recipe.engines
    if not engines.sets:
        if engines.rounds:
            yield Problem("engines.rounds", "has no effect without engines.sets: leave it out, or prepare another set")
        return
    yield from _shapes(recipe)
    if recipe.transport.engines is LaunchedBy.EXTERNAL:
        yield Problem(
            "engines.sets",
            'does not fit transport.engines = "external", whose processes this run does not start: '
            "leave engines.sets out",
        )


@rule("engines")
def batched_tokens(recipe: Recipe) -> Broken:
    """vLLM schedules at least one token of each running request in a step."""
    tokens = recipe.engines.max_num_batched_tokens
    running = max(one.max_num_seqs for one in prepared_sets(recipe))
    if 0 < tokens < running:
        yield Problem(
            "engines.max_num_batched_tokens",
            f"{tokens} is less than engines.max_num_seqs = {running}, a token for each: raise it, or set 0 (by GPU)",
        )


@rule("engines")
def serving_engines(recipe: Recipe) -> Broken:
    """Every set has as many engines as must serve."""
    fewest = recipe.engines.min_serving
    smallest = min(prepared_sets(recipe), key=lambda one: one.count)
    if fewest > smallest.count:
        where = f"engines.count = {smallest.count}" if smallest.first == 0 else f"the engines of set {smallest.name}"
        yield Problem("engines.min_serving", f"{fewest} is more than {where}: set {smallest.count} or less")


@rule("engines.kind", "sampling.temperature")
def sampling_temperature(recipe: Recipe) -> Broken:
    """Sampling temperatures that vLLM replaces (0.01 for less than that) are refused: the trainer divides by the
    recipe's."""
    value = recipe.sampling.temperature
    if recipe.engines.kind is EngineKind.VLLM and not COLDEST <= value <= HOTTEST:
        yield Problem(
            "sampling.temperature",
            f"{shown(value)} is not what vLLM would sample with, which takes {COLDEST} for less and refuses more "
            f"than {HOTTEST:g}: set it from {COLDEST} to {HOTTEST:g}",
        )


@rule("engines.kind", "evaluation.temperature")
def evaluation_temperature(recipe: Recipe) -> Broken:
    """Evaluation temperatures that vLLM refuses. 0 is greedy, and vLLM may take 0.01 for less than that."""
    value = recipe.evaluation.temperature
    if recipe.engines.kind is EngineKind.VLLM and value is not None and value > HOTTEST:
        yield Problem("evaluation.temperature", f"{shown(value)} is refused by vLLM: set it to {HOTTEST:g} or less")


def _shapes(recipe: Recipe) -> Broken:
    sets = prepared_sets(recipe)
    for name, count in Counter(one.name for one in sets).items():
        if count > 1:
            yield Problem(
                "engines.sets",
                f"{count} sets are {name} (engines x workers of each): sets must differ in one of the two; "
                "the first is engines.count and engines.tensor_parallel_size",
            )
    for kind, count in Counter(kind for one in sets for kind in one.rounds).items():
        if count > 1:
            yield Problem("engines.sets", f'"{kind}" rounds belong to {count} sets: name them in one of them')
    known = KINDS_OF_ROUNDS.get(recipe.rollout.rounds)
    for index, shape in enumerate(recipe.engines.sets):
        if len(shape.cores) not in (0, shape.count):
            yield Problem(
                f"engines.sets.{index}.cores",
                f"has {len(shape.cores)} entries for {shape.count} engines: give one for each, or none",
            )
    for index, one in enumerate(sets):
        field = f"engines.sets.{index - 1}.rounds" if index else "engines.rounds"
        for kind in one.rounds:
            if known and kind not in known:
                names = ", ".join(f'"{name}"' for name in sorted(known))
                yield Problem(field, f'rounds = "{recipe.rollout.rounds}" has no "{kind}" rounds: name some of {names}')


@rule("engines.cores", "engines.count", "engines.sets")
def engine_cores(recipe: Recipe) -> Broken:
    cores = recipe.engines.cores
    count = recipe.engines.count
    if len(cores) not in (0, count):
        yield Problem(
            "engines.cores",
            f'has {len(cores)} entries for {count} engines: give one for each, such as ["0-3", "4-7"], or none',
        )
    places = {f"engines.cores.{index}": entry for index, entry in enumerate(cores)}
    for number, shape in enumerate(recipe.engines.sets):
        places |= {f"engines.sets.{number}.cores.{index}": entry for index, entry in enumerate(shape.cores)}
    for place, entry in places.items():
        if not are_cores(entry):
            yield Problem(place, f'"{entry}" is not a list of cores: write "0", "0-3" or "0,2,4-7"')


@rule("engines.max_model_len", "sampling.max_tokens")
def engine_context(recipe: Recipe) -> Broken:
    if 0 < recipe.engines.max_model_len <= recipe.sampling.max_tokens:
        yield Problem(
            "engines.max_model_len",
            f"{recipe.engines.max_model_len} leaves no room for a prompt beside sampling.max_tokens = "
            f"{recipe.sampling.max_tokens}: raise it, lower max_tokens, or set 0 (derived)",
        )


@rule("rollout.rounds", "tail_batching", "length_sorted", "engines")
def released_engines(recipe: Recipe) -> Broken:
    """Engines are freed late in a round and are back before the next: there must be such a time, and others."""
    release = recipe.engines.release
    field = "engines.release"
    rollout = recipe.rollout
    if release is ReleaseKind.NEVER:
        return
    if max(one.count for one in prepared_sets(recipe)) < 2:
        yield Problem(
            field, f'"{release}" needs an engine that goes on: set engines.count = 2 or more, or release = "never"'
        )
    if rollout.rounds in (RoundKind.CONTINUOUS, RoundKind.CUSTOM) and not recipe.on_policy:
        yield Problem(
            field,
            f'does not fit rounds = "{rollout.rounds}" at staleness {rollout.max_staleness}, where one round runs into '
            'the next and no engine is spare: set release = "never", or take rounds that end',
        )
