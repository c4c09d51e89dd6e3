"""Random walks of control with trajectories of several turns: every invariant after every event, kills and resumes."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

WALKED = {
    "tail batching": ("race", "fixed"),
    "length_sorted": ("sorted, oversubscribed", "fixed"),
    "length_sorted, partial": ("partial, oversubscribed", "fixed"),
    "continuous": ("continuous at 3", "fixed"),
    "SAGC": ("race on both axes", "sagc"),
}
"""Compositions and group sizes of the walks (``tests/oracle/control_walks.py``)."""
PLANTED = {
    "restored": ("streamrl.control.policies.length_sorted.LengthSortedRounds.snapshot", lambda policy: {}),
    "slots": ("streamrl.buffers.slots.Slots.version_live", lambda *state: None),
    "accounting": ("streamrl.buffers.rollout_buffer.RolloutBuffer._dropped", lambda *state: None),
}
"""Bugs by name, each in place of a function of control."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--events", type=int, default=1_000_000, help="of all walks together")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--plant", choices=PLANTED, help="plant a bug, which the walks must find")
    command.set_defaults(work=run)


def run(arguments: argparse.Namespace) -> int:
    """Walk until each composition has its share of the events; 1 where an invariant does not hold."""
    began, wrong, sums = time.monotonic(), 0, Counter[str]()
    walk = partial(_walks, arguments.events // len(WALKED), arguments.seed, arguments.plant)
    with multiprocessing.Pool(min(2, len(WALKED))) as pool:
        for name, counts, problem in pool.imap_unordered(walk, WALKED):
            sums += counts
            wrong += bool(problem)
            print(f"{name}: {dict(counts)}{problem}", flush=True)
    ends = sums["trained"] + sums["dropped"] + sums["in flight"]
    print(
        f"{sums['events']} events in {time.monotonic() - began:.0f} s: {sums['issued']} issued = {ends} = {dict(sums)}"
    )
    return int(wrong > 0 or ends != sums["issued"])


def _walks(events: int, seed: int, planted: str | None, name: str) -> tuple[str, Counter[str], str]:
    from oracle import control_walks as oracle  # type: ignore[import-not-found]

    found, visits = Counter[str](), oracle.TurnsWorld.visits
    with mock.patch(*PLANTED[planted]) if planted else nullcontext():
        while found["events"] < events:
            seed += 1
            try:
                world = oracle.random_run(Random(seed), *WALKED[name], world_of=oracle.TurnsWorld)
            except AssertionError as error:
                return name, found, f"\n  seed {seed}: {str(error)[:400]}"
            said = world.state.accounting()
            dropped = sum(said.dropped.values())
            found += Counter({"issued": said.issued, "trained": said.trained, "in flight": said.in_flight})
            found += Counter({"runs": 1, "events": len(world.log), "dropped": dropped})
        found["waits"] = oracle.TurnsWorld.visits - visits
    return name, found, ""
