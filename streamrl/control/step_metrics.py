"""What one batch says about itself: pure functions from scored trajectories to named figures (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from statistics import fmean, pstdev

from streamrl.buffers.slots import staleness
from streamrl.types import FinishReason, ScoredTrajectory


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie (nearest rank). 0.0 for no values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def reward_metrics(batch: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """``reward/*`` over trained samples and within groups."""
    rewards = [s.reward for s in batch]
    groups = [[s.reward for s in members] for members in _groups(batch)]
    deviations = [pstdev(g) for g in groups]
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/group_std_mean": fmean(deviations),
        "reward/zero_std_ratio": sum(d == 0 for d in deviations) / len(groups),
    }
    for name in sorted({name for s in batch for name in s.reward_parts}):
        values = [s.reward_parts[name] for s in batch if name in s.reward_parts]
        metrics[f"reward/func/{name}/mean"] = fmean(values)
        metrics[f"reward/func/{name}/std"] = pstdev(values)
    seconds = [s.reward_seconds for s in batch]
    metrics["reward/latency_p50_s"] = percentile(seconds, 0.5)
    metrics["reward/latency_p95_s"] = percentile(seconds, 0.95)
    return metrics


def completion_metrics(batch: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """``completion/*``: lengths in sampled tokens, and how completions ended."""
    lengths = [s.trajectory.generated_tokens for s in batch]
    reasons = [s.trajectory.finish_reason for s in batch]
    seconds = [s.trajectory.rollout_seconds for s in batch]
    return {
        "completion/length_mean": fmean(lengths),
        "completion/length_p50": percentile(lengths, 0.5),
        "completion/length_p95": percentile(lengths, 0.95),
        "completion/length_max": max(lengths),
        "completion/truncated_ratio": sum(r is FinishReason.LENGTH for r in reasons) / len(batch),
        "completion/eos_ratio": sum(r is FinishReason.STOP for r in reasons) / len(batch),
        "time/rollout_p50_s": percentile(seconds, 0.5),
        "time/rollout_p95_s": percentile(seconds, 0.95),
        "time/rollout_p99_s": percentile(seconds, 0.99),
    }


def staleness_metrics(batch: Sequence[ScoredTrajectory], trained_at: int) -> dict[str, float]:
    """``async/staleness_*``: ``trained_at`` is the version that the trainer held when it consumed the batch."""
    newest = [staleness(trained_at, s.trajectory.newest_version) for s in batch]
    oldest = [staleness(trained_at, s.trajectory.oldest_version) for s in batch]
    versions = [s.trajectory.newest_version - s.trajectory.oldest_version + 1 for s in batch]
    return {
        "async/staleness_mean": fmean(newest),
        "async/staleness_max": max(newest),
        "async/staleness_p95": percentile(newest, 0.95),
        "async/staleness_oldest_max": max(oldest),
        "async/versions_per_sample_mean": fmean(versions),
    }


def _groups(batch: Sequence[ScoredTrajectory]) -> Iterable[list[ScoredTrajectory]]:
    ordered = sorted(batch, key=lambda s: s.trajectory.id.group_id)
    return (list(members) for _, members in groupby(ordered, key=lambda s: s.trajectory.id.group_id))
