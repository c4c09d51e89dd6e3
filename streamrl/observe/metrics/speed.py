"""Where the time goes: seconds, idle shares, rates."""

from __future__ import annotations

from streamrl.observe.metrics.metric import LAST, MAX, MEAN, P50, P95, P99, RATE, SHARE, SUM, TOTAL, Metric

SPEED: tuple[Metric, ...] = (
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
    Metric(
        "util/trainer_idle_ratio",
        "share",
        SHARE,
        "Share of the step in which the trainer computed nothing.",
        "trainer-idle",
    ),
    Metric(
        "util/bubble_ratio",
        "share",
        SHARE,
        "Idle share of the capacity c (util/capacity) over the whole step: 1 - sum(min(running, c) dt) / (c sum(dt)).",
        "engine-idle",
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
    Metric("perf/train_tok_s", "tokens/s", RATE, "Trained tokens per second of wall time: goodput.", "tok/s"),
    Metric(
        "perf/gen_tok_s",
        "tokens/s",
        RATE,
        "Generated tokens per second of wall time, dropped and evaluation ones too.",
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
)
