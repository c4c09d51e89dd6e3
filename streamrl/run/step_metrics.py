"""Metrics of one batch: pure functions from scored trajectories to named figures (docs/metrics.md)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean, pstdev

import msgspec

from streamrl.base.types import FinishReason, ScoredTrajectory
from streamrl.buffers.slots import staleness
from streamrl.control.model import RunState

UNSEEN = 0.05
"""``length/unbiased_mean`` is reported where lengths that were not observed to their end cannot add more than this
share to it."""


class SampledLength(msgspec.Struct, frozen=True):
    """One trajectory's sampled tokens. ``whole``: it ended by itself or at the limit."""

    tokens: int
    whole: bool
    truncated: bool
    round_kind: str


class StepWindow(msgspec.Struct):
    """Trajectories that ended since the last step: sampled (whole, or stopped with the tokens until then), trained; and
    the rewards of the trained ones and of those that were rewarded and then discarded, by kind of round."""

    sampled: list[SampledLength] = []
    trained: list[SampledLength] = []
    kept_rewards: dict[str, list[float]] = msgspec.field(default_factory=lambda: defaultdict(list))
    discarded_rewards: dict[str, list[float]] = msgspec.field(default_factory=lambda: defaultdict(list))


class FirstLengths(msgspec.Struct):
    """Lengths of first attempts since the run began, by number of tokens: ``whole`` ones and those ``stopped`` there;
    and of all trained samples. ``limit``: tokens that one may have; 0: which ones are stopped depends on how long they
    would be (siblings race each other), and nothing is counted."""

    limit: int
    whole: Counter[int] = msgspec.field(default_factory=Counter)
    stopped: Counter[int] = msgspec.field(default_factory=Counter)
    trained_tokens: int = 0
    trained_samples: int = 0


def reward_metrics(batch: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """``reward/*`` over trained samples and within groups. A group of one has no deviation: a batch of such groups has
    neither ``reward/group_std_mean`` nor ``reward/zero_std_ratio``."""
    rewards = [s.reward for s in batch]
    deviations = [pstdev([s.reward for s in members]) for members in _groups(batch) if len(members) > 1]
    metrics = {
        "reward/mean": fmean(rewards),
        "reward/std": pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
    }
    if deviations:
        metrics["reward/group_std_mean"] = fmean(deviations)
        metrics["reward/zero_std_ratio"] = sum(d == 0 for d in deviations) / len(deviations)
    for name, values in part_values(batch).items():
        metrics[f"reward/func/{name}/mean"] = fmean(values)
        metrics[f"reward/func/{name}/std"] = pstdev(values)
    seconds = [s.reward_seconds for s in batch]
    metrics["reward/latency_p50_s"] = percentile(seconds, 0.5)
    metrics["reward/latency_p95_s"] = percentile(seconds, 0.95)
    return metrics


def part_values(scored: Iterable[ScoredTrajectory]) -> dict[str, list[float]]:
    """Values of each named part of the rewards, ascending by name."""
    parts: defaultdict[str, list[float]] = defaultdict(list)
    for one in scored:
        for name, value in one.reward_parts.items():
            parts[name].append(value)
    return dict(sorted(parts.items()))


def completion_metrics(batch: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """``completion/*``: lengths in sampled tokens, and how completions ended; ``environment/*`` where there is one."""
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
        **_environment_metrics(batch),
    }


def _environment_metrics(batch: Sequence[ScoredTrajectory]) -> dict[str, float]:
    """``environment/*``: turns, time between them, and calls of tools; nothing of a run without an environment."""
    found = [(s.trajectory, e) for s in batch if (e := s.trajectory.environment) is not None]
    if not found:
        return {}
    turns = [sum(segment.trained for segment in trajectory.segments) for trajectory, _ in found]
    appended = [sum(len(s.token_ids) for s in trajectory.segments if not s.trained) for trajectory, _ in found]
    seconds = [environment.seconds for _, environment in found]
    calls = Counter[str]()
    notes = Counter[str]()
    for _, environment in found:
        calls.update(environment.calls)
        notes.update(environment.notes)
    limited = sum(trajectory.finish_reason is FinishReason.TURNS for trajectory, _ in found)
    made = calls.total()
    return {
        "environment/turns_mean": fmean(turns),
        "environment/turns_max": float(max(turns)),
        "environment/turns_limit_ratio": limited / len(found),
        "environment/appended_tokens_mean": fmean(appended),
        "environment/seconds_mean": fmean(seconds),
        "environment/seconds_p95": percentile(seconds, 0.95),
        "environment/calls_mean": made / len(found),
        "environment/calls_failed_ratio": 1 - (calls["done"] + calls["truncated"]) / made if made else 0.0,
        **{f"environment/calls/{end}": float(count) for end, count in sorted(calls.items())},
        **{f"environment/notes/{name}": float(count) for name, count in sorted(notes.items())},
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


def length_metrics(window: StepWindow, lengths: FirstLengths, *, by_kind: bool) -> dict[str, float]:
    """``length/*``: what was sampled against what was trained, since the last step (and, for the bias, since the run
    began). Racing and cutting keep the short ones: this is where it shows. ``by_kind``: also for each kind of round."""
    metrics = _length_figures("length/sampled_", window.sampled)
    kinds = {length.round_kind for length in (*window.sampled, *window.trained)} if by_kind else set()
    for kind in sorted(kinds):
        for what, lengths_of in (("sampled", window.sampled), ("trained", window.trained)):
            of_kind = [length for length in lengths_of if length.round_kind == kind]
            metrics |= _length_figures(f"length/{kind}/{what}_", of_kind)
    unbiased = unbiased_mean(lengths.whole, lengths.stopped, lengths.limit)
    if unbiased and lengths.trained_samples:
        metrics["length/unbiased_mean"] = unbiased
        metrics["length/bias"] = lengths.trained_tokens / lengths.trained_samples / unbiased
    return metrics


def discard_metrics(window: StepWindow, *, by_kind: bool) -> dict[str, float]:
    """``reward/discarded_*``: the rewards of what control threw away; ``by_kind``: beside those it kept, for each kind
    of round."""
    discarded = [reward for rewards in window.discarded_rewards.values() for reward in rewards]
    metrics = {"reward/discarded_samples": float(len(discarded))}
    if discarded:
        metrics["reward/discarded_mean"] = fmean(discarded)
    if by_kind:
        metrics |= {f"round/{kind}/kept_reward_mean": fmean(kept) for kind, kept in window.kept_rewards.items()}
        metrics |= {f"round/{kind}/discarded_reward_mean": fmean(r) for kind, r in window.discarded_rewards.items()}
    return metrics


def _length_figures(prefix: str, lengths: Sequence[SampledLength]) -> dict[str, float]:
    """Mean, 95th percentile and share at the token limit; nothing of no lengths."""
    tokens = [length.tokens for length in lengths]
    if not tokens:
        return {}
    return {
        f"{prefix}mean": fmean(tokens),
        f"{prefix}p95": percentile(tokens, 0.95),
        f"{prefix}truncated_ratio": sum(length.truncated for length in lengths) / len(lengths),
    }


def unbiased_mean(whole: Mapping[int, int], stopped: Mapping[int, int], limit: int) -> float:
    """Mean length that nobody had stopped: the area under the product-limit estimate of the survivors (Kaplan and
    Meier, JASA 53, 1958). ``whole``, ``stopped``: numbers of trajectories by length in tokens.

    A stopped completion counts as longer than it is. 0.0 where that cannot tell the mean: where those that were longer
    than all whole ones could add more than ``UNSEEN`` of it, if they went on to ``limit``."""
    at_risk = sum(whole.values()) + sum(stopped.values())
    if not any(whole.values()):
        return 0.0
    surviving = 1.0
    before = 0
    area = 0.0
    for length in sorted(whole.keys() | stopped.keys()):
        area += surviving * (length - before)
        ended = whole.get(length, 0)
        surviving *= 1 - ended / at_risk
        at_risk -= ended + stopped.get(length, 0)
        before = length
    return area if surviving * (limit - before) <= UNSEEN * area else 0.0


def waste_metrics(wasted: Mapping[str, int], ended_tokens: int) -> dict[str, float]:
    """``perf/wasted_*``: tokens that were sampled and not trained since the run began, by drop reason."""
    metrics = {f"perf/wasted_tok_{reason}_total": float(tokens) for reason, tokens in sorted(wasted.items())}
    return metrics | {"perf/wasted_tok_ratio": sum(wasted.values()) / max(ended_tokens, 1)}


def control_metrics(state: RunState) -> dict[str, float]:
    """Count trajectories under way and those dropped until now, with what sized the groups."""
    accounting = state.accounting()
    return {
        "async/inflight": float(accounting.in_flight),
        "async/queue_depth": float(len(state.buffer.ready)),
        "async/dropped_ratio": sum(accounting.dropped.values()) / max(accounting.issued, 1),
        **{f"async/dropped_{reason}_total": float(count) for reason, count in accounting.dropped.items()},
        **state.sizing_figures,
        "run/steps": float(state.steps),
        "steering/changes_total": float(state.steering.changes),
    }


def _groups(batch: Sequence[ScoredTrajectory]) -> Iterable[list[ScoredTrajectory]]:
    ordered = sorted(batch, key=lambda s: s.trajectory.id.group_id)
    return (list(members) for _, members in groupby(ordered, key=lambda s: s.trajectory.id.group_id))


def percentile(values: Sequence[float], share: float) -> float:
    """The least of ``values`` that ``share`` of them do not exceed (nearest rank). 0.0 for no values."""
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)] if values else 0.0
