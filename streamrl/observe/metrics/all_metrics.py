"""The metric registry: what every number means is fixed here and nowhere else; docs/metrics.md is made from it.
``<name>`` in a metric's name stands for one word that a run fills in: a reward function, an engine, a reason."""

from __future__ import annotations

import re
from functools import cache

import msgspec

# How the number of one step is made from what was seen in it.
MEAN = "mean"
STD = "standard deviation"
MIN = "minimum"
MAX = "maximum"
P50 = "median"
P95 = "95th percentile"
P99 = "99th percentile"
SHARE = "share"
SUM = "sum"
RATE = "per second of the step"
TOTAL = "counter since the start of the run"
LAST = "value at the end of the step"


class Metric(msgspec.Struct, frozen=True):
    """One metric."""

    name: str
    unit: str
    aggregation: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    # What rewards and the judge report.
    Metric("reward/mean", "reward", MEAN, "Total reward over the samples that were trained."),
    Metric("reward/std", "reward", STD, "Total reward over the samples that were trained."),
    Metric("reward/min", "reward", MIN, "Smallest total reward of a trained sample."),
    Metric("reward/max", "reward", MAX, "Largest total reward of a trained sample."),
    Metric("reward/group_std_mean", "reward", MEAN, "Standard deviation inside a group, over groups."),
    Metric(
        "reward/zero_std_ratio",
        "share",
        SHARE,
        "Groups of two and more in the batch whose rewards are all equal: no signal.",
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
    # Metrics of completions: those trained, those sampled, those of an evaluation.
    Metric("completion/length_mean", "tokens", MEAN, "Generated tokens of a trained sample."),
    Metric("completion/length_p50", "tokens", P50, "Generated tokens of a trained sample."),
    Metric("completion/length_p95", "tokens", P95, "Generated tokens of a trained sample."),
    Metric("completion/length_max", "tokens", MAX, "Generated tokens of a trained sample."),
    Metric(
        "completion/truncated_ratio", "share", SHARE, "Trained samples cut by the token limit (finish reason length)."
    ),
    Metric("completion/eos_ratio", "share", SHARE, "Trained samples that ended by themselves (finish reason stop)."),
    Metric(
        "length/sampled_mean",
        "tokens",
        MEAN,
        "Tokens of every trajectory whose sampling ended since the last step, kept or not; of one that was stopped "
        "those so far. completion/ has the trained ones.",
    ),
    Metric("length/sampled_p95", "tokens", P95, "As length/sampled_mean."),
    Metric("length/sampled_truncated_ratio", "share", SHARE, "Of those, cut by the token limit."),
    Metric(
        "length/unbiased_mean",
        "tokens",
        MEAN,
        "Mean length of first attempts since the start of the run, had none been stopped (Kaplan-Meier). Left out "
        "where lengths that were always stopped could add 5 % to it, and where siblings race.",
    ),
    Metric(
        "length/bias",
        "ratio",
        MEAN,
        "Mean trained length since the start of the run over length/unbiased_mean; below 1: races, cuts or filters "
        "kept the short ones.",
    ),
    Metric(
        "length/<kind>/sampled_mean",
        "tokens",
        MEAN,
        "Of trajectories that this kind of round launched; only where a run has several kinds.",
    ),
    Metric("length/<kind>/sampled_p95", "tokens", P95, "As length/<kind>/sampled_mean."),
    Metric("length/<kind>/sampled_truncated_ratio", "share", SHARE, "As length/<kind>/sampled_mean."),
    Metric("length/<kind>/trained_mean", "tokens", MEAN, "Of trajectories that this kind of round launched, trained."),
    Metric("length/<kind>/trained_p95", "tokens", P95, "As length/<kind>/trained_mean."),
    Metric("length/<kind>/trained_truncated_ratio", "share", SHARE, "As length/<kind>/trained_mean."),
    Metric(
        "length/first_update",
        "tokens",
        MEAN,
        "Of a trained sample in the first of several updates on the batch; rising to length/last_update where "
        "length-sorted rounds train short groups first.",
    ),
    Metric("length/last_update", "tokens", MEAN, "Of a trained sample in the last of several updates on the batch."),
    Metric(
        "eval/<set>/avg@<k>",
        "reward",
        MEAN,
        "Score over k samples of each held-out prompt, then over prompts (accuracy for 0/1): the value of the first "
        "reward, or of evaluation.advanced.reward.",
    ),
    Metric("eval/<set>/standard_error", "reward", STD, "Of avg@k, over prompts."),
    Metric("eval/<set>/func/<name>/mean", "reward", MEAN, "What one reward function returned, before its weight."),
    Metric(
        "eval/<set>/pass@<k>",
        "share",
        MEAN,
        "Probability that at least one of k samples scores success_reward or more, unbiased (arXiv 2107.03374).",
    ),
    Metric("eval/<set>/prompts", "prompts", SUM, "Prompts with at least one score: those in avg@k."),
    Metric("eval/<set>/failed", "samples", SUM, "Samples without a reward; in neither avg@k nor pass@k."),
    Metric("eval/<set>/truncated_ratio", "share", SHARE, "Evaluation samples cut by the token limit."),
    Metric("eval/<set>/length_mean", "tokens", MEAN, "Generated tokens of an evaluation sample."),
    Metric("eval/<set>/length_p50", "tokens", P50, "Generated tokens of an evaluation sample."),
    Metric("eval/<set>/length_p95", "tokens", P95, "Generated tokens of an evaluation sample."),
    Metric("eval/<set>/length_max", "tokens", MAX, "Generated tokens of an evaluation sample."),
    Metric("eval/<set>/eos_ratio", "share", SHARE, "Evaluation samples that ended by themselves."),
    # What the trainer reports of the policy and of the optimizer.
    Metric(
        "policy/kl_rollout",
        "nats",
        MEAN,
        "KL from the behaviour policy that sampled the tokens to the policy being trained, over trained tokens "
        "(k3 estimate, before the step). policy/reference_kl is the KL that a coefficient weighs.",
    ),
    Metric("policy/logprob_diff_abs_mean", "nats", MEAN, "Absolute difference of trainer and behaviour logprob."),
    Metric("policy/logprob_diff_abs_p99", "nats", P99, "Absolute difference of trainer and behaviour logprob."),
    Metric("policy/ess", "share", MEAN, "Effective sample size of the importance weights over their number."),
    Metric("policy/entropy", "nats", MEAN, "Entropy of the policy at trained tokens."),
    Metric("policy/clip_ratio", "share", SHARE, "Trained tokens whose ratio was clipped, either side."),
    Metric("policy/is_weight_mean", "ratio", MEAN, "Trainer over behaviour probability, before any correction."),
    Metric("policy/correction_mean", "ratio", MEAN, "Off-policy weight of a token's loss, 0 where masked."),
    Metric("policy/masked_ratio", "share", SHARE, "Trained tokens that the off-policy mask left out of the loss."),
    Metric(
        "policy/mismatch_abs_mean",
        "nats",
        MEAN,
        "Absolute difference of trainer and engine logprob over tokens that the trained version sampled itself.",
    ),
    Metric("policy/reference_kl", "nats", MEAN, "Estimated KL to the reference model at trained tokens."),
    Metric("optim/loss", "loss", SUM, "The value that was differentiated, normalised as the recipe says."),
    Metric("optim/value_loss", "loss", SUM, "The critic's loss, normalised as the policy's."),
    Metric("optim/grad_norm", "norm", LAST, "Global gradient norm before clipping."),
    Metric(
        "optim/lr", "1", LAST, "Learning rate of the step, or of each one where several batches are trained at once."
    ),
    Metric("optim/skipped_steps_total", "steps", TOTAL, "Steps left out because no group of the batch had a signal."),
    Metric(
        "optim/groups_without_signal",
        "groups",
        SUM,
        "Groups whose rewards are all equal: they count in the batch and are not computed.",
    ),
    # What control decides and how old its work is: staleness, drops, rounds, group sizes.
    Metric(
        "async/staleness_mean",
        "steps",
        MEAN,
        "Version that trains minus newest version that sampled a token of the sample.",
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
        "Complete groups, before any filter, whose longest completion was group_sizing.advanced.straggler_ratio times "
        "their median one or more, or truncated; what a race cuts is estimated, groups of fewer than 4 are left out.",
    ),
    Metric("sizing/queue", "steps", LAST, "Virtual queue of straggler-aware sizing: straggler rate owed."),
    Metric("sizing/budget", "share", LAST, "Long-term straggler rate that is kept; 0 until it is measured."),
    Metric(
        "sizing/risk_<size>", "share", LAST, "Posterior mean of the share of groups that would straggle at that size."
    ),
    # Where the time goes: seconds, idle shares, rates.
    Metric("time/step_s", "s", SUM, "Wall time from one live version to the next."),
    Metric(
        "time/wait_batch_s",
        "s",
        SUM,
        "From a live version to the close of the next batch: rollout, reward, and the training that overlaps them.",
    ),
    Metric("time/close_batch_s", "s", SUM, "Time from closing the batch to the report of its step."),
    Metric("time/rollout_p50_s", "s", P50, "Wall time of one trajectory, launch to last token."),
    Metric("time/rollout_p95_s", "s", P95, "Wall time of one trajectory, launch to last token."),
    Metric("time/rollout_p99_s", "s", P99, "Wall time of one trajectory, launch to last token."),
    Metric("time/forward_backward_s", "s", SUM, "Time in forward and backward, on rank 0."),
    Metric("time/optim_s", "s", SUM, "Time in gradient reduction, clipping and the optimizer, on rank 0."),
    Metric(
        "time/wait_eval_s", "s", SUM, "Time in which a trained version waited for the evaluation of the one before it."
    ),
    Metric("time/publish_s", "s", SUM, "Time to diff and encode the new version, on rank 0."),
    Metric("time/weight_sync_s", "s", SUM, "Wall time from the announcement of a version to the last engine's commit."),
    Metric(
        "time/weight_stage_s", "s", MAX, "Time to fetch and decode a version, on the slowest engine; it still samples."
    ),
    Metric("time/engine_paused_s", "s", MAX, "Time in which an engine was paused for a commit, on the slowest engine."),
    Metric("time/eval_s", "s", SUM, "Wall time of the evaluation, which runs beside the next step."),
    Metric(
        "time/engine_switch_s",
        "s",
        SUM,
        "Time in which no engine served because another set took over: stop or sleep, start or wake, weights.",
    ),
    Metric("util/trainer_idle_ratio", "share", SHARE, "Share of the step in which the trainer computed nothing."),
    Metric(
        "util/bubble_ratio",
        "share",
        SHARE,
        "Idle share of the capacity c (util/capacity) over the whole step: 1 - sum(min(running, c) dt) / (c sum(dt)).",
    ),
    Metric(
        "util/rollout_bubble_ratio",
        "share",
        SHARE,
        "The same over the rollout alone: from a live version until the next batch is full, at the same capacity.",
    ),
    Metric(
        "util/wait_reason/<reason>",
        "share",
        SHARE,
        "Share of the step in which the run as a whole waited for this: engine_start, sampling, tail (few still run), "
        "reward, training, push, evaluation, checkpoint, prompts, recovery, shutdown, control (what happened is on its "
        "way to control). One reason at every instant: the shares sum to 1.",
    ),
    Metric(
        "util/loop_lag_s",
        "s",
        MAX,
        "Longest time since the last step in which the controller's event loop answered nothing.",
    ),
    Metric("util/capacity", "requests", LAST, "What the bubble ratios count as full: requests that run at once."),
    Metric("perf/train_tok_s", "tokens/s", RATE, "Trained tokens per second of wall time: goodput."),
    Metric(
        "perf/gen_tok_s", "tokens/s", RATE, "Generated tokens per second of wall time, dropped and evaluation ones too."
    ),
    Metric(
        "perf/forward_backward_tok_s",
        "tokens/s",
        RATE,
        "Tokens laid into rows (a prompt that siblings share once) per second of forward and backward.",
    ),
    Metric("perf/samples_s", "samples/s", RATE, "Trained samples per second of wall time."),
    Metric("perf/groups_s", "groups/s", RATE, "Trained groups per second of wall time."),
    Metric(
        "perf/generated_per_trained_tok",
        "ratio",
        MEAN,
        "Tokens of trajectories whose sampling ended since the last step, over trained tokens of the step.",
    ),
    Metric(
        "perf/wasted_tok_<reason>_total",
        "tokens",
        TOTAL,
        "Generated tokens that were not trained, by drop reason, with those of trajectories stopped half-way.",
    ),
    Metric(
        "perf/kept_tok_accepted_ratio",
        "share",
        SHARE,
        "Tokens of deferred completions that the new weights chose again, of all that were verified since the last "
        'step (tail_batching.deferred_prompts = "verify"); they were not decoded twice, though they count as wasted '
        "where they lost.",
    ),
    Metric(
        "perf/wasted_tok_ratio", "share", SHARE, "Generated tokens that were not trained, of all whose end is known."
    ),
    # What engines and weight pushes report.
    Metric("engines/set", "number", LAST, "Which of the prepared sets of engines serves: 0 is the first."),
    Metric("engines/serving", "engines", LAST, "Engines of the set that serves."),
    Metric("engines/switches_total", "switches", TOTAL, "Changes from one prepared set of engines to another."),
    Metric("engines/restarts_total", "engines", TOTAL, "Engines that died, or were ended, and serve again."),
    Metric(
        "engines/lost_requests_total",
        "requests",
        TOTAL,
        "Requests that an engine served when it died: they were sampled again, to the same tokens.",
    ),
    Metric("weights/payload_bytes", "bytes", SUM, "Encoded bytes of the version, over ranks."),
    Metric("weights/changed_ratio", "share", SHARE, "Elements whose published bits changed."),
    Metric("weights/reanchored", "engines", SUM, "Engines that refused the delta and took an anchor."),
    Metric(
        "weights/canary_deviation",
        "nats",
        LAST,
        "How far engines are from the trainer on fixed tokens (`weights.advanced.canary`): the worst engine's "
        "median over the "
        "tokens. Of the latest version that was answered for when this one was pushed, the one before as a rule.",
    ),
    # How well the machinery of the run itself does.
    Metric(
        "health/telemetry_dropped_total",
        "messages",
        TOTAL,
        "Dropped by the metrics socket; counts once for each time that a subscriber ran over its limit.",
    ),
    Metric(
        "health/metrics_refused_total",
        "values",
        TOTAL,
        "Not recorded: their names were more than a run may have (4,096), or too long: rewards name their parts.",
    ),
    Metric(
        "health/observer_errors_total",
        "errors",
        TOTAL,
        "Calls of the recipe's observers (`run.advanced.observers`) that raised; the first of each is in the log.",
    ),
    Metric(
        "health/observer_calls_dropped_total",
        "calls",
        TOTAL,
        "Not made: an observer of the recipe was more than 4,096 calls behind.",
    ),
    Metric(
        "health/insecure_transport",
        "0 or 1",
        LAST,
        '1: sockets of this run are open to other hosts without keys (`transport.advanced.security = "none"`).',
    ),
)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))
    )


def find_metric(name: str) -> Metric | None:
    """The registered metric that ``name`` (filled in, such as ``engine/engine-0/running``) is one of."""
    return next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


def unregistered(names: list[str]) -> list[str]:
    """The names that the registry does not know: a stage must not emit them."""
    return [name for name in names if find_metric(name) is None]
