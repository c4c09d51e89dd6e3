"""What the sets of engines of a recipe must satisfy together. The machine is asked by ``preflight``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from streamrl.plan.topology import prepared_sets
from streamrl.recipe.problems import shown
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import EngineKind, Launch, Recipe, ReleaseKind

COLDEST, HOTTEST = 0.01, 2.0
"""Temperatures that vLLM samples with as they are."""
KINDS_OF_ROUNDS = {RoundKind.SYNCHRONOUS: {"synchronous"}, RoundKind.TAIL_BATCHING: {"short", "long"}}
"""Rounds whose kinds are known; others may call theirs what they like."""


def prepared_engine_sets(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """One set is awake, and they change between rounds: there must be such a time, and something to choose from."""
    engines = recipe.engines
    if not engines.sets:
        if engines.rounds:
            yield "engines.rounds", "has no effect without engines.sets: leave it out, or prepare another set"
        return
    yield from _shapes(recipe)
    rounds = recipe.rollout.rounds
    if not recipe.on_policy:
        yield (
            "engines.sets",
            (
                f'does not fit rounds = "{rounds}" at staleness {recipe.rollout.max_staleness}, where one round runs '
                "into the next and no set may leave: leave engines.sets out, or take rounds that train on-policy"
            ),
        )
    if recipe.rollout.presubmit:
        yield (
            "engines.sets",
            (
                "does not fit rollout.presubmit, which submits a round before its set of engines serves: "
                "set presubmit = false, or leave engines.sets out"
            ),
        )
    if engines.release is not ReleaseKind.NEVER:
        yield (
            "engines.sets",
            (
                f'does not fit engines.release = "{engines.release}" yet, which frees engines of one set: '
                'set release = "never", or leave engines.sets out'
            ),
        )
    if recipe.transport.engines is Launch.EXTERNAL:
        yield (
            "engines.sets",
            (
                'does not fit transport.engines = "external", whose processes this run does not start: '
                "leave engines.sets out"
            ),
        )


def batched_tokens(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """vLLM schedules at least one token of each running request in a step."""
    tokens, running = recipe.engines.max_num_batched_tokens, max(one.max_num_seqs for one in prepared_sets(recipe))
    if 0 < tokens < running:
        yield (
            "engines.max_num_batched_tokens",
            f"{tokens} is less than engines.max_num_seqs = {running}, a token for each: raise it, or set 0 (by GPU)",
        )


def engine_restarts(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Where sets change, a death is the end of the run; and enough engines must serve."""
    engines = recipe.engines
    if engines.restarts and engines.sets:
        yield (
            "engines.restarts",
            (
                f"{engines.restarts} does not fit engines.sets yet, which starts and stops engines itself: set "
                "restarts = 0 (the death of an engine ends the run), or leave engines.sets out"
            ),
        )
    if engines.min_serving > engines.count:
        yield (
            "engines.min_serving",
            f"{engines.min_serving} is more than engines.count = {engines.count}: set {engines.count} or less",
        )


def sampling_temperature(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What the trainer divides by must be what the engines sampled with: vLLM takes 0.01 for less than that."""
    value = recipe.sampling.temperature
    if recipe.engines.kind is EngineKind.VLLM and not COLDEST <= value <= HOTTEST:
        yield (
            "sampling.temperature",
            (
                f"{shown(value)} is not what vLLM would sample with, which takes {COLDEST} for less and refuses more "
                f"than {HOTTEST:g}: set it from {COLDEST} to {HOTTEST:g}"
            ),
        )


def evaluation_temperature(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Nothing is trained on these: vLLM may take 0.01 for less, which is as good as greedy."""
    value = recipe.evaluation.temperature
    if recipe.engines.kind is EngineKind.VLLM and value is not None and value > HOTTEST:
        yield "evaluation.temperature", f"{shown(value)} is refused by vLLM: set it to {HOTTEST:g} or less"


def _shapes(recipe: Recipe) -> Iterator[tuple[str, str]]:
    sets = prepared_sets(recipe)
    for name, count in Counter(one.name for one in sets).items():
        if count > 1:
            yield (
                "engines.sets",
                (
                    f"{count} sets are {name} (engines x tensor-parallel size): sets must differ in one of the two; "
                    "the first is engines.count and engines.tensor_parallel_size"
                ),
            )
    for kind, count in Counter(kind for one in sets for kind in one.rounds).items():
        if count > 1:
            yield "engines.sets", f'"{kind}" rounds belong to {count} sets: name them in one of them'
    known = KINDS_OF_ROUNDS.get(recipe.rollout.rounds)
    for index, shape in enumerate(recipe.engines.sets):
        if len(shape.cores) not in (0, shape.count):
            yield (
                f"engines.sets.{index}.cores",
                f"has {len(shape.cores)} entries for {shape.count} engines: give one for each, or none",
            )
    for index, one in enumerate(sets):
        field = f"engines.sets.{index - 1}.rounds" if index else "engines.rounds"
        for kind in one.rounds:
            if known and kind not in known:
                names = ", ".join(f'"{name}"' for name in sorted(known))
                yield field, f'rounds = "{recipe.rollout.rounds}" has no "{kind}" rounds: name some of {names}'
