"""Many seeds: which fail, what fired, and the smallest plan that still fails.

    python tests/simulation/campaign.py run --seeds 0:2000 [--state FILE] [--hours H --faults N] [--seconds S]
    python tests/simulation/campaign.py replay SEED [--plan FILE]
    python tests/simulation/campaign.py shrink SEED

``run`` goes on where the state file ends, until all seeds, or both goals, are done or the seconds are over.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from fault_plan import MAY_END_A_RUN, Fault, Phase, cells, draw_plan
from ledger import Violation
from world import Outcome, World
from world_shape import Shape, draw_shape

SAVE_EVERY = 20


class Failure(msgspec.Struct, kw_only=True):
    """A seed that failed, and how."""

    seed: int
    kind: str
    message: str
    violations: list[Violation]
    faults: list[Fault]


class Progress(msgspec.Struct, kw_only=True):
    """What a campaign has done so far. ``cells``: how often each fired."""

    next_seed: int
    seeds: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    fired: int = 0
    steps: int = 0
    trained: int = 0
    events: int = 0
    kinds: dict[str, int] = {}
    cells: dict[str, int] = {}
    failures: list[Failure] = []

    def add(self, outcome: Outcome, faults: list[Fault], cpu_s: float) -> None:
        self.next_seed = outcome.seed + 1
        self.seeds += 1
        self.virtual_s += outcome.virtual_s
        self.cpu_s += cpu_s
        self.fired += len(outcome.fired)
        self.steps += max(outcome.steps, 0)
        self.trained += outcome.trained
        self.events += outcome.events
        self.kinds = dict(Counter(self.kinds) + Counter([outcome.kind]))
        self.cells = dict(Counter(self.cells) + Counter(outcome.fired))
        if not outcome.ok:
            self.failures.append(
                Failure(
                    seed=outcome.seed,
                    kind=outcome.kind,
                    message=outcome.message,
                    violations=list(outcome.violations),
                    faults=faults,
                )
            )

    @property
    def missing(self) -> list[str]:
        """Cells that have not fired."""
        return [cell for cell in ("/".join(map(str, parts)) for parts in cells()) if cell not in self.cells]


def plan_of(seed: int, shape: Shape) -> list[Fault]:
    """The faults of a seed: two in three runs have none that may end them, and must finish."""
    random = Random(f"plan {seed}")
    steps = shape.recipe.run.steps
    count = random.randint(steps, 3 * steps)
    return draw_plan(random, count, steps, ending=int(random.random() < 1 / 3), phases=list(Phase))


def run_seed(
    seed: int,
    *,
    faults: list[Fault] | None = None,
    steps: int = 0,
    keep_history: bool = False,
    stacks_at: float = 0.0,
) -> Outcome:
    """One world. ``faults`` None: those of the seed."""
    shape = draw_shape(seed, steps=steps)
    plan = plan_of(seed, shape) if faults is None else faults
    return World(shape, plan, keep_history=keep_history, stacks_at=stacks_at).run()


def shrink(seed: int, fails: Callable[[Outcome], bool] | None = None) -> tuple[list[Fault], int, Outcome]:
    """The fewest faults, then the fewest steps, with which ``seed`` still violates the same invariant."""
    shape = draw_shape(seed)
    faults, steps = plan_of(seed, shape), shape.recipe.run.steps
    outcome = run_seed(seed, faults=faults)
    wanted = {v.invariant for v in outcome.violations}
    still = fails or (lambda o: bool({v.invariant for v in o.violations} & wanted))
    fired = set(outcome.fired)
    faults = _smaller(seed, faults, [f for f in faults if f.cell in fired], steps, still)
    part = len(faults) // 2
    while part:
        start, before = 0, len(faults)
        while start < len(faults):
            fewer = _smaller(seed, faults, faults[:start] + faults[start + part :], steps, still)
            start += part * (len(fewer) == len(faults))
            faults = fewer
        part = part if part == 1 and len(faults) < before else part // 2
    for fewer in range(1, steps):
        if still(run_seed(seed, faults=faults, steps=fewer)):
            steps = fewer
            break
    return faults, steps, run_seed(seed, faults=faults, steps=steps, keep_history=True)


def _smaller(
    seed: int, faults: list[Fault], tried: list[Fault], steps: int, still: Callable[[Outcome], bool]
) -> list[Fault]:
    return tried if len(tried) < len(faults) and still(run_seed(seed, faults=tried, steps=steps)) else faults


# ---- the command ---------------------------------------------------------------------------------


def run_campaign(arguments: argparse.Namespace) -> int:
    first, _, last = arguments.seeds.partition(":")
    state = Path(arguments.state) if arguments.state else None
    progress = Progress(next_seed=int(first))
    if state is not None and state.exists():
        progress = msgspec.json.decode(state.read_bytes(), type=Progress)
        progress.next_seed = max(progress.next_seed, int(first))
    ends = time.monotonic() + arguments.seconds
    for seed in range(progress.next_seed, int(last or 10**9)):
        enough = progress.virtual_s >= 3600 * arguments.hours and progress.fired >= arguments.faults
        if time.monotonic() > ends or (not last and enough):
            break
        _one_more(progress, seed, arguments.show)
        if state is not None and progress.seeds % SAVE_EVERY == 0:
            _save(state, progress)
    if state is not None:
        _save(state, progress)
    for line in report(progress):
        print(line)
    return int(bool(progress.failures))


def _one_more(progress: Progress, seed: int, show: int) -> None:
    began = time.process_time()
    faults = plan_of(seed, draw_shape(seed))
    outcome = run_seed(seed)
    progress.add(outcome, faults, time.process_time() - began)
    if not outcome.ok:
        told = "; ".join(f"{v.invariant} {v.text}" for v in outcome.violations[:2]) or outcome.message
        print(f"seed {seed} {outcome.kind}: {told[:400]}", flush=True)
        if show:
            print(*run_seed(seed, keep_history=True).history[-show:], sep="\n")


def _save(state: Path, progress: Progress) -> None:
    partial = state.with_name(f".{state.name}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(progress), indent=1))
    partial.replace(state)


def report(progress: Progress) -> Iterable[str]:
    """What a campaign found, for people."""
    hours, minutes = progress.virtual_s / 3600, max(progress.cpu_s / 60, 1e-9)
    yield f"seeds {progress.seeds}, next {progress.next_seed}: {progress.kinds}"
    yield f"{hours:.2f} simulated hours, {progress.fired} faults, {progress.steps} steps, {progress.trained} trained"
    rates = f"{progress.fired / minutes:.0f} faults, {progress.events / minutes:.0f} events"
    yield f"a CPU minute: {hours / minutes:.2f} hours, {rates}"
    total = len(cells())
    yield f"cells fired: {total - len(progress.missing)} of {total}; missing: {', '.join(progress.missing[:12])}"
    yield f"failures: {len(progress.failures)}"


def replay(arguments: argparse.Namespace) -> int:
    faults = None
    if arguments.plan:
        faults = msgspec.json.decode(Path(arguments.plan).read_bytes(), type=list[Fault])
    outcome = run_seed(
        arguments.seed, faults=faults, steps=arguments.steps, keep_history=True, stacks_at=arguments.stacks
    )
    print(*outcome.history, sep="\n")
    return _tell(outcome)


def shrink_command(arguments: argparse.Namespace) -> int:
    faults, steps, outcome = shrink(arguments.seed)
    print(*outcome.history[-arguments.lines :], sep="\n")
    print(msgspec.json.encode(faults).decode())
    print(f"{len(faults)} faults, {steps} steps")
    return _tell(outcome)


def _tell(outcome: Outcome) -> int:
    print(f"seed {outcome.seed}: {outcome.kind} ({outcome.message}); trace {outcome.trace}")
    for violation in outcome.violations:
        print(f"  {violation.invariant} at {violation.time_s} s: {violation.text}")
    return int(not outcome.ok)


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings are walked in the same order in every process
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--seeds", default="0:")
    one.add_argument("--state", default="")
    one.add_argument("--hours", type=float, default=2000.0)
    one.add_argument("--faults", type=int, default=1_000_000)
    one.add_argument("--show", type=int, default=0, help="lines of the trace of a seed that fails")
    one.add_argument("--seconds", type=float, default=float("inf"))
    one.set_defaults(work=run_campaign)
    two = commands.add_parser("replay")
    two.add_argument("seed", type=int)
    two.add_argument("--plan", default="")
    two.add_argument("--steps", type=int, default=0)
    two.add_argument("--stacks", type=float, default=0.0, help="virtual second at which to show where every task is")
    two.set_defaults(work=replay)
    three = commands.add_parser("shrink")
    three.add_argument("seed", type=int)
    three.add_argument("--lines", type=int, default=60)
    three.set_defaults(work=shrink_command)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    return int(arguments.work(arguments))


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["MAY_END_A_RUN", "Failure", "Progress", "replay", "run_seed", "shrink"]
