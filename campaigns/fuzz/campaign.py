"""Fuzz every decoder of streamrl, for as long as one likes.

    python campaigns/fuzz/campaign.py --state fuzz.json --executions 5000000 --seconds 220 --jobs 2
    python campaigns/fuzz/campaign.py --replay fuzz-failures/streams.items-123.msgpack

Inputs are valid messages with something wrong in them; input ``n`` of a target follows from the target's name and
``n`` alone. ``--state`` holds which numbers were run, by target, with their outcomes: a campaign goes on where it was.
Targets take turns, a slice each (``--finish``: what takes least to its end goes first). The first crash, hang, memory
breach or wrong meaning ends it with exit code 1; the input is in a file then, which ``--replay`` runs again. What
counts as one: ``campaigns/fuzz/execution.py``.
"""

from __future__ import annotations

import argparse
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from campaigns.fuzz.bombs import bombs  # noqa: E402
from campaigns.fuzz.decoders import every_target  # noqa: E402
from campaigns.fuzz.execution import SCHEME, Fault, RunningSlice, Slice, Target, check_seeds, run_one  # noqa: E402
from campaigns.fuzz.planted import BUGS, find  # noqa: E402
from streamrl.base.whole_files import write_whole  # noqa: E402

_FIRST_SLICE, _LARGEST_SLICE, _SLICE_S = 2000, 1_000_000, 8.0
_MOST_KINDS = 400


class Done(msgspec.Struct):
    """What was run of one target: numbers below ``executions``. ``seconds``: processor time of the forked processes;
    ``grown_bytes``: of their memory; ``watched``: slices that were run again, each execution on its own. ``earlier``:
    numbers below were run under a scheme before ``scheme``, and took ``earlier_seconds``."""

    executions: int = 0
    seconds: float = 0.0
    slices: int = 0
    grown_bytes: int = 0
    outcomes: dict[str, int] = {}
    watched: int = 0
    scheme: int = 1
    earlier: int = 0
    earlier_seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Executions a second, under this scheme."""
        return (self.executions - self.earlier) / self.seconds if self.seconds else 0.0

    def seconds_of(self, executions: int) -> float:
        """Of processor time, about; 0 where nobody knows yet."""
        return executions / self.rate if self.rate else 0.0

    def next_slice(self, left: int) -> int:
        """How many of those that are ``left`` to run now: some seconds of them."""
        size = int(self.rate * _SLICE_S) if self.rate else _FIRST_SLICE
        return min(max(size, _FIRST_SLICE), _LARGEST_SLICE, left)

    def take(self, found: Slice) -> None:
        """Add a slice that went well."""
        self.executions, self.slices = found.last, self.slices + 1
        self.seconds += found.seconds
        self.grown_bytes += found.grown_bytes
        self.watched += found.watched
        for outcome, count in found.outcomes.items():
            kind = outcome if outcome in self.outcomes or len(self.outcomes) < _MOST_KINDS else "more"
            self.outcomes[kind] = self.outcomes.get(kind, 0) + count

    def go_on_with(self, scheme: int) -> None:
        """Count what another scheme ran, and begin with the numbers after it."""
        if self.scheme != scheme:
            self.earlier, self.earlier_seconds = self.executions, self.earlier_seconds + self.seconds
            self.scheme, self.seconds = scheme, 0.0


def read_state(path: Path | None) -> dict[str, Done]:
    """What earlier campaigns did."""
    if path is None or not path.exists():
        return {}
    state = msgspec.json.decode(path.read_bytes(), type=dict[str, Done])
    for done in state.values():
        done.go_on_with(SCHEME)
    return state


def write_state(path: Path | None, state: Mapping[str, Done]) -> None:
    """At once or not at all."""
    if path is not None:
        write_whole(path, msgspec.json.format(msgspec.json.encode(state), indent=1))


def campaign(chosen: Sequence[Target], state: dict[str, Done], options: argparse.Namespace) -> list[Fault]:
    """Run slices in turn until there is a fault (``--go-on``: until the time is over), or no time, or nothing to do.

    Several slices of a target may run at once; they are taken in the order of their numbers, so that a state says "all
    below this one".
    """
    deadline = time.monotonic() + options.seconds
    faults: list[Fault] = []
    for target in chosen:
        state.setdefault(target.name, Done(scheme=SCHEME))
    waiting = [target for target in chosen if state[target.name].executions < options.executions]
    begun = {target.name: state[target.name].executions for target in waiting}
    ahead: dict[tuple[str, int], Slice] = {}
    running: list[RunningSlice] = []
    try:
        while running or waiting:
            while len(running) < options.jobs and time.monotonic() < deadline:
                free = [target for target in waiting if not _stands_alone(target, running)]
                if not free:
                    break
                target = min(free, key=lambda target: _seconds(state[target.name], begun[target.name], options))
                first = begun[target.name]
                begun[target.name] = first + state[target.name].next_slice(options.executions - first)
                running.append(RunningSlice(target, first, begun[target.name]))
                if begun[target.name] == options.executions:
                    waiting.remove(target)
            if not running:
                break
            for target, found in _ended(running):
                if found.fault is None:
                    ahead[target.name, found.first] = found
                    _take_in_order(state[target.name], target.name, ahead)
                    write_state(options.state, state)
                    continue
                faults.append(found.fault)
                print(told(found.fault, keep(found.fault, options.failures)), flush=True)
                waiting = [other for other in waiting if options.go_on and other is not target]
    finally:
        for one in running:
            one.end()
    return faults


def _take_in_order(done: Done, name: str, ahead: dict[tuple[str, int], Slice]) -> None:
    """Add the slices of a target that follow on what was run."""
    while (found := ahead.pop((name, done.executions), None)) is not None:
        done.take(found)


def _stands_alone(target: Target, running: Sequence[RunningSlice]) -> bool:
    """Whether it has to wait for a slice of its own: decoders of users' files write them to one folder."""
    return target.name.startswith("user.") and any(one.target is target for one in running)


def _seconds(done: Done, begun: int, options: argparse.Namespace) -> float:
    """What decides whose turn it is: who needs the least, or had the least, since slices are longer than calls."""
    if options.finish:
        return done.seconds_of(options.executions - begun)
    return done.seconds + done.seconds_of(begun - done.executions)


def _ended(running: list[RunningSlice]) -> Iterator[tuple[Target, Slice]]:
    """Those that ended by now; they are taken out."""
    select.select([one.source for one in running], [], [], 1.0)
    for one in list(running):
        if (found := one.look(0)) is not None:
            running.remove(one)
            yield one.target, found


def keep(fault: Fault, directory: Path) -> Path:
    """Store an input."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{fault.target}-{fault.number}.msgpack"
    path.write_bytes(msgspec.msgpack.encode(fault))
    return path


def told(fault: Fault, path: Path) -> str:
    """A fault, for people."""
    size = sum(map(len, fault.frames))
    return f"FAULT {fault.kind} in {fault.target}, number {fault.number}, {size} bytes: {path}\n{fault.reason}"


def replay(path: Path, targets: Mapping[str, Target]) -> int:
    """Run a stored input again; 1 where it still is a fault."""
    stored = msgspec.msgpack.decode(path.read_bytes(), type=Fault)
    found = run_one(targets[stored.target], stored.frames)
    if found.fault is not None:
        print(told(found.fault, path))
        return 1
    print(f"{stored.target}: {', '.join(found.outcomes)} (it was: {stored.kind}, {stored.reason.splitlines()[0]})")
    return 0


def drop_bombs(targets: Mapping[str, Target], options: argparse.Namespace) -> list[Fault]:
    """Run every input that is about size."""
    faults = []
    for name, what, frames in bombs(8 << 20):
        if not options.target or name.startswith(tuple(options.target)):
            found = run_one(targets[name], frames).fault
            if found is not None:
                print(f"{what}: {told(found, keep(found, options.failures))}", flush=True)
                faults.append(found)
    return faults


def planted_bugs(targets: Mapping[str, Target], options: argparse.Namespace) -> int:
    """Plant every bug, and list how it was found. 1 where one was not."""
    missed = 0
    for bug in BUGS:
        if options.target and not bug.target.startswith(tuple(options.target)):
            continue
        began = time.monotonic()
        fault = find(bug, targets, min(options.executions, 100_000))
        missed += fault is None
        how = "MISSED" if fault is None else f"{fault.kind} at {fault.number}: {fault.reason.splitlines()[0][:70]}"
        print(
            f"{bug.target:22} {bug.module:28} {bug.old.strip()[:60]!r:64} {time.monotonic() - began:5.1f} s  {how}",
            flush=True,
        )
    return 1 if missed else 0


def summary(state: Mapping[str, Done], wanted: int, *, outcomes: bool) -> str:
    """A table of what was run."""
    head = (
        f"{'target':28} {'executions':>11} {'per second':>10} {'s left':>8} {'accepted':>9} {'kinds':>6} "
        f"{'KiB grown/slice':>16} {'watched':>8}"
    )
    lines = [head]
    for name, done in sorted(state.items()):
        refused = sum(count for outcome, count in done.outcomes.items() if outcome.startswith("refused"))
        share = 1 - refused / done.executions if done.executions else 0.0
        grown = done.grown_bytes / 1024 / max(1, done.slices)
        left = done.seconds_of(wanted - done.executions)
        lines.append(
            f"{name:28} {done.executions:11,} {done.rate:10,.0f} {left:8,.0f} {share:9.1%} {len(done.outcomes):6} "
            f"{grown:16,.0f} {done.watched:8}"
        )
        if outcomes:
            ordered = sorted(done.outcomes.items(), key=lambda item: -item[1])
            lines += [f"    {count:10,}  {outcome}" for outcome, count in ordered]
    total = sum(done.executions for done in state.values())
    left = sum(done.seconds_of(wanted - done.executions) for done in state.values())
    whole = sum(done.executions >= wanted for done in state.values())
    return "\n".join([*lines, f"{'all':28} {total:11,} {'':10} {left:8,.0f}  {whole} of {len(state)} at {wanted:,}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", default=[], help="name, or how it begins; all by default")
    parser.add_argument("--executions", type=int, default=5_000_000, help="of each target, those of the state included")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no slice after so long")
    parser.add_argument("--state", type=Path, help="file that says what was run; written after every slice")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"), help="where faulty inputs are stored")
    parser.add_argument("--jobs", type=int, default=1, help="slices that run at the same time")
    parser.add_argument("--finish", action="store_true", help="finish first what needs the least time")
    parser.add_argument("--go-on", action="store_true", help="go on with other targets after a fault")
    parser.add_argument("--outcomes", action="store_true", help="list how executions ended, by kind")
    parser.add_argument("--bombs", action="store_true", help="run the inputs that are about size")
    parser.add_argument("--planted", action="store_true", help="plant bugs in decoders, and see that each is found")
    parser.add_argument("--replay", type=Path, help="run a stored input again")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # no slice is left behind
    with tempfile.TemporaryDirectory(prefix="streamrl-fuzz-", dir="/dev/shm") as scratch:
        targets = every_target(Path(scratch))
        if options.replay:
            return replay(options.replay, targets)
        chosen = [t for t in targets.values() if not options.target or t.name.startswith(tuple(options.target))]
        if not chosen:
            parser.error(f"no target is called so; there are {', '.join(targets)}")
        for target in chosen:
            check_seeds(target)
        if options.planted:
            return planted_bugs(targets, options)
        if options.bombs:
            return 1 if drop_bombs(targets, options) else 0
        state = read_state(options.state)
        faults = campaign(chosen, state, options)
        print(summary({t.name: state[t.name] for t in chosen}, options.executions, outcomes=options.outcomes))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
