"""Check at every load, on a few tokens, that a model computes the same logprobs on packed rows as on single sequences.

``loading`` calls it in each trainer rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.attention import (
    ATTENTION_NAME,
    PackedSequence,
    chunk_of_mask,
    has_bfloat16,
    packed_attention,
    packed_layout,
    register_packed_attention,
)
from streamrl.learning.model.first_difference import first_difference
from streamrl.learning.model.hugging_face import AttentionInterface, AttentionMaskInterface
from streamrl.learning.model.local_shards import local_part
from streamrl.learning.model.policy import PackedPolicy, empty_micro_batch
from streamrl.learning.model.recurrent import recurrent_layers
from streamrl.learning.model.text_part import placeholder_tokens

TOLERANCE = 1e-3
"""Largest allowed difference of logprobs, in nats. Rounding of deep float32 models is below, a missing cap above it."""
FLASH_TOLERANCE = 2**-5
"""Largest allowed difference of the attention of the flash kernel, as a share of the largest value: its rounding to
bfloat16 is a quarter of it."""
_ROW = (PackedSequence(0, 4), PackedSequence(4, 3, prefix=0), PackedSequence(7, 5))
_SINGLE_LENGTHS = (7, 5)
"""Twelve tokens: a prompt, its continuation, and another sequence. As single sequences they have 7 and 5 tokens."""
_FAR = 1 << 40
_WIDEST = 1 << 18
_EVERYTHING = -1
_IRREGULAR = -2

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@torch.no_grad()
def check_packing(policy: PackedPolicy, *, sixteen_bit: bool) -> None:
    """Compare a packed forward with the model's own forward of each sequence, on tokens spread over the vocabulary.
    Leaves the model on packed attention. Raises ``StreamRLError`` with the measured difference.

    ``sixteen_bit``: whether the model is trained in bfloat16, on a GPU by the flash kernel, which is then compared with
    the float32 attention of the packed forward."""
    model = policy.hugging_face
    kind = f"model type {model.config.model_type!r}"
    for name, weight in model.named_parameters():
        part = local_part(weight)
        if part.numel() and not all(isfinite(bound) for bound in part.aminmax()):
            raise StreamRLError(f"{kind}: the weight {name} has NaN or infinite values: repair or replace the model")
    tokens_T = _probe_tokens(model)
    try:
        policy.set_attention(register_packed_attention())
        # Packed forwards run first: with sharded parameters, they gather the parameters that the next forward needs.
        attending = _check_windows(policy, tokens_T[: _ROW[0].length])
        policy.recurrent.take(model, recurrent_layers(model, attending))
        policy.recurrent.measure(lambda: _packed_logprobs(policy, tokens_T, _ROW))
        actual_TV = _packed_logprobs(policy, tokens_T, _ROW)
        if sixteen_bit and has_bfloat16(tokens_T.device):
            _check_flash(policy, tokens_T)
        expected_TV = _single_logprobs(policy, tokens_T)
    except StreamRLError:
        raise
    except Exception as error:
        raise StreamRLError(
            f"{kind} cannot be trained on packed rows: its forward fails with {type(error).__name__}: {error}"
        ) from error
    difference = float((actual_TV - expected_TV).abs().max())
    if not difference <= TOLERANCE and policy.recurrent.in_kernels:
        policy.recurrent.leave_kernels()
        difference = float((_packed_logprobs(policy, tokens_T, _ROW) - expected_TV).abs().max())
    if not difference <= TOLERANCE:  # also when it is NaN
        raise StreamRLError(
            f"{kind} gives other logprobs on packed rows than on single sequences (largest difference "
            f"{difference:.3g}, tolerated {TOLERANCE:g}): {_cause(policy, tokens_T)}"
        )


def _cause(policy: PackedPolicy, tokens_T: Tensor) -> str:
    """Return which layer makes packed rows differ: one whose outputs for a sequence depend on the sequence before it,
    or else one whose outputs for a sequence are others than alone."""
    model = policy.hugging_face
    first, second = _SINGLE_LENGTHS
    two = [PackedSequence(0, first), PackedSequence(first, second)]
    of_second = slice(first, first + second)
    others_T = torch.cat([tokens_T[:first].flip(0), tokens_T[of_second]])

    def packed(row_T: Tensor) -> Callable[[], Tensor]:
        return lambda: _packed_logprobs(policy, row_T, two)

    if name := first_difference(model, packed(tokens_T), packed(others_T), of_second):
        return f"{name} carries a state over the border of two sequences: give a model without such layers"

    def alone() -> None:
        policy.set_attention("eager")
        policy.forget_row()
        model(input_ids=tokens_T[None, of_second], use_cache=False)

    name = first_difference(model, packed(tokens_T), alone, of_second)
    policy.set_attention(register_packed_attention())
    if name:
        return f"{name} gives a sequence other outputs than alone, which packing cannot repeat"
    return "its output head does something that packing cannot repeat"


def _probe_tokens(model: Any) -> Tensor:
    """Tokens of the single sequences, spread over the vocabulary."""
    end = 1 + sum(_SINGLE_LENGTHS)
    vocabulary = model.config.get_text_config().vocab_size
    placeholders = placeholder_tokens(model.config)
    spread = [number * vocabulary // end for number in range(1, end)]
    tokens = [next(token for token in range(first, vocabulary) if token not in placeholders) for first in spread]
    return torch.tensor(tokens, device=model.device)


def _single_logprobs(policy: PackedPolicy, tokens_T: Tensor) -> Tensor:
    """Log-softmax of each single sequence, through the model's own attention and head. Float32 [T, V]."""
    policy.set_attention("eager")
    policy.forget_row()
    try:
        parts = [
            policy.hugging_face(input_ids=ids[None], use_cache=False).logits[0]
            for ids in torch.split(tokens_T, list(_SINGLE_LENGTHS))
        ]
    finally:
        policy.set_attention(register_packed_attention())
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


def _check_windows(policy: PackedPolicy, tokens_T: Tensor) -> list[Module]:
    """Check that each attention function gets the window of its layer's mask: a few tokens are not enough to show a
    window of 4096 in the logprobs. Each mask is replaced by a tensor that holds its reach. Returns the modules that
    call the attention function."""
    mismatches: dict[str, str] = {}
    attending: list[Module] = []

    def mask(*_: Any, mask_function: MaskFunction, **options: Any) -> Tensor | int:
        chunk = chunk_of_mask(**options)
        if chunk is not None and _is_chunked(mask_function, chunk):
            return chunk
        reach = _reach(mask_function)
        return torch.full((1, 1, len(tokens_T), len(tokens_T)), reach, dtype=torch.int64, device=tokens_T.device)

    def attention(
        module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | int | None, **options: Any
    ) -> tuple[Tensor, None]:
        attending.append(module)
        if isinstance(attention_mask, int):
            return packed_attention(module, query, key, value, attention_mask, **options)
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
    return attending


def _is_chunked(function: MaskFunction, chunk: int) -> bool:
    """Return whether the first token of the second chunk attends to no token of the first one, and the last does."""
    zero = torch.zeros((), dtype=torch.int64)
    places_Q = torch.tensor([chunk - 1, chunk])
    seen_QK = function(zero, zero, places_Q[:, None], torch.arange(chunk)[None])
    return seen_QK.expand(2, chunk).sum(-1).tolist() == [chunk, 0]


def _check_flash(policy: PackedPolicy, tokens_T: Tensor) -> None:
    """Check that the flash kernel attends in a packed row as the float32 attention does, in each layer."""
    differences: list[float] = []

    def attention(
        module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | int | None, **options: Any
    ) -> tuple[Tensor, None]:
        query, key, rounded = (tensor.bfloat16() for tensor in (query, key, value))
        actual, _ = packed_attention(module, query, key, rounded, mask, **options)
        exact, _ = packed_attention(module, query.float(), key.float(), rounded.float(), mask, **options)
        differences.append(float((actual.float() - exact).abs().max() / rounded.abs().max().clamp_min(1e-30)))
        return exact.to(value.dtype), None

    try:
        AttentionInterface.register(ATTENTION_NAME, attention)
        _packed_logprobs(policy, tokens_T, _ROW)
    finally:
        register_packed_attention()
    largest = float(torch.tensor([0.0, *differences]).max())  # a layer that carries a state has no attention
    if not largest <= FLASH_TOLERANCE:  # also when it is NaN
        raise StreamRLError(
            f"model type {policy.hugging_face.config.model_type!r}: torch's flash attention gives other outputs on "
            f"packed rows than in float32 (largest difference {largest:.3g} of the largest value, tolerated "
            f'{FLASH_TOLERANCE:g}): set training.compute_dtype = "float32", or another torch'
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
