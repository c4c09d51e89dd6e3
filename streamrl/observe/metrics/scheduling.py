"""What control decides and how old its work is: staleness, drops, rounds, group sizes."""

from __future__ import annotations

from streamrl.observe.metrics.metric import LAST, MAX, MEAN, P95, SHARE, TOTAL, Metric

SCHEDULING: tuple[Metric, ...] = (
    Metric(
        "async/staleness_mean",
        "steps",
        MEAN,
        "Version that trains minus newest version that sampled a token of the sample.",
        "stale",
    ),
    Metric("async/staleness_p95", "steps", P95, "As async/staleness_mean."),
    Metric("async/staleness_max", "steps", MAX, "As async/staleness_mean."),
    Metric(
        "async/staleness_oldest_max",
        "steps",
        MAX,
        "Version that trains minus oldest version that sampled a token of the sample; never above max_staleness.",
    ),
    Metric("async/versions_per_sample_mean", "versions", MEAN, "Policy versions that sampled one trained sample."),
    Metric("async/dropped_<reason>_total", "trajectories", TOTAL, "Trajectories not trained, by drop reason."),
    Metric("async/dropped_ratio", "share", SHARE, "Trajectories dropped so far, of those issued so far."),
    Metric("async/inflight", "trajectories", LAST, "Trajectories that hold a slot."),
    Metric("async/queue_depth", "groups", LAST, "Scored groups that wait to be trained."),
    Metric(
        "round/<kind>/group_size",
        "trajectories",
        MEAN,
        "Samples of a trained group; there for the one kind of round that the step trained.",
        "round",
    ),
    Metric("round/<kind>/total", "rounds", TOTAL, "Rounds of this kind that were trained."),
    Metric(
        "round/<kind>/kept_reward_mean",
        "reward",
        MEAN,
        "Total reward of samples that this kind of round launched and the step trained; only where a run has several "
        "kinds.",
    ),
    Metric(
        "round/<kind>/discarded_reward_mean",
        "reward",
        MEAN,
        "Total reward of those that were rewarded and then dropped since the last step.",
    ),
    Metric("sizing/size", "trajectories", LAST, "Group size chosen for the next round."),
    Metric(
        "sizing/straggler_rate",
        "share",
        SHARE,
        "Complete groups, before any filter, whose longest completion was group_sizing.straggler_ratio times their "
        "median one or more, or truncated; groups of fewer than 4 are left out.",
    ),
    Metric("sizing/queue", "steps", LAST, "Virtual queue of straggler-aware sizing: straggler rate owed."),
    Metric("sizing/budget", "share", LAST, "Long-term straggler rate that is kept; calibration may have replaced it."),
    Metric(
        "sizing/risk_<size>", "share", LAST, "Posterior mean of the share of groups that would straggle at that size."
    ),
)
