"""Fuzz every decoder of streamrl, for as long as one likes.

Inputs are valid messages with something wrong in them; input ``n`` of a target follows from the target's name and
``n`` alone. ``--state`` holds how many were run of each target: a campaign continues there. A fault (see
``execution.py``) ends it with exit code 1, and its input is in a file, which ``--replay`` runs again."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec

from campaigns.fuzz import targets_journal, targets_rewards, targets_runs, targets_streams, targets_weights
from campaigns.fuzz.execution import Fault, Target, check_seeds, run_inputs, run_slice
from streamrl.base.atomic_files import write_atomic

SLICE = 5000


def every_target() -> dict[str, Target]:
    """Return every decoder, by name."""
    families = (targets_streams, targets_weights, targets_rewards, targets_journal, targets_runs)
    return {target.name: target for family in families for target in family.targets()}


def fuzz(chosen: dict[str, Target], options: argparse.Namespace) -> int:
    """Run slices of the targets in turn."""
    done: dict[str, int] = {}
    if options.state and options.state.exists():
        done = msgspec.json.decode(options.state.read_bytes(), type=dict[str, int])
    ends = time.monotonic() + options.seconds
    for target in chosen.values():
        check_seeds(target)
    while time.monotonic() < ends:
        name = min(chosen, key=lambda name: done.get(name, 0))
        first = done.get(name, 0)
        if first >= options.executions:
            break
        found = run_slice(chosen[name], first, min(first + SLICE, options.executions))
        if found.fault is not None:
            return report(found.fault, options.failures)
        done[name] = min(first + SLICE, options.executions)
        if options.state:
            write_atomic(options.state, msgspec.json.encode(done))
    print(*(f"{name:28} {done.get(name, 0):11,}" for name in sorted(chosen)), sep="\n")
    return 0


def report(fault: Fault, directory: Path) -> int:
    """Store its input and say what it is."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{fault.target}-{fault.number}.msgpack"
    path.write_bytes(msgspec.msgpack.encode(fault))
    print(f"FAULT {fault.kind} in {fault.target}, number {fault.number}: {path}\n{fault.reason}")
    return 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this campaign."""
    parser.add_argument("--target", default="", help="name, or how it begins; all by default")
    parser.add_argument("--executions", type=int, default=5_000_000, help="of each target, those of the state included")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--state", type=Path, help="file that says what was run; written after every slice")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="where faulty inputs are stored")
    parser.add_argument("--replay", type=Path, help="run a stored input again")
    parser.set_defaults(work=fuzz_or_replay)


def fuzz_or_replay(options: argparse.Namespace) -> int:
    """Return 1 where a fault was found."""
    targets = every_target()
    if options.replay:
        stored = msgspec.msgpack.decode(options.replay.read_bytes(), type=Fault)
        found = run_inputs(targets[stored.target], [stored.frames]).fault
        return report(found, options.failures) if found else 0
    return fuzz({name: target for name, target in targets.items() if name.startswith(options.target)}, options)
