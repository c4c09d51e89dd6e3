"""Metrics of one optimizer step. Reduced over the ranks, so equal on each. Names: docs/metrics.md."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import cache

import numpy as np
import torch
import torch.distributed as dist

from streamrl.base.errors import StreamRLError
from streamrl.base.messages import CloseBatch, WeightSource
from streamrl.learning.batches.gradients import BatchSums, TokenSums
from streamrl.learning.batches.packing import PreparedSample
from streamrl.learning.model.policy import PackedPolicy
from streamrl.learning.objective.objectives import loss_denominator
from streamrl.learning.options import TrainerOptions
from streamrl.learning.process_group import all_gather_bytes, all_reduce

log = logging.getLogger(__name__)


def check_totals(sums: BatchSums, close: CloseBatch, device: torch.device, copies: int) -> None:
    """Raises ``StreamRLError`` when the ranks together did not get what control closed. ``copies``: ranks
    that have the same rows. Collective."""
    counts = [float(n) for n in (sums.groups, sums.samples, sums.trained_tokens)]
    received = tuple(int(count) for count in all_reduce(counts, device, copies=copies))
    if received != (close.groups, close.samples, close.trained_tokens):
        raise StreamRLError(
            f"batch {close.batch_id} was closed with {close.groups} groups, {close.samples} samples and "
            f"{close.trained_tokens} trained tokens, but the ranks received {received[0]}, {received[1]} and "
            f"{received[2]}: a group was lost or sent twice"
        )


def policy_metrics(sums: BatchSums, options: TrainerOptions, device: torch.device) -> dict[str, float]:
    """Metrics of the batch over all ranks. Collective. Token means are over the computed tokens (groups without signal
    are not computed); where there are none, they are absent."""
    # The ranks of a context group count the same groups, and sum over tokens of their own.
    counted = (sums.groups_without_signal, sums.loss_tokens, sums.samples)
    counts = [count / options.context_parallel_size for count in counted]
    values = all_reduce([*counts, *astuple(sums.tokens)], device, copies=options.tensor_parallel_size)
    without_signal, loss_tokens, samples = values[:3]
    total = TokenSums(*values[3:])
    [seconds] = all_reduce([sums.seconds], device, dist.ReduceOp.MAX)
    mine = b"".join(differences_N.cpu().numpy().tobytes() for differences_N in sums.differences)
    gathered = np.frombuffer(b"".join(all_gather_bytes(mine)[:: options.tensor_parallel_size]), dtype=np.float32)
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
    if total.on_policy_tokens:
        metrics["policy/mismatch_abs_mean"] = total.mismatch / total.on_policy_tokens
    if computed := total.computed_tokens:
        metrics |= {
            "policy/entropy": total.entropy / computed,
            "policy/clip_ratio": total.clipped / computed,
            "policy/masked_ratio": total.masked / computed,
            "policy/correction_mean": total.correction / computed,
            "policy/kl_rollout": total.kl / computed,
            "policy/is_weight_mean": total.importance / computed,
            "policy/ess": total.importance**2 / (computed * total.importance_square)
            if total.importance_square
            else 0.0,
            "policy/logprob_diff_abs_mean": float(gathered.mean(dtype=np.float64)),
            "policy/logprob_diff_abs_p99": float(np.percentile(gathered, 99)),
        }
        if options.objective.has_reference:
            metrics["policy/reference_kl"] = total.reference_kl / computed
        if options.objective.has_critic:
            metrics["optim/value_loss"] = total.value_loss / denominator
    return metrics


def expert_metrics(policy: PackedPolicy, unreplayed: float, options: TrainerOptions) -> dict[str, float]:
    """Load of the experts since the last call, over all ranks; empty for a model without experts. ``unreplayed``:
    tokens of this rank. Collective. Warns once of a batch that has no token whose experts an engine returned."""
    if policy.experts is None:
        return {}
    mine = policy.experts.take_loads()
    values = all_reduce([unreplayed, *mine.flatten().tolist()], mine.device, copies=options.tensor_parallel_size)
    loads_LE = np.array(values[1:]).reshape(mine.shape)
    loads_LE = loads_LE[loads_LE.sum(1) > 0]  # without layers that have none, or of a batch that trained nothing
    metrics = {"experts/unreplayed_tokens": values[0]} if options.routing_replay is True else {}
    if metrics and 0 < loads_LE.sum(initial=0) <= values[0] * policy.experts.top_k * len(loads_LE):
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
    first: Sequence[PreparedSample], last: Sequence[PreparedSample], over_ranks: Callable[[list[float]], list[float]]
) -> dict[str, float]:
    """Mean trained tokens of a sample in the first and the last update on a batch. ``over_ranks``: sums. Collective."""
    samples = [float(len(share)) for share in (first, last)]
    tokens = [float(sum(item.sample.trained_tokens for item in share)) for share in (first, last)]
    *tokens, in_first, in_last = over_ranks(tokens + samples)
    names = ("length/first_update", "length/last_update")
    return {n: t / count for n, t, count in zip(names, tokens, (in_first, in_last), strict=True) if count}


def publishing_metrics(source: WeightSource, device: torch.device) -> dict[str, float]:
    """Share of the weights that changed, and bytes of the push. Collective."""
    changed, elements, payload = all_reduce(
        [float(source.changed_elements), float(source.total_elements), float(source.payload_bytes)], device
    )
    return {"weights/changed_ratio": changed / max(1.0, elements), "weights/payload_bytes": payload}
