"""Signals in every phase of a run: one drains, two end at once, and what a killed supervisor leaves can be cleaned up.

    python benchmarks/shutdown_matrix.py --out matrix.jsonl          # goes on where it was interrupted
    python benchmarks/shutdown_matrix.py --only SIGINT-push-2

Real processes with the simulated engine and the real trainer, about seven seconds a cell. A cell is wrong when the
command's exit code is not the promised one, when it takes longer than ``LIMITS_S``, when anything is left (processes,
shared memory, temporary or half-written files), or when the event log does not replay to the orders that it records.
``kill``: the supervisor dies by SIGKILL, and all with it; then the clean-up of a resume has to leave nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
from chaos_processes import become_subreaper, living, residue, send, shared_memory, start_tapped, wait_until_none
from chaos_records import Record, Witness

from streamrl.launch.supervise.clean_up import remove_half_written, remove_killed_life

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "sort"
LIMITS_S = {"1": 30.0, "2": 1.0, "kill": 10.0}
"""From the (last) signal until the command has ended."""
SLACK_S = 0.5
"""For this process to notice it, on a machine that does other things."""
EXIT_CODES = {"1": (0, 130), "2": (130,), "kill": (-signal.SIGKILL,)}
# Python itself still starts: nothing of streamrl is there that could drain, or leave anything.
BEFORE_ANYTHING = (1, -signal.SIGINT, -signal.SIGTERM)
STARTING = {"start": 0.2, "loading": 1.5}
"""Seconds from the command to the signal."""
SEEN_BY: dict[str, Callable[[Record], bool]] = {
    "evaluation": lambda record: record.get("event") == "RunBegan",
    "rollout": lambda record: record["kind"] == "generate done",
    "training": lambda record: record["kind"] == "close_batch" and record["version"] > 1,
    "push": lambda record: record["kind"] == "stage" and record["version"] > 1,
    "commit": lambda record: record["kind"] == "commit" and record["version"] > 1,
    "checkpoint": lambda record: record["kind"] == "save_checkpoint",
}
PHASES = (*STARTING, *SEEN_BY, "drain")
CELLS = [
    f"{number}-{phase}-{presses}" for number in ("SIGINT", "SIGTERM") for phase in PHASES for presses in ("1", "2")
] + [f"SIGKILL-{phase}-kill" for phase in PHASES]


class Outcome(msgspec.Struct, kw_only=True):
    """``seconds``: from the last signal to the end of the command; ``faults``: everything that is wrong."""

    cell: str
    exit_code: int | None
    seconds: float
    faults: list[str]


def main() -> int:
    """Run the cells that ``--out`` does not have yet; exit code 1 where one is wrong."""
    parser = argparse.ArgumentParser(description="Signals in every phase of a run.")
    parser.add_argument("--out", type=Path, help="a line of JSON for each cell; those that it has are left out")
    parser.add_argument("--only", nargs="+", choices=CELLS, default=CELLS, metavar="CELL")
    options = parser.parse_args()
    become_subreaper()
    lines = options.out.read_bytes().splitlines() if options.out and options.out.exists() else []
    outcomes = [msgspec.json.decode(line, type=Outcome) for line in lines]
    for cell in [cell for cell in options.only if cell not in {outcome.cell for outcome in outcomes}]:
        outcomes.append(carry_out(cell))
        told = "; ".join(outcomes[-1].faults) or "as promised"
        print(f"{cell:22s} exit {outcomes[-1].exit_code!s:>4} after {outcomes[-1].seconds:5.2f} s  {told}", flush=True)
        if options.out:
            with options.out.open("ab") as out:
                out.write(msgspec.json.encode(outcomes[-1]) + b"\n")
    wrong = [outcome.cell for outcome in outcomes if outcome.faults]
    print(f"{len(outcomes)} cells, {len(wrong)} wrong{': ' if wrong else ''}{', '.join(wrong)}")
    for presses, limit_s in LIMITS_S.items():
        times = sorted(outcome.seconds for outcome in outcomes if outcome.cell.endswith(f"-{presses}"))
        if times:
            print(f"  {presses:>4}: median {times[len(times) // 2]:.2f} s, longest {times[-1]:.2f} s of {limit_s:g}")
    return 1 if wrong else 0


def carry_out(cell: str) -> Outcome:
    """Start a run, signal it in its phase, look at what is left."""
    number, phase, presses = cell.split("-")
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="sk-", ignore_cleanup_errors=True) as name:  # a socket path has 107 bytes
        folder = Path(name)
        (folder / "tmp").mkdir()
        process = _train(folder)
        try:
            faults = _aim(phase, folder, process)
            fired = _fire(number, presses, process)
            limit_s = LIMITS_S[presses]
            code = _wait(process, 4 * limit_s)
            seconds = time.monotonic() - fired
            if seconds > limit_s + SLACK_S:
                faults.append(f"took {seconds:.2f} s, {limit_s:g} are allowed")
            too_early = phase in STARTING and code in BEFORE_ANYTHING and not (folder / "runs").exists()
            if code not in EXIT_CODES[presses] and not too_early:
                faults.append(f"exit code {code}: {_tail(folder)}")
            faults += _judge_rest(folder, presses, before)
        finally:
            send(living(), signal.SIGKILL)
            wait_until_none(5.0)
    return Outcome(cell=cell, exit_code=code, seconds=round(seconds, 3), faults=faults)


def _train(folder: Path) -> subprocess.Popen[bytes]:
    chosen: dict[str, Any] = {
        "run.directory": str(folder / "runs"),
        "run.steps": 2000,
        "engines.kind": "simulated",
        "rollout.prompts_per_batch": 4,
        "rollout.group_size": 4,
        "sampling.max_tokens": 64,
        "training.advanced.threads": 1,
        "checkpoint.every": 2,
        "checkpoint.advanced.min_free_gib": 0.1,
        "evaluation.every": 2,
        "evaluation.limit": 16,
    }
    flags = [part for name, value in chosen.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    arguments = ["train", str(EXAMPLE / "recipe.toml"), *flags]
    return start_tapped(arguments, folder, folder / "tap.jsonl", folder / "tmp")


def _aim(phase: str, folder: Path, process: subprocess.Popen[bytes]) -> list[str]:
    """Return when the run is in ``phase``; and why it never was."""
    witness = Witness(folder / "tap.jsonl")
    if phase in STARTING:
        time.sleep(STARTING[phase])
        return []
    seen = witness.wait_for(SEEN_BY.get(phase, SEEN_BY["rollout"]), 60.0, lambda: process.poll() is not None)
    if phase == "drain":
        process.terminate()
        time.sleep(0.05)
    return [] if seen else [f"the run never came to {phase}: {_tail(folder)}"]


def _fire(number: str, presses: str, process: subprocess.Popen[bytes]) -> float:
    """Send the signals; returns when the last one was sent."""
    if presses == "kill":
        send([psutil.Process(process.pid)], signal.SIGKILL)
        return time.monotonic()
    for press in range(int(presses)):
        if press:
            time.sleep(0.1)  # two signals of one kind at once are one
        fired = time.monotonic()
        if process.poll() is None:
            process.send_signal(getattr(signal, number))
    return fired


def _judge_rest(folder: Path, presses: str, before: set[str]) -> list[str]:
    if presses == "kill":
        time.sleep(1.0)
    runs = [path.parent for path in folder.glob("runs/*/recipe.toml") if not path.parent.is_symlink()]
    for run in runs if presses == "kill" else ():
        if failures := [*remove_killed_life(run), *remove_half_written(run)]:
            return failures
    for run in runs:
        (run / "control.key").unlink(missing_ok=True) if presses == "kill" else None
    # Simulations and fuzzing beside this have shared memory that is none of a run's.
    others = {name for name in shared_memory() if name.startswith("streamrl-")}
    faults = residue(runs, folder / "tmp", before | others)
    for run in runs:
        if any((run / "journal").glob("*.journal")):
            faults += _replayed(run)
    return faults


def _replayed(run: Path) -> list[str]:
    from streamrl.cli.show import read_run

    return [] if read_run(run).summary.accounting.balanced else ["the accounts are not balanced"]


def _wait(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE:
                return process.wait()
        except psutil.NoSuchProcess:
            return process.wait()
        time.sleep(0.01)
    return process.poll()


def _tail(folder: Path) -> str:
    return " | ".join((folder / "output.txt").read_text(errors="replace").splitlines()[-4:])


if __name__ == "__main__":
    sys.exit(main())
