"""Text for people: lines for steps, evaluations, completions and resumed runs; durations, counts. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from streamrl.base.printable import one_line
from streamrl.base.run_events import CompletionSampled, RunResumed

ABSENT = "-"
LINE_TEXT = 160
"""Characters of the prompt and of the completion on a line."""
HELD_OUT = "eval/<set>/avg@<k>"
"""Name under which ``Column`` finds the score of the last evaluation."""


def duration(seconds: float) -> str:
    """``0.8 s``, ``42 s``, ``3m05s``, ``2h07m``, ``4d03h``, ``694d``: at most 6 characters below 10,000 days."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    days, rest = divmod(whole, 86_400)
    return f"{days}d{rest // 3600:02d}h" if days < 100 else f"{days}d"


def short_count(value: float) -> str:
    """``812``, ``9.8k``, ``13k``, ``2.1M``."""
    for divisor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= divisor * 0.9995:
            scaled = value / divisor
            return f"{scaled:.1f}{suffix}" if abs(scaled) < 9.95 else f"{scaled:.0f}{suffix}"
    return f"{value:.0f}"


def percent(share: float) -> str:
    """``12%``."""
    return f"{100 * share:.0f}%"


def _decimals(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}" if abs(value) < 1e6 else f"{value:.0e}"


class Column(NamedTuple):
    """One column: ``width`` includes the space before it. ``moves``: it is shown only in a run that moves it."""

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
    Column("stale", "async/staleness_mean", lambda value: f"{value:.1f}", 6, moves=True),
    Column("tok/s", "perf/train_tok_s", short_count, 7),
    Column("grad", "optim/grad_norm", lambda value: f"{value:.2g}", 8),
    Column("free-slots", "util/free_slot_ratio", percent, 11),
    Column("engine-idle", "util/engine_idle_ratio", percent, 12),
    Column("trainer-idle", "util/trainer_idle_ratio", percent, 13),
    Column("mismatch", "policy/mismatch_abs_mean", lambda value: f"{value:.1g}", 9),
)
"""The most useful first: a terminal shows as many as it has room for. docs/metrics.md has all columns in bold."""
LEGEND = (
    "  columns  reward: mean of the last 10 steps; held-out: the last evaluation;",
    "           cut: completions at max_tokens; no-signal: groups of equal rewards",
)
_TIME = 7
_LEFT = 7


def further_columns(moving: frozenset[str], steps: int, width: int | None) -> tuple[Column, ...]:
    """The further columns of a run that moves those labelled ``moving``, as far as ``width`` characters hold them
    beside the columns that are always shown (None: all)."""
    room = math.inf if width is None else width - len(table_header(steps))
    chosen = []
    for column in FURTHER:
        if (not column.moves or column.label in moving) and column.width <= room:
            chosen.append(column)
            room -= column.width
    return tuple(chosen)


def round_of(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """Kind and group size of the round that a step trained (``round/<kind>/group_size``); None where it is unknown."""
    for name, value in metrics.items():
        section, _, rest = name.partition("/")
        kind, _, what = rest.rpartition("/")
        if section == "round" and what == "group_size":
            return kind, value
    return None


def _cell(column: Column, metrics: Mapping[str, float], width: int = 0) -> str:
    """``-`` for a metric that is absent or not finite. ``width``: the kind of a round is cut to it (0: not)."""
    kind = ""
    value = metrics.get(column.metric)
    if column.label == "round" and (seen := round_of(metrics)) is not None:
        kind, value = seen
    if value is None or not math.isfinite(value):
        return ABSENT
    text = column.write(value)
    return f"{kind[: width - len(text) - 2] if width else kind} {text}".lstrip()


def step_line(
    step: int,
    steps: int,
    metrics: Mapping[str, float],
    step_s: float,
    remaining_s: float,
    further: Sequence[Column] = (),
) -> str:
    """The line of one step with a label at each value, for files and pipes."""
    head = f"step {step:>{len(str(steps))}}/{steps}"
    fields = [f"{column.label} {_cell(column, metrics)}" for column in (*COLUMNS, *further)]
    left = f"{duration(remaining_s)} left" if step < steps else "done"
    return "  ".join([head, *fields, duration(step_s), left])


def table_header(steps: int, further: Sequence[Column] = ()) -> str:
    """The head of the columns that ``table_row`` fills, for a terminal."""
    labels = "".join(f"{column.label:>{column.width}}" for column in (*COLUMNS, *further))
    return f"{'step':>{max(4, 2 * len(str(steps)) + 1)}}{labels}{'time':>{_TIME}}{'left':>{_LEFT}}"


def table_row(
    step: int,
    steps: int,
    metrics: Mapping[str, float],
    step_s: float,
    remaining_s: float,
    further: Sequence[Column] = (),
) -> str:
    """The line of one step as a row under ``table_header``."""
    cells = "".join(f"{_cell(column, metrics, column.width):>{column.width}}" for column in (*COLUMNS, *further))
    left = duration(remaining_s) if step < steps else "done"
    head = f"{f'{step}/{steps}':>{max(4, 2 * len(str(steps)) + 1)}}"
    return f"{head}{cells}{duration(step_s):>{_TIME}}{left:>{_LEFT}}"


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """``eval at step 20: held_out 0.531 pass@8 0.814 (2048 prompts)``; pass@k for the largest k above 1; the mean of
    each reward function where there are several."""
    parts = []
    for name, value in sorted(metrics.items()):
        prefix, _, rest = name.partition("/")
        collection, _, what = rest.rpartition("/")
        if prefix == "eval" and what.startswith("avg@"):
            prompts = metrics.get(f"eval/{collection}/prompts")
            count = f" ({prompts:.0f} prompts)" if prompts is not None else ""
            k = what.removeprefix("avg@")
            solved = metrics.get(f"eval/{collection}/pass@{k}") if k != "1" else None
            share = "" if solved is None else f" pass@{k} {solved:.3f}"
            start = f"eval/{collection}/func/"
            end = "/mean"
            means = {n[len(start) : -len(end)]: v for n, v in metrics.items() if n.startswith(start)}
            each = "; " + ", ".join(f"{n} {v:.3f}" for n, v in means.items()) if len(means) > 1 else ""
            parts.append(f"{collection} {value:.3f}{share}{count}{each}")
    return f"eval at step {step}: " + (", ".join(parts) or "no result")


def _figures(sample: CompletionSampled) -> str:
    """``reward 0.730 (exact 1.000, length -0.270), 22 tokens, stop``."""
    several = len(sample.rewards) > 1
    each = f" ({', '.join(f'{name} {value:.3f}' for name, value in sample.rewards.items())})" if several else ""
    return f"reward {sample.reward:.3f}{each}, {sample.tokens} tokens, {sample.finish_reason}"


def sample_line(sample: CompletionSampled) -> str:
    """All of it on one line, with long texts shortened."""
    short = sample.shortened(LINE_TEXT)
    return f'sample at step {sample.step}: {_figures(sample)}: "{one_line(short.prompt)}" -> "{one_line(short.text)}"'


def sample_block(title: str, sample: CompletionSampled) -> list[str]:
    """Title, figures and whole texts, by message of a conversation. Further lines of a text are indented: none looks
    like a line of another one."""
    turns = [(f"{one.role} {one.tokens} tok" if one.sampled else one.role, one.text) for one in sample.turns]
    parts = turns or [("prompt", sample.prompt), ("text", sample.text)]
    wide = 20 if turns else 8
    lines = [f"  {name:<{wide}}" + text.replace("\n", f"\n{'':<{wide + 2}}") for name, text in parts]
    return [f"{title}: {_figures(sample)}" if title else _figures(sample), *lines]


def resumed_lines(event: RunResumed) -> list[str]:
    """Describe the state of a run that resumes from its journal, and what it did to get there."""
    has = {name: f"{count:,}" for name, count in event.restored.items()}
    step = f"step {event.policy_version}"
    events = f"{has['events']} events, {has['replayed']} of them replayed"
    waits = f"{has['unscored']} that wait for their reward, {has['partial']} in part, {has['queued']} prompts queued"
    lines = [
        f"resumed at {step}: {events}; {has['trained']} trajectories trained, {has['drawn']} prompts drawn so far",
        f"  kept     {has['scored']} trajectories scored, {waits}; sampled again: {has['again']}",
    ]
    if event.trained_again:
        again = f"{event.trained_again} batches of the journal trained again"
        lines.append(f"  trainer  began with step {event.held_version}; {again}")
    if event.same_weights is True:
        lines.append(f"  weights  of {step} are bit for bit those that were published before")
    elif event.same_weights is False:
        why = "streaming adds up in the order of arrival"
        lines.append(f"  weights  of {step} differ from those published before ({why}); engines get the new ones")
    return lines
