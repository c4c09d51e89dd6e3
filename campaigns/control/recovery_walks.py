"""Random runs in which control is kept, restored, killed and rebuilt, for as long as one likes.

    python campaigns/control/recovery_walks.py --steps 3000000
    python campaigns/control/recovery_walks.py --only "race" --sizing sagc --seed 17 --steps 1

Each seed is one run of every combination as a twin (``restore_whole`` beside the original), one that crashes again and
again, both also in deterministic order where rounds allow it, and several runs whose answers arrive in any order. Ends
at the first one that breaks; to go on later, begin with the seed that it printed last. ``test_whole_state.py``,
``test_outstanding.py`` and ``test_arrival_order.py`` do the same in a few seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "control"))

import msgspec
from oracle.control_walks import (
    COMBINATIONS,
    COMPOSITIONS,
    ON_POLICY,
    SIZINGS,
    CrashWorld,
    TwinWorld,
    random_run,
    random_settings,
)
from test_arrival_order import runs


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Random runs with control kept, restored and rebuilt.")
    parser.add_argument("--steps", type=int, default=1_000_000, help="events, over all combinations")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next ones count on")
    parser.add_argument("--only", nargs="+", choices=sorted(COMPOSITIONS), default=list(COMPOSITIONS))
    parser.add_argument("--sizing", nargs="+", choices=sorted(SIZINGS), default=list(SIZINGS))
    return parser.parse_args()


def all_of(pair: tuple[str, str], seed: int) -> int:
    """Every kind of run of one combination. Returns the events that were told."""
    events = 0
    for deterministic in (False, True) if pair in ON_POLICY else (False,):
        TwinWorld.random = Random(seed)
        twins = random_run(Random(seed), *pair, world_of=TwinWorld, deterministic=deterministic)
        crashing = random_run(Random(seed), *pair, world_of=CrashWorld, deterministic=deterministic)
        assert isinstance(crashing, CrashWorld)
        crashing.crash(Random(seed))
        crashing.check_end()
        events += len(twins.log) + len(crashing.log)
    if pair in ON_POLICY:
        drawn = random_settings(*pair, Random(seed))
        settings = msgspec.structs.replace(drawn, deterministic=True, steps=6, failure_window=8, max_failed_share=0.6)
        first, *others = runs(settings, seed % 7, 3) + runs(settings, seed % 7, 2, crashes=0.03)
        assert all(other == first for other in others), "the order of arrival decides"
    return events


def main() -> None:
    """Run until ``--steps`` events were told, or something breaks."""
    options = parse_arguments()
    chosen = [(name, sizing) for name, sizing in COMBINATIONS if name in options.only and sizing in options.sizing]
    events, seed, began = 0, options.seed, time.monotonic()
    while events < options.steps:
        for pair in chosen:
            try:
                events += all_of(pair, seed)
            except Exception as error:
                error.add_note(f'again: {sys.argv[0]} --only "{pair[0]}" --sizing {pair[1]} --seed {seed} --steps 1')
                raise
        seed += 1
        print(f"{seed - options.seed} seeds, next {seed}: {events} events, {CrashWorld.crashes} crashes", flush=True)
    print(f"done in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
