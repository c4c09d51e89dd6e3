"""Report on a reward that was tried outside of a run: its figures, a histogram, and advice for training. Pure functions
of outcomes, called by ``reward test`` and ``try`` in the command's own process."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct, structs
from rich.bar import Bar as RichBar
from rich.console import Group
from rich.table import Table
from rich.text import Text

from streamrl.base.run_events import CompletionSampled
from streamrl.base.types import Metrics, RewardFailure, ScoredTrajectory
from streamrl.cli.try_rewards.trial_completions import CompletedGroup
from streamrl.observe.terminal.step_line import sample_block
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.rewards.scoring import Outcome
from streamrl.run.evaluate.sample_files import sample_of
from streamrl.run.step_metrics import part_values, percentile

_BINS = 10
_EXAMPLES = 5
_EXAMPLE_TEXT = 400
_BAR = 40
_MOST_MESSAGES = 5
_LATE_SHARE = 0.5
_FEW_SIGNAL = 0.5
_MANY_FAILED = 0.05
_SAME = 1e-9


class Bin(Struct, frozen=True):
    """Number of values from ``low`` to ``high`` (equal for a bin of a single value)."""

    low: float
    high: float
    count: int


class ValueSpread(Struct, frozen=True):
    """Distribution of values, or of seconds."""

    mean: float
    std: float
    least: float
    p50: float
    p95: float
    most: float


class FailureCount(Struct, frozen=True):
    """Number of failures of one kind with one message."""

    kind: str
    message: str
    count: int


class GroupSignal(Struct, frozen=True):
    """Groups of at least two values. ``flat``: all values of the group are equal, so that its advantages are 0 and
    nothing is learned from the group; ``flat_low`` and ``flat_high``: flat groups at the least and at the greatest
    value."""

    groups: int
    flat: int
    flat_low: int
    flat_high: int
    mean_std: float


class RewardReport(Struct, frozen=True, kw_only=True):
    """``scored``: completions with a value; ``waited_s``: time from the request of a call to its start;
    ``per_second``: completions, all processes together; ``bytes_for_tokens``: the reward reads token ids, which without
    a tokenizer are bytes."""

    reward: str
    prompts: int
    completions: int
    scored: int
    values: ValueSpread | None
    histogram: tuple[Bin, ...]
    parts: Metrics
    seconds: ValueSpread | None
    waited_s: ValueSpread | None
    per_second: float
    limit_s: float
    failures: tuple[FailureCount, ...]
    signal: GroupSignal
    examples: tuple[CompletionSampled, ...] = ()
    bytes_for_tokens: bool = False


def summarize(
    reward: str,
    outcomes: Sequence[Sequence[Outcome]],
    groups: Sequence[CompletedGroup],
    seconds: float,
    *,
    tokenizer: Tokenizer,
    bytes_for_tokens: bool = False,
) -> RewardReport:
    """Return the report of ``outcomes``, a sequence for each group in its order."""
    all_outcomes = [outcome for group in outcomes for outcome in group]
    by_group = [[o.reward for o in group if isinstance(o, ScoredTrajectory)] for group in outcomes]
    values = [value for group in by_group for value in group]
    calls = [call for outcome in all_outcomes for call in outcome.calls]
    failed = Counter((o.kind.value, o.message) for o in all_outcomes if isinstance(o, RewardFailure))
    return RewardReport(
        reward=reward,
        prompts=len(groups),
        completions=len(all_outcomes),
        scored=len(values),
        values=spread(values),
        histogram=histogram(values),
        parts={
            name.removeprefix(f"{reward}."): statistics.fmean(parts)
            for name, parts in part_values(o for o in all_outcomes if isinstance(o, ScoredTrajectory)).items()
            if name != reward
        },
        seconds=spread([call.seconds for call in calls]),
        waited_s=spread([call.waited_s for call in calls]),
        per_second=len(all_outcomes) / seconds if seconds > 0 else 0.0,
        limit_s=max((call.limit_s for call in calls), default=0.0),
        failures=tuple(FailureCount(kind, message, count) for (kind, message), count in failed.most_common()),
        signal=signal_of(by_group),
        examples=_examples(all_outcomes, tokenizer),
        bytes_for_tokens=bytes_for_tokens,
    )


def _examples(outcomes: Sequence[Outcome], tokenizer: Tokenizer) -> tuple[CompletionSampled, ...]:
    """A few completions, from the least value to the greatest."""
    ordered = sorted((o for o in outcomes if isinstance(o, ScoredTrajectory)), key=lambda scored: scored.reward)
    count = min(_EXAMPLES, len(ordered))
    places = [index * (len(ordered) - 1) // max(count - 1, 1) for index in range(count)]
    return tuple(sample_of(ordered[place], tokenizer, step=0, choice="") for place in places)


def spread(values: Sequence[float]) -> ValueSpread | None:
    """Return the distribution of ``values``; None without values. ``std`` of the population; quantiles are values that
    occurred."""
    if not values:
        return None
    mean = statistics.fmean(values)
    deviation = statistics.pstdev(values)
    return ValueSpread(mean, deviation, min(values), percentile(values, 0.5), percentile(values, 0.95), max(values))


def histogram(values: Sequence[float]) -> tuple[Bin, ...]:
    """A bin for each value where there are few different ones, else 10 of equal width."""
    counts = Counter(values)
    if len(counts) <= _BINS:
        return tuple(Bin(value, value, counts[value]) for value in sorted(counts))
    low = min(values)
    high = max(values)
    width = (high - low) / _BINS
    if not width > 0 or not math.isfinite(width):  # adjacent floats, or a range that overflows
        return (Bin(low, high, len(values)),)
    places = Counter(min(int((value - low) / width), _BINS - 1) for value in values)
    return tuple(Bin(low + i * width, low + (i + 1) * width, places[i]) for i in range(_BINS))


def signal_of(groups: Sequence[Sequence[float]]) -> GroupSignal:
    """Count the groups that carry signal for a method that compares the completions of a group."""
    compared = [group for group in groups if len(group) > 1]
    values = [value for group in compared for value in group]
    low = min(values, default=0.0)
    high = max(values, default=0.0)
    flat = [group for group in compared if max(group) - min(group) <= _SAME]
    return GroupSignal(
        groups=len(compared),
        flat=len(flat),
        flat_low=sum(high > low and abs(group[0] - low) <= _SAME for group in flat),
        flat_high=sum(high > low and abs(group[0] - high) <= _SAME for group in flat),
        mean_std=statistics.fmean([statistics.pstdev(group) for group in compared]) if compared else 0.0,
    )


def problems_of(report: RewardReport) -> Iterator[str]:
    """Yield the problems to mend before a run is spent on the reward."""
    failed = report.completions - report.scored
    if failed and not report.scored:
        yield "every call failed: nothing would be trained"
    elif failed > _MANY_FAILED * report.completions:
        yield f"{failed / report.completions:.0%} of the calls failed: those samples would not be trained"
    if report.values is not None and report.values.most - report.values.least <= _SAME and report.scored > 1:
        yield f"every value is {report.values.least:g}: there is nothing to learn"
    elif report.signal.groups and report.signal.flat >= _FEW_SIGNAL * report.signal.groups:
        share = report.signal.flat / report.signal.groups
        yield f"{share:.0%} of the groups carry no signal: change the difficulty of the prompts, or grade more finely"
    if not report.signal.groups and report.scored:
        yield "no prompt has two values: whether groups carry signal cannot be said"
    if report.seconds is not None and report.seconds.p95 > _LATE_SHARE * report.limit_s > 0:
        yield f"P95 is {_time(report.seconds.p95)} of a time limit of {_time(report.limit_s)}: raise the limit"
    if report.bytes_for_tokens:
        yield "its token_ids were the bytes of the text: give --tokenizer MODEL"


def rich_report(report: RewardReport, prompts: str, *, advice: bool = True) -> Group:
    """Tables and a histogram, for a terminal; with ``advice`` also the problems to mend."""
    heading = Text.assemble(
        ("reward ", "dim"), (report.reward, "bold"),
        f": {report.scored} of {report.completions} completions scored, {report.prompts} prompts of {prompts}",
    )  # fmt: skip
    numbers = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "mean", "std", "min", "P50", "P95", "max"):
        numbers.add_column(name, justify="left" if not name else "right")
    if report.values is not None:
        numbers.add_row("value", *(f"{x:.4g}" for x in structs.astuple(report.values)))
    for name, times in (("latency", report.seconds), ("waited", report.waited_s)):
        if times is not None:
            numbers.add_row(name, *map(_time, structs.astuple(times)))
    blocks: list[Text | Table] = [heading, Text(), numbers, Text()]
    if report.histogram:
        blocks += [histogram_picture(report.histogram), Text()]
    if report.parts:
        blocks.append(Text("parts (mean): " + ", ".join(f"{name} {mean:.4g}" for name, mean in report.parts.items())))
    blocks.append(_signal_line(report.signal))
    blocks.append(Text(f"throughput: {report.per_second:,.0f} completions/s"))
    for sample in report.examples:
        blocks += [Text(), Text("\n".join(sample_block("", sample.shortened(_EXAMPLE_TEXT))), "dim")]
    if report.failures:
        blocks += [Text(), _failures(report)]
    if advice and (problems := list(problems_of(report))):
        blocks += [Text(), *(Text.assemble(("-> ", "yellow"), problem) for problem in problems)]
    return Group(*blocks)


def _signal_line(signal: GroupSignal) -> Text:
    if not signal.groups:
        return Text("groups: none with two values")
    signal_count = signal.groups - signal.flat
    flat = f"{signal.flat} flat ({signal.flat_low} all at the least value, {signal.flat_high} all at the greatest)"
    return Text(
        f"groups: {signal_count} of {signal.groups} carry signal ({signal_count / signal.groups:.0%}); {flat}; "
        f"mean std in a group {signal.mean_std:.3g}"
    )


def histogram_picture(bins: Sequence[Bin]) -> Table:
    """A bar for each bin, for a terminal."""
    picture = Table(box=None, pad_edge=False, show_header=False)
    picture.add_column(justify="right", style="dim")
    picture.add_column(style="cyan", no_wrap=True)
    picture.add_column(justify="right")
    tallest = max(entry.count for entry in bins)
    for entry in bins:
        name = f"{entry.low:.4g}" if entry.low == entry.high else f"{entry.low:.4g} to {entry.high:.4g}"
        picture.add_row(name, RichBar(tallest, 0, max(entry.count, tallest / (8 * _BAR)), width=_BAR), str(entry.count))
    return picture


def _failures(report: RewardReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("failures", "kind", "message"):
        table.add_column(name, justify="right" if name == "failures" else "left")
    for failure in report.failures[:_MOST_MESSAGES]:
        table.add_row(str(failure.count), Text(failure.kind, "red"), Text(failure.message))
    if omitted := report.failures[_MOST_MESSAGES:]:
        count = sum(failure.count for failure in omitted)
        table.add_row(str(count), "", f"{len(omitted)} other messages (--json has all)")
    return table


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
