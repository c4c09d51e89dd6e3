"""What one optimizer step reports. Reduced over the ranks, so equal on each. Names: docs/metrics.md."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from streamrl.errors import StreamRLError
from streamrl.learning.gradients import BatchSums
from streamrl.learning.losses import loss_denominator
from streamrl.learning.options import TrainerOptions
from streamrl.learning.process_group import all_gather_values, all_reduce
from streamrl.messages import CloseBatch, WeightSource


def policy_metrics(
    sums: BatchSums, options: TrainerOptions, close: CloseBatch, device: torch.device
) -> tuple[dict[str, float], float]:
    """Metrics of the batch over all ranks, and how many tokens were computed. Collective.

    Token means are over the computed tokens (groups without signal are not computed); where there are none,
    they are absent. Raises ``StreamRLError`` when the ranks together did not get what control closed.
    """
    counts = [float(n) for n in (sums.groups, sums.samples, sums.trained_tokens, sums.groups_without_signal)]
    tokens = [float(sums.packed_tokens), float(sums.computed_tokens)]
    values = [sums.loss, sums.entropy, sums.clipped, sums.kl, sums.importance, sums.importance_square]
    total = all_reduce(counts + tokens + values, device)
    [seconds] = all_reduce([sums.seconds], device, dist.ReduceOp.MAX)
    received = (int(total[0]), int(total[1]), int(total[2]))
    if received != (close.groups, close.samples, close.trained_tokens):
        raise StreamRLError(
            f"batch {close.batch_id} was closed with {close.groups} groups, {close.samples} samples and "
            f"{close.trained_tokens} trained tokens, but the ranks received {received[0]}, {received[1]} and "
            f"{received[2]}: a group was lost or sent twice"
        )
    differences = sums.differences or [torch.zeros(0, device=device)]
    gathered = all_gather_values(torch.cat(differences)).cpu().numpy()
    denominator = loss_denominator(
        options.loss_normalization,
        samples=close.samples,
        trained_tokens=close.trained_tokens,
        max_tokens=options.max_tokens,
    )
    packed, computed, loss, entropy, clipped, kl, importance, square = total[4:]
    metrics = {
        "optim/loss": loss / denominator,
        "optim/groups_without_signal": total[3],
        "time/forward_backward_s": seconds,
        "perf/forward_backward_tok_s": packed / seconds if seconds else 0.0,
    }
    if computed:
        metrics |= {
            "policy/entropy": entropy / computed,
            "policy/clip_ratio": clipped / computed,
            "policy/kl_rollout": kl / computed,
            "policy/is_weight_mean": importance / computed,
            "policy/ess": importance**2 / (computed * square) if square else 0.0,
            "policy/logprob_diff_abs_mean": float(gathered.mean(dtype=np.float64)),
            "policy/logprob_diff_abs_p99": float(np.percentile(gathered, 99)),
        }
    return metrics, computed


def publishing_metrics(source: WeightSource, device: torch.device) -> dict[str, float]:
    """How much of the weights changed, and what the push weighs. Collective."""
    changed, elements, payload = all_reduce(
        [float(source.changed_elements), float(source.total_elements), float(source.payload_bytes)], device
    )
    return {"weights/changed_ratio": changed / max(1.0, elements), "weights/payload_bytes": payload}
