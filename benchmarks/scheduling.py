"""What is each schedule worth on real engines? Every policy against ``synchronous``, at equal trained samples.

    python benchmarks/scheduling.py --out cells --seeds 3
    python benchmarks/scheduling.py --out cells --regimes heavy:16x8 --arms synchronous tail_both --seeds 5
    python benchmarks/scheduling.py --out cells --regimes heavy:16x8 --arms size_4 size_16 sagc random_sizes
    python benchmarks/scheduling.py --out cells --regimes demo:8x8 --arms synchronous prompts_size_4 prompts_size_16 \
        prompts_sagc prompts_random_sizes --set evaluation.every=10 --set 'objective.advantages="leave_one_out"'
    python benchmarks/scheduling.py --out cells --regimes demo:8x8 --arms reinforce_synchronous reinforce_sorted
    python benchmarks/scheduling.py --out cells --report
    python benchmarks/scheduling.py --out cells --against ../before --regimes demo:32x8 --arms synchronous --seeds 5

``prompts_`` arms have the same prompts a step, in equal steps; size 8 of ``8x8`` is ``synchronous``, and advantages are
given because they are others where sizes vary.

A cell is one run of one arm with one seed, and one JSON file in ``--out``: a rerun goes on with those that are missing.
All arms of a seed run before the next seed, in the opposite order, so that a drift of the machine meets every arm.
Wall time is that of the steps after 2 warm-up ones and before the last one: no start, no evaluation. Each arm measures
whole cycles of its rounds. Held-out accuracy is measured once, at the end, after as many samples in every arm. Arms
that this tree does not know, or cannot compose, are skipped and said so. Exit code 1 when a run failed.

CPU time is that of all processes of a run in the same steps (``cpu_time.py``). ``--against`` runs each cell in another
checkout, too, in turns, and compares the two by seed: milliseconds of wall and CPU time a sample, and steps alike."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from scheduling_cells import (
    ARMS,
    COOL_DOWN_STEPS,
    ROUND_ARMS,
    SORTED_RL_ARMS,
    CellPlan,
    Regime,
    parse_regime,
    pooled_shares,
    read_cell,
    read_cells,
    run_cell,
    sizing_overrides,
    steps_for,
)
from scheduling_report import checkouts_table, report
from training_run import ROOT, RunFailed

from streamrl.base.errors import RecipeError
from streamrl.cli.compare.run_figures import WARM_UP_STEPS

DEFAULT_REGIMES = ("demo:8x8", "heavy:16x8", "heavy:8x8", "demo:32x8")


class NotYet(Exception):
    """A cell that cannot run; the message says why."""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Compare schedules on real engines, at equal trained samples, paired by seed."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the finished cells")
    parser.add_argument("--report", action="store_true", help="run nothing; print what the finished cells say")
    parser.add_argument("--regimes", nargs="+", type=parse_regime, default=[parse_regime(r) for r in DEFAULT_REGIMES])
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ROUND_ARMS), metavar="ARM", help=", ".join(ARMS)
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="measured steps of synchronous; others: as many samples")
    parser.add_argument(
        "--best", choices=list(ROUND_ARMS), default="tail_prompts_presubmit", help="what best_* build on"
    )
    parser.add_argument(
        "--sagc-budget", type=float, default=0.6, help="group_sizing.budget of the sagc arms (0: measured)"
    )
    parser.add_argument(
        "--sagc-tradeoff", type=float, default=0.0, help="group_sizing.advanced.tradeoff (V) of them (0: its default)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="an override for every arm")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="run each cell there, too (OUT/against)")
    parser.add_argument("--traces", action="store_true", help="keep each run's trace and recipe beside its cell")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="for each run")
    return parser.parse_args()


def planned(options: argparse.Namespace) -> Iterator[tuple[Regime, str, int]]:
    """Regime, arm and seed of every cell, in the order in which they run."""
    for regime in options.regimes:
        for count in range(options.seeds):
            arms = options.arms if count % 2 == 0 else options.arms[::-1]
            # An arm with the sizes that another one chose has to wait for it.
            late = sorted(arms, key=lambda arm: arm.endswith("random_sizes"))
            yield from ((regime, arm, options.first_seed + count) for arm in late)


def plan(options: argparse.Namespace, regime: Regime, arm: str, seed: int) -> CellPlan:
    """What that cell runs. Raises ``NotYet`` where it needs something that is not there."""
    if arm in (known := ROUND_ARMS | SORTED_RL_ARMS):
        overrides = dict(known[arm])
    else:
        like = arm.replace("random_sizes", "sagc")
        finished = [cell for cell in read_cells(options.out) if cell.regime == regime and cell.arm == like]
        shares = pooled_shares(finished)
        if arm.endswith("random_sizes") and not shares:
            raise NotYet(f"it draws sizes with the shares of {like}, of which no cell is finished")
        try:
            sagc = {"budget": options.sagc_budget, "advanced.tradeoff": options.sagc_tradeoff}
            sagc = {name: value for name, value in sagc.items() if value}
            overrides = sizing_overrides(regime, arm, best=options.best, sagc=sagc, shares=shares)
        except ValueError as error:
            raise NotYet(str(error)) from None
    for text in options.set:
        key, _, value = text.partition("=")
        overrides[key] = msgspec.json.decode(value)
    try:
        measured = steps_for(regime, overrides, options.steps or regime.steps)
    except ValueError as error:
        raise NotYet(str(error)) from None
    steps = WARM_UP_STEPS + measured + COOL_DOWN_STEPS
    return CellPlan(regime=regime, arm=arm, seed=seed, steps=steps, overrides=overrides)


def run_missing(options: argparse.Namespace) -> int:
    """Run every cell that ``--out`` does not hold. Returns the number of runs that failed."""
    checkouts = {options.out: ROOT} | ({options.out / "against": options.against} if options.against else {})
    failed = 0
    for number, (regime, arm, seed) in enumerate(planned(options)):
        for folder in list(checkouts)[:: 1 if number % 2 else -1]:
            folder.mkdir(parents=True, exist_ok=True)
            title = f"{regime.name} {arm} seed {seed}" + (f" in {checkouts[folder]}" if options.against else "")
            try:
                cell_plan = plan(options, regime, arm, seed)
                path = cell_plan.file(folder)
                if path.exists():
                    check_same(cell_plan, path)
                    continue
                cell_plan.checked_on_policy()
            except (NotYet, RecipeError) as reason:
                print(f"{title}: skipped: {reason}", flush=True)
                continue
            failed += not run_one(options, cell_plan, folder, checkouts[folder].resolve(), title)
    return failed


def run_one(options: argparse.Namespace, cell_plan: CellPlan, folder: Path, checkout: Path, title: str) -> bool:
    """Run a cell and print its figures; False where the run failed, which then says why in a file beside the cells."""
    try:
        cell = run_cell(cell_plan, folder, checkout=checkout, timeout_s=options.timeout_s, keep_trace=options.traces)
    except RunFailed as error:
        path = cell_plan.file(folder).with_suffix(".failed.txt")
        path.write_text(str(error), encoding="utf-8")
        print(f"{title}: FAILED: {str(error).splitlines()[0]} ({path})", flush=True)
        return False
    print(
        f"{title}: {cell.seconds:.1f} s for {len(cell.measured)} steps, {cell.sample_ms:.2f} ms a sample, "
        f"{cell.sample_cpu_ms:.2f} CPU ms a sample ("
        f"{', '.join(f'{name} {1e3 * used / cell.samples:.2f}' for name, used in cell.cpu.items())}), "
        f"length {cell.length:.0f}, accuracy {cell.accuracy:.3f}"
        + "".join(f"\n    {warning}" for warning in cell.warnings),
        flush=True,
    )
    return True


def check_same(cell_plan: CellPlan, path: Path) -> None:
    """A finished cell is only reused for the same steps and overrides. Exits with what differs."""
    finished = read_cell(path)
    shares = "group_sizing.advanced.shares"  # of random sizes: those of the cells that were there at the time
    same = {key: value for key, value in finished.overrides.items() if key != shares} == {
        key: value for key, value in cell_plan.overrides.items() if key != shares
    }
    if len(finished.steps) != cell_plan.steps or not same:
        sys.exit(f"{path} was run with other steps or overrides: name another --out, or remove it")


def main() -> int:
    """Run what is missing, report everything; exit code 1 when a run failed."""
    options = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run under way is ended, not left behind
    failed = 0 if options.report else run_missing(options)
    print(f"\n{report(read_cells(options.out), options.out)}")
    if options.against:
        print(f"\n{checkouts_table(read_cells(options.out), read_cells(options.out / 'against'))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
