"""Check at every load, on a few tokens, that a model computes the same logprobs on packed rows as on single sequences.

``loading`` calls it in each trainer rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.attention import (
    ATTENTION_NAME,
    PackedSequence,
    packed_attention,
    packed_layout,
    register_packed_attention,
)
from streamrl.learning.model.hugging_face import AttentionInterface, AttentionMaskInterface
from streamrl.learning.model.local_shards import local_part
from streamrl.learning.model.policy import PackedPolicy, empty_micro_batch

TOLERANCE = 1e-3
"""Largest allowed difference of logprobs, in nats. Rounding of deep float32 models is below, a missing cap above it."""
_ROW = (PackedSequence(0, 4), PackedSequence(4, 3, prefix=0), PackedSequence(7, 5))
_SINGLE_LENGTHS = (7, 5)
"""Twelve tokens: a prompt, its continuation, and another sequence. As single sequences they have 7 and 5 tokens."""
_FAR = 1 << 40
_WIDEST = 1 << 18
_EVERYTHING = -1
_IRREGULAR = -2

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def check_packing(policy: PackedPolicy) -> None:
    """Compare a packed forward with the model's own forward of each sequence, on tokens spread over the vocabulary.
    Leaves the model on packed attention. Raises ``StreamRLError`` with the measured difference."""
    model = policy.hugging_face
    kind = f"model type {model.config.model_type!r}"
    for name, weight in model.named_parameters():
        part = local_part(weight)
        if part.numel() and not all(math.isfinite(bound) for bound in part.aminmax()):
            raise StreamRLError(f"{kind}: the weight {name} has NaN or infinite values: repair or replace the model")
    vocabulary = model.config.get_text_config().vocab_size
    tokens_T = torch.arange(1, 1 + sum(_SINGLE_LENGTHS), device=model.device) * vocabulary // (1 + sum(_SINGLE_LENGTHS))
    try:
        model.set_attn_implementation(register_packed_attention())
        # The packed forward runs first: with sharded parameters, it gathers the parameters that the next forward needs.
        actual_TV = _packed_logprobs(policy, tokens_T, _ROW)
        expected_TV = _single_logprobs(model, tokens_T)
        _check_windows(policy, tokens_T[: _ROW[0].length])
    except StreamRLError:
        raise
    except Exception as error:
        raise StreamRLError(
            f"{kind} cannot be trained on packed rows: its forward fails with {type(error).__name__}: {error}"
        ) from error
    difference = float((actual_TV - expected_TV).abs().max())
    if not difference <= TOLERANCE:  # also when it is NaN
        raise StreamRLError(
            f"{kind} gives other logprobs on packed rows than on single sequences (largest difference "
            f"{difference:.3g}, tolerated {TOLERANCE:g}): its layers or its output head do something that packing "
            "cannot repeat"
        )


def _single_logprobs(model: Any, tokens_T: Tensor) -> Tensor:
    """Log-softmax of each single sequence, through the model's own attention and head. Float32 [T, V]."""
    model.set_attn_implementation("eager")
    try:
        parts = [
            model(input_ids=ids[None], use_cache=False).logits[0]
            for ids in torch.split(tokens_T, list(_SINGLE_LENGTHS))
        ]
    finally:
        model.set_attn_implementation(register_packed_attention())
    return torch.cat(parts).float().log_softmax(-1)


def _packed_logprobs(policy: PackedPolicy, tokens_T: Tensor, sequences: Sequence[PackedSequence]) -> Tensor:
    """Log-softmax of ``sequences`` as one packed row, through the policy. Float32 [T, V]."""
    device = tokens_T.device
    prefixes = [sequences[item.prefix].length if item.prefix >= 0 else 0 for item in sequences]
    positions = [torch.arange(item.length) + prefix for item, prefix in zip(sequences, prefixes, strict=True)]
    row = empty_micro_batch(device)._replace(
        tokens_T=tokens_T,
        positions_T=torch.cat(positions).to(device),
        layout=packed_layout(sequences, device),
        predictors_N=torch.arange(len(tokens_T), device=device),
    )
    return policy.head(policy(row)).float().log_softmax(-1)


def _check_windows(policy: PackedPolicy, tokens_T: Tensor) -> None:
    """Check that each attention function gets the window of its layer's mask: a few tokens are not enough to show a
    window of 4096 in the logprobs. Each mask is replaced by a tensor that holds its reach."""
    mismatches: dict[str, str] = {}

    def mask(*_: Any, mask_function: MaskFunction, **__: Any) -> Tensor:
        reach = _reach(mask_function)
        return torch.full((1, 1, len(tokens_T), len(tokens_T)), reach, dtype=torch.int64, device=tokens_T.device)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        window = options.get("sliding_window") or _EVERYTHING
        mask_window = window if attention_mask is None else int(attention_mask.flatten()[0])
        if mask_window != window:
            names = {_EVERYTHING: "all tokens", _IRREGULAR: "a changing number of tokens"}
            mask_name = names.get(mask_window, f"{mask_window} tokens")
            mismatches[mask_name] = names.get(window, f"{window} tokens")
        result: tuple[Tensor, None] = packed_attention(module, query, key, value, None, **options)
        return result

    try:
        AttentionInterface.register(ATTENTION_NAME, attention)
        AttentionMaskInterface.register(ATTENTION_NAME, mask)
        _packed_logprobs(policy, tokens_T, [PackedSequence(0, len(tokens_T))])
    finally:
        register_packed_attention()
    for mask_name, window_name in mismatches.items():
        kind = policy.hugging_face.config.model_type
        raise StreamRLError(
            f"model type {kind!r} masks attention to {mask_name}, but tells its attention function {window_name}"
        )


def _reach(function: MaskFunction) -> int:
    """Count the tokens that a token at a far position attends to, itself included. ``_EVERYTHING``: all tokens;
    ``_IRREGULAR``: the number depends on the position."""
    positions_Q = torch.tensor([_FAR, _FAR + 12_345])
    back_K = torch.arange(_WIDEST)
    zero = torch.zeros((), dtype=torch.int64)
    seen_QK = function(zero, zero, positions_Q[:, None], positions_Q[:, None] - back_K)
    count, later_count = (int(count) for count in seen_QK.expand(2, _WIDEST).sum(-1))
    if count != later_count:
        return _IRREGULAR
    return _EVERYTHING if count == _WIDEST else count
