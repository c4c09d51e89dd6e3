"""What the trainer finds for the tokens of the canary, on the bits that it publishes: see ``config.canary``."""

from __future__ import annotations

import torch

from streamrl.learning.batches.packing import empty_micro_batch
from streamrl.learning.model.attention import PackedSequence, packed_layout
from streamrl.learning.model.policy import PackedPolicy, compute_context
from streamrl.learning.options import TrainerOptions
from streamrl.recipe.canary import probe_tokens


@torch.no_grad()
def probe_logprobs(policy: PackedPolicy, options: TrainerOptions) -> tuple[float, ...]:
    """Logprobs of the canary's tokens after the first, at temperature 1. Collective where parameters are sharded."""
    tokens = probe_tokens(policy.hugging_face.config.get_text_config().vocab_size)
    device = policy.hugging_face.device
    tokens_T = torch.tensor(tokens, dtype=torch.int64, device=device)
    row = empty_micro_batch(device)._replace(
        tokens_T=tokens_T,
        positions_T=torch.arange(len(tokens), device=device),
        layout=packed_layout([PackedSequence(0, len(tokens))], device),
        predictors_N=torch.arange(len(tokens) - 1, device=device),
    )
    with compute_context(options, device):
        logits_NV = policy.head(policy(row)).float()
    logprobs_N = logits_NV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]
    return tuple(float(logprob) for logprob in logprobs_N.cpu())
