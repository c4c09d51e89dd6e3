"""Runs of the sorting example on simulated engines, small enough for many; and what a run leaves behind.

    python -m campaigns.hostile.real_runs SCRIPT OUT ERR LIMIT_S

runs a bash script and prints its exit code (``late``: after so many seconds it had not ended) and what it left running.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from streamrl.recipe.toml_text import toml_value

RECIPE = Path(__file__).parents[2] / "examples" / "sort" / "recipe.toml"
SETTINGS: dict[str, object] = {
    "engines.kind": "simulated",
    "rollout.prompts_per_batch": 4,
    "rollout.group_size": 4,
    "sampling.max_tokens": 32,
    "evaluation.prompts": "",
    "training.advanced.threads": 1,
}


def flags(settings: Mapping[str, object]) -> list[str]:
    """Return ``--set`` for ``SETTINGS`` and these."""
    merged = {**SETTINGS, **settings}
    return [part for key, value in merged.items() for part in ("--set", f"{key}={toml_value(value)}")]


def train_command(settings: Mapping[str, object]) -> list[str]:
    """Return the command line that trains with these settings."""
    return [sys.executable, "-m", "streamrl", "train", str(RECIPE), *flags(settings)]


def adopt_orphans() -> None:
    """Make this process the parent of every orphan among its descendants."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def end_left_behind(waits_s: float) -> list[str]:
    """Kill the descendants of this process that have not ended after ``waits_s``; returns their command lines."""
    deadline = time.monotonic() + waits_s
    while (children := _living()) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = [" ".join(child.cmdline())[:150] or child.name() for child in children]
    for child in children:
        child.send_signal(signal.SIGKILL)
    return names


def _living() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def main() -> None:
    script, out, err, limit_s = sys.argv[1:]
    adopt_orphans()
    with open(out, "wb") as o, open(err, "wb") as e:
        child = subprocess.Popen(["bash", "-c", script], stdout=o, stderr=e, stdin=subprocess.DEVNULL)
        try:
            code = str(child.wait(float(limit_s)))
        except subprocess.TimeoutExpired:
            code = "late"
    print(code, *end_left_behind(0.0 if code == "late" else 10.0), sep="\n")


if __name__ == "__main__":
    main()
