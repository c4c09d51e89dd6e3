"""What the journal costs a controller: processor time, groups a second, and how long ``durable`` takes.

    python benchmarks/journal_cost.py                       # 1,000 groups a second for 10 s, each way, three times
    python benchmarks/journal_cost.py --directory /mnt/run  # on another disk

The controller's part is one event loop (uvloop) that receives scored completions as bytes, decodes them as the stream
does, and holds them until they are durable. Three ways: without a journal, with ``process``, with ``fsync``. First at
the asked rate: what is reached, and the processor time of the process (both threads, kernel included) in percent of
one core. Then as fast as it goes. Last how fast a journal is recovered. Every way is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any, cast

import uvloop

from streamrl.base.types import (
    FinishReason,
    Prompt,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
    VersionSpan,
    float_array,
    token_array,
)
from streamrl.comm.wire import Buffer, WireCodec
from streamrl.run.journal.log import Journal, read_journal

WAYS = ("none", "process", "fsync")


def scored_completions(count: int, tokens: int) -> list[bytes]:
    """Scored completions of so many tokens as bodies of stream messages; with logprobs about 10 bytes a token."""
    rng = random.Random(5)
    codec: WireCodec[ScoredTrajectory] = WireCodec(ScoredTrajectory)
    bodies = []
    for place in range(count):
        prompt = Prompt(prompt_id=f"prompt-{place // 8}", token_ids=token_array(rng.choices(range(150_000), k=120)))
        segment = Segment(
            token_ids=token_array(rng.choices(range(150_000), k=tokens)),
            trained=True,
            behavior_logprobs=float_array([-rng.expovariate(1) for _ in range(tokens)]),
            version_spans=(VersionSpan(start=0, end=tokens, policy_version=3),),
        )
        trajectory = Trajectory(
            id=TrajectoryId(prompt_id=prompt.prompt_id, group_id=place // 8, sample=place % 8, attempt=0),
            prompt=prompt,
            segments=(segment,),
            finish_reason=FinishReason.STOP,
        )
        bodies.append(bytes(codec.encode(ScoredTrajectory(trajectory=trajectory, reward=1.0))[0]))
    return bodies


class Controller:
    """Takes groups; counts those that are done, and how long each waited for the disk (seconds)."""

    def __init__(self, journal: Journal | None, bodies: list[bytes], group: int) -> None:
        self._journal = journal
        self._codec: WireCodec[ScoredTrajectory] = WireCodec(ScoredTrajectory)
        self._bodies = bodies
        self._group = group
        self._next = 0
        self.taken: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
        self.waited: list[float] = []

    def take_group(self) -> None:
        """One group: each completion is decoded, and journalled as it came."""
        sequence = 0
        for _ in range(self._group):
            body = self._bodies[self._next % len(self._bodies)]
            self._next += 1
            self._codec.decode(cast("list[Buffer]", [body]))
            if self._journal:
                sequence = self._journal.append(body)
        self.taken.put_nowait((sequence, time.perf_counter()))

    async def acknowledge(self) -> None:
        """Forever: the oldest group is acknowledged once it is durable."""
        while True:
            sequence, since = await self.taken.get()
            if self._journal:
                await self._journal.durable(sequence)
            self.waited.append(time.perf_counter() - since)


async def at_rate(controller: Controller, rate: float, seconds: float) -> None:
    """``rate`` groups a second, in the pace in which they would come (every 2 ms what is due)."""
    began, taken = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        while taken < passed * rate:
            controller.take_group()
            taken += 1
        await asyncio.sleep(0.002)


async def flat_out(controller: Controller, journal: Journal | None, seconds: float) -> None:
    """As many groups as it can."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        controller.take_group()
        if journal:
            await journal.room()
        await asyncio.sleep(0)


async def measured(arguments: argparse.Namespace, directory: Path) -> dict[str, float]:
    """One way, in this process."""
    journal = None
    if arguments.way != "none":
        journal = Journal(directory / "journal", fsync=arguments.way == "fsync")
        journal.begin_segment([b""])
    bodies = scored_completions(512, arguments.tokens)
    controller = Controller(journal, bodies, arguments.group)
    async with asyncio.TaskGroup() as tasks:
        acknowledging = tasks.create_task(controller.acknowledge())
        writing = tasks.create_task(journal.run()) if journal else acknowledging
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        if arguments.flat_out:
            await flat_out(controller, journal, arguments.seconds)
        else:
            await at_rate(controller, arguments.rate, arguments.seconds)
        seconds = time.perf_counter() - began
        done = len(controller.waited)
        after = resource.getrusage(resource.RUSAGE_SELF)
        acknowledging.cancel()
        if journal:
            await journal.close()
        writing.cancel()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    waited = quantiles(controller.waited, n=100)
    return {
        "groups_s": done / seconds,
        "cpu_percent": 100 * cpu / seconds,
        "cpu_us_a_group": 1e6 * cpu / max(done, 1),
        "durable_p50_ms": 1e3 * waited[49],
        "durable_p99_ms": 1e3 * waited[98],
        "bytes_a_completion": sum(map(len, bodies)) / len(bodies),
    }


def recovered(directory: Path) -> dict[str, float]:
    """How long it takes to check a journal, and then to read its records."""
    began = time.perf_counter()
    found = read_journal(directory / "journal")
    checked = time.perf_counter() - began
    size = sum(map(len, found.records()))
    return {
        "MB": size / 1e6,
        "check_MB_s": size / 1e6 / checked,
        "all_MB_s": size / 1e6 / (time.perf_counter() - began),
    }


def in_process(arguments: argparse.Namespace, way: str, flat: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Measure one way in a fresh process and directory; what it wrote is then recovered."""
    directory = Path(tempfile.mkdtemp(prefix="journal-cost-", dir=arguments.directory))
    command = [sys.executable, __file__, "--way", way, "--directory", str(directory), "--tokens", str(arguments.tokens)]
    command += ["--group", str(arguments.group), "--rate", str(arguments.rate), "--seconds", str(arguments.seconds)]
    try:
        output = subprocess.run(
            [*command, *(["--flat-out"] if flat else [])], check=True, stdout=subprocess.PIPE
        ).stdout
        return json.loads(output), recovered(directory) if way == "fsync" else {}
    finally:
        shutil.rmtree(directory)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What the journal costs.")
    parser.add_argument("--rate", type=float, default=1000, help="groups a second")
    parser.add_argument("--group", type=int, default=8, help="completions of a group")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a completion")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", help="where to write; a temporary folder if not given")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--flat-out", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def report(title: str, results: dict[str, list[dict[str, float]]]) -> None:
    """One line a way: the median of each figure."""
    print(title)
    for way, runs in results.items():
        line = {name: median(run[name] for run in runs) for name in runs[0]}
        print(f"  {way:8}" + "  ".join(f"{name} {value:,.2f}" for name, value in line.items()))


def middle(runs: list[dict[str, float]], name: str) -> float:
    """Median of one figure."""
    return median(run[name] for run in runs)


def main() -> None:
    """Measure every way, interleaved, and print what they cost."""
    arguments = parse_arguments()
    if arguments.way:
        print(json.dumps(uvloop.run(measured(arguments, Path(arguments.directory)))))
        return
    reading: list[dict[str, float]] = []
    for title, flat in ((f"{arguments.rate:g} groups a second", False), ("as fast as it goes", True)):
        results: dict[str, list[Any]] = {way: [] for way in WAYS}
        for _ in range(arguments.repeats):
            for way in WAYS:
                result, read = in_process(arguments, way, flat)
                results[way].append(result)
                reading += [read] if read else []
        report(title, results)
        without = results["none"]
        for way in WAYS[1:]:
            added = middle(results[way], "cpu_percent") - middle(without, "cpu_percent")
            ratio = middle(results[way], "groups_s") / middle(without, "groups_s")
            print(f"  {way}: {added:+.1f} % of a core, {ratio:.4f} of the groups without a journal")
    report("recovery", {"": reading})


if __name__ == "__main__":
    main()
