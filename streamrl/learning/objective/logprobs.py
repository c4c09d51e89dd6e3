"""Logprobs of sampled tokens under the distribution that the engine sampled from, and its entropy.

``batches.processed_logprobs`` calls it in each trainer rank, and vLLM's worker on a CPU calls ``removed_tokens``
(``engines.vllm.sampler_patches``). Outside of vLLM a sampling setting has its effect here alone. Shapes: ``N`` trained
tokens, ``V`` vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamrl.base.types import UNCHANGED, TokenDistribution


def removed_tokens(logits_NV: Tensor, settings: TokenDistribution) -> Tensor | None:
    """Mask of the tokens that vLLM's sampler removes by min-p, top-k and top-p: bool [N, V], None where ``settings``
    remove none. ``logits_NV``: logits that the temperature has divided.

    It repeats vLLM 0.32 (``MinPLogitsProcessor``, ``apply_top_k_top_p_pytorch``) operation for operation in float32
    (ascending sort, softmax, cumulative sum, ``<= 1 - p``, the last token always stays), so that equal logits give an
    equal nucleus. Either of two tied tokens at the edge may be removed; both have the same probability, so the
    renormalised logprobs are the same. Logits that differ in the last bits can move a token at the very edge."""
    if not settings.removes_tokens:
        return None
    if settings.min_p > 0:
        probabilities_NV = logits_NV.softmax(dim=-1)
        unlikely_NV = probabilities_NV < probabilities_NV.amax(-1, keepdim=True) * settings.min_p
        logits_NV = logits_NV.masked_fill(unlikely_NV, -torch.inf)
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=False)
    if 0 < settings.top_k < sorted_NV.shape[-1]:
        sorted_NV = sorted_NV.masked_fill(sorted_NV < sorted_NV[:, -settings.top_k, None], -torch.inf)
    removed_NV = sorted_NV == -torch.inf
    if settings.top_p < 1:
        threshold = 1 - torch.tensor(settings.top_p, dtype=torch.float32, device=logits_NV.device)
        removed_NV |= torch.cumsum(sorted_NV.softmax(dim=-1), dim=-1) <= threshold
    removed_NV[:, -1] = False
    return torch.zeros_like(removed_NV).scatter_(-1, order_NV, removed_NV)


def outside_of_kept_sets(logits_NV: Tensor, settings: TokenDistribution, kept_NK: Tensor) -> Tensor:
    """Mask of the tokens that could not be sampled, as the engine removed them: bool [N, V].

    ``kept_NK``: kept set of each row, with -1 behind its last token. Where the set of a row is not known (-1 alone),
    the mask is that of ``removed_tokens``.

    Logits that have moved since keep other tokens, and weights of stale tokens would not be those of the distribution
    that they were sampled from."""
    rows, vocabulary = logits_NV.shape
    outside_NV = torch.ones((rows, vocabulary + 1), dtype=torch.bool, device=logits_NV.device)
    outside_NV.scatter_(-1, kept_NK.where(kept_NK >= 0, vocabulary), False)
    outside_NV = outside_NV[:, :vocabulary]
    unknown_N = kept_NK[:, 0] < 0
    if unknown_N.any():
        removed_NV = removed_tokens(logits_NV[unknown_N], settings)
        outside_NV[unknown_N] = False if removed_NV is None else removed_NV
    return outside_NV


class _SampledLogprobs(torch.autograd.Function):
    """Log-softmax at one target of each row and the entropy of the row, with one [N, V] buffer.

    ``log_softmax`` followed by ``exp`` keeps two such buffers and computes the exponential twice more (for the entropy
    and in its backward). Here exp(logits - max) is computed once. The backward scales it in place into the gradient, so
    a second backward through the same result raises. A sum over the row is pairwise, so the result is also nearer to
    float64."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        largest_N = logits_NV.amax(-1)
        exponentials_NV = (logits_NV - largest_N[:, None]).exp_()
        sum_N = exponentials_NV.sum(-1)
        log_sum_N = sum_N.log()
        with torch.autocast(logits_NV.device.type, enabled=False):  # autocast would compute the products in bfloat16
            mean_logit_N = torch.linalg.vecdot(exponentials_NV, logits_NV) / sum_N
        entropy_N = log_sum_N + (largest_N - mean_logit_N)
        if entropy_gradient:
            ctx.save_for_backward(exponentials_NV, sum_N, targets_N, logits_NV, mean_logit_N)
        else:
            ctx.save_for_backward(exponentials_NV, sum_N, targets_N)
            ctx.mark_non_differentiable(entropy_N)
        return logits_NV.gather(-1, targets_N[:, None])[:, 0] - largest_N - log_sum_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logprob_gradient_N, entropy_gradient_N = gradients
        exponentials_NV, sum_N, targets_N, *entropy_tensors = ctx.saved_tensors
        from_entropy_NV = None
        if entropy_tensors:
            # d entropy / d logit = -p (log p + entropy). p is multiplied first: it is 0 for a removed token, whose
            # logit is huge.
            logits_NV, mean_logit_N = entropy_tensors
            from_entropy_NV = (logits_NV - mean_logit_N[:, None]).mul_(exponentials_NV)
            from_entropy_NV.mul_((entropy_gradient_N / sum_N)[:, None])
        gradient_NV = exponentials_NV.mul_((-logprob_gradient_N / sum_N)[:, None])
        gradient_NV.scatter_add_(-1, targets_N[:, None], logprob_gradient_N[:, None])
        if from_entropy_NV is not None:
            gradient_NV.sub_(from_entropy_NV)
        return gradient_NV, None, None


def processed_logits(
    logits_NV: Tensor,
    settings: TokenDistribution = UNCHANGED,
    *,
    temperature_N: Tensor | None = None,
    excluded: tuple[Tensor, Sequence[int]] | None = None,
) -> Tensor:
    """Logits, float32 [N, V], divided by the temperature, and as low as they can be for excluded tokens. Arguments as
    for ``token_logprobs``."""
    # float64 is not rounded: tests compute references with it.
    scaled_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if temperature_N is not None:
        scaled_NV = scaled_NV / temperature_N[:, None]
    elif settings.temperature != 1.0:
        scaled_NV = scaled_NV / settings.temperature
    if excluded is not None:
        removed_NV = torch.zeros_like(scaled_NV, dtype=torch.bool)
        removed_NV[:, list(excluded[1])] = excluded[0][:, None]
        scaled_NV = scaled_NV.masked_fill(removed_NV, _lowest(scaled_NV))
    return scaled_NV


def _lowest(logits_NV: Tensor) -> float:
    """Logit of a removed token; not -inf: 0 * -inf in the entropy is NaN."""
    return torch.finfo(logits_NV.dtype).min


def token_logprobs(
    logits_NV: Tensor,
    targets_N: Tensor,
    settings: TokenDistribution = UNCHANGED,
    *,
    temperature_N: Tensor | None = None,
    excluded: tuple[Tensor, Sequence[int]] | None = None,
    kept_NK: Tensor | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Logprobs of the targets under the processed distribution, and its entropy in nats. Float32 [N] and [N].

    The processing is the engine's: divide by the temperature, remove the tokens outside of the nucleus, renormalise.
    Logits must be finite. The target was inside of the nucleus when it was sampled, so it always stays: its logprob is
    finite.

    ``temperature_N``: temperature of each row, [N], in place of that of ``settings``.
    ``excluded``: rows (bool [N]) and the token ids that could not be sampled in these rows.
    ``kept_NK``: kept set of each row (``outside_of_kept_sets``); None: the tokens that ``settings`` remove from these
    logits are removed.
    ``entropy_gradient``: whether the entropy can be differentiated; then the logits are kept for it."""
    scaled_NV = processed_logits(logits_NV, settings, temperature_N=temperature_N, excluded=excluded)
    if kept_NK is None:
        cut_NV = removed_tokens(scaled_NV.detach(), settings)
    else:
        cut_NV = outside_of_kept_sets(scaled_NV.detach(), settings, kept_NK)
    if cut_NV is not None:
        scaled_NV = scaled_NV.masked_fill(cut_NV.scatter_(-1, targets_N[:, None], False), _lowest(scaled_NV))
    result: tuple[Tensor, Tensor] = _SampledLogprobs.apply(  # type: ignore[no-untyped-call]
        scaled_NV, targets_N, entropy_gradient
    )
    return result
