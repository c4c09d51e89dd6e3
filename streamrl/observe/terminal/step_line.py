"""Text for people: lines for steps, evaluations, completions and resumed runs; durations and counts.
``StdoutReporter``, ``streamrl top`` and commands of ``cli`` call it in their processes. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from streamrl.base.printable import one_line
from streamrl.base.run_events import CompletionSampled, RunResumed
from streamrl.base.types import MetricsMapping

ABSENT = "-"
LINE_TEXT = 160
"""Characters to which the prompt and the completion on a line are shortened."""
HELD_OUT = "eval/<set>/avg@<k>"
"""Name of the metric under which ``RunHistory`` gives a line the score of the last evaluation."""


def duration(seconds: float) -> str:
    """Return a duration such as ``0.8 s``, ``42 s``, ``3m05s``, ``2h07m``, ``4d03h`` or ``694d``, which has at most 6
    characters below 10,000 days."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60}m{whole_seconds % 60:02d}s"
    if whole_seconds < 86_400:
        return f"{whole_seconds // 3600}h{whole_seconds % 3600 // 60:02d}m"
    days, remaining_seconds = divmod(whole_seconds, 86_400)
    return f"{days}d{remaining_seconds // 3600:02d}h" if days < 100 else f"{days}d"


def short_count(value: float) -> str:
    """Return a count such as ``812``, ``9.8k``, ``13k`` or ``2.1M``."""
    for divisor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= divisor * 0.9995:
            scaled = value / divisor
            return f"{scaled:.1f}{suffix}" if abs(scaled) < 9.95 else f"{scaled:.0f}{suffix}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """Return a share as text such as ``12%``."""
    return f"{100 * share:.0f}%"


def _decimals(value: float) -> str:
    if abs(value) < 100:
        return f"{value:.3f}"
    if abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.0e}"


class Column(NamedTuple):
    """A column of the table. ``width``: characters with the space before it. ``moves``: whether the column is shown
    only in a run in which its metric changes."""

    label: str
    metric: str
    write: Callable[[float], str]
    width: int
    moves: bool = False


COLUMNS = (
    Column("reward", "reward/mean", _decimals, 8),
    Column("held-out", HELD_OUT, _decimals, 9),
    Column("len", "completion/length_mean", lambda value: f"{value:.0f}", 6),
    Column("cut", "completion/truncated_ratio", percent, 5),
    Column("no-signal", "reward/zero_std_ratio", percent, 10),
    Column("entropy", "policy/entropy", lambda value: f"{value:.2f}", 8),
)
FURTHER = (
    Column("round", "round/<kind>/group_size", lambda value: f"{value:.0f}", 9, moves=True),
    Column("kl", "policy/reference_kl", lambda value: f"{value:.2g}", 8, moves=True),
    Column("teacher-kl", "policy/teacher_kl", lambda value: f"{value:.2g}", 11, moves=True),
    Column("stale", "async/staleness_mean", lambda value: f"{value:.1f}", 6, moves=True),
    Column("tok/s", "perf/train_tok_s", short_count, 7),
    Column("grad", "optim/grad_norm", lambda value: f"{value:.2g}", 8),
    Column("free-slots", "util/free_slot_ratio", percent, 11),
    Column("engine-idle", "util/engine_idle_ratio", percent, 12),
    Column("trainer-idle", "util/trainer_idle_ratio", percent, 13),
    Column("mismatch", "policy/mismatch_abs_mean", lambda value: f"{value:.1g}", 9),
)
"""Further columns, the most useful first: a terminal shows as many as fit. docs/metrics.md has the metrics of all
columns in bold."""
LEGEND = (
    "  columns  reward: mean of the last 10 steps; held-out: the last evaluation;",
    "           cut: completions at max_tokens; no-signal: groups of equal rewards",
)
_TIME_WIDTH = 7
_REMAINING_WIDTH = 7


def further_columns(moving: frozenset[str], steps: int, width: int | None) -> tuple[Column, ...]:
    """Return the further columns that fit into ``width`` characters (None: all) beside the columns that are always
    shown. ``moving``: labels of the columns whose metric changes in the run."""
    room = math.inf if width is None else width - len(table_header(steps))
    columns = []
    for column in FURTHER:
        if (not column.moves or column.label in moving) and column.width <= room:
            columns.append(column)
            room -= column.width
    return tuple(columns)


def round_of(metrics: MetricsMapping) -> tuple[str, float] | None:
    """Return kind and group size of the round that a step trained (``round/<kind>/group_size``); None where they are
    not known."""
    for name, value in metrics.items():
        section, _, path = name.partition("/")
        kind, _, figure = path.rpartition("/")
        if section == "round" and figure == "group_size":
            return kind, value
    return None


def _cell(column: Column, metrics: MetricsMapping, width: int = 0) -> str:
    """Return the text of a metric; ``-`` where it is absent or not finite. ``width``: number of characters to which the
    kind of a round is shortened (0: it is not)."""
    kind = ""
    value = metrics.get(column.metric)
    if column.label == "round" and (step_round := round_of(metrics)) is not None:
        kind, value = step_round
    if value is None or not math.isfinite(value):
        return ABSENT
    text = column.write(value)
    if width:
        kind = kind[: width - len(text) - 2]
    return f"{kind} {text}".lstrip()


def step_line(
    step: int, steps: int, metrics: MetricsMapping, step_s: float, remaining_s: float, further: Sequence[Column] = ()
) -> str:
    """Return the line of a step with a label at each value, for files and pipes."""
    head = f"step {step:>{len(str(steps))}}/{steps}"
    fields = [f"{column.label} {_cell(column, metrics)}" for column in (*COLUMNS, *further)]
    remaining = f"{duration(remaining_s)} left" if step < steps else "done"
    return "  ".join([head, *fields, duration(step_s), remaining])


def table_header(steps: int, further: Sequence[Column] = ()) -> str:
    """Return the head of the columns that ``table_row`` fills, for a terminal."""
    labels = "".join(f"{column.label:>{column.width}}" for column in (*COLUMNS, *further))
    return f"{'step':>{max(4, 2 * len(str(steps)) + 1)}}{labels}{'time':>{_TIME_WIDTH}}{'left':>{_REMAINING_WIDTH}}"


def table_row(
    step: int, steps: int, metrics: MetricsMapping, step_s: float, remaining_s: float, further: Sequence[Column] = ()
) -> str:
    """Return the line of a step as a row under ``table_header``."""
    cells = "".join(f"{_cell(column, metrics, column.width):>{column.width}}" for column in (*COLUMNS, *further))
    remaining = duration(remaining_s) if step < steps else "done"
    head = f"{f'{step}/{steps}':>{max(4, 2 * len(str(steps)) + 1)}}"
    return f"{head}{cells}{duration(step_s):>{_TIME_WIDTH}}{remaining:>{_REMAINING_WIDTH}}"


def evaluation_line(step: int, metrics: MetricsMapping) -> str:
    """Return a line such as ``eval at step 20: held_out 0.531 pass@8 0.814 (2048 prompts)``, with pass@k for the
    largest k above 1, and the mean of each reward function where there are several."""
    parts = []
    for name, value in sorted(metrics.items()):
        prefix, _, path = name.partition("/")
        collection, _, score = path.rpartition("/")
        if prefix == "eval" and score.startswith("avg@"):
            parts.append(_collection_scores(collection, value, score.removeprefix("avg@"), metrics))
    return f"eval at step {step}: " + (", ".join(parts) or "no result")


def _collection_scores(collection: str, average: float, k: str, metrics: MetricsMapping) -> str:
    """Return the scores of one held-out set, for ``evaluation_line``."""
    prefix = f"eval/{collection}"
    text = f"{collection} {average:.3f}"
    if k != "1" and (solved := metrics.get(f"{prefix}/pass@{k}")) is not None:
        text += f" pass@{k} {solved:.3f}"
    if (prompts := metrics.get(f"{prefix}/prompts")) is not None:
        text += f" ({prompts:.0f} prompts)"
    start = f"{prefix}/func/"
    means = {name[len(start) : -len("/mean")]: mean for name, mean in metrics.items() if name.startswith(start)}
    if len(means) > 1:
        text += "; " + ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
    return text


def _figures(sample: CompletionSampled) -> str:
    """Return figures such as ``reward 0.730 (exact 1.000, length -0.270), 22 tokens, stop``."""
    text = f"reward {sample.reward:.3f}"
    if len(sample.rewards) > 1:
        parts = ", ".join(f"{name} {value:.3f}" for name, value in sample.rewards.items())
        text += f" ({parts})"
    return f"{text}, {sample.tokens} tokens, {sample.finish_reason}"


def sample_line(sample: CompletionSampled) -> str:
    """Return a completion on one line, with long texts shortened."""
    short = sample.shortened(LINE_TEXT)
    prompt = one_line(short.question or short.prompt)
    return f'sample at step {sample.step}: {_figures(sample)}: "{prompt}" -> "{one_line(short.text)}"'


def sample_block(title: str, sample: CompletionSampled) -> list[str]:
    """Return title, figures and full texts of a completion, by message where it is a conversation. Further lines of a
    text are indented, so that they do not look like the start of a message."""
    parts = [("prompt", sample.prompt), ("text", sample.text)]
    label_width = 8
    if sample.turns:
        parts = [(f"{turn.role} {turn.tokens} tok" if turn.sampled else turn.role, turn.text) for turn in sample.turns]
        label_width = 20
    indent = " " * (label_width + 2)
    parts += [(entry.reward, f"{entry.number:+.4g}  {one_line(entry.text)[:LINE_TEXT]}") for entry in sample.numbers]
    lines = [f"  {name:<{label_width}}" + text.replace("\n", f"\n{indent}") for name, text in parts]
    return [f"{title}: {_figures(sample)}" if title else _figures(sample), *lines]


def resumed_lines(event: RunResumed) -> list[str]:
    """Describe the state that a run restored from its journal, and the work that this took."""
    counts = {name: f"{count:,}" for name, count in event.restored.items()}
    step = f"step {event.policy_version}"
    events = f"{counts['events']} events, {counts['replayed']} of them replayed"
    progress = f"{counts['trained']} trajectories trained, {counts['drawn']} prompts drawn so far"
    waiting = f"{counts['unscored']} that wait for their reward, {counts['partial']} in part"
    queued = f"{counts['queued']} prompts queued"
    lines = [
        f"resumed at {step}: {events}; {progress}",
        f"  kept     {counts['scored']} trajectories scored, {waiting}, {queued}; sampled again: {counts['again']}",
    ]
    if event.trained_again:
        again = f"{event.trained_again} batches of the journal trained again"
        lines.append(f"  trainer  began with step {event.held_version}; {again}")
    if event.same_weights is True:
        lines.append(f"  weights  of {step} are bit for bit those that were published before")
    elif event.same_weights is False:
        reason = "streaming adds up in the order of arrival"
        lines.append(f"  weights  of {step} differ from those published before ({reason}); engines get the new ones")
    return lines
