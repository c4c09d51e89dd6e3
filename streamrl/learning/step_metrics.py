"""Metrics of one optimizer step, reduced over the ranks and so equal on each. Their names are in docs/metrics.md.

``trainer`` and ``updates`` call it in each trainer rank, when a batch is closed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache
from logging import getLogger

import numpy as np
import torch
from torch.distributed import ReduceOp

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import CloseBatch, WeightSource
from streamrl.base.types import Metrics
from streamrl.learning.batches.gradients import BatchSums, TokenSums
from streamrl.learning.batches.packing import PreparedSample
from streamrl.learning.model.policy import PackedPolicy
from streamrl.learning.objective.objectives import loss_denominator
from streamrl.learning.options import TrainerOptions
from streamrl.learning.process_group import all_gather_bytes, all_reduce

log = getLogger(__name__)


def check_totals(sums: BatchSums, close: CloseBatch, device: torch.device, copies: int) -> None:
    """Raise ``StreamRLError`` when all ranks together did not receive the totals of ``close``. ``copies``: number of
    ranks that have the same rows. Collective."""
    counts = [float(count) for count in (sums.groups, sums.samples, sums.trained_tokens)]
    received = tuple(int(count) for count in all_reduce(counts, device, copies=copies))
    if received != (close.groups, close.samples, close.trained_tokens):
        raise StreamRLError(
            f"batch {close.batch_id} was closed with {close.groups} groups, {close.samples} samples and "
            f"{close.trained_tokens} trained tokens, but the ranks received {received[0]}, {received[1]} and "
            f"{received[2]}: a group was lost or sent twice"
        )


def policy_metrics(sums: BatchSums, options: TrainerOptions, device: torch.device) -> Metrics:
    """Metrics of the batch over all ranks. Collective. Token means are over the computed tokens: groups without signal
    are not computed. A batch without computed tokens has no token means."""
    # The ranks of a context group count the same groups, and each sums over its own tokens.
    counted = (sums.groups_without_signal, sums.loss_tokens, sums.samples)
    counts = [count / options.context_parallel_size for count in counted]
    values = all_reduce([*counts, *astuple(sums.tokens)], device, copies=options.tensor_parallel_size)
    without_signal, loss_tokens, samples = values[:3]
    total = TokenSums(*values[3:])
    [seconds] = all_reduce([sums.seconds], device, ReduceOp.MAX)
    rank_differences = b"".join(differences_N.cpu().numpy().tobytes() for differences_N in sums.differences)
    # The ranks of a tensor parallel group have the same rows: one of each group is enough.
    gathered = all_gather_bytes(rank_differences)[:: options.tensor_parallel_size]
    all_differences_N = np.frombuffer(b"".join(gathered), dtype=np.float32)
    denominator = loss_denominator(
        options.objective.loss_normalization, samples=samples, trained_tokens=loss_tokens, max_tokens=options.max_tokens
    )
    denominator *= options.epochs_per_batch  # the sums are over all passes
    metrics = {
        "optim/loss": total.loss / denominator,
        "optim/groups_without_signal": without_signal,
        "time/forward_backward_s": seconds,
        "perf/forward_backward_tok_s": total.packed_tokens / seconds if seconds else 0.0,
    }
    if total.imitated_tokens:
        metrics["observations/loss"] = total.imitation / total.imitated_tokens
        metrics["observations/tokens"] = total.imitated_tokens
    if total.on_policy_tokens:
        metrics["policy/mismatch_abs_mean"] = total.mismatch / total.on_policy_tokens
        metrics["policy/mismatch_below_ratio"] = total.far_below / total.on_policy_tokens
    if computed := total.computed_tokens:
        effective_samples = 0.0
        if total.importance_square:
            effective_samples = total.importance**2 / (computed * total.importance_square)
        metrics |= {
            "policy/entropy": total.entropy / computed,
            "policy/clip_ratio": total.clipped / computed,
            "policy/masked_ratio": total.masked / computed,
            "policy/correction_mean": total.correction / computed,
            "policy/kl_rollout": total.kl / computed,
            "policy/is_weight_mean": total.importance / computed,
            "policy/ess": effective_samples,
            "policy/logprob_diff_abs_mean": float(all_differences_N.mean(dtype=np.float64)),
            "policy/logprob_diff_abs_p99": float(np.percentile(all_differences_N, 99)),
        }
        if options.sampling.removes_tokens:
            metrics["policy/kept_set_ratio"] = total.kept_sets / computed
        if options.objective.kl_coefficient:
            metrics["policy/reference_kl"] = total.reference_kl / computed
        if options.objective.distils:
            metrics["policy/teacher_kl"] = total.teacher_kl / computed
        if options.objective.has_critic:
            metrics["optim/value_loss"] = total.value_loss / denominator
    return metrics


def expert_metrics(policy: PackedPolicy, unreplayed: float, options: TrainerOptions) -> Metrics:
    """Load of the experts since the last call, over all ranks; empty for a model without experts. Collective. Warns
    once about a batch that has no token whose experts an engine returned. ``unreplayed``: number of tokens of this rank
    whose experts no engine returned."""
    if policy.experts is None:
        return {}
    rank_loads_LE, replayed = policy.experts.take_loads()
    values = [unreplayed, float(replayed), *rank_loads_LE.flatten().tolist()]
    all_unreplayed, all_replayed, *loads = all_reduce(values, rank_loads_LE.device, copies=options.tensor_parallel_size)
    loads_LE = np.array(loads).reshape(rank_loads_LE.shape)
    loads_LE = loads_LE[loads_LE.sum(1) > 0]  # without layers that have no experts or trained no token
    metrics = {}
    if options.routing_replay is True:
        metrics["experts/unreplayed_tokens"] = all_unreplayed
        if len(loads_LE) and not all_replayed:
            _warn_that_nothing_is_replayed()
    if len(loads_LE):
        shares_LE = loads_LE / loads_LE.sum(1, keepdims=True)
        entropies_L = -(shares_LE * np.log(np.maximum(shares_LE, 1e-30))).sum(1)
        metrics["experts/busiest_share"] = float(shares_LE.max()) * policy.experts.top_k
        metrics["experts/load_entropy"] = float(entropies_L.mean() / np.log(policy.experts.number))
    return metrics


@cache
def _warn_that_nothing_is_replayed() -> None:
    log.warning(
        "training.advanced.routing_replay: engines returned the experts of no token of a batch, and the trainer chose "
        "its own: update vllm on their hosts, or set it to false in the next run"
    )


def update_lengths(
    first: Sequence[PreparedSample],
    last: Sequence[PreparedSample],
    sum_over_ranks: Callable[[list[float]], list[float]],
) -> Metrics:
    """Mean trained tokens of a sample in the first and the last update on a batch. Collective."""
    samples = [float(len(share)) for share in (first, last)]
    tokens = [float(sum(item.sample.trained_tokens for item in share)) for share in (first, last)]
    first_tokens, last_tokens, first_samples, last_samples = sum_over_ranks(tokens + samples)
    metrics = {}
    if first_samples:
        metrics["length/first_update"] = first_tokens / first_samples
    if last_samples:
        metrics["length/last_update"] = last_tokens / last_samples
    return metrics


def publishing_metrics(source: WeightSource, device: torch.device) -> Metrics:
    """Share of the weights that changed, and bytes of the push. Collective."""
    changed, elements, payload = all_reduce(
        [float(source.changed_elements), float(source.total_elements), float(source.payload_bytes)], device
    )
    return {"weights/changed_ratio": changed / max(1.0, elements), "weights/payload_bytes": payload}
