"""Table and picture of accuracy by trained samples and by seconds, for baselines and group sizes.

    python benchmarks/scheduling.py --out CELLS --regimes demo:8x8 --seeds 2 --steps 60 --sagc-budget 0 \
        --set evaluation.every=10 --arms loo_4 loo_8 loo_16 loo_4_fewer loo_16_more loo_sagc tracked_1 tracked_sagc \
        filter_8 loo_8_continuous
    python benchmarks/method_table.py CELLS [--picture docs/images/methods.png]

Seconds are those of all steps, without waits for evaluations; "ms a step" is of the steps after the warm-up. Accuracy
between two evaluations is interpolated. The target is ``BELOW`` below the final accuracy of the best static group size
at 64 trajectories a step (``STATIC``)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import numpy as np
from scheduling_cells import METHOD_ARMS, Cell, read_cells

from streamrl.cli.compare.run_figures import samples_of

BELOW = 0.02
STATIC = ("loo_4", "loo_8", "loo_16")
NAMES = {
    "loo_4": "leave-one-out, 4",
    "loo_8": "leave-one-out, 8",
    "loo_16": "leave-one-out, 16",
    "loo_4_fewer": "4, half the samples a step",
    "loo_16_more": "16, twice the samples a step",
    "loo_sagc": "SAGC (4, 8, 16)",
    "tracked_1": "tracked, 1",
    "tracked_sagc": "SAGC (1, 2, 4, 8), tracked",
    "filter_8": "DAPO's filter, 8",
    "loo_8_continuous": "continuous, staleness 1, 8",
}
COLUMNS = (
    "method",
    "ms a step",
    "ms a sample",
    "accuracy at the end",
    "samples to target",
    "seconds to target",
    "accuracy at equal samples",
    "accuracy at equal seconds",
    "rollout bubble",
    "stragglers",
    "group sizes",
)


class Curve:
    """Accuracy of one run. ``seconds``, ``samples``: of its steps before each evaluation, from the first step on."""

    def __init__(self, cell: Cell) -> None:
        waited = [step["time/step_s"] - step.get("time/wait_eval_s", 0.0) for step in cell.steps]
        elapsed_s = list(accumulate(waited))
        trained = list(accumulate(map(samples_of, cell.steps)))
        steps = sorted(cell.accuracies)
        self.seconds = [elapsed_s[step - 1] for step in steps]
        self.samples = [trained[step - 1] for step in steps]
        self.accuracies = [cell.accuracies[step] for step in steps]

    def at(self, places: Sequence[float], place: float) -> float:
        """Accuracy at ``place`` of ``places`` (seconds or samples); NaN behind the last evaluation."""
        if place > places[-1] + 1e-6:
            return math.nan
        return float(np.interp(place, places, self.accuracies))

    def until(self, places: Sequence[float], target: float) -> float:
        """First place of ``places`` (seconds or samples) with the ``target`` accuracy; infinite where none has it."""
        before = None
        for place, accuracy in zip(places, self.accuracies, strict=True):
            if accuracy >= target:
                if before is None:
                    return place
                share = (target - before[1]) / (accuracy - before[1])
                return before[0] + share * (place - before[0])
            before = place, accuracy
        return math.inf


def with_spread(values: Sequence[float], form: str) -> str:
    """Mean and range of ``values``: ``0.48 (0.47 to 0.50)``; ``never`` and how often, where some are infinite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "-" if any(map(math.isnan, values)) else "never"
    text = format(fmean(finite), form)
    if len(finite) > 1:
        text += f" ({min(finite):{form}} to {max(finite):{form}})"
    missing = sum(math.isinf(value) for value in values)
    return f"{text}, {missing} of {len(values)} never" if missing else text


def table(arms: Mapping[str, Sequence[Cell]]) -> tuple[str, dict[str, float]]:
    """Markdown of one regime, and the mean seconds to its target by arm (infinite where a run never got there)."""
    static = {arm: fmean(cell.accuracy for cell in arms[arm]) for arm in STATIC if arm in arms}
    if not static:
        raise SystemExit(f"no cell of {', '.join(STATIC)}, whose accuracy is the target")
    best = max(static, key=static.__getitem__)
    target = static[best] - BELOW
    curves = {arm: [Curve(cell) for cell in cells] for arm, cells in arms.items()}
    samples = min(curve.samples[-1] for curve in curves.get("loo_8", curves[best]))
    seconds = min(curve.seconds[-1] for each in curves.values() for curve in each)
    reached = {arm: [curve.until(curve.seconds, target) for curve in each] for arm, each in curves.items()}
    rows = []
    for arm, cells in arms.items():
        sizes = [shares for cell in cells if (shares := cell.size_shares())]
        every = sorted({size for shares in sizes for size in shares})
        row = [
            NAMES[arm],
            f"{fmean(1e3 * cell.seconds / len(cell.measured) for cell in cells):.0f}",
            f"{fmean(cell.sample_ms for cell in cells):.1f}",
            with_spread([cell.accuracy for cell in cells], ".3f"),
            with_spread([curve.until(curve.samples, target) for curve in curves[arm]], ".0f"),
            with_spread(reached[arm], ".0f"),
            with_spread([curve.at(curve.samples, samples) for curve in curves[arm]], ".3f"),
            with_spread([curve.at(curve.seconds, seconds) for curve in curves[arm]], ".3f"),
            f"{fmean(cell.weighted('util/rollout_bubble_ratio') for cell in cells):.2f}",
            with_spread([cell.per_batch("sizing/straggler_rate") for cell in cells], ".2f"),
            ", ".join(f"{size}: {fmean(shares.get(size, 0.0) for shares in sizes):.2f}" for size in every) or "-",
        ]
        rows.append(f"| {' | '.join(row)} |")
    head = f"target {target:.3f} ({BELOW} below {NAMES[best]}); equal: {samples:.0f} samples, {seconds:.0f} s"
    lines = [head, "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows]
    return "\n".join(lines), {arm: fmean(each) for arm, each in reached.items()}


def picture(regimes: Mapping[str, Mapping[str, Sequence[Cell]]], path: Path) -> None:
    """Draw mean accuracy over samples and over seconds, a row for each regime."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(regimes), 2, figsize=(11, 4 * len(regimes)), squeeze=False)
    for (name, arms), (by_samples, by_seconds) in zip(regimes.items(), axes, strict=True):
        for arm, cells in arms.items():
            curves = [Curve(cell) for cell in cells]
            accuracies = np.mean([curve.accuracies for curve in curves], axis=0)
            for axis, places in ((by_samples, "samples"), (by_seconds, "seconds")):
                mean = np.mean([getattr(curve, places) for curve in curves], axis=0)
                axis.plot(mean, accuracies, marker=".", label=NAMES[arm])
                axis.set_xlabel(f"{places} (mean of {len(cells)} seeds)")
                axis.set_ylabel(f"accuracy, {name}")
        by_samples.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the table of each regime, and the ratios that the goal is about."""
    parser = argparse.ArgumentParser(description="Accuracy of baselines and group sizes over samples and seconds.")
    parser.add_argument("cells", type=Path, nargs="+", help="folders of finished cells")
    parser.add_argument("--picture", type=Path, help="where the picture goes")
    options = parser.parse_args()
    regimes: dict[str, dict[str, list[Cell]]] = {}
    for cell in (cell for folder in options.cells for cell in read_cells(folder)):
        if cell.arm in METHOD_ARMS:
            regimes.setdefault(cell.regime.name, {}).setdefault(cell.arm, []).append(cell)
    for name, arms in regimes.items():
        seeds = max(len(cells) for cells in arms.values())
        text, seconds = table(arms)
        print(f"### {name}, {seeds} seeds\n\n{text}\n")
        static = {arm: seconds[arm] for arm in STATIC if arm in seconds}
        accurate = max(static, key=lambda arm: fmean(cell.accuracy for cell in arms[arm]))
        fastest = min(static, key=static.__getitem__)
        for arm in ("loo_sagc", "tracked_sagc"):
            if arm in seconds:
                ratios = [f"{seconds[arm] / seconds[other]:.2f} of {NAMES[other]}" for other in (accurate, fastest)]
                print(f"- {NAMES[arm]}: seconds to target {' and '.join(ratios)} (the most accurate and the fastest)")
        print()
    if options.picture:
        picture(regimes, options.picture)


if __name__ == "__main__":
    main()
