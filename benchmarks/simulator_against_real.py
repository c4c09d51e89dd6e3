"""Does the simulator predict what a policy gains here? Its ratio to ``synchronous`` against the measured one.

    python benchmarks/scheduling.py --out cells --traces --regimes demo:8x8 heavy:16x8 --seeds 3
    python benchmarks/simulator_against_real.py --cells cells

The cost model of engines, trainer, rewards and push is fitted to the trace of one ``synchronous`` run (with the seed
``--calibrate``). The lengths that are simulated come from the traces of the *other* seeds, and so do the measured
ratios: nothing that is compared was calibrated on. Passes when every ratio is within ``--within`` of the measured one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from repeated_runs import Interval
from scheduling_cells import ROUND_ARMS, SYNCHRONOUS, Cell, CellPlan, Regime, read_cells
from scheduling_report import paired, ratio_text
from training_run import toml_value

from streamrl.config.load import load_recipe
from streamrl.control.settings import ControlSettings
from streamrl.control.trajectory_trace import RecordedRun
from streamrl.pipeline import control_settings
from streamrl.simulate.calibrate import calibrate
from streamrl.simulate.cluster import ClusterModel
from streamrl.simulate.lengths import RecordedLengths
from streamrl.simulate.recording import TRACE_FILE, load_recording
from streamrl.simulate.simulation import simulate


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """How much less wall time a trained group takes under ``arm`` than under ``synchronous``."""

    regime: str
    arm: str
    simulated: float
    measured: Interval
    seeds: int

    @property
    def error(self) -> float:
        """Relative to the measured ratio; above 0: the simulator promises too much."""
        return self.simulated / self.measured.mean - 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare the simulator's ratios between policies with measured ones.")
    parser.add_argument("--cells", type=Path, required=True, help="folder of benchmarks/scheduling.py --traces")
    parser.add_argument("--arms", nargs="+", choices=list(ROUND_ARMS), default=list(ROUND_ARMS), metavar="ARM")
    parser.add_argument("--calibrate", type=int, default=0, metavar="SEED", help="the run whose trace is fitted")
    parser.add_argument("--steps", type=int, default=400, help="simulated optimizer steps for each ratio")
    parser.add_argument("--within", type=float, default=0.15, help="largest relative error that passes")
    parser.add_argument("--out", type=Path, help="write the predictions as JSON")
    return parser.parse_args()


def settings_of(cell: Cell) -> ControlSettings:
    """What control was told in the run of ``cell``."""
    plan = CellPlan(regime=cell.regime, arm=cell.arm, seed=cell.seed, steps=len(cell.steps), overrides=cell.overrides)
    recipe = load_recipe(plan.recipe, [f"{key}={toml_value(value)}" for key, value in plan.settings.items()])
    settings = control_settings(recipe)
    return msgspec.structs.replace(settings, evaluate_at_end=False, checkpoint_at_end=False)


def trace_of(cells: Path, cell: Cell) -> RecordedRun | None:
    """The kept trace of a run; None where ``--traces`` was not given."""
    plan = CellPlan(regime=cell.regime, arm=cell.arm, seed=cell.seed, steps=len(cell.steps), overrides=cell.overrides)
    folder = plan.file(cells).with_suffix("")
    return load_recording(folder) if (folder / TRACE_FILE).is_file() else None


def seconds_a_group(cell: Cell, model: ClusterModel, lengths: RecordedRun, steps: int) -> float:
    """Simulated, under the policy of ``cell`` and resampled lengths of another run."""
    source = RecordedLengths(lengths, resample=True, seed=cell.seed)
    return 1 / simulate(settings_of(cell), model, steps, lengths=source, seed=cell.seed, warm_up=20).groups_s


def predictions(options: argparse.Namespace, regime: Regime, cells: Sequence[Cell]) -> Iterator[Prediction]:
    """Every arm of one regime. Says why where a trace that it needs is missing."""
    baseline = {cell.seed: cell for cell in cells if cell.regime == regime and cell.arm == SYNCHRONOUS}
    traces = {seed: trace for seed, cell in baseline.items() if (trace := trace_of(options.cells, cell)) is not None}
    if options.calibrate not in traces or len(traces) < 2:
        print(
            f"{regime.name}: skipped: it needs traces of {SYNCHRONOUS} with seed {options.calibrate} and another seed, "
            f"and has {sorted(traces)}: run benchmarks/scheduling.py with --traces"
        )
        return
    fit = calibrate(traces[options.calibrate])
    print(f"{regime.name}: decode step explained to {fit.step_error:.1%}, life times to {fit.life_error:.1%}")
    others = [
        cell for cell in cells if cell.regime == regime and cell.seed in traces and cell.seed != options.calibrate
    ]
    alike = {
        seed: seconds_a_group(cell, fit.model, traces[seed], options.steps)
        for seed, cell in baseline.items()
        if seed in traces
    }
    for pair in paired(others):
        if pair.arm in options.arms:
            ratios = [
                alike[cell.seed] / seconds_a_group(cell, fit.model, traces[cell.seed], options.steps)
                for cell in pair.cells
            ]
            yield Prediction(
                regime=regime.name,
                arm=pair.arm,
                simulated=fmean(ratios),
                measured=pair.speed,
                seeds=len(ratios),
            )


def main() -> int:
    """Calibrate, simulate, compare; exit code 1 when a ratio is too far off, or there is none."""
    options = parse_arguments()
    cells = read_cells(options.cells)
    found = [
        prediction
        for regime in sorted({cell.regime for cell in cells})
        for prediction in predictions(options, regime, cells)
    ]
    print("\n| regime | policy | simulated ratio | measured ratio | error | seeds |\n|---|---|---|---|---|---|")
    for one in found:
        print(
            f"| {one.regime} | {one.arm} | {one.simulated:.2f} | {ratio_text(one.measured)} | {one.error:+.1%} "
            f"| {one.seeds} |"
        )
    worst = max(found, key=lambda one: abs(one.error), default=None)
    passed = worst is not None and abs(worst.error) <= options.within
    if worst is None:
        print("\nFAILED: nothing to compare")
    else:
        print(f"\n{'passed' if passed else 'FAILED'}: worst error {worst.error:+.1%} ({worst.regime}, {worst.arm})")
    if options.out:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
