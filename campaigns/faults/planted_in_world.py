"""Bugs that are planted in the product, one at a time: every one must be caught.

    python campaigns/faults/planted_in_world.py [NAME ...] [--seeds N]

runs seeds with each bug until the ledger objects, and prints how many it took, and what objected. ``invariant``: the
one that the bug breaks (``refs/reliability.md``, section 3); what notices it first may be another one. A bug that makes
a run fail or hang which must not, is caught by I13.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from campaigns.faults.campaign import run_seed
from campaigns.faults.planted_around_control import IN_WHAT_IS_AROUND
from campaigns.faults.planted_bugs import Planted
from campaigns.faults.planted_in_control import IN_CONTROL

PLANTED = (*IN_CONTROL, *IN_WHAT_IS_AROUND)


class Caught(msgspec.Struct, frozen=True):
    """``seeds``: worlds until it was caught (0: it was not); ``by``: the invariant that objected, and what it said."""

    name: str
    invariant: str
    seeds: int
    seconds: float
    by: str
    text: str


def catch(bug: Planted, seeds: int, first: int = 0) -> Caught:
    """Run seeds with ``bug`` until one objects."""
    began = time.process_time()
    for count, seed in enumerate(range(first, first + seeds), start=1):
        by, text = _objection(bug, seed)
        if by and (bug.check is not None or run_seed(seed).ok):  # and not of something else
            return Caught(bug.name, bug.invariant, count, time.process_time() - began, by, text)
    return Caught(bug.name, bug.invariant, 0, time.process_time() - began, "", "")


def _objection(bug: Planted, seed: int) -> tuple[str, str]:
    """The invariant that ``seed`` breaks with the bug, and how."""
    if bug.check is not None:
        text = bug.check()
        return bug.invariant if text else "", text
    with bug.planted():
        outcome = run_seed(seed)
        if bug.invariant == "I18" and (other := run_seed(seed).trace) != outcome.trace:
            return "I18", f"seed {seed} has trace {outcome.trace}, and then {other}"
    if outcome.kind == "vacuous":
        return "I21", "no fault fired"
    return (outcome.violations[0].invariant, outcome.violations[0].text) if outcome.violations else ("", "")


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=200)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    missed = 0
    print("| planted bug | breaks | caught by | after seeds | CPU s | what it said |\n|---|---|---|---|---|---|")
    for bug in PLANTED:
        if arguments.names and bug.name not in arguments.names:
            continue
        found = catch(bug, arguments.seeds)
        missed += not found.seeds
        said = found.text.splitlines()[0][:90] if found.text else "NOT CAUGHT"
        print(
            f"| {bug.name} | {bug.invariant} | {found.by} | {found.seeds} | {found.seconds:.1f} | {said} |", flush=True
        )
    print(f"\n{missed} not caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["PLANTED", "Caught", "Planted", "catch"]
