"""Many seeds: which fail, what fired, the smallest plan that still fails, and whether planted bugs are caught.

``run`` continues where the state file ends. Plans lean towards cells (component, fault, phase) that have fired least,
so a seed is replayed with the plan that the state file has of it."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from random import Random

import msgspec

from campaigns.faults.fault_plan import Fault, cells, draw_plan
from campaigns.faults.planted import PLANTED, Planted
from campaigns.faults.world import Outcome, World
from campaigns.faults.world_shape import Shape, draw_shape
from streamrl.base.atomic_files import write_atomic

FEWEST_FAULTS, MOST_FAULTS = 6, 16
"""Of a step."""


class Progress(msgspec.Struct, kw_only=True):
    """What a campaign has done so far. ``cells``: how often each fired; ``failures``: plans of seeds that failed."""

    next_seed: int = 0
    seeds: int = 0
    lives: int = 0
    virtual_s: float = 0.0
    faults: int = 0
    kinds: dict[str, int] = {}
    cells: dict[str, int] = {}
    failures: dict[int, list[Fault]] = {}

    def add(self, outcome: Outcome, plan: list[Fault]) -> None:
        """Count one world."""
        self.next_seed = outcome.seed + 1
        self.seeds += 1
        self.lives += outcome.lives
        self.virtual_s += outcome.virtual_s
        self.faults += len(outcome.fired)
        self.kinds = dict(Counter(self.kinds) + Counter([outcome.kind]))
        self.cells = dict(Counter(self.cells) + Counter(outcome.fired))
        if not outcome.ok:
            self.failures[outcome.seed] = plan

    def report(self) -> Iterable[str]:
        """Say it in lines."""
        yield f"seeds {self.seeds}: {self.kinds}, {self.lives} lives, {self.virtual_s / 3600:.2f} simulated hours"
        missing = [cell for cell in ("/".join(map(str, parts)) for parts in cells()) if cell not in self.cells]
        yield f"{self.faults} faults; cells that have not fired: {', '.join(missing) or 'none'}"
        yield f"failed seeds: {', '.join(map(str, self.failures)) or 'none'}"


def plan_of(seed: int, shape: Shape, fired: Mapping[str, int] | None = None) -> list[Fault]:
    """Draw the faults of a seed. ``fired``: how often each cell has in this campaign: what is missing is likelier."""
    random = Random(f"plan {seed}")
    steps = shape.recipe.run.steps
    return draw_plan(random, random.randint(FEWEST_FAULTS * steps, MOST_FAULTS * steps), shape.course, fired or {})


def run_seed(seed: int, *, faults: list[Fault] | None = None, steps: int = 0, keep_history: bool = False) -> Outcome:
    """Run one world. ``faults`` None: those of the seed."""
    shape = draw_shape(seed, steps=steps)
    plan = plan_of(seed, shape) if faults is None else faults
    return World(shape, plan, keep_history=keep_history).run()


def shrink(seed: int, plan: list[Fault] | None = None) -> tuple[list[Fault], int, Outcome]:
    """Return the fewest faults, then steps, with which ``seed`` breaks the same invariant. ``plan`` None: its own."""
    shape = draw_shape(seed)
    faults, steps = plan_of(seed, shape) if plan is None else plan, shape.recipe.run.steps
    outcome = run_seed(seed, faults=faults)
    wanted, fired = {v.invariant for v in outcome.violations}, set(outcome.fired)

    def fails(tried: list[Fault], steps: int) -> bool:
        return bool({v.invariant for v in run_seed(seed, faults=tried, steps=steps).violations} & wanted)

    if fails(only_fired := [fault for fault in faults if fault.cell in fired], steps):
        faults = only_fired
    part = len(faults) // 2
    while part:
        start, before = 0, len(faults)
        while start < len(faults):
            tried = faults[:start] + faults[start + part :]
            if fails(tried, steps):
                faults = tried
            else:
                start += part
        part = part if part == 1 and len(faults) < before else part // 2
    steps = next((fewer for fewer in range(1, steps) if fails(faults, fewer)), steps)
    return faults, steps, run_seed(seed, faults=faults, steps=steps, keep_history=True)


def catch(bug: Planted, seeds: int, first: int = 0) -> tuple[int, str, str]:
    """Return after how many seeds one objects to ``bug`` (0: none), the invariant that objects, and what it says."""
    for count, seed in enumerate(range(first, first + seeds), start=1):
        with bug.planted():
            outcome = run_seed(seed)
            again = run_seed(seed).trace if bug.breaks == "repeatable" else outcome.trace
        found = ("coverage", "no fault fired") if outcome.kind == "vacuous" else ("", "")
        if outcome.violations:
            found = outcome.violations[0].invariant, outcome.violations[0].text
        if again != outcome.trace:
            found = "repeatable", f"seed {seed} has two traces"
        if found[0] and run_seed(seed).ok:  # and not because of something else
            return count, *found
    return 0, "", ""


# ---- the command ---------------------------------------------------------------------------------


def run_campaign(arguments: argparse.Namespace) -> int:
    first, _, last = arguments.seeds.partition(":")
    progress = _read(arguments.state) or Progress(next_seed=int(first))
    ends = time.monotonic() + arguments.seconds
    for seed in range(progress.next_seed, int(last or 10**9)):
        if time.monotonic() > ends:
            break
        plan = plan_of(seed, draw_shape(seed), progress.cells)
        outcome = run_seed(seed, faults=plan)
        progress.add(outcome, plan)
        if not outcome.ok:
            _show(outcome)
        if arguments.state and (not outcome.ok or seed % 20 == 0):
            write_atomic(Path(arguments.state), msgspec.json.encode(progress))
    if arguments.state:
        write_atomic(Path(arguments.state), msgspec.json.encode(progress))
    print(*progress.report(), sep="\n")
    return int(bool(progress.failures))


def _read(state: str) -> Progress | None:
    return msgspec.json.decode(Path(state).read_bytes(), type=Progress) if state and Path(state).exists() else None


def _plan_in(arguments: argparse.Namespace) -> list[Fault] | None:
    progress = _read(arguments.state)
    return progress.failures[arguments.seed] if progress else None


def replay(arguments: argparse.Namespace) -> int:
    outcome = run_seed(arguments.seed, faults=_plan_in(arguments), steps=arguments.steps, keep_history=True)
    print(*outcome.history, sep="\n")
    return _show(outcome)


def shrink_command(arguments: argparse.Namespace) -> int:
    faults, steps, outcome = shrink(arguments.seed, _plan_in(arguments))
    print(
        *outcome.history[-60:], msgspec.json.encode(faults).decode(), f"{len(faults)} faults, {steps} steps", sep="\n"
    )
    return _show(outcome)


def planted(arguments: argparse.Namespace) -> int:
    missed = 0
    for bug in PLANTED:
        if not arguments.names or bug.name in arguments.names:
            count, by, text = catch(bug, arguments.seeds)
            missed += not count
            print(f"{bug.name} | {bug.breaks} | {by or 'NOT CAUGHT'} | {count} | {text.splitlines()[:1]}", flush=True)
    return int(bool(missed))


def _show(outcome: Outcome) -> int:
    print(f"seed {outcome.seed}: {outcome.kind} ({outcome.message[:300]}); trace {outcome.trace}")
    for violation in outcome.violations:
        print(f"  {violation.invariant} at {violation.time_s} s: {violation.text}")
    return int(not outcome.ok)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands of this campaign and their arguments."""
    commands = parser.add_subparsers(required=True)
    for work in (run_campaign, replay, shrink_command, planted):
        command = commands.add_parser(work.__name__.split("_")[0])
        command.set_defaults(work=partial(_repeatably, work))
        if work is planted:
            command.add_argument("names", nargs="*")
            command.add_argument("--seeds", type=int, default=60)
            continue
        command.add_argument("--state", default="")
        if work is run_campaign:
            command.add_argument("--seeds", default="0:")
            command.add_argument("--seconds", type=float, default=float("inf"))
            continue
        command.add_argument("seed", type=int)
        command.add_argument("--steps", type=int, default=0)


def _repeatably(work: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings are walked in the same order in every process
        command = [sys.executable, "-m", "campaigns", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    return work(arguments)
