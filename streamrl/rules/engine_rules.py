"""Rules of ``[engines]``, of its sets, and of what vLLM samples with. ``plan.preflight`` asks the machine."""

from __future__ import annotations

import re
from collections import Counter

from streamrl.plan.topology import prepared_sets
from streamrl.recipe.problems import shown
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import EngineKind, Launch, Recipe, ReleaseKind
from streamrl.rules.rule import Broken, Problem, rule

COLDEST, HOTTEST = 0.01, 2.0
"""Temperatures that vLLM samples with as they are."""
KINDS_OF_ROUNDS = {RoundKind.SYNCHRONOUS: {"synchronous"}, RoundKind.TAIL_BATCHING: {"short", "long"}}
"""Rounds whose kinds are known; others may call theirs what they like."""


_CORES = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def are_cores(text: str) -> bool:
    """Whether ``text`` is such as ``0``, ``0-3`` or ``0,2,4-7``."""
    ranges = [_CORES.fullmatch(part) for part in text.split(",")]
    return all(found and int(found[1]) <= int(found[2] or found[1]) for found in ranges)


@rule("rollout.rounds", "tail_batching", "length_sorted", "rollout.presubmit", "engines", "transport.engines")
def prepared_engine_sets(recipe: Recipe) -> Broken:
    """One set is awake, and they change between rounds: there must be such a time, and something to choose from."""
    engines = recipe.engines
    if not engines.sets:
        if engines.rounds:
            yield Problem("engines.rounds", "has no effect without engines.sets: leave it out, or prepare another set")
        return
    yield from _shapes(recipe)
    yield from _between_rounds(recipe, "engines.sets", "leave engines.sets out")
    if engines.release is not ReleaseKind.NEVER:
        yield Problem(
            "engines.sets",
            f'does not fit engines.release = "{engines.release}" yet, which frees engines of one set: '
            'set release = "never", or leave engines.sets out',
        )
    if recipe.transport.engines is Launch.EXTERNAL:
        yield Problem(
            "engines.sets",
            'does not fit transport.engines = "external", whose processes this run does not start: '
            "leave engines.sets out",
        )


@rule("engines")
def batched_tokens(recipe: Recipe) -> Broken:
    """vLLM schedules at least one token of each running request in a step."""
    tokens, running = recipe.engines.max_num_batched_tokens, max(one.max_num_seqs for one in prepared_sets(recipe))
    if 0 < tokens < running:
        yield Problem(
            "engines.max_num_batched_tokens",
            f"{tokens} is less than engines.max_num_seqs = {running}, a token for each: raise it, or set 0 (by GPU)",
        )


@rule("engines")
def engine_restarts(recipe: Recipe) -> Broken:
    """Where sets change, a death is the end of the run; and enough engines must serve."""
    engines = recipe.engines
    if engines.restarts and engines.sets:
        yield Problem(
            "engines.restarts",
            f"{engines.restarts} does not fit engines.sets yet, which starts and stops engines itself: set "
            "restarts = 0 (the death of an engine ends the run), or leave engines.sets out",
        )
    if engines.min_serving > engines.count:
        yield Problem(
            "engines.min_serving",
            f"{engines.min_serving} is more than engines.count = {engines.count}: set {engines.count} or less",
        )


@rule("engines.kind", "sampling.temperature")
def sampling_temperature(recipe: Recipe) -> Broken:
    """What the trainer divides by must be what the engines sampled with: vLLM takes 0.01 for less than that."""
    value = recipe.sampling.temperature
    if recipe.engines.kind is EngineKind.VLLM and not COLDEST <= value <= HOTTEST:
        yield Problem(
            "sampling.temperature",
            f"{shown(value)} is not what vLLM would sample with, which takes {COLDEST} for less and refuses more "
            f"than {HOTTEST:g}: set it from {COLDEST} to {HOTTEST:g}",
        )


@rule("engines.kind", "evaluation.temperature")
def evaluation_temperature(recipe: Recipe) -> Broken:
    """Nothing is trained on these: vLLM may take 0.01 for less, which is as good as greedy."""
    value = recipe.evaluation.temperature
    if recipe.engines.kind is EngineKind.VLLM and value is not None and value > HOTTEST:
        yield Problem("evaluation.temperature", f"{shown(value)} is refused by vLLM: set it to {HOTTEST:g} or less")


def _shapes(recipe: Recipe) -> Broken:
    sets = prepared_sets(recipe)
    for name, count in Counter(one.name for one in sets).items():
        if count > 1:
            yield Problem(
                "engines.sets",
                f"{count} sets are {name} (engines x tensor-parallel size): sets must differ in one of the two; "
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
    cores, count = recipe.engines.cores, recipe.engines.count
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


@rule("rollout.rounds", "tail_batching", "length_sorted", "rollout.presubmit", "engines", "transport.engines")
def released_engines(recipe: Recipe) -> Broken:
    """Engines are freed late in a round and are back before the next: there must be such a time, and others."""
    release, field = recipe.engines.release, "engines.release"
    if release is ReleaseKind.NEVER:
        return
    if recipe.engines.count < 2:
        yield Problem(
            field, f'"{release}" needs an engine that goes on: set engines.count = 2 or more, or release = "never"'
        )
    yield from _between_rounds(recipe, field, 'set release = "never"')


def _between_rounds(recipe: Recipe, field: str, remedy: str) -> Broken:
    """Engines that leave must do so while no request is under way."""
    rollout = recipe.rollout
    if not recipe.on_policy:
        yield Problem(
            field,
            f'does not fit rounds = "{rollout.rounds}" at staleness {rollout.max_staleness}, where one round runs into '
            f"the next and no engine may leave: {remedy}, or take rounds that train on-policy",
        )
    if rollout.presubmit:
        yield Problem(
            field,
            "does not fit rollout.presubmit, which needs all engines before the next round begins: "
            f"set presubmit = false, or {remedy}",
        )
