"""What rewards and the judge report."""

from __future__ import annotations

from streamrl.observe.metrics.metric import LAST, MAX, MEAN, MIN, P50, P95, SHARE, STD, SUM, TOTAL, Metric

REWARDS: tuple[Metric, ...] = (
    Metric("reward/mean", "reward", MEAN, "Total reward over the samples that were trained.", "reward"),
    Metric("reward/std", "reward", STD, "Total reward over the samples that were trained."),
    Metric("reward/min", "reward", MIN, "Smallest total reward of a trained sample."),
    Metric("reward/max", "reward", MAX, "Largest total reward of a trained sample."),
    Metric("reward/group_std_mean", "reward", MEAN, "Standard deviation inside a group, over groups."),
    Metric(
        "reward/zero_std_ratio",
        "share",
        SHARE,
        "Groups of two and more in the batch whose rewards are all equal: no signal.",
        "no-signal",
    ),
    Metric("reward/func/<name>/mean", "reward", MEAN, "What one reward function returned, before its weight."),
    Metric("reward/func/<name>/std", "reward", STD, "What one reward function returned, before its weight."),
    Metric(
        "reward/func/<name>/<kind>_total",
        "rewards",
        TOTAL,
        "Failures of one function: raised, timed_out, not_finite, wrong_type; such a trajectory is never trained.",
    ),
    Metric(
        "reward/func/<name>/latency_p50_s", "s", P50, "Time inside of one function, over calls since the last step."
    ),
    Metric(
        "reward/func/<name>/latency_p95_s", "s", P95, "Time inside of one function, over calls since the last step."
    ),
    Metric(
        "reward/func/<name>/waited_p95_s",
        "s",
        P95,
        "From when a call of one function was asked for to when it began: its concurrency, its rate, its retries.",
    ),
    Metric(
        "reward/func/<name>/adapted_limit_p50_s",
        "s",
        P50,
        "The time limit of those calls since the last step whose limit was learnt (rewards.advanced.adaptive_timeout).",
    ),
    Metric(
        "reward/in_flight", "orders", LAST, "Trajectories (groups, where a function scores groups) without a reward."
    ),
    Metric(
        "reward/round_cost_s",
        "s",
        SUM,
        "How much sooner the batch would have been complete, had every reward come at once.",
    ),
    Metric(
        "reward/func/<name>/round_cost_s",
        "s",
        SUM,
        "reward/round_cost_s, where it was this function that the last sample of the batch waited for longest.",
    ),
    Metric(
        "judge/questions_total", "questions", TOTAL, "What the run's own judge was asked: calls that no cache answered."
    ),
    Metric("judge/batches_total", "batches", TOTAL, "Times that it was woken, or was asked after it had had nothing."),
    Metric(
        "judge/waited_mean_s", "s", MEAN, "How long a question waited for its batch and the actor, since the start."
    ),
    Metric("judge/awake_s_total", "s", TOTAL, "Time in which it did not rest."),
    Metric("reward/latency_p50_s", "s", P50, "Time from a trajectory to its reward, over trained samples."),
    Metric("reward/latency_p95_s", "s", P95, "Time from a trajectory to its reward, over trained samples."),
    Metric(
        "reward/discarded_mean",
        "reward",
        MEAN,
        "Total reward over trajectories that were rewarded and then dropped since the last step; reward/mean is that "
        "of those kept.",
    ),
    Metric(
        "reward/discarded_samples",
        "trajectories",
        SUM,
        "Trajectories that were rewarded and then dropped since the last step.",
    ),
)
