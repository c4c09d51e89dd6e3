"""Does any death end the run? Starts a run for each of its processes in turn, and kills that one with SIGKILL.

    python benchmarks/kill_each_process.py              # every process, vLLM's own included
    python benchmarks/kill_each_process.py --only engine-0 trainer-0

Each run must be over within 10 s (no process of it left, whoever its parent), with an exit code other than 0, with
the dead process named in its output, and with nothing left in shared memory or in its temporary directory. Needs a
machine on which nothing else creates shared memory meanwhile.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

import psutil
from process_tree import describe, marked_processes, process_tree
from training_run import DEMO_RECIPE, TrainingRun, training_run

END_SECONDS = 10.0
SHARED_MEMORY = Path("/dev/shm")
OVERRIDES: dict[str, object] = {
    "run.steps": 1000,
    "rollout.prompts_per_batch": 4,
    "evaluation.at_start": False,
    "evaluation.at_end": False,
}
OWN_PROCESS = re.compile(r"streamrl\.processes[. ](?P<role>\w+)(?:.*--index[ =](?P<index>\d+))?")
ROLES_WITHOUT_INDEX = ("controller", "guardian")


def label(process: psutil.Process, root_pid: int) -> str:
    """A name for the process that is equal from run to run: ``engine-0``, ``engine-0/VLLM::EngineCore``, ..."""
    if process.pid == root_pid:
        return "supervisor"
    command = " ".join(process.cmdline())
    if own := OWN_PROCESS.search(command):
        role, index = own["role"], own["index"] or "0"
        return role if role in ROLES_WITHOUT_INDEX else f"{role}-{index}"
    parent = process.parent()
    above = label(parent, root_pid) if parent else "orphan"
    tracker = "resource_tracker" in command
    return f"{above}/{'resource_tracker' if tracker else command.split()[0] if command else process.name()}"


def labelled_tree(root_pid: int) -> dict[str, psutil.Process]:
    """Processes of the run by label; equal labels are numbered in order of pid."""
    found: dict[str, psutil.Process] = {}
    for process in sorted(process_tree(root_pid), key=lambda process: process.pid):
        name = base = label(process, root_pid)
        number = 1
        while name in found:
            number += 1
            name = f"{base}#{number}"
        found[name] = process
    return found


def seconds_until_gone(run: TrainingRun, timeout_s: float) -> float | None:
    """Seconds until no process of the run is left; None when some still live after ``timeout_s``."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        if run.process.poll() is not None and not marked_processes(run.mark):
            return time.monotonic() - began
        time.sleep(0.05)
    return None


def faults_after_kill(run: TrainingRun, victim_name: str, temporary: Path, shared_before: set[str]) -> list[str]:
    """Kill one process of a run that has trained; returns what is wrong with how the run ends."""
    victim = labelled_tree(run.process.pid).get(victim_name)
    if victim is None:
        return [f"no such process in this run; it has {', '.join(labelled_tree(run.process.pid))}"]
    victim.kill()
    seconds = seconds_until_gone(run, END_SECONDS)
    faults = []
    if seconds is None:
        left = "; ".join(map(describe, marked_processes(run.mark)))
        faults.append(f"after {END_SECONDS:.0f} s still there: {left or 'only the supervisor'}")
    if run.process.poll() == 0:
        faults.append("exit code 0")
    owner = victim_name.partition("/")[0].partition("#")[0]
    if owner != "supervisor" and owner not in run.tail(200):
        faults.append(f"the output does not name {owner}")
    if shared := {path.name for path in SHARED_MEMORY.iterdir()} - shared_before:
        faults.append(f"left in shared memory: {', '.join(sorted(shared))}")
    if files := [str(path.relative_to(temporary)) for path in temporary.rglob("*") if not path.is_dir()]:
        faults.append(f"left in the temporary directory: {', '.join(files[:5])}")
    if not faults:
        cause = run.tail(200).strip().splitlines()
        print(f"  gone after {seconds:.1f} s, exit code {run.process.returncode}: {cause[-1] if cause else ''}")
    return faults


def list_processes(recipe: Path, timeout_s: float) -> list[str]:
    """Labels of every process of a run that trains."""
    with training_run(recipe, OVERRIDES) as run:
        run.wait_for_step(1, timeout_s=timeout_s)
        return list(labelled_tree(run.process.pid))


def main() -> int:
    """Kill one after the other; exit code 1 when any run ended badly."""
    arguments = argparse.ArgumentParser(description="Kill each process of a run in turn.")
    arguments.add_argument("--recipe", type=Path, default=DEMO_RECIPE)
    arguments.add_argument("--only", nargs="*", help="labels; default: every process")
    arguments.add_argument("--start-timeout-s", type=float, default=180.0)
    options = arguments.parse_args()
    victims = options.only or list_processes(options.recipe, options.start_timeout_s)
    print(f"{len(victims)} processes: {', '.join(victims)}")
    failed = 0
    for victim in victims:
        print(f"SIGKILL to {victim}", flush=True)
        shared_before = {path.name for path in SHARED_MEMORY.iterdir()}
        with tempfile.TemporaryDirectory(prefix="sk-") as name:  # short: socket paths have 107 bytes
            with training_run(options.recipe, OVERRIDES, environment={"TMPDIR": name}) as run:
                run.wait_for_step(1, timeout_s=options.start_timeout_s)
                faults = faults_after_kill(run, victim, Path(name), shared_before)
            failed += bool(faults)
            for fault in faults:
                print(f"  FAULT: {fault}", flush=True)
    print(f"{len(victims) - failed} of {len(victims)} ended as they should")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
