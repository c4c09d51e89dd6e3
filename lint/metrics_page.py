"""The metric registry, and the page made from it: ``python lint/metrics_page.py > docs/metrics.md``.

What every number means is fixed here and nowhere else. ``<name>`` in a metric's name stands for one word that a run
fills in: a reward function, an engine, a reason."""

from __future__ import annotations

import re
import sys
from functools import cache

import msgspec

from streamrl.observe.terminal.step_line import COLUMNS, FURTHER

AGGREGATIONS = {
    "mean": "mean",
    "std": "standard deviation",
    "min": "minimum",
    "max": "maximum",
    "p50": "median",
    "p95": "95th percentile",
    "p99": "99th percentile",
    "share": "share",
    "sum": "sum",
    "rate": "per second of the step",
    "total": "counter since the start of the run",
    "last": "value at the end of the step",
}
"""Ways to make the number of one step from what was seen in it, by the words of the table."""


class Metric(msgspec.Struct, frozen=True):
    """One metric."""

    name: str
    unit: str
    aggregation: str
    meaning: str


_TABLE = """
# What rewards and the judge report.
reward/mean | reward | mean | Total reward over the samples that were trained.
reward/std | reward | std | Total reward over the samples that were trained.
reward/min | reward | min | Smallest total reward of a trained sample.
reward/max | reward | max | Largest total reward of a trained sample.
reward/group_std_mean | reward | mean | Standard deviation inside a group, over groups.
reward/zero_std_ratio | share | share | Groups of two and more in the batch whose rewards are all equal: no signal.
reward/func/<name>/mean | reward | mean | What one reward function returned, before its weight.
reward/func/<name>/std | reward | std | What one reward function returned, before its weight.
reward/func/<name>/<kind>_total | rewards | total | Failures of one function: raised, timed_out, not_finite, wrong_type;
    such a trajectory is never trained.
reward/func/<name>/latency_p50_s | s | p50 | Time inside of one function, over calls since the last step.
reward/func/<name>/latency_p95_s | s | p95 | Time inside of one function, over calls since the last step.
reward/func/<name>/waited_p95_s | s | p95 | From when a call of one function was asked for to when it began: its
    concurrency, its rate, its retries.
reward/func/<name>/adapted_limit_p50_s | s | p50 | The time limit of those calls since the last step whose limit was
    learnt (rewards.advanced.adaptive_timeout).
reward/in_flight | orders | last | Trajectories (groups, where a function scores groups) without a reward.
reward/round_cost_s | s | sum | How much sooner the batch would have been complete, had every reward come at once.
reward/func/<name>/round_cost_s | s | sum | reward/round_cost_s, where it was this function that the last sample of the
    batch waited for longest.
judge/questions_total | questions | total | What the run's own judge was asked: calls that no cache answered.
judge/batches_total | batches | total | Times that it was woken, or was asked after it had had nothing.
judge/waited_mean_s | s | mean | How long a question waited for its batch and the actor, since the start.
judge/awake_s_total | s | total | Time in which it did not rest.
reward/latency_p50_s | s | p50 | Time from a trajectory to its reward, over trained samples.
reward/latency_p95_s | s | p95 | Time from a trajectory to its reward, over trained samples.
reward/discarded_mean | reward | mean | Total reward over trajectories that were rewarded and then dropped since the
    last step; reward/mean is that of those kept.
reward/discarded_samples | trajectories | sum | Trajectories that were rewarded and then dropped since the last step.
# Metrics of completions: those trained, those sampled, those of an evaluation.
completion/length_mean | tokens | mean | Generated tokens of a trained sample.
completion/length_p50 | tokens | p50 | Generated tokens of a trained sample.
completion/length_p95 | tokens | p95 | Generated tokens of a trained sample.
completion/length_max | tokens | max | Generated tokens of a trained sample.
completion/truncated_ratio | share | share | Trained samples cut by the token limit (finish reason length).
completion/eos_ratio | share | share | Trained samples that ended by themselves (finish reason stop).
length/sampled_mean | tokens | mean | Tokens of every trajectory whose sampling ended since the last step, kept or not;
    of one that was stopped those so far. completion/ has the trained ones.
length/sampled_p95 | tokens | p95 | As length/sampled_mean.
length/sampled_truncated_ratio | share | share | Of those, cut by the token limit.
length/unbiased_mean | tokens | mean | Mean length of first attempts since the start of the run, had none been stopped
    (Kaplan-Meier). Left out where lengths that were always stopped could add 5 % to it, and where siblings race.
length/bias | ratio | mean | Mean trained length since the start of the run over length/unbiased_mean; below 1: races,
    cuts or filters kept the short ones.
length/<kind>/sampled_mean | tokens | mean | Of trajectories that this kind of round launched; only where a run has
    several kinds.
length/<kind>/sampled_p95 | tokens | p95 | As length/<kind>/sampled_mean.
length/<kind>/sampled_truncated_ratio | share | share | As length/<kind>/sampled_mean.
length/<kind>/trained_mean | tokens | mean | Of trajectories that this kind of round launched, trained.
length/<kind>/trained_p95 | tokens | p95 | As length/<kind>/trained_mean.
length/<kind>/trained_truncated_ratio | share | share | As length/<kind>/trained_mean.
length/first_update | tokens | mean | Of a trained sample in the first of several updates on the batch; rising to
    length/last_update where length-sorted rounds train short groups first.
length/last_update | tokens | mean | Of a trained sample in the last of several updates on the batch.
eval/<set>/avg@<k> | reward | mean | Score over k samples of each held-out prompt, then over prompts (accuracy for 0/1):
    the value of the first reward, or of evaluation.advanced.reward.
eval/<set>/standard_error | reward | std | Of avg@k, over prompts.
eval/<set>/func/<name>/mean | reward | mean | What one reward function returned, before its weight.
eval/<set>/pass@<k> | share | mean | Probability that at least one of k samples scores success_reward or more, unbiased
    (arXiv 2107.03374).
eval/<set>/prompts | prompts | sum | Prompts with at least one score: those in avg@k.
eval/<set>/failed | samples | sum | Samples without a reward; in neither avg@k nor pass@k.
eval/<set>/truncated_ratio | share | share | Evaluation samples cut by the token limit.
eval/<set>/length_mean | tokens | mean | Generated tokens of an evaluation sample.
eval/<set>/length_p50 | tokens | p50 | Generated tokens of an evaluation sample.
eval/<set>/length_p95 | tokens | p95 | Generated tokens of an evaluation sample.
eval/<set>/length_max | tokens | max | Generated tokens of an evaluation sample.
eval/<set>/eos_ratio | share | share | Evaluation samples that ended by themselves.
# What the trainer reports of the policy and of the optimizer.
policy/kl_rollout | nats | mean | KL from the behaviour policy that sampled the tokens to the policy being trained, over
    trained tokens (k3 estimate, before the step). policy/reference_kl is the KL that a coefficient weighs.
policy/logprob_diff_abs_mean | nats | mean | Absolute difference of trainer and behaviour logprob.
policy/logprob_diff_abs_p99 | nats | p99 | Absolute difference of trainer and behaviour logprob.
policy/ess | share | mean | Effective sample size of the importance weights over their number.
policy/entropy | nats | mean | Entropy of the policy at trained tokens.
policy/clip_ratio | share | share | Trained tokens whose ratio was clipped, either side.
policy/is_weight_mean | ratio | mean | Trainer over behaviour probability, before any correction.
policy/correction_mean | ratio | mean | Off-policy weight of a token's loss, 0 where masked.
policy/masked_ratio | share | share | Trained tokens that the off-policy mask left out of the loss.
policy/mismatch_abs_mean | nats | mean | Absolute difference of trainer and engine logprob over tokens that the trained
    version sampled itself.
policy/reference_kl | nats | mean | Estimated KL to the reference model at trained tokens.
optim/loss | loss | sum | The value that was differentiated, normalised as the recipe says.
optim/value_loss | loss | sum | The critic's loss, normalised as the policy's.
optim/grad_norm | norm | last | Global gradient norm before clipping.
optim/lr | 1 | last | Learning rate of the step, or of each one where several batches are trained at once.
optim/skipped_steps_total | steps | total | Steps left out because no group of the batch had a signal.
optim/groups_without_signal | groups | sum | Groups whose rewards are all equal: they count in the batch and are not
    computed.
# What control decides and how old its work is: staleness, drops, rounds, group sizes.
async/staleness_mean | steps | mean | Version that trains minus newest version that sampled a token of the sample.
async/staleness_p95 | steps | p95 | As async/staleness_mean.
async/staleness_max | steps | max | As async/staleness_mean.
async/staleness_oldest_max | steps | max | Version that trains minus oldest version that sampled a token of the sample;
    never above max_staleness.
async/versions_per_sample_mean | versions | mean | Policy versions that sampled one trained sample.
async/dropped_<reason>_total | trajectories | total | Trajectories not trained, by drop reason.
async/dropped_ratio | share | share | Trajectories dropped so far, of those issued so far.
async/inflight | trajectories | last | Trajectories that hold a slot.
async/queue_depth | groups | last | Scored groups that wait to be trained.
steering/changes_total | changes | total | Changes of settings that took effect while the run went on (`streamrl set`).
round/<kind>/group_size | trajectories | mean | Samples of a trained group; there for the one kind of round that the
    step trained.
round/<kind>/total | rounds | total | Rounds of this kind that were trained.
round/<kind>/kept_reward_mean | reward | mean | Total reward of samples that this kind of round launched and the step
    trained; only where a run has several kinds.
round/<kind>/discarded_reward_mean | reward | mean | Total reward of those that were rewarded and then dropped since the
    last step.
sizing/size | trajectories | last | Group size chosen for the next round.
sizing/straggler_rate | share | share | Complete groups, before any filter, whose longest completion was
    group_sizing.advanced.straggler_ratio times their median one or more, or truncated; what a race cuts is estimated,
    groups of fewer than 4 are left out.
sizing/queue | steps | last | Virtual queue of straggler-aware sizing: straggler rate owed.
sizing/budget | share | last | Long-term straggler rate that is kept; 0 until it is measured.
sizing/risk_<size> | share | last | Posterior mean of the share of groups that would straggle at that size.
# Where the time goes: seconds, idle shares, rates.
time/step_s | s | sum | Wall time from one live version to the next.
time/wait_batch_s | s | sum | From a live version to the close of the next batch: rollout, reward, and the training that
    overlaps them.
time/close_batch_s | s | sum | Time from closing the batch to the report of its step.
time/rollout_p50_s | s | p50 | Wall time of one trajectory, launch to last token.
time/rollout_p95_s | s | p95 | Wall time of one trajectory, launch to last token.
time/rollout_p99_s | s | p99 | Wall time of one trajectory, launch to last token.
time/forward_backward_s | s | sum | Time in forward and backward, on rank 0.
time/optim_s | s | sum | Time in gradient reduction, clipping and the optimizer, on rank 0.
time/wait_eval_s | s | sum | Time in which a trained version waited for the evaluation of the one before it.
time/publish_s | s | sum | Time to diff and encode the new version, on rank 0.
time/weight_sync_s | s | sum | Wall time from the announcement of a version to the last engine's commit.
time/weight_stage_s | s | max | Time to fetch and decode a version, on the slowest engine; it still samples.
time/engine_paused_s | s | max | Time in which an engine was paused for a commit, on the slowest engine.
time/eval_s | s | sum | Wall time of the evaluation, which runs beside the next step.
time/engine_switch_s | s | sum | Time in which no engine served because another set took over: stop or sleep, start or
    wake, weights.
util/trainer_idle_ratio | share | share | Share of the step in which the trainer computed nothing.
util/engine_idle_ratio | share | share | Share of the step in which no engine had anything to compute: no request was
    open (from its launch until its tokens are here), or all engines were paused.
util/free_slot_ratio | share | share | Free share of the capacity c (util/capacity) over the whole step: 1 -
    sum(min(running, c) dt) / (c sum(dt)). Engines that compute one long completion have c - 1 free slots.
util/rollout_bubble_ratio | share | share | The same over the rollout alone, from a live version until the next batch is
    full: SortedRL's bubble ratio (arXiv 2603.23414).
util/wait_reason/<reason> | share | share | Share of the step in which the run as a whole waited for this: engine_start,
    sampling, tail (few still run), reward, training, push, evaluation, checkpoint, prompts, recovery, shutdown, paused,
    control (what happened is on its way to control). One reason at every instant: the shares sum to 1.
util/loop_lag_s | s | max | Longest time since the last step in which the controller's event loop answered nothing.
util/capacity | requests | last | Slots: requests that run at once in full engines.
perf/train_tok_s | tokens/s | rate | Trained tokens per second of wall time: goodput.
perf/gen_tok_s | tokens/s | rate | Generated tokens per second of wall time, dropped and evaluation ones too.
perf/forward_backward_tok_s | tokens/s | rate | Tokens laid into rows (a prompt that siblings share once) per second of
    forward and backward.
perf/samples_s | samples/s | rate | Trained samples per second of wall time.
perf/groups_s | groups/s | rate | Trained groups per second of wall time.
perf/generated_per_trained_tok | ratio | mean | Tokens of trajectories whose sampling ended since the last step, over
    trained tokens of the step.
perf/wasted_tok_<reason>_total | tokens | total | Generated tokens that were not trained, by drop reason, with those of
    trajectories stopped half-way.
perf/kept_tok_accepted_ratio | share | share | Tokens of deferred completions that the new weights chose again, of all
    that were verified since the last step (tail_batching.deferred_prompts = "verify"); they were not decoded twice,
    though they count as wasted where they lost.
perf/draft_accepted_ratio | share | share | Tokens that speculative decoding drafted and the engine sampled, of all
    drafted ones, in steps without a prefill (engines.args.speculative_config).
perf/draft_accepted_per_step | tokens | mean | Of those, tokens that a request gained in a step of an engine, beside the
    one that each step samples.
perf/wasted_tok_ratio | share | share | Generated tokens that were not trained, of all whose end is known.
# What engines and weight pushes report.
engines/set | number | last | Which of the prepared sets of engines serves: 0 is the first.
engines/serving | engines | last | Engines of the set that serves.
engines/switches_total | switches | total | Changes from one prepared set of engines to another.
engines/restarts_total | engines | total | Engines that died, or were ended, and serve again.
engines/lost_requests_total | requests | total | Requests that an engine served when it died: they were sampled again,
    to the same tokens.
weights/payload_bytes | bytes | sum | Encoded bytes of the version, over ranks.
weights/changed_ratio | share | share | Elements whose published bits changed.
weights/reanchored | engines | sum | Engines that refused the delta and took an anchor.
weights/canary_deviation | nats | last | How far engines are from the trainer on fixed tokens
    (`weights.advanced.canary`): the worst engine's median over the tokens. Of the latest version that was answered for
    when this one was pushed, the one before as a rule.
# How well the machinery of the run itself does.
health/telemetry_dropped_total | messages | total | Dropped by the metrics socket; counts once for each time that a
    subscriber ran over its limit.
health/metrics_refused_total | values | total | Not recorded: their names were more than a run may have (4,096), or too
    long: rewards name their parts.
health/observer_errors_total | errors | total | Calls of the recipe's observers (`run.advanced.observers`) that raised;
    the first of each is in the log.
health/observer_calls_dropped_total | calls | total | Not made: an observer of the recipe was more than 4,096 calls
    behind.
health/insecure_transport | 0 or 1 | last | 1: sockets of this run are open to other hosts without keys
    (`transport.advanced.security = "none"`)."""


def _read(table: str) -> tuple[Metric, ...]:
    """One metric a line: name, unit, aggregation, meaning; indented lines continue the one above."""
    rows = (row.split("|") for row in re.split(r"\n(?! )", table.strip()) if not row.startswith("#"))
    cells = ([" ".join(cell.split()) for cell in row] for row in rows)
    return tuple(Metric(name, unit, AGGREGATIONS[made], meaning) for name, unit, made, meaning in cells)


METRICS = _read(_TABLE)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(
        "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name))
    )


def find_metric(name: str) -> Metric | None:
    """The registered metric that ``name`` (filled in, such as ``engine/engine-0/running``) is one of."""
    return next((metric for metric in METRICS if _pattern(metric.name).fullmatch(name)), None)


def metrics_page() -> str:
    """The page as it must stand in the repository."""
    lines = [_HEAD]
    heading, shown = "", {column.metric for column in (*COLUMNS, *FURTHER)}
    for metric in METRICS:
        if (section := metric.name.partition("/")[0]) != heading:
            heading = section
            lines += ["", f"## {heading}", "", "| name | unit | made by | meaning |", "|---|---|---|---|"]
        name = f"**`{metric.name}`**" if metric.name in shown else f"`{metric.name}`"
        lines.append(f"| {name} | {metric.unit} | {metric.aggregation} | {metric.meaning} |")
    return "\n".join([*lines, "", _PLACES])


_HEAD = """# Metrics

Made by `python lint/metrics_page.py`, which defines them; a test compares the two.
The names are the same in `metrics.jsonl`, on the metrics socket and in `StepFinished.metrics`; `<name>` in one is
filled in by the run. **Bold**: on the step line. A *step* makes one version of the weights: one step of the
optimizer, or as many as batches where a long round trains several at once (`tail_batching.long_round_batches`)."""

_PLACES = """## Where they go

| place | form |
|---|---|
| stdout | one line a step: the bold metrics |
| `metrics.jsonl` | one flat object a line: `kind` (`step`, `evaluation`), `time`, `step`, `policy_version`, metrics |
| `trace.jsonl` | trajectories, steps and engine loads, for the simulator (`observe/report/trajectory_trace.py`) |
| `older-trace.jsonl` | its content before it last grew to 1 GiB and was started again |
| `samples.jsonl` | best, worst and a random completion of each batch; `streamrl samples RUN` shows them |
| `evaluations/step-N.jsonl` | each completion of the evaluation at step N (`run/evaluate/sample_files.py`) |
| `stalls/*.txt` | who waits for whom, with stacks: when nothing moves, or the controller is sent `SIGUSR1` |
| `crash/*.zip` | when the run fails: what somebody needs who was not there, without secrets (`streamrl show`) |
| metrics socket | see below |
| `curve.svg` | reward and evaluation over steps, written when the run ends |

`time` is in seconds since 1970. A value that is not finite is `null`.

## The metrics socket, schema 1

A ZeroMQ PUB socket (XPUB) at `metrics.endpoint` of the recipe, or at an ipc endpoint that the run prints.
`streamrl watch ENDPOINT` shows it; any ZeroMQ SUB socket can read it. Each message has three frames:

| frame | content |
|---|---|
| 0 | topic, one of those below; an empty subscription takes all |
| 1 | schema version in decimal: `1`. Refuse a version that you do not know |
| 2 | JSON object: `run_id`, `sequence` (from 1 in each topic), `time`, `replay`, and the fields of the topic |

| topic | fields |
|---|---|
| `run` | `state` (`started`, `finished`) and what the run says of itself |
| `step`, `evaluation` | `step`, `policy_version`, `metrics` (name to value) |
| `progress` | `step`, `phase`, `finished`, `wanted` |
| `sample` | a completion that was trained on, now and then: `prompt`, `text`, `reward`, `rewards`, `tokens` |
| `warning` | `step`, `message`: a metric left its bounds |
| `decision` | `step`, `subject`, `reason`, `figures`: control changed how it works from `step` on |
| `stall` | `waits`, `seconds`, `file`: nothing moves any more, and the run is about to end |
| `event` | `event` (its kind), `fields` |
| `live` | twice a second: `waits_for` and `waits_s`, `pending` orders, `batch`, `engines`, and `groups` with the \
tokens of each member so far, the racing ones first, at most 64 of `groups_in_all` (`observe/top/live_figures.py`) |

- **Late joiners.** When a subscription arrives, the last message of every topic is sent again, with `replay` true.
  Ignore a replay whose `sequence` you have already seen for its topic. Any other message whose `sequence` falls is the
  first of a controller that was started again.
- **Slow subscribers.** Publishing never waits. A subscriber that falls more than 1,000 messages behind loses messages:
  it sees how many by the gap in `sequence`. `health/telemetry_dropped_total` counts how often that happened.
- Within a schema version fields are only added.
"""


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
