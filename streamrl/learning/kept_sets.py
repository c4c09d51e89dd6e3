"""Decide which kept sets the engines return, for the trainer to sample from the same tokens
(``training.advanced.kept_set_replay``).

The options of engines are made with it. ``batches.packing`` puts the sets of a row together, and
``objective.logprobs`` removes the tokens outside of them."""

from __future__ import annotations

from streamrl.learning.routing_replay import MOST_BYTES
from streamrl.recipe.sections import Recipe

MOST_TOKENS = 128
"""Largest kept set that engines return: vLLM writes each of its tokens into lists of Python."""
MOST_TOKENS_BY_SHARE = 64
"""Largest kept set that engines return where top-p or min-p alone bound it."""
_TOKEN_BYTES = 4


def kept_tokens(recipe: Recipe) -> int:
    """Return the largest kept set that engines return with a sampled token; 0: they return none, since nothing is
    removed, or the recipe wants none. The sets of a group go to the trainer in one message."""
    sampling = recipe.sampling
    if not recipe.training.kept_set_replay or not sampling.removes_tokens:
        return 0
    tokens_of_group = recipe.largest_group * recipe.max_tokens
    most = MOST_BYTES // (tokens_of_group * _TOKEN_BYTES)
    return min(sampling.top_k or MOST_TOKENS_BY_SHARE, MOST_TOKENS, most)
