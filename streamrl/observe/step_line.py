"""Text for people: one line for a step, durations, counts. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

ABSENT = "-"


def duration(seconds: float) -> str:
    """``0.8 s``, ``42 s``, ``3m05s``, ``2h07m``, ``4d03h``."""
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


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


def small(value: float) -> str:
    """Three digits: ``0.0123``, ``1.5e-07``."""
    return f"{value:.3g}"


# The ten fields of the line: label, the metrics in it, how each is written. docs/metrics.md has them in bold.
LINE: tuple[tuple[str, tuple[str, ...], Callable[[float], str]], ...] = (
    ("reward", ("reward/mean",), lambda value: f"{value:.3f}"),
    ("no-signal", ("reward/zero_std_ratio",), percent),
    ("len", ("completion/length_mean",), lambda value: f"{value:.0f}"),
    ("cut", ("completion/truncated_ratio",), percent),
    ("kl", ("policy/kl_rollout",), small),
    ("entropy", ("policy/entropy",), lambda value: f"{value:.2f}"),
    ("grad", ("optim/grad_norm",), small),
    ("stale", ("async/staleness_mean",), lambda value: f"{value:.1f}"),
    ("tok/s gen/train", ("perf/gen_tok_s", "perf/train_tok_s"), short_count),
    ("idle engine/trainer", ("util/bubble_ratio", "util/trainer_idle_ratio"), percent),
)


def field(metrics: Mapping[str, float], names: tuple[str, ...], write: Callable[[float], str]) -> str:
    """The value of one field of the line; ``-`` for a metric that is absent or not finite."""
    values = (metrics.get(name) for name in names)
    return "/".join(ABSENT if value is None or not math.isfinite(value) else write(value) for value in values)


def round_of(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """Kind and group size of the round that a step trained (``round/<kind>/group_size``); None where nobody said."""
    for name, value in metrics.items():
        section, _, rest = name.partition("/")
        kind, _, what = rest.rpartition("/")
        if section == "round" and what == "group_size":
            return kind, value
    return None


def step_line(
    step: int,
    steps: int,
    metrics: Mapping[str, float],
    step_s: float,
    remaining_s: float,
    *,
    show_round: bool = False,
) -> str:
    """The line of one step, with progress and remaining time. ``show_round``: also the kind of round, group size."""
    head = f"step {step:>{len(str(steps))}}/{steps}"
    fields = [f"{label} {field(metrics, names, write)}" for label, names, write in LINE]
    rounds = [f"round {_round_field(metrics, 0)}"] if show_round else []
    left = f"{duration(remaining_s)} left" if step < steps else "done"
    return "  ".join([head, *rounds, *fields, duration(step_s), left])


def _round_field(metrics: Mapping[str, float], width: int) -> str:
    """``short 8``: kind of round and group size; the kind is cut where ``width`` (0: any) is too small for it."""
    seen = round_of(metrics)
    if seen is None:
        return ABSENT
    kind, size = seen
    written = f"{size:.0f}"
    return f"{kind[: width - len(written) - 2] if width else kind} {written}"


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """``eval at step 20: held_out 0.531 pass@8 0.814 (2048 prompts)``; pass@k for the largest k above 1."""
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
            parts.append(f"{collection} {value:.3f}{share}{count}")
    return f"eval at step {step}: " + (", ".join(parts) or "no result")


_COLUMNS = (8, 10, 6, 5, 9, 8, 8, 6, 16, 20)
# With the kind of round the table is as wide as without: the last column's label is shorter.
_ROUND_COLUMN = 9
_LAST_LABEL, _LAST_COLUMN = "idle e/t", 11


def table_header(steps: int, *, show_round: bool = False) -> str:
    """The head of the columns that ``table_row`` fills, for a terminal."""
    width = 2 * len(str(steps)) + 1
    named = [label for label, _, _ in LINE]
    sizes = _COLUMNS
    first = ""
    if show_round:
        named[-1], sizes, first = _LAST_LABEL, (*_COLUMNS[:-1], _LAST_COLUMN), f"{'round':>{_ROUND_COLUMN}}"
    labels = "".join(f"{label:>{size}}" for label, size in zip(named, sizes, strict=True))
    return f"{'step':>{width}}{first}{labels}{'time':>8}{'left':>8}"


def table_row(
    step: int,
    steps: int,
    metrics: Mapping[str, float],
    step_s: float,
    remaining_s: float,
    *,
    show_round: bool = False,
) -> str:
    """The line of one step as a row under ``table_header``."""
    width = 2 * len(str(steps)) + 1
    sizes = (*_COLUMNS[:-1], _LAST_COLUMN) if show_round else _COLUMNS
    first = f"{_round_field(metrics, _ROUND_COLUMN):>{_ROUND_COLUMN}}" if show_round else ""
    cells = "".join(
        f"{field(metrics, names, write):>{size}}" for (_, names, write), size in zip(LINE, sizes, strict=True)
    )
    left = duration(remaining_s) if step < steps else "done"
    return f"{f'{step}/{steps}':>{width}}{first}{cells}{duration(step_s):>8}{left:>8}"
