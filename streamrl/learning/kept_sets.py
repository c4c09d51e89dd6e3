"""Decide which kept sets the engines return, for the trainer to renormalise over the same tokens
(``training.advanced.kept_set_replay``).

The options of engines are made with it. ``batches.packing`` puts the sets of a row together, and
``objective.logprobs`` removes the tokens outside of them."""

from __future__ import annotations

from streamrl.recipe.sections import Recipe

MOST_TOKENS = 128
"""Largest kept set that engines return: vLLM writes each of its tokens into lists of Python."""
MOST_TOKENS_BY_SHARE = 32
"""Largest kept set that engines return where top-p or min-p alone bound it."""
TIED_TOKENS = 8
"""Tokens beyond ``top_k`` that may be in a set, since vLLM keeps all tokens whose logit is the one at its edge."""
MOST_GROUP_BYTES = 64 << 20
"""Largest size of the sets of a group. A message of 256 MiB takes it to the trainer, with the experts of its tokens."""
MOST_ENGINE_BYTES = 4 << 30
"""Largest size of what an engine holds of the sets of its requests."""
_ID_BYTES = 4
_LOGPROB_BYTES = 12  # an id of a GPU, and its logprob


def kept_tokens(recipe: Recipe) -> int:
    """Return the largest kept set that engines return with a sampled token; 0: they return none, since nothing is
    removed, or the recipe wants none."""
    sampling = recipe.sampling
    if not recipe.training.kept_set_replay or not sampling.removes_tokens:
        return 0
    largest_set = MOST_TOKENS_BY_SHARE
    if sampling.top_k:
        largest_set = sampling.top_k + TIED_TOKENS
    group_tokens = recipe.largest_group * recipe.max_tokens
    engine_tokens = recipe.engines.max_num_seqs * recipe.max_tokens
    return min(
        largest_set,
        MOST_TOKENS,
        MOST_GROUP_BYTES // (_ID_BYTES * group_tokens),
        MOST_ENGINE_BYTES // (_LOGPROB_BYTES * engine_tokens),
    )
