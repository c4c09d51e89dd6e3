"""Held-out prompts of a run, of one set or of several."""

from __future__ import annotations

from streamrl.base.types import Prompt
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.sections import HELD_OUT, EvaluationSet, Recipe
from streamrl.run.evaluate.evaluation import HeldOut
from streamrl.run.prompts.prompt_spec import prompt_sources
from streamrl.run.prompts.prompts import open_prompts

MOST_HELD_OUT = 10_000


async def read_held_out(recipe: Recipe, tokenizer: Tokenizer, in_flight: int) -> HeldOut:
    """Read all held-out prompts, in file order; of an iterator at most ``MOST_HELD_OUT``. ``in_flight``: requests of an
    evaluation that are open at once."""
    prompts: list[Prompt] = []
    sets: dict[str, tuple[EvaluationSet, int]] = {}
    _, *sources = prompt_sources(recipe).values()
    for spec, (name, one) in zip(sources, recipe.evaluation.sets.items(), strict=True):
        source = open_prompts(spec, tokenizer, seed=0, shuffle=False)
        try:
            found = await source.draw(source.size or MOST_HELD_OUT)
        finally:
            await source.aclose()
        prompts += found
        sets[name] = one, len(found)
    several = sets if sets.keys() - {HELD_OUT} else {}
    return HeldOut(prompts=prompts, sets=several, settings=recipe.evaluation, reward=recipe.score, in_flight=in_flight)
