"""Random runs of every round policy for as long as one likes: the invariants, checked after every event.

    python campaigns/control/random_runs.py --steps 3000000
    python campaigns/control/random_runs.py --only "race" partial --sizing sagc --seed 17 --steps 1

Prints what every combination did. Ends at the first run that breaks an invariant, with the command that repeats it.
Not a test of the suite: ``test_round_policies.py`` is, and does the same in a few seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "control"))

from oracle.control_walks import COMBINATIONS, COMPOSITIONS, SIZINGS, random_run


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Random runs of every round policy.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="events, over all combinations")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next ones count on")
    parser.add_argument("--only", nargs="+", choices=sorted(COMPOSITIONS), default=list(COMPOSITIONS))
    parser.add_argument("--sizing", nargs="+", choices=sorted(SIZINGS), default=list(SIZINGS))
    return parser.parse_args()


def main() -> None:
    """Run until ``--steps`` events were told, or an invariant breaks."""
    options = parse_arguments()
    chosen = [(name, sizing) for name, sizing in COMBINATIONS if name in options.only and sizing in options.sizing]
    events: Counter[tuple[str, str]] = Counter()
    trained: Counter[tuple[str, str]] = Counter()
    ends: Counter[str] = Counter()
    seed, began = options.seed, time.monotonic()
    try:
        while sum(events.values()) < options.steps:
            for name, sizing in chosen:
                try:
                    world = random_run(Random(seed), name, sizing)
                except Exception as error:
                    error.add_note(f'again: {sys.argv[0]} --only "{name}" --sizing {sizing} --seed {seed} --steps 1')
                    raise
                events[name, sizing] += len(world.log)
                trained[name, sizing] += sum(world.trained.values())
                ends["stopped by the trip-wire" if world.finished is None else world.finished.partition(":")[0]] += 1
            seed += 1
    finally:
        for name, sizing in chosen:
            print(f"{name:28s} {sizing:8s} {events[name, sizing]:9d} events {trained[name, sizing]:9d} trained")
        seconds = time.monotonic() - began
        print(f"{sum(events.values())} events of {sum(ends.values())} runs in {seconds:.0f} s; ends: {dict(ends)}")


if __name__ == "__main__":
    main()
