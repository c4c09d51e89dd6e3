"""The metric registry, and the page made from it: ``python lint/metrics_page.py > docs/metrics.md``.

Names, units and meanings are in ``streamrl/observe/run_files/metrics.txt`` and nowhere else."""

from __future__ import annotations

import sys

from streamrl.observe.run_files.metric_help import METRICS as METRICS
from streamrl.observe.run_files.metric_help import find_metric as find_metric
from streamrl.observe.terminal.step_line import COLUMNS, FURTHER


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

Made by `python lint/metrics_page.py` from `streamrl/observe/run_files/metrics.txt`; a test compares the two.
The names are the same in `metrics.jsonl`, on the metrics socket and in `StepFinished.metrics`; `<name>` in one is
filled in by the run. **Bold**: on the step line. A *step* makes one version of the weights: one step of the
optimizer, or as many as batches where a long round trains several at once (`tail_batching.long_round_batches`)."""

_PLACES = """## Where they go

| place | form |
|---|---|
| stdout | one line a step: the bold metrics |
| `metrics.jsonl` | one flat object a line: `kind` (`step`, `evaluation`), `time`, `step`, `policy_version`, metrics |
| `trace.jsonl` | trajectories, steps and engine loads, for the simulator (`observe/report/trajectory_trace.py`) |
| `older-NAME.jsonl` | the part before the present one ([how large](watch.md#how-large-the-files-of-a-run-become)) |
| `samples.jsonl` | best, worst and a random completion of a batch, with logprobs and versions; `streamrl samples RUN` |
| `prompts.jsonl` | id and first words of each prompt that was answered, by which the page names prompts |
| `evaluations/step-N.jsonl` | each completion of the evaluation at step N (`run/evaluate/sample_files.py`) |
| `stalls/*.txt` | who waits for whom, with stacks: when nothing moves, or the controller is sent `SIGUSR1` |
| `crash/*.zip` | when the run fails: what somebody needs who was not there, without secrets (`streamrl show`) |
| metrics socket | see below |

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
| `live` | twice a second: `waits_for`, `waits_s`, `pending`, `filled` of `target`, `engines`, and `groups` with the \
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
