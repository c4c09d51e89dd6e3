"""What the trainer reports of the policy and of the optimizer."""

from __future__ import annotations

from streamrl.observe.metrics.metric import LAST, MEAN, P99, SHARE, SUM, TOTAL, Metric

LEARNING: tuple[Metric, ...] = (
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
    Metric("policy/entropy", "nats", MEAN, "Entropy of the policy at trained tokens.", "entropy"),
    Metric("policy/clip_ratio", "share", SHARE, "Trained tokens whose ratio was clipped, either side."),
    Metric("policy/is_weight_mean", "ratio", MEAN, "Trainer over behaviour probability, before any correction."),
    Metric("policy/correction_mean", "ratio", MEAN, "Off-policy weight of a token's loss, 0 where masked."),
    Metric("policy/masked_ratio", "share", SHARE, "Trained tokens that the off-policy mask left out of the loss."),
    Metric(
        "policy/mismatch_abs_mean",
        "nats",
        MEAN,
        "Absolute difference of trainer and engine logprob over tokens that the trained version sampled itself.",
        "mismatch",
    ),
    Metric("policy/reference_kl", "nats", MEAN, "Estimated KL to the reference model at trained tokens.", "kl"),
    Metric("optim/loss", "loss", SUM, "The value that was differentiated, normalised as the recipe says."),
    Metric("optim/value_loss", "loss", SUM, "The critic's loss, normalised as the policy's."),
    Metric("optim/grad_norm", "norm", LAST, "Global gradient norm before clipping.", "grad"),
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
)
