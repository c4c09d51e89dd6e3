"""Trackers that are killed, stopped, out of disk or asleep: batches, time and stores, compared with a run without any.

``shots``: two deterministic runs on simulated engines. One has no tracker. The other begins without, its supervisor is
killed, and it is resumed with all four and a plug-in that sleeps for ever, their folders on full disks (as root);
followers are killed at random, one is stopped (SIGSTOP), the disks get room, all processes of the run are killed at
once, and it is resumed. ``pairs``: wall time, and CPU time of the controller, without and with trackers, in turns."""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from campaigns.hostile.real_runs import train_command
from streamrl.base.line_file import read_lines
from streamrl.observe.trackers.wandb import Rows

STREAMRL = (sys.executable, "-m", "streamrl")
REWARD = """import asyncio
async def reward(completion):
    await asyncio.sleep(PACE)
    return len(completion) % 7"""
SLEEPER = """import time
from streamrl.observe.trackers.tracker import Tracker
class Sleeper(Tracker):
    def metrics(self, *_):
        time.sleep(1e6)"""
SITE = {
    "reward.py": REWARD,
    "sleeper.py": SLEEPER,
    "sleeper-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: sleeper\nVersion: 1",
    "sleeper-1.dist-info/entry_points.txt": "[streamrl.trackers]\nsleeper = sleeper:Sleeper",
}
SAME = ("reward/mean", "completion/length_mean", "policy/entropy", "optim/grad_norm")
MARK = "CAMPAIGN_FOLDER"  # a variable of every process of a run

# ---- what the stores have, by their own readers: {name: steps} -----------------------------------


def of_tensorboard(run: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), dict.fromkeys(("scalars", "tensors", "histograms"), 0))
    events.Reload()
    tags = events.Tags()
    found = {name: [one.step for one in events.Scalars(name)] for name in tags["scalars"]}
    found |= {name: [one.step for one in events.Histograms(name)] for name in tags["histograms"]}
    for name in tags["tensors"]:
        tensors = events.Tensors(name)
        assert not any(b"<img" in text or b"<b>" in text for one in tensors for text in one.tensor_proto.string_val)
        found[name.removesuffix("/text_summary")] = [one.step for one in tensors]
    return found


def of_trackio(run: Path) -> dict[str, list[int]]:
    (path,) = glob.glob(f"{run}/trackio/*.db")
    with closing(sqlite3.connect(path)) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    return by_name([(step, json.loads(metrics)) for step, metrics in rows])


def of_wandb(run: Path) -> dict[str, list[int]]:
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    return by_name([row for file in files for row in Rows(file).read()])


def by_name(rows: Sequence[tuple[int, Iterable[str]]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for step, names in rows:
        for name in names:
            found.setdefault(name, []).append(step)
    return found


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb, "trackio": of_trackio}


def train(root: Path, steps: int, pace_s: float, **more: object) -> subprocess.Popen[bytes]:
    """A small run below ``root`` whose rewards take ``pace_s``."""
    for name, text in SITE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text.replace("PACE", str(pace_s)))
    common = {"run.directory": str(root / "runs"), "run.steps": steps, "checkpoint.every": steps}
    return start(root, train_command(common | {"rewards.0.function": f"{root / 'reward.py'}:reward"} | more))


def start(root: Path, command: Sequence[object]) -> subprocess.Popen[bytes]:
    own_variables = {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}", "WANDB_API_KEY": "", "NETRC": "/none"}
    with (root / "output").open("ab") as output:
        variables = os.environ | own_variables | {MARK: str(root)}
        line = [*map(str, command)]
        return subprocess.Popen(line, env=variables, stdin=subprocess.PIPE, stdout=output, stderr=output)


def latest(root: Path) -> Path:
    return (root / "runs" / "latest").resolve()


def steps_of(root: Path) -> dict[int, list[Any]]:
    """Steps that were made: their time, and what is the same in each where each batch is."""
    lines = read_lines(latest(root) / "metrics.jsonl", dict[str, Any])
    return {line["step"]: [line["time"], *map(line.get, SAME)] for line in lines if line.get("kind") == "step"}


def processes_of(root: Path, word: str = "") -> list[psutil.Process]:
    """Living processes of the run, those that have ``word`` in their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            own = process.environ().get(MARK) == str(root) and process.status() != psutil.STATUS_ZOMBIE
            if own and word in ["", *process.cmdline()]:
                found.append(process)
    return found


def kill(processes: Iterable[psutil.Process], with_signal: int = signal.SIGKILL) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(with_signal)


def wait_until(true: Callable[[], bool], limit_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not (found := true()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return found


def wait_for_step(step: int, root: Path, process: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: process.poll() is not None or step in steps_of(root), 300)


def weights_of(root: Path) -> str:
    """A digest of the last weights."""
    (weights,) = max(latest(root).glob("checkpoints/step-*")).glob("hf/*.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def shots(arguments: argparse.Namespace, folder: Path, disks: ExitStack) -> Iterator[tuple[str, object]]:
    """Yield each check with what is wrong."""
    chance, kills, root = random.Random(1), arguments.kills, folder / "shot"
    begin = {"steps": arguments.steps, "pace_s": arguments.pace, "run.deterministic": True}
    alone, shot = train(folder / "alone", **begin), train(root, **begin)
    wait_for_step(2, root, shot)
    shot.kill()
    shot.wait()
    wait_until(lambda: not processes_of(root))
    run = latest(root)
    full = [run / name for name in READERS] if os.geteuid() == 0 else []
    for disk in full:
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=True)
        disks.callback(os.system, f"umount -l {disk}")
    trackers = [*READERS, f"prometheus?port={chance.randrange(20_000, 30_000)}"]
    resume = [*STREAMRL, "resume", run, "--set", f"metrics.report_to={json.dumps([*trackers, 'sleeper'])}"]
    shot = start(root, resume)
    left, due_s, seen_s = (dict.fromkeys(trackers, value) for value in (kills, 0.0, time.monotonic() + 30))
    own: list[psutil.Process] = []
    while any(left.values()):
        for name in [name for name in left if left[name]]:
            living, now_s = processes_of(root, name), time.monotonic()
            seen_s[name] = now_s if living else seen_s[name]
            if living and not due_s[name]:
                due_s[name] = now_s + chance.uniform(0.5, 12)
            elif living and now_s > due_s[name]:
                kill(living)
                left[name], due_s[name] = left[name] - 1, 0.0
                print(f"{len(steps_of(root))} steps, kills left: {left}", flush=True)
            elif not living and now_s > seen_s[name] + 3:  # it was given up, or waits
                follower = [sys.executable, "-P", "-m", "streamrl.observe.trackers", name, run]
                own.append(psutil.Process(start(root, follower).pid))
        if sum(left.values()) <= 2 * kills:
            while full:
                subprocess.run(["mount", "-o", "remount,size=1g", full.pop()], check=True)
            kill(processes_of(root, "sleeper"), signal.SIGSTOP)
        time.sleep(0.1)
    yield "end before all was killed (raise --steps): code", shot.poll()
    for victim in ("supervisor", "whole run"):
        kill([psutil.Process(shot.pid), *own] if victim == "supervisor" else processes_of(root))
        yield f"processes after a SIGKILL of the {victim}", not wait_until(lambda: not processes_of(root))
        shot = start(root, resume)
        wait_for_step(max(steps_of(root)) + 1, root, shot)
    kill(processes_of(root, trackers[3]), signal.SIGSTOP)
    yield "exit codes", [code for code in (shot.wait(), alone.wait()) if code]
    yield "processes after its end", not wait_until(lambda: not processes_of(root))
    whole, found = steps_of(folder / "alone"), steps_of(root)
    yield "batches that differ", [step for step in whole if step not in found or whole[step][1:] != found[step][1:]]
    yield "weights that differ", weights_of(folder / "alone") != weights_of(root)
    for name, reader in READERS.items():
        code = start(root, [*STREAMRL, "sync", run, "--to", name]).wait()
        steps = reader(run).get("reward/mean")
        yield f"steps in {name} missing or twice", code or (steps != [*range(1, arguments.steps + 1)] and steps)


def pairs(arguments: argparse.Namespace, folder: Path, _: ExitStack) -> Iterator[tuple[str, object]]:
    """Print the times of each pair, and yield whether wall time grew."""
    ratios = []
    for n in range(5):
        figures = {}
        for attached in (n % 2 == 1, n % 2 == 0):
            root, port = folder / f"{n}-{attached}", random.randrange(20_000, 30_000)
            report_to = ["tensorboard", f"prometheus?port={port}"] if attached else []
            process = train(root, arguments.pair_steps, 0.0, **{"metrics.report_to": report_to})
            wait_for_step(3, root, process)  # what comes before loads and compiles
            controller, used = processes_of(root, "controller")[0], []
            while process.poll() is None:
                with suppress(psutil.Error):
                    used.append(sum(controller.cpu_times()[:2]))
                time.sleep(0.1)
            if process.wait():
                raise SystemExit((root / "output").read_text())
            times = steps_of(root)
            figures[attached] = times[max(times)][0] - times[3][0], used[-1] - used[0]
        ratios.append([figures[True][one] / figures[False][one] for one in (0, 1)])
        print(f"wall s, controller's CPU s: without {figures[False]}, with {figures[True]}, ratios {ratios[-1]}")
    for name, column in zip(("wall", "controller's CPU"), zip(*ratios, strict=True), strict=True):
        print(f"{name}: median ratio {median(column):.3f}, from {min(column):.3f} to {max(column):.3f}", flush=True)
    yield "wall time above 1.02", median(wall for wall, _ in ratios) > 1.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this campaign."""
    parser.add_argument("parts", nargs="*", metavar="PART", help="shots or pairs (both)")
    parser.add_argument("--kills", type=int, default=20, help="of each follower")
    parser.add_argument("--steps", type=int, default=400, help="of the run whose followers are shot")
    parser.add_argument("--pace", type=float, default=0.5, help="seconds that its rewards take")
    parser.add_argument("--pair-steps", type=int, default=600)
    parser.set_defaults(work=run_parts)


def run_parts(arguments: argparse.Namespace) -> int:
    """Print each check; 1 where one fails."""
    failed = 0
    for part in [one for one in (shots, pairs) if one.__name__ in (arguments.parts or ("shots", "pairs"))]:
        with tempfile.TemporaryDirectory(prefix="followers-") as folder, ExitStack() as disks:
            for check, wrong in part(arguments, Path(folder), disks):
                failed += bool(wrong)
                print(f"{part.__name__}: {check}: {wrong or 'none'}", flush=True)
    return int(failed > 0)
