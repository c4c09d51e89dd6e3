"""Metrics of one batch: pure functions from scored trajectories to named figures (docs/metrics.md).

``observe/report`` calls them in the controller process after each step; ``streamrl try`` reports some of them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from statistics import fmean, pstdev

from msgspec import Struct, field

from streamrl.base.types import FinishReason, Metrics, ScoredTrajectory
from streamrl.buffers.slots import staleness
from streamrl.control.admission import admission_metrics
from streamrl.control.run_state import PromptPool, RunState

UNSEEN = 0.05
"""Largest share that lengths which were not observed to their end could add to ``length/unbiased_mean``. The metric is
not reported above it."""


_OF_SETS = (
    "reward/mean", "reward/std", "reward/zero_std_ratio", "completion/length_mean", "completion/length_p95",
    "completion/truncated_ratio",
)  # fmt: skip
"""Figures that each training set has of its own."""


class SampledLength(Struct, frozen=True):
    """Number of sampled tokens of one trajectory.

    ``complete``: whether it ended by itself or at the token limit, and was not stopped before;
    ``truncated``: whether it ended at the token limit;
    ``round_kind``: kind of the round that launched it."""

    tokens: int
    complete: bool
    truncated: bool
    round_kind: str


class StepWindow(Struct):
    """Trajectories that ended since the last step.

    ``sampled``: lengths of all, complete or stopped;
    ``trained``: lengths of trained ones;
    ``kept_rewards``: rewards of trained ones by kind of round;
    ``discarded_rewards``: rewards of dropped ones by kind of round."""

    sampled: list[SampledLength] = []
    trained: list[SampledLength] = []
    kept_rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    discarded_rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class FirstLengths(Struct):
    """Lengths of first attempts since the run began.

    ``limit``: token limit of a trajectory; 0: nothing is counted, because the members of a group race each other, so
    that the length decides which of them is stopped;
    ``complete``: number of complete attempts by length;
    ``stopped``: number of stopped attempts by the length at which they were stopped;
    ``trained_tokens``, ``trained_samples``: sums over all trained samples."""

    limit: int
    complete: Counter[int] = field(default_factory=Counter)
    stopped: Counter[int] = field(default_factory=Counter)
    trained_tokens: int = 0
    trained_samples: int = 0


def reward_metrics(batch: Sequence[ScoredTrajectory]) -> Metrics:
    """Return ``reward/*`` over trained samples and within groups. A group of one sample has no deviation: a batch of
    such groups has neither ``reward/group_std_mean`` nor ``reward/zero_std_ratio``."""
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


def set_metrics(batch: Sequence[ScoredTrajectory]) -> Metrics:
    """Return ``prompts/<set>/*``: rewards and lengths of the trained samples of each training set; empty for a run of a
    single source."""
    by_set = defaultdict(list)
    for scored in batch:
        by_set[scored.trajectory.prompt.set].append(scored)
    metrics = {}
    for name, samples in sorted(by_set.items()):
        if name:
            prefix = f"prompts/{name}"
            metrics[f"{prefix}/samples"] = float(len(samples))
            figures = reward_metrics(samples) | completion_metrics(samples)
            for figure in _OF_SETS:
                if figure in figures:
                    metrics[f"{prefix}/{figure.replace('/', '_')}"] = figures[figure]
    return metrics


def part_values(scored: Iterable[ScoredTrajectory]) -> dict[str, list[float]]:
    """Return the values of each named part of the rewards, ascending by name."""
    parts = defaultdict(list)
    for trajectory in scored:
        for name, value in trajectory.reward_parts.items():
            parts[name].append(value)
    return dict(sorted(parts.items()))


def completion_metrics(batch: Sequence[ScoredTrajectory]) -> Metrics:
    """Return ``completion/*``: lengths in sampled tokens, and how completions ended; with ``environment/*`` where the
    run has an environment."""
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


def _environment_metrics(batch: Sequence[ScoredTrajectory]) -> Metrics:
    """Return ``environment/*``: turns, time between turns, and calls of tools; empty without an environment."""
    trajectories = [scored.trajectory for scored in batch if scored.trajectory.environment is not None]
    results = [trajectory.environment for trajectory in trajectories if trajectory.environment is not None]
    if not results:
        return {}
    turns = [sum(segment.trained for segment in trajectory.segments) for trajectory in trajectories]
    appended = [sum(len(s.token_ids) for s in trajectory.segments if not s.trained) for trajectory in trajectories]
    seconds = [result.seconds for result in results]
    calls = Counter[str]()
    notes = Counter[str]()
    for result in results:
        calls.update(result.calls)
        notes.update(result.notes)
    at_turn_limit = sum(trajectory.finish_reason is FinishReason.TURNS for trajectory in trajectories)
    call_count = calls.total()
    return {
        "environment/turns_mean": fmean(turns),
        "environment/turns_max": float(max(turns)),
        "environment/turns_limit_ratio": at_turn_limit / len(results),
        "environment/appended_tokens_mean": fmean(appended),
        "environment/seconds_mean": fmean(seconds),
        "environment/seconds_p95": percentile(seconds, 0.95),
        "environment/calls_mean": call_count / len(results),
        "environment/calls_failed_ratio": 1 - (calls["done"] + calls["truncated"]) / call_count if call_count else 0.0,
        **{f"environment/calls/{end}": float(count) for end, count in sorted(calls.items())},
        **{f"environment/notes/{name}": float(count) for name, count in sorted(notes.items())},
    }


def staleness_metrics(batch: Sequence[ScoredTrajectory], trained_at: int) -> Metrics:
    """Return ``async/staleness_*``. ``trained_at``: version that the trainer held when it consumed the batch."""
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


def length_metrics(window: StepWindow, lengths: FirstLengths, *, by_kind: bool) -> Metrics:
    """Return ``length/*``: lengths of sampled trajectories and of trained ones since the last step, and the bias of
    trained lengths since the run began. Races between members of a group prefer short trajectories, and these metrics
    show it. ``by_kind``: whether each kind of round has metrics of its own, too."""
    metrics = _length_figures("length/sampled_", window.sampled)
    if by_kind:
        for kind in sorted({length.round_kind for length in (*window.sampled, *window.trained)}):
            sampled = [length for length in window.sampled if length.round_kind == kind]
            trained = [length for length in window.trained if length.round_kind == kind]
            metrics |= _length_figures(f"length/{kind}/sampled_", sampled)
            metrics |= _length_figures(f"length/{kind}/trained_", trained)
    unbiased = unbiased_mean(lengths.complete, lengths.stopped, lengths.limit)
    if unbiased and lengths.trained_samples:
        metrics["length/unbiased_mean"] = unbiased
        metrics["length/bias"] = lengths.trained_tokens / lengths.trained_samples / unbiased
    return metrics


def discard_metrics(window: StepWindow, *, by_kind: bool) -> Metrics:
    """Return ``reward/discarded_*``: rewards of trajectories that control dropped. ``by_kind``: whether each kind of
    round has the mean rewards of its trained and of its dropped trajectories, too."""
    discarded = [reward for rewards in window.discarded_rewards.values() for reward in rewards]
    metrics = {"reward/discarded_samples": float(len(discarded))}
    if discarded:
        metrics["reward/discarded_mean"] = fmean(discarded)
    if by_kind:
        metrics |= {f"round/{kind}/kept_reward_mean": fmean(rewards) for kind, rewards in window.kept_rewards.items()}
        metrics |= {
            f"round/{kind}/discarded_reward_mean": fmean(rewards) for kind, rewards in window.discarded_rewards.items()
        }
    return metrics


def _length_figures(prefix: str, lengths: Sequence[SampledLength]) -> Metrics:
    """Return mean, 95th percentile and share at the token limit; empty without lengths."""
    tokens = [length.tokens for length in lengths]
    if not tokens:
        return {}
    return {
        f"{prefix}mean": fmean(tokens),
        f"{prefix}p95": percentile(tokens, 0.95),
        f"{prefix}truncated_ratio": sum(length.truncated for length in lengths) / len(lengths),
    }


def unbiased_mean(complete: Mapping[int, int], stopped: Mapping[int, int], limit: int) -> float:
    """Estimate the mean length that completions would have if none were stopped: the area under the product-limit
    estimate of the survivors (Kaplan and Meier, JASA 53, 1958). ``complete``, ``stopped``: numbers of trajectories by
    length in tokens.

    A stopped completion is known to be longer than it is. The result is 0.0 where the data do not determine the mean:
    where stopped completions that are longer than all complete ones could add more than the share ``UNSEEN`` to it, if
    they went on to ``limit``."""
    at_risk = sum(complete.values()) + sum(stopped.values())
    if not any(complete.values()):
        return 0.0
    surviving = 1.0
    before = 0
    area = 0.0
    for length in sorted(complete.keys() | stopped.keys()):
        area += surviving * (length - before)
        complete_here = complete.get(length, 0)
        surviving *= 1 - complete_here / at_risk
        at_risk -= complete_here + stopped.get(length, 0)
        before = length
    return area if surviving * (limit - before) <= UNSEEN * area else 0.0


def waste_metrics(wasted: Mapping[str, int], ended_tokens: int) -> Metrics:
    """Return ``perf/wasted_*``: tokens that were sampled and not trained since the run began, by drop reason."""
    metrics = {f"perf/wasted_tok_{reason}_total": float(tokens) for reason, tokens in sorted(wasted.items())}
    return metrics | {"perf/wasted_tok_ratio": sum(wasted.values()) / max(ended_tokens, 1)}


def control_metrics(state: RunState) -> Metrics:
    """Return counts of open and of dropped trajectories, the figures that decided the group size, and the changes of
    settings."""
    accounting = state.accounting()
    return {
        "async/inflight": float(accounting.in_flight),
        "async/queue_depth": float(len(state.buffer.ready)),
        "async/dropped_ratio": sum(accounting.dropped.values()) / max(accounting.issued, 1),
        **{f"async/dropped_{reason}_total": float(count) for reason, count in accounting.dropped.items()},
        **_draw_metrics(state.prompts),
        **state.sizing_figures,
        **admission_metrics(state),
        "run/steps": float(state.steps),
        "steering/changes_total": float(state.steering.changes),
    }


def _draw_metrics(pool: PromptPool) -> Metrics:
    """Return the numbers of prompts that were drawn from each of several sets, and that pools have skipped."""
    metrics = {}
    for name, drawn in pool.sets.items():
        if name:
            metrics[f"prompts/{name}/drawn_total"] = float(drawn.drawn)
            metrics[f"prompts/{name}/skipped_total"] = float(drawn.skipped)
    for name, count in pool.pools.items():
        metrics[f"pools/{name}/drawn_total"] = float(count.drawn)
        metrics[f"pools/{name}/skipped_total"] = float(count.drawn - count.launched)
    return metrics


def _groups(batch: Sequence[ScoredTrajectory]) -> Iterable[list[ScoredTrajectory]]:
    ordered = sorted(batch, key=lambda s: s.trajectory.id.group_id)
    return (list(members) for _, members in groupby(ordered, key=lambda s: s.trajectory.id.group_id))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as ``share`` of all ``values`` (nearest rank); 0.0 without
    values."""
    if not values:
        return 0.0
    rank = max(math.ceil(share * len(values)) - 1, 0)
    return sorted(values)[rank]
