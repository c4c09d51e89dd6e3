"""Metrics of completions: those trained, those sampled, those of an evaluation."""

from __future__ import annotations

from streamrl.observe.metrics.metric import MAX, MEAN, P50, P95, SHARE, STD, SUM, Metric

SAMPLES: tuple[Metric, ...] = (
    Metric("completion/length_mean", "tokens", MEAN, "Generated tokens of a trained sample.", "len"),
    Metric("completion/length_p50", "tokens", P50, "Generated tokens of a trained sample."),
    Metric("completion/length_p95", "tokens", P95, "Generated tokens of a trained sample."),
    Metric("completion/length_max", "tokens", MAX, "Generated tokens of a trained sample."),
    Metric(
        "completion/truncated_ratio",
        "share",
        SHARE,
        "Trained samples cut by the token limit (finish reason length).",
        "cut",
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
        "eval/<set>/avg@<k>",
        "reward",
        MEAN,
        "Score over k samples of each held-out prompt, then over prompts (accuracy for 0/1): the value of the first "
        "reward, or of evaluation.advanced.reward.",
        "held-out",
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
)
