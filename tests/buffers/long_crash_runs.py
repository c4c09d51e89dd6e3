"""Crashes of the journal for as long as one likes, outside of the suite.

    PYTHONPATH=. python tests/buffers/long_crash_runs.py --minutes 10 --state crash_runs.json
    PYTHONPATH=. python tests/buffers/long_crash_runs.py --kills 500 --state crash_runs.json

The first looks at states that the disk may have after a power cut, seed after seed, with crashes of recoveries; the
second kills real writers. Both go on where ``--state`` says that the last call ended, and print what was looked at.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from journal_world import power_cuts

WRITER = Path(__file__).parent / "writer_process.py"


def programs(seed: int) -> list[str]:
    """What the runs of one seed do."""
    rng = random.Random(seed)
    return ["".join(rng.choices("aaggbfr", k=rng.randrange(1, 20))) for _ in range(rng.randrange(1, 6))]


def look_at_power_cuts(counts: dict[str, int], minutes: float) -> None:
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        seed = counts["seeds"]
        try:
            counts["states"] += power_cuts(seed, programs(seed), states=8)
        except BaseException:
            print(f"seed {seed}: {programs(seed)}")
            raise
        counts["seeds"] += 1


def kill_writers(counts: dict[str, int], kills: int) -> None:
    """In one directory after another, each with 50 writers."""
    while kills > 0:
        with tempfile.TemporaryDirectory() as directory:
            acknowledged = 0
            for _ in range(min(50, kills)):
                rng = random.Random(counts["kills"])
                writer = subprocess.Popen([sys.executable, WRITER, directory, str(rng.random())[2:]], stdout=-1)
                assert writer.stdout
                lines = [writer.stdout.readline().strip() for _ in range(rng.choice([0, 1, 2, 10, 100]))]
                time.sleep(rng.random() * 0.02)
                writer.kill()
                lines += writer.stdout.read().split(b"\n")[:-1]
                writer.stdout.close()
                assert writer.wait() == -9, f"kill {counts['kills']}: the writer ended by itself: {lines[-1:]}"
                opened = [int(line.split()[2]) for line in lines if line.startswith(b"opened")]
                assert all(last >= acknowledged for last in opened), f"{acknowledged} acknowledged, {opened} came back"
                durable = [int(line) for line in lines if line.isdigit()]
                acknowledged = max([acknowledged, *opened, *durable])
                counts["kills"] += 1
                kills -= 1
            counts["records"] += acknowledged


def main() -> None:
    parser = argparse.ArgumentParser(description="Crashes of the journal.")
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--state", type=Path, required=True)
    arguments = parser.parse_args()
    counts = dict.fromkeys(("seeds", "states", "kills", "records"), 0)
    if arguments.state.exists():
        counts |= json.loads(arguments.state.read_text())
    try:
        look_at_power_cuts(counts, arguments.minutes)
        kill_writers(counts, arguments.kills)
    finally:
        arguments.state.write_text(json.dumps(counts))
    print(counts)


if __name__ == "__main__":
    main()
