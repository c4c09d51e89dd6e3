"""Does a run with environments grow? Games, then agent programs that leave things behind, on real engines.

    python -m campaigns agent_soak --minutes 30

The first half plays ``examples/game``. In the second, each trajectory is a program that leaves an orphan, files and, in
some, a thread that does not end. Every few seconds each process of the run is asked for its memory, descriptors and
threads; processes, zombies and temporary files are counted (``campaigns.soak``). Passes where nothing grows, the runs
played as many trajectories as they should, and nothing is left of them."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from training_run import TrainingRun

from campaigns.chaos.chaos_processes import become_subreaper, describe, living, reap, send
from campaigns.soak import Series, table

GAME = Path(__file__).parents[2] / "examples" / "game"
ENDLESS = 10**6
SAMPLE_S = 5.0
START_S = 300.0
DRAIN_S = 300.0
GAMES = 10_000
PROGRAMS = 1_500
BATCH = {"game": 256, "agents": 64}
"""Trajectories of a step of the recipes."""

AGENT = """
import json, os, subprocess, sys, tempfile, threading, time, urllib.request
from pathlib import Path

row = json.loads(sys.stdin.readline())
Path(tempfile.mkdtemp(prefix="profile-"), "cache").write_bytes(b"x" * 100_000)
Path(tempfile.gettempdir(), "lock").touch()
subprocess.Popen(["sleep", "100000"], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
subprocess.Popen(["sh", "-c", "sleep 100000 & sleep 100000 &"], stdout=subprocess.DEVNULL)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": str(row)[:40]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request, timeout=300))["choices"][0]["message"]["content"] or ""
print(json.dumps({"reward": len(said) % 7 / 7}), flush=True)
if os.getpid() % 10 == 0:
    threading.Thread(target=time.sleep, args=(100000,)).start()
"""
"""A program that asks once, and leaves a folder, a file, three orphans and, one in ten times, a thread."""


class GameRun(TrainingRun):
    """A run below ``runs`` of its folder; what lies beside comes and goes."""

    @property
    def directory(self) -> Path | None:
        return next((path.parent for path in sorted(self.folder.glob("runs/*/metrics.jsonl"))), None)


def _settings(kind: str, folder: Path) -> list[str]:
    """Settings of a run that goes on until it is stopped."""
    common = [f"run.steps={ENDLESS}", f"run.directory={folder}/runs", "evaluation.every=0", "checkpoint.every=0"]
    if kind == "game":
        return common
    program = folder / "agent.py"
    program.write_text(AGENT)
    return [
        *common,
        f"environment.agent={json.dumps([sys.executable, str(program)])}",
        "environment.advanced.agent_tasks=0",
        "environment.seconds=10",
    ]


def play(kind: str, minutes: float, trajectories: int, faults: list[str]) -> None:
    """Have a run for ``minutes``, and until it has trained ``trajectories``. Adds what is wrong to ``faults``."""
    recipe = GAME / ("recipe.toml" if kind == "game" else "agent.toml")
    series = Series()
    folder = Path(tempfile.mkdtemp(prefix="as-"))
    temporary = folder / "t"
    temporary.mkdir()
    run = GameRun(folder, {"TMPDIR": str(temporary)})
    try:
        words = [word for setting in _settings(kind, folder) for word in ("--set", setting)]
        process = run.start("train", str(recipe), *words)
        run.wait_for_step(1, timeout_s=START_S)
        begin = time.monotonic()
        trained = 0
        while not run.over:
            series.take(process.pid, temporary)
            trained = BATCH[kind] * len(run.steps())
            if time.monotonic() > begin + 60 * minutes and trained >= trajectories:
                break
            if time.monotonic() > begin + 120 * minutes + START_S:
                faults.append(f"{kind}: {trained} of {trajectories} trajectories in twice the time")
                break
            time.sleep(SAMPLE_S)
        if run.over:
            faults.append(f"{kind}: the run ended by itself: {run.tail(6)}")
        run.terminate()
        code = run.exit_code(DRAIN_S)
        if code != 0:
            faults.append(f"{kind}: the run ended with {code}: {run.tail(6)}")
        time.sleep(2)
        reap()
        faults += [f"{kind}: left: {describe(process)}" for process in living()]
        faults += [f"{kind}: left: {path}" for path in temporary.iterdir()]
        lines, growth = table(series)
        print(f"{kind}: {trained:,} trajectories, {len(run.steps())} steps", *lines, sep="\n", flush=True)
        faults += [f"{kind}: {text}" for text in growth]
    finally:
        send(living(), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kinds", nargs="*", default=["game", "agents"], choices=["game", "agents"])
    parser.add_argument("--games", type=int, default=GAMES)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    parser.set_defaults(work=_work)


def _work(options: argparse.Namespace) -> int:
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faults: list[str] = []
    trajectories = {"game": options.games, "agents": options.programs}
    for kind in options.kinds:
        play(kind, options.minutes / len(options.kinds), trajectories[kind], faults)
    print(*(f"FAULT: {fault}" for fault in faults), f"{len(faults)} faults", sep="\n")
    return int(bool(faults))
