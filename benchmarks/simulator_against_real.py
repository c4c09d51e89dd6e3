"""Does the simulator predict what a policy gains here? Its ratio to ``synchronous`` against the measured one.

    python benchmarks/scheduling.py --out cells --traces --regimes demo:8x8 heavy:16x8 --seeds 3
    python benchmarks/simulator_against_real.py --cells cells

Runs nothing real. Leaves one out: the cost model of engines, trainer, rewards and push is fitted to the trace of one
``synchronous`` run, and ratios are predicted for every *other* seed, over as many steps as were measured. Nothing that
is compared was calibrated on. Three predictions, each with more knowledge than the one before:

* forecast: from the trace of the ``synchronous`` run alone. Both policies get its prompts in their order, with the
  lengths that they got there. A real run samples other lengths for the same prompts, and in 20 steps of a heavy tail
  that luck is 10 to 20 %.
* replayed: each policy gets the lengths that its own run recorded. This is the simulator against the real pipeline on
  the same work, and what passes or fails: every policy, over its seeds, within ``--within`` of the measured ratio.
* at its speed: decode steps of each run also as slow or fast as its engine reported, against the fit: what is left is
  not the load of the machine while it ran, it is the model.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np
from repeated_runs import Interval
from scheduling_cells import ROUND_ARMS, SYNCHRONOUS, WARM_UP_STEPS, Cell, CellPlan, Regime, read_cells
from scheduling_report import of_ratios, ratio_text

from streamrl.control.settings import control_settings
from streamrl.observe.report.trajectory_trace import RecordedRun
from streamrl.recipe.rules.load import load_recipe
from streamrl.recipe.sections import Recipe
from streamrl.simulate.calibrate import Fit, calibrate
from streamrl.simulate.cluster import ClusterModel
from streamrl.simulate.engine_fit import step_samples
from streamrl.simulate.engines import EngineModel
from streamrl.simulate.lengths import RecordedLengths
from streamrl.simulate.recording import TRACE_FILE, load_recording
from streamrl.simulate.report import SimulationReport
from streamrl.simulate.simulation import simulate

KINDS = ("forecast", "replayed", "at_its_speed")


class RecordedCell(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run with its trace and the recipe that it had."""

    cell: Cell
    trace: RecordedRun
    recipe: Recipe

    @property
    def group_s(self) -> float:
        """Measured wall time of a trained group."""
        return self.cell.seconds / self.cell.groups

    def simulated(self, model: ClusterModel, lengths: RecordedRun) -> SimulationReport:
        """The same steps in virtual time, with the prompts and lengths of ``lengths`` in their order."""
        source = RecordedLengths(lengths, resample=False, seed=self.cell.seed)
        steps = len(self.cell.measured)
        settings = msgspec.structs.replace(
            control_settings(self.recipe), evaluate_at_end=False, checkpoint_at_end=False
        )
        return simulate(settings, model, steps, lengths=source, seed=self.cell.seed, warm_up=WARM_UP_STEPS)


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How many times less wall time a trained group takes under ``arm`` than under ``synchronous``, of one seed.

    ``calibrated``: the seed whose ``synchronous`` run was fitted. ``forecast``, ``replayed``, ``at_its_speed``: see the
    module. ``arm_pace``, ``synchronous_pace``: seconds of a decode step in that run over what was fitted.
    """

    regime: str
    arm: str
    seed: int
    calibrated: int
    measured: float
    forecast: float
    replayed: float
    at_its_speed: float
    arm_pace: float
    synchronous_pace: float

    def error(self, predicted: str) -> float:
        """Of the prediction of that name, relative to the measured ratio; above 0: it promises too much."""
        return float(getattr(self, predicted)) / self.measured - 1


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One policy over all its seeds, each counted once: geometric means. ``predicted``: by kind of prediction."""

    regime: str
    arm: str
    seeds: int
    measured: Interval
    predicted: dict[str, float]

    def error(self, predicted: str) -> float:
        """As of ``Prediction``."""
        return self.predicted[predicted] / self.measured.mean - 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare the simulator's ratios between policies with measured ones.")
    parser.add_argument("--cells", type=Path, required=True, help="folder of benchmarks/scheduling.py --traces")
    parser.add_argument("--arms", nargs="+", choices=list(ROUND_ARMS), default=list(ROUND_ARMS), metavar="ARM")
    parser.add_argument("--calibrate", type=int, metavar="SEED", help="fit this seed only (default: each in turn)")
    parser.add_argument(
        "--calibrate-cells", type=Path, metavar="DIR", help="fit the synchronous runs of another folder, of any seed"
    )
    parser.add_argument("--within", type=float, default=0.15, help="largest relative error that passes")
    parser.add_argument("--steps", action="store_true", help="print every step, as measured and as simulated")
    parser.add_argument("--out", type=Path, help="write the predictions as JSON")
    return parser.parse_args()


def recorded_cells(folder: Path) -> Iterator[RecordedCell]:
    """Every finished cell of ``folder`` whose trace and recipe were kept."""
    for cell in read_cells(folder):
        plan = CellPlan(
            regime=cell.regime, arm=cell.arm, seed=cell.seed, steps=len(cell.steps), overrides=cell.overrides
        )
        kept = plan.file(folder).with_suffix("")
        if not (kept / TRACE_FILE).is_file():
            print(f"{kept.name}: left out: it has no trace; run benchmarks/scheduling.py with --traces")
            continue
        yield RecordedCell(cell=cell, trace=load_recording(kept), recipe=load_recipe(kept / "recipe.toml"))


def paced(model: ClusterModel, pace: float) -> ClusterModel:
    """``model`` with engines whose every decode step takes ``pace`` times as long."""
    engine = model.engine
    return msgspec.structs.replace(
        model,
        engine=msgspec.structs.replace(
            engine,
            base_s=engine.base_s * pace,
            per_running_s=engine.per_running_s * pace,
            per_root_running_s=engine.per_root_running_s * pace,
        ),
    )


def engine_pace(run: RecordedRun, model: EngineModel) -> float:
    """Seconds that the decode steps of ``run`` took over what ``model`` says of steps of as many requests."""
    seen = step_samples(run, [])
    expected = np.array([model.step_s(running) for running in seen.running.tolist()])
    return float(seen.weights @ seen.seconds) / float(seen.weights @ expected)


def predicted(calibrated: int, fit: Fit, synchronous: RecordedCell, other: RecordedCell) -> Prediction:
    """The ratio of ``other`` to ``synchronous``, from the latter's trace; and what it is with more knowledge."""
    model = fit.model
    lengths = synchronous.trace
    base = 1 / synchronous.simulated(model, lengths).groups_s
    slow, fast = (engine_pace(run.trace, model.engine) for run in (synchronous, other))
    own_speed = other.simulated(paced(model, fast), other.trace).groups_s
    return Prediction(
        regime=other.cell.regime.name,
        arm=other.cell.arm,
        seed=other.cell.seed,
        calibrated=calibrated,
        measured=synchronous.group_s / other.group_s,
        forecast=base * other.simulated(model, lengths).groups_s,
        replayed=base * other.simulated(model, other.trace).groups_s,
        at_its_speed=own_speed / synchronous.simulated(paced(model, slow), lengths).groups_s,
        arm_pace=fast,
        synchronous_pace=slow,
    )


def verdicts(found: Sequence[Prediction]) -> Iterator[Verdict]:
    """Every policy of every regime, in the order in which it was found."""
    for regime, arm in dict.fromkeys((one.regime, one.arm) for one in found):
        own = [one for one in found if (one.regime, one.arm) == (regime, arm)]
        measured = {one.seed: one.measured for one in own}
        predicted = {}
        for kind in KINDS:
            # Of each seed the mean over calibrations, so that each counts once, as in what was measured.
            logs = [fmean(math.log(getattr(one, kind)) for one in own if one.seed == seed) for seed in measured]
            predicted[kind] = math.exp(fmean(logs))
        ratios = of_ratios(list(measured.values()))
        yield Verdict(regime=regime, arm=arm, seeds=len(measured), measured=ratios, predicted=predicted)


def regime_predictions(
    options: argparse.Namespace, regime: Regime, runs: Sequence[RecordedCell], fitted: Sequence[RecordedCell]
) -> Iterator[Prediction]:
    """Leave one out over the ``synchronous`` runs of ``fitted``. Says how well each fit explains its own run."""
    baseline = {run.cell.seed: run for run in runs if run.cell.arm == SYNCHRONOUS}
    fitted = [run for run in fitted if run.cell.arm == SYNCHRONOUS]
    if options.calibrate is not None:
        fitted = [run for run in fitted if run.cell.seed == options.calibrate]
    foreign = options.calibrate_cells is not None
    pairs = 0
    for source in fitted:
        seed = source.cell.seed
        fit = calibrate(source.trace, source.recipe)
        print(f"{regime.name}, fitted to seed {seed}: {fit_sentence(fit, source)}")
        for other in runs:
            known = baseline.get(other.cell.seed)
            if other.cell.arm in options.arms and other is not known and known and (foreign or known is not source):
                pairs += 1
                yield predicted(seed, fit, known, other)
    if not pairs:
        print(
            f"{regime.name}: skipped: it needs traces of {SYNCHRONOUS} of two seeds (or --calibrate-cells), and of a "
            f"policy with one of them; it has {sorted((run.cell.arm, run.cell.seed) for run in runs)}"
        )


def fit_sentence(fit: Fit, source: RecordedCell) -> str:
    """Constants, and how well they explain the run that they were fitted to."""
    engine = fit.model.engine
    again = 1 / source.simulated(fit.model, source.trace).groups_s / source.group_s
    steps = ", ".join(f"{count}: {engine.step_s(count) * 1e3:.1f}" for count in (1, 4, 16, 64, 128))
    return (
        f"decode step in ms of so many requests {steps}; an arrival {engine.arrival_s * 1e3:.2f} ms, one that waited "
        f"{engine.presubmitted_s * 1e3:.2f}; training slows decoding {fit.model.trainer.rollout_slowdown:.2f} times; "
        f"medians of errors: step {fit.step_error:.0%}, life {fit.life_error:.0%}; the run itself takes {again:.2f} of "
        "its wall time"
    )


def print_pairs(found: Sequence[Prediction]) -> None:
    """One row a prediction, and how far each kind is off."""
    columns = ("measured", *map(title, KINDS), "speed of the two runs")
    print("\n| regime | policy | seed | fitted to | " + " | ".join(columns) + " |\n|" + "---|" * 9)
    for one in found:
        cells = " | ".join(f"{getattr(one, kind):.2f} ({one.error(kind):+.1%})" for kind in KINDS)
        print(
            f"| {one.regime} | {one.arm} | {one.seed} | {one.calibrated} | {one.measured:.2f} | {cells} "
            f"| {1 / one.synchronous_pace:.2f}, {1 / one.arm_pace:.2f} |"
        )
    for kind in KINDS:
        sizes = sorted(abs(one.error(kind)) for one in found)
        print(f"{title(kind)}: median error {sizes[len(sizes) // 2]:.1%}, worst {sizes[-1]:.1%}")


def title(kind: str) -> str:
    """A kind of prediction, for people."""
    return kind.replace("_", " ")


def print_parts(runs: Sequence[RecordedCell], fit: Fit, every_step: bool) -> None:
    """Measured against simulated, with each run's own lengths and speed: mean seconds of a step by kind of round."""
    print("\n| run | kind | steps | rollout s | training s | push s |\n|---|---|---|---|---|---|")
    listed: list[str] = []
    for run in runs:
        model = paced(fit.model, engine_pace(run.trace, fit.model.engine))
        rows = run.simulated(model, run.trace).recent
        real = run.trace.steps[WARM_UP_STEPS:]
        for kind in sorted({line.round_kind for line in real}):
            lines = [line for line in real if line.round_kind == kind]
            same = [row for row in rows if row.round_kind == kind]

            def both(part: Callable[..., float], lines: Sequence[object] = lines, same: Sequence[object] = same) -> str:
                return " | ".join(f"{fmean(map(part, side)):.3g}" if side else "-" for side in (lines, same))

            parts = (both(part).replace(" | ", " / ") for part in PARTS)
            counts = f"{len(lines)} / {len(same)}"
            print(f"| {run.cell.arm} {run.cell.seed} | {kind} | {counts} | " + " | ".join(parts) + " |")
        listed += [f"{run.cell.arm} {run.cell.seed}", *step_lists(real, rows)]
    print("(measured / simulated)")
    if every_step:
        print("\nseconds of each step, with own lengths and speed:\n" + "\n".join(listed))


PARTS: tuple[Callable[..., float], ...] = (
    lambda step: step.rollout_s,
    lambda step: step.training_s,
    lambda step: step.push_s,
)


def step_lists(*sides: Sequence[object]) -> Iterator[str]:
    """Seconds of each step: measured, then simulated."""
    for name, side in zip(("measured ", "simulated"), sides, strict=True):
        yield f"  {name} " + " ".join(f"{step.step_s:5.2f}" for step in side)  # type: ignore[attr-defined]


def print_verdicts(found: Sequence[Verdict]) -> None:
    """One row a policy."""
    print("\n| regime | policy | seeds | measured ratio | " + " | ".join(map(title, KINDS)) + " |\n|" + "---|" * 7)
    for one in found:
        cells = " | ".join(f"{one.predicted[kind]:.2f} ({one.error(kind):+.1%})" for kind in KINDS)
        print(f"| {one.regime} | {one.arm} | {one.seeds} | {ratio_text(one.measured)} | {cells} |")


def print_passed(found: Sequence[Verdict], kind: str, within: float) -> bool:
    """Whether the predictions of ``kind`` are all near enough."""
    worst = max(found, key=lambda one: abs(one.error(kind)))
    passed = abs(worst.error(kind)) <= within
    print(
        f"{title(kind)}, {within:.0%} allowed: {'passed' if passed else 'FAILED'}: worst error "
        f"{worst.error(kind):+.1%} ({worst.regime}, {worst.arm}, {worst.seeds} seeds)"
    )
    return passed


def main() -> int:
    """Calibrate, simulate, compare; exit code 1 when a replayed ratio is too far off, or there is none."""
    options = parse_arguments()
    runs = list(recorded_cells(options.cells))
    fitted = list(recorded_cells(options.calibrate_cells)) if options.calibrate_cells else runs
    found: list[Prediction] = []
    for regime in sorted({run.cell.regime for run in runs}):
        own = [run for run in runs if run.cell.regime == regime]
        sources = [run for run in fitted if run.cell.regime == regime]
        found += regime_predictions(options, regime, own, sources)
        baseline = next((run for run in sources if run.cell.arm == SYNCHRONOUS), None)
        if baseline is not None:
            print_parts(own, calibrate(baseline.trace, baseline.recipe), options.steps)
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    if not found:
        print("\nFAILED: nothing to compare")
        return 1
    print_pairs(found)
    each = list(verdicts(found))
    print_verdicts(each)
    print()
    print_passed(each, "forecast", options.within)
    return 0 if print_passed(each, "replayed", options.within) else 1


if __name__ == "__main__":
    sys.exit(main())
