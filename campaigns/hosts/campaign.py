"""Shots at real runs over three hosts of a laboratory with Ray: processes, hosts, links, the head.

``hosts shots``: each run gets several shots and must work again after each, by itself or, where its command died, by
``streamrl resume``; then it is drained. Judged by the namespaces of pids of the hosts (nothing is left 2 s after a
lease), the journal, and witnesses of what each rank trained. ``hosts equality``: without shots (``equality``). Needs
root, and a Python with Ray and streamrl's packages (``--python``)."""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from campaigns.hosts.equality import LAYOUTS, compare
from campaigns.hosts.hosts_run import HostsRun, left_on, named, wait_until
from campaigns.hosts.lab import end, laboratory, why_not
from campaigns.hosts.ray_nodes import RayNodes
from campaigns.hosts.shots import EACH, HEAD, Shot, fire, plan


class Result(msgspec.Struct, kw_only=True):
    """One shot. ``outcome``: ``recovered``, ``resumed``, ``missed``, ``stuck``, or ``not watched`` where the next shot
    hit the run while it recovered; ``works_s``: until all engines and ranks worked, after the fault was over or
    ``resume`` began; ``empty_s``: until a host had no process of the run."""

    shot: Shot
    outcome: str
    works_s: float | None = None
    empty_s: float | None = None
    faults: list[str] = []

    def __str__(self) -> str:
        wrong = "".join(f"\n    FAULT: {fault}" for fault in self.faults)
        return f"{self.shot!s:<24} {self.outcome:<10} works after {self.works_s} s, empty after {self.empty_s} s{wrong}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["shots", "equality"])
    parser.add_argument("--shots", type=int, default=60)
    parser.add_argument("--of-a-run", type=int, default=8, help="shots that one run gets")
    parser.add_argument(
        "--kinds", nargs="*", default=[], help="only these: engine, rank, cut, ...; or fsdp2, hsdp2x2, ..."
    )
    parser.add_argument("--steps", type=int, default=12, help="of a run of equality")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", type=Path, default=Path(sys.executable))
    parser.add_argument("--name", default="shots", help="of the laboratory")
    parser.add_argument("--out", type=Path, default=Path("/tmp/hosts-shots"))
    parser.set_defaults(work=run_campaign)


def run_campaign(arguments: argparse.Namespace) -> int:
    """Run all; 1 where something is wrong."""
    known = set(LAYOUTS) if arguments.what == "equality" else {spec.split()[0] for spec in f"{HEAD},{EACH}".split(",")}
    if unknown := set(arguments.kinds) - known:
        print(f"--kinds: {', '.join(sorted(unknown))}: {arguments.what} has {', '.join(sorted(known))}")
        return 1
    if reason := why_not():
        print(f"no laboratory: {reason}")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the laboratory ends with it
    began = time.monotonic()
    shots = plan(arguments.shots, arguments.seed, arguments.kinds) if arguments.what == "shots" else []
    shutil.rmtree(arguments.out, ignore_errors=True)
    results: list[Result] = []
    faults: list[str] = []
    with laboratory(arguments.name) as lab:
        ray = RayNodes(lab, arguments.python)
        ray.start()
        print(f"three hosts with Ray after {time.monotonic() - began:.0f} s", flush=True)
        if arguments.what == "equality":
            faults = list(compare(ray, arguments))
            print(*faults, f"{len(faults)} faults", sep="\n")
            return int(bool(faults))
        try:
            while len(results) < len(shots):
                folder = arguments.out / f"run-{len(results):03d}"
                ending = one_run(ray, folder, shots[len(results) :][: arguments.of_a_run], results)
                faults += ending
                print(*(f"    FAULT: {folder.name}: {fault}" for fault in ending), sep="\n", flush=True)
        finally:
            faults += [f"{result.shot}: {fault}" for result in results for fault in result.faults]
            print(*table(results), sep="\n")
            minutes = (time.monotonic() - began) / 60
            print(f"{len(results)} of {len(shots)} shots, {len(faults)} faults, {minutes:.0f} minutes", flush=True)
    return int(bool(faults))


def one_run(ray: RayNodes, folder: Path, shots: list[Shot], results: list[Result]) -> list[str]:
    """Shoot at one run, drain and judge it. Returns what is wrong with the run as a whole."""
    run, began = HostsRun(ray, folder), time.monotonic()
    try:
        run.train()
        if run.works_after(began) is None:
            results += [Result(shot=shot, outcome="not fired") for shot in shots[:1]]
            return [f"did not start: {run.said()}"]
        for number, shot in enumerate(shots):
            results.append(shoot(run, shot, waits=number % 2 == 1 or shot is shots[-1]))
            print(results[-1], flush=True)
            if results[-1].outcome == "stuck":
                run.ended()
                return run.faults()
        drains = time.monotonic()
        end(run.driver_processes(), signal.SIGTERM)
        code, seconds = run.exit_code(90.0), time.monotonic() - drains
        gone = wait_until(lambda: not any(map(left_on, run.hosts)), 3.0)
        print(f"drained in {seconds:.1f} s, exit code {code}, {len(run.records)} records", flush=True)
        faults = [] if code == 0 else [f"drain ended with {code}: {run.said()}"]
        return faults + ([] if gone else [f"left after the drain: {named(run.hosts)}"]) + run.faults()
    finally:
        run.ended()


def shoot(run: HostsRun, shot: Shot, *, waits: bool) -> Result:
    """Fire, and watch until the run works again, unless it is not to be waited for: then the next shot hits it while it
    recovers."""
    time.sleep(3.0 * random.random())
    hit = fire(run, shot)
    result = Result(
        shot=shot, outcome="missed" if hit.missed else "recovered", empty_s=hit.empty_s, faults=list(hit.faults)
    )
    from_s = hit.from_s
    if hit.ended:
        if run.exit_code(20.0) is None:
            result.faults.append("the command did not end")
        result.outcome, from_s = "resumed", time.monotonic()
        run.resume()
    if not waits and not hit.ended and not run.over:
        result.outcome = result.outcome if hit.missed else "not watched"
        return result
    works = run.works_after(from_s)
    if works is None and run.over and not hit.ended:
        if shot.kind != "full" or not run.has_said("because the disk is full (free space, then resume"):
            result.faults.append(f"the command ended with {run.exit_code(0)}: {run.said()}")
        result.outcome, from_s = "resumed", time.monotonic()
        run.resume()
        works = run.works_after(from_s)
    if works is None:
        result.outcome = "stuck"
        result.faults.append(f"{', '.join(run.missing)} did not work again: {run.said()}")
    else:
        result.works_s = round(works - from_s, 1)
    return result


def table(results: list[Result]) -> Iterator[str]:
    """One line a kind."""
    for kind in sorted({result.shot.kind for result in results}):
        own = [result for result in results if result.shot.kind == kind]
        words = ("recovered", "resumed", "not watched")
        alone, resumed, unseen = (sum(result.outcome == word for result in own) for word in words)
        works, empty = max(result.works_s or 0 for result in own), max(result.empty_s or 0 for result in own)
        yield (
            f"{kind:<11} {len(own):>3} shots, {alone:>2} recovered, {resumed:>2} resumed, {unseen:>2} not watched; at "
            f"most {works:>5g} s until all worked, {empty:>4g} s until the host was empty"
        )
