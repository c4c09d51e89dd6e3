"""Many seeds: which fail, what fired, and the smallest plan that still fails.

    python campaigns/faults/campaign.py run --state FILE [--part K/N] [--seeds 0:2000] [--hours H] [--faults N]
    python campaigns/faults/campaign.py report FILE ...
    python campaigns/faults/campaign.py replay SEED [--state FILE]
    python campaigns/faults/campaign.py shrink SEED [--state FILE]

``run`` goes on where the state file ends, until all seeds, or its part of both goals, are done or the seconds are over;
``--part K/N`` takes every N-th seed, for N processes with a state file each, which ``report`` adds up. Plans of a
campaign lean towards cells that have fired least, so a seed is replayed with the plan that the state file keeps.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from campaigns.faults.fault_plan import Fault, cells, draw_plan
from campaigns.faults.ledger import Violation
from campaigns.faults.world import Outcome, World
from campaigns.faults.world_shape import Shape, draw_shape
from streamrl.base.whole_files import write_whole

SAVE_EVERY = 20
FEWEST_FAULTS, MOST_FAULTS = 6, 16
"""Of a step."""


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
    lives: int = 0
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
        self.seeds += 1
        self.lives += outcome.lives
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


def plan_of(seed: int, shape: Shape, fired: Mapping[str, int] | None = None) -> list[Fault]:
    """The faults of a seed. ``fired``: how often each cell has in this campaign: what is missing is likelier."""
    random = Random(f"plan {seed}")
    steps = shape.recipe.run.steps
    count = random.randint(FEWEST_FAULTS * steps, MOST_FAULTS * steps)
    return draw_plan(random, count, shape.course, fired or {})


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


def shrink(
    seed: int, fails: Callable[[Outcome], bool] | None = None, plan: list[Fault] | None = None
) -> tuple[list[Fault], int, Outcome]:
    """The fewest faults, then the fewest steps, with which ``seed`` still violates the same invariant. ``plan`` None:
    its own."""
    shape = draw_shape(seed)
    faults, steps = plan_of(seed, shape) if plan is None else plan, shape.recipe.run.steps
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
    part, _, parts = arguments.part.partition("/")
    state = Path(arguments.state) if arguments.state else None
    progress = Progress(next_seed=int(first) + int(part))
    if state is not None and state.exists():
        progress = msgspec.json.decode(state.read_bytes(), type=Progress)
    ends, goal = time.monotonic() + arguments.seconds, 1 / int(parts)
    for seed in range(progress.next_seed, int(last or 10**9), int(parts)):
        hours, faults = progress.virtual_s / 3600, progress.fired
        enough = hours >= goal * arguments.hours and faults >= goal * arguments.faults and not progress.missing
        if time.monotonic() > ends or (not last and enough):
            break
        failed = not _one_more(progress, seed, arguments.show)
        progress.next_seed = seed + int(parts)
        if state is not None and (failed or progress.seeds % SAVE_EVERY == 0):
            _save(state, progress)
    if state is not None:
        _save(state, progress)
    return _report([progress])


def _one_more(progress: Progress, seed: int, show: int) -> bool:
    began = time.process_time()
    faults = plan_of(seed, draw_shape(seed), progress.cells)
    outcome = run_seed(seed, faults=faults)
    progress.add(outcome, faults, time.process_time() - began)
    if not outcome.ok:
        told = "; ".join(f"{v.invariant} {v.text}" for v in outcome.violations[:2]) or outcome.message
        print(f"seed {seed} {outcome.kind}: {told[:400]}", flush=True)
        if show:
            print(*run_seed(seed, faults=faults, keep_history=True).history[-show:], sep="\n")
    return outcome.ok


def _save(state: Path, progress: Progress) -> None:
    write_whole(state, msgspec.json.format(msgspec.json.encode(progress), indent=1))


def report(parts: Sequence[Progress]) -> Iterable[str]:
    """What a campaign, in one or several parts, has found, for people."""
    whole = added_up(parts)
    hours, minutes = whole.virtual_s / 3600, max(whole.cpu_s / 60, 1e-9)
    yield f"seeds {whole.seeds}: {whole.kinds}, {whole.lives} lives"
    yield f"{hours:.2f} simulated hours, {whole.fired} faults, {whole.steps} steps, {whole.trained} trained"
    rates = f"{hours / minutes:.2f} hours, {whole.fired / minutes:.0f} faults, {whole.events / minutes:.0f} events"
    yield f"{minutes:.1f} CPU minutes; in each: {rates}"
    total, least = len(cells()), min(whole.cells.values(), default=0)
    yield f"cells fired: {total - len(whole.missing)} of {total}, each {least} times or more"
    if whole.missing:
        yield f"missing: {', '.join(whole.missing)}"
    yield f"failures: {len(whole.failures)}"
    for failure in whole.failures:
        told = "; ".join(f"{v.invariant} {v.text}" for v in failure.violations[:1]) or failure.message
        yield f"  seed {failure.seed} {failure.kind}: {told.splitlines()[0][:150] if told else ''}"


def added_up(parts: Sequence[Progress]) -> Progress:
    """One for all."""
    whole = Progress(next_seed=0)
    for part in parts:
        for name in ("seeds", "lives", "virtual_s", "cpu_s", "fired", "steps", "trained", "events"):
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.kinds = dict(Counter(whole.kinds) + Counter(part.kinds))
        whole.cells = dict(Counter(whole.cells) + Counter(part.cells))
        whole.failures = [*whole.failures, *part.failures]
    return whole


def _report(parts: Sequence[Progress]) -> int:
    print(*report(parts), sep="\n")
    return int(any(part.failures for part in parts))


def report_command(arguments: argparse.Namespace) -> int:
    return _report([msgspec.json.decode(Path(file).read_bytes(), type=Progress) for file in arguments.files])


def _kept_plan(arguments: argparse.Namespace) -> list[Fault] | None:
    """With which that seed failed. None: the seed's own."""
    if not arguments.state:
        return None
    progress = msgspec.json.decode(Path(arguments.state).read_bytes(), type=Progress)
    return next(failure.faults for failure in progress.failures if failure.seed == arguments.seed)


def replay(arguments: argparse.Namespace) -> int:
    outcome = run_seed(
        arguments.seed,
        faults=_kept_plan(arguments),
        steps=arguments.steps,
        keep_history=True,
        stacks_at=arguments.stacks,
    )
    print(*outcome.history, sep="\n")
    return _tell(outcome)


def shrink_command(arguments: argparse.Namespace) -> int:
    faults, steps, outcome = shrink(arguments.seed, plan=_kept_plan(arguments))
    print(*outcome.history[-arguments.lines :], sep="\n")
    print(msgspec.json.encode(faults).decode())
    print(f"{len(faults)} faults, {steps} steps")
    return _tell(outcome)


def _tell(outcome: Outcome) -> int:
    print(f"seed {outcome.seed}: {outcome.kind} ({outcome.message}); trace {outcome.trace}")
    for violation in outcome.violations:
        print(f"  {violation.invariant} at {violation.time_s} s: {violation.text}")
    return int(not outcome.ok)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--seeds", default="0:")
    one.add_argument("--part", default="0/1")
    one.add_argument("--state", default="")
    one.add_argument("--hours", type=float, default=2000.0)
    one.add_argument("--faults", type=int, default=1_000_000)
    one.add_argument("--show", type=int, default=0, help="lines of the trace of a seed that fails")
    one.add_argument("--seconds", type=float, default=float("inf"))
    one.set_defaults(work=run_campaign)
    two = commands.add_parser("report")
    two.add_argument("files", nargs="+")
    two.set_defaults(work=report_command)
    three = commands.add_parser("replay")
    three.add_argument("seed", type=int)
    three.add_argument("--state", default="")
    three.add_argument("--steps", type=int, default=0)
    three.add_argument("--stacks", type=float, default=0.0, help="virtual second at which to show where every task is")
    three.set_defaults(work=replay)
    four = commands.add_parser("shrink")
    four.add_argument("seed", type=int)
    four.add_argument("--state", default="")
    four.add_argument("--lines", type=int, default=60)
    four.set_defaults(work=shrink_command)
    return parser


def main() -> int:
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of strings are walked in the same order in every process
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    arguments = _parser().parse_args()
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    return int(arguments.work(arguments))


if __name__ == "__main__":
    sys.exit(main())
