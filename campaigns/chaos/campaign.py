"""Kills real processes of real runs, at random and at the worst moments, and looks for what was lost, and what is left.

    python -m campaigns chaos --engines simulated --kills 270 --out chaos-cells     # goes on where it was stopped
    python -m campaigns chaos --engines vllm --kills 30 --steps 30 --out chaos-cells
    python -m campaigns chaos --teacher --kills 20 --shots-per-run 5 --out chaos-cells-teacher
    python -m campaigns chaos --guests --kills 60 --shots-per-run 6 --out chaos-cells-guests
    python -m campaigns chaos --out chaos-cells --report

A *cell* is one run of a small version of the demo and the shots it gets (``chaos_plan``): SIGKILL, or SIGSTOP and then
SIGCONT or SIGKILL, to the controller, engine processes and vLLM's own process, trainer ranks, the reward worker and
what it started, the supervisor, two at once, all at once; at random, or as a phase is seen to begin. A run must
go on by itself, after the death of its supervisor by ``streamrl resume``. Then it is judged by what the runner's own
witnesses wrote (``tap``, ``chaos_reward``, ``chaos_oracle``). A shot that hit nothing is vacuous and does not
count. Each cell is one JSON file; what a faulty run left is kept beside it."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from campaigns.chaos.chaos_plan import Cell, plan
from campaigns.chaos.chaos_processes import become_subreaper
from campaigns.chaos.chaos_report import read_results, report
from campaigns.chaos.chaos_run import CellResult, run_cell
from streamrl.base.atomic_files import write_atomic


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument("--engines", choices=["simulated", "vllm"], default="simulated")
    arguments.add_argument("--kills", type=int, default=270)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--shots-per-run", type=int, default=3)
    arguments.add_argument(
        "--steps", type=int, default=0, help="steps of the demo itself, with its evaluation; 0: short"
    )
    arguments.add_argument("--talks", action="store_true", help="trajectories of several turns, with tools")
    arguments.add_argument("--teacher", action="store_true", help="a teacher on vLLM, which alone is shot")
    arguments.add_argument("--guests", action="store_true", help="two engines, which their hosts take back")
    arguments.add_argument("--unkilled", type=int, default=0, help="so many runs without a shot instead, to compare")
    arguments.add_argument("--only", type=int, nargs="*", help="numbers of cells; they are run again")
    arguments.add_argument("--at-most", type=int, default=0, help="so many cells in this call (0: all)")
    arguments.add_argument("--out", type=Path, default=Path("chaos-cells"))
    arguments.add_argument("--keep", action="store_true", help="keep what good runs left, too")
    arguments.add_argument("--report", action="store_true", help="only print what there is")
    arguments.set_defaults(work=run)


def run(options: argparse.Namespace) -> int:
    """Run what is missing, then report; 1 when a cell has a fault."""
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.report:
        become_subreaper()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a cell's processes end with it
        kinds = {"talks": options.talks, "teacher": options.teacher, "guests": options.guests}
        cells = plan(options.engines, options.kills, options.seed, options.shots_per_run, **kinds)
        if options.unkilled:
            cells = [msgspec.structs.replace(c, shots=(), number=10_000 + c.number) for c in cells[: options.unkilled]]
        _run_missing(cells, options)
    results = read_results(options.out)
    print("\n".join(report(results)))
    return 1 if any(result.faults for result in results) else 0


def _run_missing(cells: Sequence[Cell], options: argparse.Namespace) -> None:
    done = 0
    for cell in cells:
        file = options.out / f"{cell.engines}-{options.seed}-{cell.number:05d}.json"
        if (file.exists() and not options.only) or (options.only and cell.number not in options.only):
            continue
        folder = file.with_suffix("")
        result = run_cell(cell, folder, steps=options.steps)
        write_atomic(file, msgspec.json.format(msgspec.json.encode(result), indent=1))
        if not result.faults and not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        print(_line(result), flush=True)
        done += 1
        if options.at_most and done >= options.at_most:
            return


def _line(result: CellResult) -> str:
    shots = ", ".join(f"{'+'.join(r.shot.victims)} in {r.shot.phase} {r.outcome}" for r in result.shots)
    wrong = "".join(f"\n    FAULT: {fault}" for fault in result.faults)
    return (
        f"cell {result.cell.number} ({result.cell.rounds}, {result.cell.ranks} ranks, {result.seconds:.0f} s, "
        f"{result.verdict.steps} steps): {shots}{wrong}"
    )
