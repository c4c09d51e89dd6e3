"""Decoder layers that trade time for memory (activation checkpointing), or start-up time for speed (``torch.compile``).

Both change layers in place, keep parameter names, and are called once, before ``shard`` and before the first forward;
with both, checkpointing comes last. Gradients stay those of the plain layers: bit for bit with checkpointing, to
rounding with compiled layers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from streamrl.learning.model.architecture import decoder_layers
from streamrl.learning.model.attention import register_uncompiled_attention
from streamrl.learning.model.policy import PackedPolicy


def checkpoint_activations(policy: PackedPolicy) -> None:
    """Keep only the input of each decoder layer in forward, and run the layer again in backward.

    transformers' own switch is not used: it acts in training mode only, and the policy is in evaluation mode.
    """
    for layer in decoder_layers(policy.hugging_face):
        # The policy has no dropout: the generator need not be put back for the second run.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def compile_policy(policy: PackedPolicy) -> None:
    """Compile the decoder layers for any row length; attention stays as it is, between two compiled halves.

    Layers of equal shapes share the code: it is compiled once, at the first row, not once for each layer or row.
    """
    policy.hugging_face.set_attn_implementation(register_uncompiled_attention())
    for layer in decoder_layers(policy.hugging_face):
        layer.forward = torch.compile(layer.forward, dynamic=True)
