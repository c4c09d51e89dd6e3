"""Does a run grow? Real processes for an hour, with faults, and the memory, files and threads of every one of them.

    python -m campaigns soak --minutes 60                      # simulated engines, a fault a minute on average
    python -m campaigns soak --minutes 60 --engines vllm --faults-per-minute 0.2 --out soak.json
    python -m campaigns soak --minutes 60 --faults-per-minute 0

Every few seconds each process of the run is asked for its resident and proportional memory, its file descriptors and
threads; ``/dev/shm`` and the run's socket directory are counted. A fault ends a process, and its successor starts
from zero: slopes are fitted over all lives of a name together, each with a level of its own, without its first
minute. Passes when no process grows by more than 1 MiB a minute, nothing else grows, and the run was never stuck."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from campaigns.chaos.chaos_oracle import judge
from campaigns.chaos.chaos_plan import Cell, Method, Phase, Shot
from campaigns.chaos.chaos_processes import (
    become_subreaper,
    labelled,
    living,
    mapped_segments,
    numbers_of_processes,
    residue,
    send,
    shared_memory,
)
from campaigns.chaos.chaos_run import ChaosRun, drawn_prompts, end_run, shoot

MIB = 1 << 20
WARM_S = 60.0
FEWEST_SAMPLES = 6
FEWEST_MINUTES = 10.0
FILES_A_MINUTE = 0.2
FEWEST_PROMPTS = 8192
"""So many has the demo; a run of an hour draws them several times."""
MEASURED = (
    ("rss", MIB, "MiB", 1.0),
    ("descriptors", 1, "file descriptors", FILES_A_MINUTE),
    ("threads", 1, "threads", FILES_A_MINUTE),
)
"""What is fitted, its unit, its name, and how much of it a minute is too much."""
BARS = "▁▂▃▄▅▆▇█"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One process at one moment. ``age_s``: since it began."""

    name: str
    pid: int
    t: float
    age_s: float
    rss: int
    pss: int
    descriptors: int
    threads: int


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """Files in shared memory that processes of the run mapped at some time and that are still there, files in its
    temporary directory, and its processes, at one moment."""

    t: float
    shared_files: int
    temporary_files: int
    processes: int
    zombies: int


class Series:
    """Samples of a whole run, kept by process and moment."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.whole: list[Whole] = []
        self._began = time.monotonic()
        self._seen: dict[tuple[str, int], float] = {}
        self.shared: set[str] = set()

    def take(self, supervisor_pid: int, temporary: Path) -> None:
        """Ask every process once."""
        now = time.monotonic() - self._began
        for name, process in labelled(supervisor_pid).items():
            try:
                memory = process.memory_full_info()
                sample = Sample(
                    name=name,
                    pid=process.pid,
                    t=now,
                    # Not since it was made: one that stood by is as young as its work.
                    age_s=now - self._seen.setdefault((name, process.pid), now),
                    rss=memory.rss,
                    pss=memory.pss,
                    descriptors=process.num_fds(),
                    threads=process.num_threads(),
                )
            except (psutil.Error, OSError):  # it ended meanwhile
                continue
            self.samples.append(sample)
            self.shared |= mapped_segments(process.pid)
        shared = self.shared & shared_memory()
        files = sum(len(folders) + len(names) for _, folders, names in os.walk(temporary))  # some vanish meanwhile
        processes, zombies = numbers_of_processes()
        self.whole.append(
            Whole(t=now, shared_files=len(shared), temporary_files=files, processes=processes, zombies=zombies)
        )

    def names(self) -> list[str]:
        """Of all processes that lived long enough to say anything."""
        return sorted({sample.name for sample in self.samples if sample.age_s > WARM_S})

    def of(self, name: str) -> dict[int, list[Sample]]:
        """Warm samples by life."""
        lives: dict[int, list[Sample]] = defaultdict(list)
        for sample in self.samples:
            if sample.name == name and sample.age_s > WARM_S:
                lives[sample.pid].append(sample)
        return lives


class Fit(msgspec.Struct, frozen=True):
    """A slope a minute, and twice its standard error."""

    slope: float
    error: float

    def exceeds(self, bound: float) -> bool:
        """Whether it lies above ``bound``, and above 0 whatever the noise."""
        return self.slope > bound and self.slope > self.error


def fit(lives: Sequence[Sequence[tuple[float, float]]]) -> Fit | None:
    """Least squares over (minutes, value), one slope for all lives and a level for each; None: too few samples."""
    products = squares = total = 0.0
    count = levels = 0
    for life in lives:
        if len(life) < 2:
            continue
        middle_t = statistics.mean(t for t, _ in life)
        middle = statistics.mean(value for _, value in life)
        products += sum((t - middle_t) * (value - middle) for t, value in life)
        squares += sum((t - middle_t) ** 2 for t, _ in life)
        total += sum((value - middle) ** 2 for _, value in life)
        count, levels = count + len(life), levels + 1
    free = count - levels - 1
    if free < FEWEST_SAMPLES or not squares:
        return None
    found = products / squares
    return Fit(found, 2 * math.sqrt(max(0.0, total - found * products) / free / squares))


def table(series: Series) -> tuple[list[str], list[str]]:
    """Lines for people, and what grows. A slope counts where ten minutes of a process were seen."""
    head = ["process", "lives", "minutes", "MiB (PSS)", "MiB/min", "files/min", "threads/min", ""]
    lines, grows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"], list[str]()
    for name in series.names():
        lives = list(series.of(name).values())
        minutes = sum(life[-1].t - life[0].t for life in lives) / 60
        sizes = [sample.pss / MIB for life in lives for sample in life]
        cells = []
        for field, unit, what, bound in MEASURED:
            found = fit([[(s.t / 60, getattr(s, field) / unit) for s in life] for life in lives])
            cells.append("-" if found is None else f"{found.slope:+.2f} ± {found.error:.2f}")
            if found is not None and minutes >= FEWEST_MINUTES and found.exceeds(bound):
                grows.append(f"{name} grows by {found.slope:.2f} {what} a minute")
        level = f"{min(sizes):.0f} to {max(sizes):.0f}"
        lines.append(f"| {name} | {len(lives)} | {minutes:.1f} | {level} | {' | '.join(cells)} | {picture(sizes)} |")
    warm = [whole for whole in series.whole if whole.t > WARM_S]
    for field in ("shared_files", "temporary_files", "processes", "zombies"):
        found = fit([[(w.t / 60, float(getattr(w, field))) for w in warm]])
        what = field.replace("_", " ")
        lines.append(f"{what}: {'-' if found is None else f'{found.slope:+.2f} ± {found.error:.2f}'} a minute")
        if found is not None and warm[-1].t > 60 * FEWEST_MINUTES and found.exceeds(FILES_A_MINUTE):
            grows.append(f"{what} grow by {found.slope:.2f} a minute")
    return lines, grows


def picture(values: Sequence[float], width: int = 24) -> str:
    """The course of ``values`` in ``width`` characters."""
    low, high = min(values), max(values)
    chosen = [values[i * len(values) // width] for i in range(min(width, len(values)))]
    return "".join(BARS[int((v - low) / (high - low) * (len(BARS) - 1)) if high > low else 0] for v in chosen)


def soak(options: argparse.Namespace, series: Series, faults: list[str]) -> int:
    """Run, sample, shoot; returns how many shots there were."""
    source = random.Random(options.seed)
    shared_before = shared_memory()
    cell = Cell(
        number=0, engines=options.engines, seed=options.seed, rounds="continuous", engine_count=2, ranks=1, shots=()
    )
    shots = 0
    with tempfile.TemporaryDirectory(prefix="sk-") as work, tempfile.TemporaryDirectory(prefix="sk-") as temporary:
        run = ChaosRun(cell, Path(work), Path(temporary), steps=0)
        try:
            run.train()
            if run.wait_for_step(0.0) is None:
                faults.append(f"it never made a step: {run.said()}")
            ends = time.monotonic() + 60 * options.minutes
            due = time.monotonic() + _pause(source, options.faults_per_minute)
            while time.monotonic() < ends and not run.over:
                assert run.process is not None
                series.take(run.process.pid, run.temporary)
                if time.monotonic() > due:
                    result = shoot(run, _shot(source), faults)
                    shots += result.outcome != "vacuous"
                    if result.outcome in ("ended", "stuck"):
                        faults.append(f"after a shot at {result.shot.victims}: {result.outcome}: {result.note}")
                        break
                    due = time.monotonic() + _pause(source, options.faults_per_minute)
                time.sleep(options.sample_s)
            end_run(run, faults)
            if run.directory is not None:
                run.witness.read()
                records = sorted(run.witness.records, key=lambda record: record["t"])
                made = sum(record["kind"] == "close_batch done" for record in records)
                epochs = 2 + made * 4 // FEWEST_PROMPTS
                verdict = judge(cell, records, run.directory, drawn_prompts(cell, epochs), 4)
                faults += verdict.faults
                print(f"{verdict.steps} steps, {verdict.groups} groups; {shots} shots hit")
                print(f"lost {verdict.lost}, trained twice {verdict.twice}")
            faults += residue(
                [run.directory] if run.directory else [], run.temporary, shared_before, ours=series.shared
            )
        finally:
            send(living(), signal.SIGKILL)
    return shots


def _pause(source: random.Random, per_minute: float) -> float:
    return source.expovariate(per_minute / 60) if per_minute else float("inf")


def _shot(source: random.Random) -> Shot:
    victims = ["controller", "engine-0", "engine-1", "trainer-0", "reward-0", "reward-0/python"]
    method = source.choice([Method.KILL, Method.KILL, Method.STOP_RESUME])
    stopped_s = source.uniform(0.5, 3.0)
    return Shot(victims=(source.choice(victims),), phase=Phase.ANY, method=method, delay_s=0.0, stopped_s=stopped_s)


def add_arguments(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument("--minutes", type=float, default=60.0)
    arguments.add_argument("--engines", choices=["simulated", "vllm"], default="simulated")
    arguments.add_argument("--faults-per-minute", type=float, default=1.0)
    arguments.add_argument("--sample-s", type=float, default=5.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path, help="write all samples as JSON")
    arguments.set_defaults(work=run)


def run(options: argparse.Namespace) -> int:
    """Soak, then report; 1 when something grows or is wrong."""
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    series, faults = Series(), list[str]()
    soak(options, series, faults)
    lines, grows = table(series)
    print("\n".join(lines))
    for fault in (*faults, *grows):
        print(f"FAULT: {fault}")
    if options.out:
        samples = msgspec.to_builtins({"samples": series.samples, "whole": series.whole, "faults": [*faults, *grows]})
        options.out.write_text(json.dumps(samples))
    return 1 if faults or grows else 0
