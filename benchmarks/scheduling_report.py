"""What finished cells of the scheduling benchmark say: a table for each regime, and a verdict for each claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import msgspec
from scheduling_cells import AUTO, PREFIXES, ROUND_ARMS, SORTED_RL, SYNCHRONOUS, Cell, Regime, arm_order

UNBIASED_ENOUGH = 0.9
AS_ACCURATE = 0.02
OF_BUDGET = 0.02
# Two-sided 95 % points of Student's t, by degrees of freedom from 1 on.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
STUDENT_T_BEYOND = 1.96


class Interval(msgspec.Struct, frozen=True):
    """A mean and its 95 % interval by Student's t. NaN where there is one value only."""

    mean: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """Mean of ``values`` with its 95 % interval. Raises ``ValueError`` for none."""
    if not values:
        raise ValueError("an interval needs values")
    mean, freedom = fmean(values), len(values) - 1
    if freedom == 0:
        return Interval(mean, math.nan, math.nan)
    error = stdev(values) / math.sqrt(len(values))
    reach = error * (STUDENT_T[freedom - 1] if freedom <= len(STUDENT_T) else STUDENT_T_BEYOND)
    return Interval(mean, mean - reach, mean + reach)


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """One arm against its baseline (``synchronous``), seed by seed. ``speed``, ``thrift`` (CPU time a sample),
    ``goodput``: ratios, more is better.

    ``length``: mean trained length over that of ``synchronous``; ``accuracy``: difference."""

    regime: Regime
    arm: str
    cells: list[Cell]
    speed: Interval
    thrift: Interval
    goodput: Interval
    length: Interval
    accuracy: Interval
    synchronous: list[Cell]

    @property
    def on_policy(self) -> bool:
        """Whether no token was trained by another version than sampled it."""
        return all(cell.on_policy for cell in self.cells)

    @property
    def composes(self) -> bool:
        """Whether it keeps the task's algorithm, and its group size unless a controller chooses it."""
        return self.arm in ROUND_ARMS or self.arm in ("sagc", "best_sagc")

    @property
    def own_length(self) -> float:
        """Mean trained length over the unbiased one of the same runs (``length/bias``), over whole cycles of rounds;
        NaN where none reports it."""
        values = [value for cell in self.cells if not math.isnan(value := cell.after_whole_cycles("length/bias"))]
        return fmean(values) if values else math.nan

    @property
    def unbiased(self) -> bool:
        """Whether it trains lengths as they are, nearly: by ``synchronous``, and by its own runs, whose prompts and
        luck are the same, where those can tell."""
        own = self.length.mean if math.isnan(self.own_length) else self.own_length
        return min(own, self.length.mean) >= UNBIASED_ENOUGH


def of_ratios(ratios: Sequence[float]) -> Interval:
    """Geometric mean of ``ratios`` with its 95 % interval, made on their logarithms."""
    logs = interval([math.log(ratio) for ratio in ratios])
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def baseline_of(arm: str) -> str:
    """What an arm is compared with: another algorithm's arms with its own synchronous rounds."""
    prefix = next((prefix for prefix in ("dapo_", *SORTED_RL) if prefix in arm), "")
    return SYNCHRONOUS if arm == prefix + SYNCHRONOUS else prefix + SYNCHRONOUS


def paired(cells: Sequence[Cell]) -> list[Paired]:
    """Every arm that shares a regime and a seed with its baseline, in order of regime and arm."""
    known = {(cell.regime, cell.arm, cell.seed): cell for cell in cells}
    found = []
    for regime, arm in sorted({(cell.regime, cell.arm) for cell in cells}, key=lambda key: (key[0], arm_order(key[1]))):
        other = baseline_of(arm)
        own = [cell for cell in cells if (cell.regime, cell.arm) == (regime, arm)]
        own = [cell for cell in own if (regime, other, cell.seed) in known]
        if own and arm != SYNCHRONOUS:
            found.append(_against(regime, arm, own, [known[regime, other, cell.seed] for cell in own]))
    return found


def _against(regime: Regime, arm: str, own: list[Cell], others: list[Cell]) -> Paired:
    pairs = list(zip(own, others, strict=True))
    return Paired(
        regime=regime,
        arm=arm,
        cells=own,
        speed=_faster(pairs),
        thrift=_less_cpu(pairs),
        goodput=of_ratios([(a.trained_tokens / a.seconds) / (b.trained_tokens / b.seconds) for a, b in pairs]),
        length=of_ratios([a.length / b.length for a, b in pairs]),
        accuracy=_more_accurate(pairs),
        synchronous=others,
    )


def ratio_text(value: Interval) -> str:
    """``1.32 (1.21 to 1.44)``; ``-`` where it was not measured."""
    return ("-" if math.isnan(value.mean) else f"{value.mean:.2f}") + (
        "" if math.isnan(value.low) else f" ({value.low:.2f} to {value.high:.2f})"
    )


def _difference_text(value: Interval) -> str:
    return f"{value.mean:+.3f}" + ("" if math.isnan(value.low) else f" ({value.low:+.3f} to {value.high:+.3f})")


def _mean(cells: Sequence[Cell], value: Callable[[Cell], float], spec: str) -> str:
    values = [found for cell in cells if not math.isnan(found := value(cell))]
    return format(fmean(values), spec) if values else "-"


def _row(arm: str, cells: Sequence[Cell], against: Paired | None) -> list[str]:
    sizes = [shares for cell in cells if (shares := cell.size_shares())]
    mixed = {size: fmean(shares.get(size, 0.0) for shares in sizes) for size in sorted({s for m in sizes for s in m})}
    alone = "1" if arm == SYNCHRONOUS else "-"
    return [
        arm + ("" if all(cell.on_policy for cell in cells) else " (off-policy)"),
        str(len(cells)),
        _mean(cells, lambda cell: cell.sample_ms, ".1f"),
        _mean(cells, lambda cell: cell.sample_cpu_ms, ".1f"),
        _mean(cells, lambda cell: 1000 * cell.seconds / len(cell.measured), ".0f"),
        ratio_text(against.speed) if against else alone,
        ratio_text(against.thrift) if against else alone,
        ratio_text(against.goodput) if against else alone,
        _mean(cells, lambda cell: cell.groups / cell.seconds, ".2f"),
        _mean(cells, lambda cell: cell.trained_tokens / cell.seconds, ".0f"),
        _mean(cells, lambda cell: cell.weighted("util/rollout_bubble_ratio"), ".2f"),
        _mean(cells, lambda cell: cell.weighted("util/free_slot_ratio"), ".2f"),
        _mean(cells, lambda cell: cell.weighted("util/engine_idle_ratio"), ".2f"),
        _mean(cells, lambda cell: cell.accuracy, ".3f"),
        _difference_text(against.accuracy) if against else "-",
        _mean(cells, lambda cell: cell.length, ".0f"),
        ratio_text(against.length) if against else alone,
        _mean(cells, lambda cell: cell.after_whole_cycles("length/bias"), ".2f"),
        _mean(cells, lambda cell: cell.generated_per_trained, ".2f"),
        _mean(cells, lambda cell: cell.per_batch("sizing/straggler_rate"), ".2f"),
        str(sum(len(cell.warnings) for cell in cells)),
        " ".join(f"{size}:{share:.0%}" for size, share in mixed.items()) or "-",
    ]


COLUMNS = (
    "arm",
    "seeds",
    "ms a sample",
    "CPU ms a sample",
    "ms a step",
    "times as fast",
    "less CPU",
    "trained tok/s over synchronous",
    "groups/s",
    "trained tok/s",
    "rollout bubble",
    "free slots",
    "engine idle",
    "accuracy",
    "minus synchronous",
    "trained length",
    "over synchronous",
    "over own unbiased",
    "generated/trained",
    "stragglers",
    "warnings",
    "group sizes",
)


def _change(before: Sequence[Cell], after: Sequence[Cell], value: Callable[[Cell], float], spec: str) -> str:
    """``23.7 → 14.2``."""
    return f"{_mean(before, value, spec)} → {_mean(after, value, spec)}"


def _costs_text(before: Sequence[Cell], after: Sequence[Cell]) -> str:
    """``23.7 → 14.2 ms a sample, 33.0 → 20.1 CPU ms a sample``."""
    wall = _change(before, after, lambda cell: cell.sample_ms, ".2f")
    return f"{wall} ms a sample, {_change(before, after, lambda cell: cell.sample_cpu_ms, '.2f')} CPU ms a sample"


def checkouts_table(own: Sequence[Cell], other: Sequence[Cell]) -> str:
    """Each arm in two checkouts, paired by seed, as a Markdown table: from the other's figures to those of this one.
    Steps are alike where mean reward and mean length are equal to the last bit."""
    lines = ["| arm | pairs | other checkout → this one | less wall time | less CPU | steps alike |", "|---" * 6 + "|"]
    for regime, arm in sorted({(cell.regime, cell.arm) for cell in own}, key=lambda key: (key[0], arm_order(key[1]))):
        of_arm = ([cell for cell in cells if (cell.regime, cell.arm) == (regime, arm)] for cells in (own, other))
        if not (pairs := _same_seeds(*of_arm)):
            continue
        here, there = zip(*pairs, strict=True)
        steps = [both for a, b in pairs for both in zip(a.steps, b.steps, strict=True)]
        alike = sum(all(a[name] == b[name] for name in ("reward/mean", "completion/length_mean")) for a, b in steps)
        row = [f"{regime.name} {arm}", str(len(pairs)), _costs_text(there, here), ratio_text(_faster(pairs))]
        lines.append(f"| {' | '.join(row)} | {ratio_text(_less_cpu(pairs))} | {alike} of {len(steps)} |")
    return "\n".join(lines)


def regime_table(regime: Regime, cells: Sequence[Cell], pairs: Sequence[Paired]) -> str:
    """A Markdown table of one regime; ``-`` where a run did not report a metric."""
    own = [cell for cell in cells if cell.regime == regime]
    by_arm = {pair.arm: pair for pair in pairs if pair.regime == regime}
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for arm in sorted({cell.arm for cell in own}, key=arm_order):
        members = by_arm[arm].cells if arm in by_arm else [cell for cell in own if cell.arm == arm]
        lines.append(f"| {' | '.join(_row(arm, members, by_arm.get(arm)))} |")
    return "\n".join(lines)


class Verdict(msgspec.Struct, frozen=True):
    """One sentence of the acceptance. ``met`` None: cells that it needs are missing."""

    claim: str
    met: bool | None
    figures: str

    def __str__(self) -> str:
        word = {True: "met", False: "UNMET", None: "no cells"}[self.met]
        return f"[{word}] {self.claim}: {self.figures}"


DEMO_TAIL, DEMO_TOKENS, HEAVY = Regime("demo", 8, 8), Regime("demo", 32, 8), Regime("heavy", 16, 8)


def _pair_text(pair: Paired) -> str:
    own = "" if math.isnan(pair.own_length) else f" and {pair.own_length:.2f} of its own unbiased"
    return (
        f"{pair.arm} {_costs_text(pair.synchronous, pair.cells)}: {ratio_text(pair.speed)} times less wall time, "
        f"{ratio_text(pair.thrift)} times less CPU, trained tok/s {ratio_text(pair.goodput)}, "
        f"length {pair.length.mean:.2f} of synchronous{own}, "
        f"accuracy {_difference_text(pair.accuracy)}, rollout bubble "
        f"{_change(pair.synchronous, pair.cells, lambda cell: cell.weighted('util/rollout_bubble_ratio'), '.2f')}, "
        f"{len(pair.cells)} seeds"
    )


def fastest(
    pairs: Sequence[Paired], regime: Regime, target: float, *, unbiased: bool, goal: float | None = None
) -> Verdict:
    """The fastest strictly on-policy arm of ``regime`` whose accuracy is within ``AS_ACCURATE``."""
    condition = f" at a trained length of at least {UNBIASED_ENOUGH}" if unbiased else ""
    claim = f"{regime.name}: an on-policy composition takes {target} times less wall time{condition}"
    equal_samples = [pair for pair in pairs if pair.regime == regime and not pair.cells[0].keeps_prompts]
    candidates = [pair for pair in equal_samples if pair.on_policy and (pair.unbiased or not unbiased)]
    if not candidates:
        return Verdict(claim, None, "-")
    equal = [pair for pair in candidates if pair.accuracy.mean >= -AS_ACCURATE]
    best = max(equal or candidates, key=lambda pair: pair.speed.mean)
    met = bool(equal) and best.speed.mean >= target and best.speed.low > 1
    beyond = "" if goal is None else f"; goal beyond it {goal}: {'met' if best.speed.mean >= goal else 'UNMET'}"
    return Verdict(claim, met, _pair_text(best) + beyond)


def bubble_halves(pairs: Sequence[Paired], regime: Regime) -> Verdict:
    """The rollout's bubble ratio of the arm where it falls the most."""
    claim = f"{regime.name}: the rollout's bubble ratio falls by more than half"
    rows = []
    for pair in pairs:
        before = fmean(cell.weighted("util/rollout_bubble_ratio") for cell in pair.synchronous)
        after = fmean(cell.weighted("util/rollout_bubble_ratio") for cell in pair.cells)
        if pair.regime == regime and pair.composes and pair.on_policy and not math.isnan(before + after):
            rows.append((after / before, before, after, pair))
    if not rows:
        return Verdict(claim, None, "-")
    share, before, after, pair = min(rows, key=lambda row: row[0])
    return Verdict(claim, share < 0.5, f"{before:.2f} to {after:.2f} with {_pair_text(pair)}")


def never_slower(pairs: Sequence[Paired], regime: Regime, arm: str = AUTO) -> Verdict:
    """``auto`` where tokens bind: unmet when the whole interval lies below 1."""
    claim = f"{regime.name}: {arm} is not slower than synchronous beyond noise"
    own = [pair for pair in pairs if pair.regime == regime and pair.arm == arm]
    if not own:
        return Verdict(claim, None, "-")
    return Verdict(claim, math.isnan(own[0].speed.high) or own[0].speed.high >= 1, _pair_text(own[0]))


def direction(pairs: Sequence[Paired], regime: Regime, prefix: str, *, bubble: bool) -> Verdict:
    """Whether some arm called ``prefix...`` does what its paper says: a higher speed, or a smaller bubble ratio."""
    what = "a smaller rollout bubble" if bubble else "less wall time"
    claim = f"{regime.name}: {prefix}* alone shows its paper's direction, {what}"
    own = [pair for pair in pairs if pair.regime == regime and pair.arm.startswith(prefix)]
    if not own:
        return Verdict(claim, None, "-")
    if not bubble:
        best = max(own, key=lambda pair: pair.speed.mean)
        return Verdict(claim, best.speed.low > 1, _pair_text(best))
    figures = {
        pair.arm: tuple(
            fmean(cell.weighted("util/rollout_bubble_ratio") for cell in cells)
            for cells in (pair.synchronous, pair.cells)
        )
        for pair in own
    }
    arm, (before, after) = min(figures.items(), key=lambda item: item[1][1] / item[1][0])
    return Verdict(claim, None if math.isnan(after) else after < before, f"{arm}: {before:.2f} to {after:.2f}")


def sizing(cells: Sequence[Cell], pairs: Sequence[Paired], regime: Regime, prefix: str) -> list[Verdict]:
    """Straggler-aware sizing against its budget, the random histogram and the static sizes."""
    where = f"{regime.name}: {prefix}sagc"
    controlled, random = (
        [cell for cell in cells if cell.regime == regime and cell.arm == f"{prefix}{arm}"]
        for arm in ("sagc", "random_sizes")
    )
    rate = fmean(cell.per_batch("sizing/straggler_rate") for cell in controlled)
    budget = fmean(cell.last("sizing/budget") for cell in controlled)
    found = [Verdict(f"{where} keeps its straggler budget", rate <= budget + OF_BUDGET, f"{rate:.3f} of {budget:.3f}")]
    own = next((pair for pair in pairs if (pair.regime, pair.arm) == (regime, f"{prefix}sagc")), None)
    equal, figures = (None, "-") if own is None else (own.accuracy.mean >= -AS_ACCURATE, _pair_text(own))
    found.append(Verdict(f"{where} is as accurate as synchronous", equal, figures))
    if pairs_of_seeds := _same_seeds(controlled, random):
        found += _against_random_sizes(where, budget, pairs_of_seeds)
    if prefix == "best_" or controlled[0].keeps_prompts:
        found += _against_static_sizes(where, controlled, [cell for cell in cells if cell.regime == regime])
    return found


def _against_static_sizes(where: str, controlled: Sequence[Cell], cells: Sequence[Cell]) -> list[Verdict]:
    """Wall time and accuracy against the static size that leaves the least to gain, over the seeds both ran."""
    static: dict[str, list[tuple[Cell, Cell]]] = {}
    for arm in sorted({cell.arm for cell in cells if _is_static(cell, controlled[0])}, key=arm_order):
        if shared := _same_seeds(controlled, [cell for cell in cells if cell.arm == arm]):
            static[arm] = shared
    if not static:
        return []
    faster = {arm: _faster(shared) for arm, shared in static.items()}
    figures = ", ".join(
        f"{ratio_text(faster[arm])} times faster than {arm} in {len(shared)} pairs, accuracy "
        f"{_difference_text(_more_accurate(shared))}"
        for arm, shared in static.items()
    )
    least = min(faster.values(), key=lambda one: one.mean)
    found = [Verdict(f"{where} takes less wall time than the best static size", least.low > 1, figures)]
    if controlled[0].keeps_prompts:
        found.append(_time_to_accuracy(where, controlled, {arm: [b for _, b in static[arm]] for arm in static}))
    return found


def _time_to_accuracy(where: str, controlled: Sequence[Cell], static: Mapping[str, Sequence[Cell]]) -> Verdict:
    """Wall time until it is as accurate as the best static size is at its end, where ``evaluation.every`` tells."""
    best = max(static, key=lambda arm: fmean(cell.accuracy for cell in static[arm]))
    target = fmean(cell.accuracy for cell in static[best]) - AS_ACCURATE
    arms = {"it": controlled, **static}
    taken = {arm: fmean(cell.seconds_to(target) for cell in cells) for arm, cells in arms.items()}
    figures = ", ".join(f"{arm} {seconds:.0f} s" for arm, seconds in taken.items())
    claim = f"{where} takes less wall time to {target:.3f}, {AS_ACCURATE} below the accuracy of {best}"
    return Verdict(claim, taken["it"] < taken[best], figures)


def _against_random_sizes(where: str, budget: float, pairs_of_seeds: Sequence[tuple[Cell, Cell]]) -> list[Verdict]:
    """What feedback adds to mere mixing: how far the straggler rate of a run is from its budget, and the accuracy."""

    def missed_by(cell: Cell) -> float:
        return abs(cell.per_batch("sizing/straggler_rate") - budget)

    nearer = interval([missed_by(a) - missed_by(b) for a, b in pairs_of_seeds])
    own, others = (fmean(map(missed_by, cells)) for cells in zip(*pairs_of_seeds, strict=True))
    rates = f"misses it by {own:.3f}, random sizes by {others:.3f}: {_difference_text(nearer)}"
    better = _more_accurate(pairs_of_seeds)
    figures = f"accuracy {_difference_text(better)}, {ratio_text(_faster(pairs_of_seeds))} times faster"
    return [
        Verdict(f"{where} is nearer to its budget than random sizes of its histogram", nearer.high < 0, rates),
        Verdict(f"{where} is more accurate than random sizes of its histogram", better.low > 0, figures),
    ]


def _is_static(cell: Cell, controlled: Cell) -> bool:
    """Whether it is the composition of ``controlled`` at a size that stays: a sizing arm, or that of the regime."""
    prompts = () if controlled.keeps_prompts else ("rollout.prompts_per_batch",)
    shape = ("group_sizing.", "rollout.group_size", *prompts)
    own, other = (
        {key: value for key, value in one.overrides.items() if not key.startswith(shape)} for one in (cell, controlled)
    )
    return own == other and not any(key.startswith("group_sizing.") for key in cell.overrides)


def _faster(pairs_of_seeds: Sequence[tuple[Cell, Cell]]) -> Interval:
    """By wall time a sample; a step, where those are what both made equally many of."""
    by_steps = any(a.keeps_prompts for a, _ in pairs_of_seeds)

    def each_s(cell: Cell) -> float:
        return cell.seconds / (len(cell.measured) if by_steps else cell.samples)

    return of_ratios([each_s(b) / each_s(a) for a, b in pairs_of_seeds])


def _less_cpu(pairs_of_seeds: Sequence[tuple[Cell, Cell]]) -> Interval:
    """By CPU time a sample; NaN where it was not measured."""
    ratios = [b.sample_cpu_ms / a.sample_cpu_ms for a, b in pairs_of_seeds if a.cpu and b.cpu]
    return of_ratios(ratios) if ratios else Interval(math.nan, math.nan, math.nan)


def _more_accurate(pairs_of_seeds: Sequence[tuple[Cell, Cell]]) -> Interval:
    return interval([a.accuracy - b.accuracy for a, b in pairs_of_seeds])


def _same_seeds(first: Sequence[Cell], second: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    by_seed: Mapping[int, Cell] = {cell.seed: cell for cell in second}
    return [(cell, by_seed[cell.seed]) for cell in first if cell.seed in by_seed]


def verdicts(cells: Sequence[Cell], pairs: Sequence[Paired]) -> list[Verdict]:
    """Every sentence of the acceptance that cells can decide."""
    found = [
        fastest(pairs, DEMO_TAIL, 1.2, unbiased=True),
        fastest(pairs, HEAVY, 1.7, unbiased=True),
        fastest(pairs, HEAVY, 2.0, unbiased=False, goal=2.6),
        bubble_halves(pairs, DEMO_TAIL),
        bubble_halves(pairs, HEAVY),
        never_slower(pairs, DEMO_TOKENS),
    ]
    for regime in (DEMO_TAIL, HEAVY):
        found.append(direction(pairs, regime, "tail_", bubble=False))
        found.append(direction(pairs, regime, "sorted_", bubble=True))
        arms = [pair.arm for pair in pairs if pair.regime == regime]
        own = [f"{prefix}sorted" for prefix in SORTED_RL if any(arm.startswith(f"{prefix}sorted") for arm in arms)]
        found += [direction(pairs, regime, prefix, bubble=True) for prefix in own]
    regimes = sorted({cell.regime for cell in cells if cell.arm.endswith("sagc")})
    for regime in regimes:
        for prefix in PREFIXES:
            if any(cell.arm == f"{prefix}sagc" and cell.regime == regime for cell in cells):
                found += sizing(cells, pairs, regime, prefix)
    return found


def report(cells: Sequence[Cell], folder: Path) -> str:
    """Everything that ``folder`` holds, as Markdown."""
    if not cells:
        return f"{folder} has no finished cell"
    pairs = paired(cells)
    parts = []
    for regime in sorted({cell.regime for cell in cells}):
        steps = sorted({len(cell.measured) for cell in cells if cell.regime == regime})
        measured = " and ".join(str(count) for count in steps)
        parts.append(f"### {regime.name}, {measured} measured steps\n\n{regime_table(regime, cells, pairs)}")
    lines = [f"{pair.regime.name} {_pair_text(pair)}" for pair in pairs]
    lines += [f"- {verdict}" for verdict in verdicts(cells, pairs)]
    return "\n\n".join([*parts, "\n".join(lines)])
