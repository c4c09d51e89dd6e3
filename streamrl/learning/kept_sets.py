"""Largest kept set (tokens that top-k, top-p and min-p left) that engines return, for the trainer to renormalise over
the same tokens (``training.advanced.kept_set_replay``).

``engines.vllm.options`` calls it. ``batches.packing`` puts the sets of a row together, and ``objective.logprobs`` masks
the logits of all other tokens."""

from __future__ import annotations

from streamrl.recipe.sections import Recipe

MOST_TOKENS = 128
"""Largest kept set that engines return: vLLM builds Python lists with an entry for each of its tokens."""
MOST_TOKENS_BY_SHARE = 32
"""Largest kept set that engines return without top-k."""
TIED_TOKENS = 8
"""Tokens beyond ``top_k`` that may be in a set, as vLLM keeps all tokens whose logit equals that of the k-th token."""
MOST_GROUP_BYTES = 64 << 20
"""Largest size of the sets of a group, which goes to the trainer with its experts in a message of at most 256 MiB."""
MOST_ENGINE_BYTES = 4 << 30
"""Largest size of the kept sets of all running requests in the memory of an engine."""
_ID_BYTES = 4
_LOGPROB_BYTES = 12  # 8 for a token id, as torch has it, and 4 for its logprob


def kept_tokens(recipe: Recipe) -> int:
    """Return the largest kept set that engines return with a sampled token; 0: they return none, since nothing is
    removed, groups are too long, or the recipe wants none."""
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
