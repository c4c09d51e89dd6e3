"""Rules of ``[engines]``, of its sets, and of temperatures that vLLM accepts. ``prepare.preflight`` checks the
machine."""

from __future__ import annotations

import re
from collections import Counter

from streamrl.recipe.problems import short_toml
from streamrl.recipe.rules.rule import Broken, Problem, rule
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import EngineKind, Recipe, ReleaseKind
from streamrl.recipe.topology import prepared_sets

COLDEST = 0.01
HOTTEST = 2.0
"""Bounds of the temperatures that vLLM uses unchanged."""
KINDS_OF_ROUNDS = {RoundKind.SYNCHRONOUS: {"synchronous"}, RoundKind.TAIL_BATCHING: {"short", "long"}}
"""Kinds of the rounds of a scheduling method; other methods may have any kinds."""

_CORES = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def are_cores(text: str) -> bool:
    """Return whether ``text`` is a list of cores, such as ``0``, ``0-3`` or ``0,2,4-7``."""
    ranges = [_CORES.fullmatch(part) for part in text.split(",")]
    return all(match and int(match[1]) <= int(match[2] or match[1]) for match in ranges)


@rule("rollout.rounds", "engines")
def prepared_engine_sets(recipe: Recipe) -> Broken:
    """Prepared sets need more than one set."""
    engines = recipe.engines
    if not engines.sets:
        if engines.rounds:
            yield Problem("engines.rounds", "has no effect without engines.sets: leave it out, or prepare another set")
        return
    yield from _shapes(recipe)


@rule("engines")
def batched_tokens(recipe: Recipe) -> Broken:
    """The tokens of a step must be enough for one token of each running request, as vLLM requires."""
    tokens = recipe.engines.max_num_batched_tokens
    running = max(engine_set.max_num_seqs for engine_set in prepared_sets(recipe))
    if 0 < tokens < running:
        yield Problem(
            "engines.max_num_batched_tokens",
            f"{tokens} is less than engines.max_num_seqs = {running}, a token for each: raise it, or set 0 (by GPU)",
        )


@rule("engines")
def serving_engines(recipe: Recipe) -> Broken:
    """Every set must have at least ``min_serving`` engines."""
    fewest = recipe.engines.min_serving
    smallest = min(prepared_sets(recipe), key=lambda engine_set: engine_set.count)
    if fewest > smallest.count:
        where = f"engines.count = {smallest.count}" if smallest.first == 0 else f"the engines of set {smallest.name}"
        yield Problem("engines.min_serving", f"{fewest} is more than {where}: set {smallest.count} or less")


@rule("engines.kind", "sampling.temperature")
def sampling_temperature(recipe: Recipe) -> Broken:
    """Sampling temperatures that vLLM replaces (0.01 for smaller ones) are refused: the trainer divides by the
    recipe's."""
    value = recipe.sampling.temperature
    if recipe.engines.kind is EngineKind.VLLM and not COLDEST <= value <= HOTTEST:
        yield Problem(
            "sampling.temperature",
            f"{short_toml(value)} is not what vLLM would sample with, which takes {COLDEST} for less and refuses more "
            f"than {HOTTEST:g}: set it from {COLDEST} to {HOTTEST:g}",
        )


@rule("engines.kind", "evaluation.temperature")
def evaluation_temperature(recipe: Recipe) -> Broken:
    """Evaluation temperatures that vLLM refuses. 0 is greedy, and vLLM may use 0.01 for smaller ones."""
    value = recipe.evaluation.temperature
    if recipe.engines.kind is EngineKind.VLLM and value is not None and value > HOTTEST:
        yield Problem(
            "evaluation.temperature", f"{short_toml(value)} is refused by vLLM: set it to {HOTTEST:g} or less"
        )


def _shapes(recipe: Recipe) -> Broken:
    """Sets must differ in their shape, and each kind of rounds must belong to one set."""
    sets = prepared_sets(recipe)
    for name, count in Counter(engine_set.name for engine_set in sets).items():
        if count > 1:
            yield Problem(
                "engines.sets",
                f"{count} sets are {name} (engines x workers of each): sets must differ in one of the two; "
                "the first is engines.count and engines.tensor_parallel_size",
            )
    for kind, count in Counter(kind for engine_set in sets for kind in engine_set.rounds).items():
        if count > 1:
            yield Problem("engines.sets", f'"{kind}" rounds belong to {count} sets: name them in one of them')
    kinds = KINDS_OF_ROUNDS.get(recipe.rollout.rounds)
    for index, shape in enumerate(recipe.engines.sets):
        if len(shape.cores) not in (0, shape.count):
            yield Problem(
                f"engines.sets.{index}.cores",
                f"has {len(shape.cores)} entries for {shape.count} engines: give one for each, or none",
            )
    for index, engine_set in enumerate(sets):
        field = f"engines.sets.{index - 1}.rounds" if index else "engines.rounds"
        for kind in engine_set.rounds:
            if kinds and kind not in kinds:
                names = ", ".join(f'"{name}"' for name in sorted(kinds))
                yield Problem(field, f'rounds = "{recipe.rollout.rounds}" has no "{kind}" rounds: name some of {names}')


@rule("engines.cores", "engines.count", "engines.sets")
def engine_cores(recipe: Recipe) -> Broken:
    """Lists of cores must be valid, one for each engine."""
    cores = recipe.engines.cores
    count = recipe.engines.count
    if len(cores) not in (0, count):
        yield Problem(
            "engines.cores",
            f'has {len(cores)} entries for {count} engines: give one for each, such as ["0-3", "4-7"], or none',
        )
    entries = {f"engines.cores.{index}": entry for index, entry in enumerate(cores)}
    for number, shape in enumerate(recipe.engines.sets):
        entries |= {f"engines.sets.{number}.cores.{index}": entry for index, entry in enumerate(shape.cores)}
    for path, entry in entries.items():
        if not are_cores(entry):
            yield Problem(path, f'"{entry}" is not a list of cores: write "0", "0-3" or "0,2,4-7"')


@rule("engines.max_model_len", "sampling.max_tokens")
def engine_context(recipe: Recipe) -> Broken:
    """An engine must have room for a prompt and a completion."""
    if 0 < recipe.engines.max_model_len <= recipe.sampling.max_tokens:
        yield Problem(
            "engines.max_model_len",
            f"{recipe.engines.max_model_len} leaves no room for a prompt beside sampling.max_tokens = "
            f"{recipe.sampling.max_tokens}: raise it, lower max_tokens, or set 0 (derived)",
        )


@rule("rollout.rounds", "tail_batching", "length_sorted", "engines")
def released_engines(recipe: Recipe) -> Broken:
    """Engines are released late in a round, so rounds must end, and other engines must go on."""
    release = recipe.engines.release
    field = "engines.release"
    rollout = recipe.rollout
    if release is ReleaseKind.NEVER:
        return
    if max(engine_set.count for engine_set in prepared_sets(recipe)) < 2:
        yield Problem(
            field, f'"{release}" needs an engine that goes on: set engines.count = 2 or more, or release = "never"'
        )
    if rollout.rounds in (RoundKind.CONTINUOUS, RoundKind.CUSTOM) and not recipe.on_policy:
        yield Problem(
            field,
            f'does not fit rounds = "{rollout.rounds}" at staleness {rollout.max_staleness}, where one round runs into '
            'the next and no engine is spare: set release = "never", or take rounds that end',
        )
