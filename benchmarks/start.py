"""The start of a run: seconds and CPU seconds from the command to the first step, of this checkout and of another.

    python benchmarks/start.py [KIND ...] [--against CHECKOUT] [--pairs N]

Kinds: ``cold`` (the demo where vLLM has no note of its architecture), ``demo`` (where it has), ``smollm2`` (that of
``examples/smollm2``, made before by ``make demo MODEL=smollm2``) and ``simulated`` (the demo with simulated engines).
Runs have one step and no evaluation. The checkouts, each with a ``.venv`` of its own, take turns. CPU seconds are those
of all processes of the run, until the first step is done."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from cpu_time import CpuTree

ROOT = Path(__file__).resolve().parent.parent
SIMULATED = ('engines.kind="simulated"', "sampling.max_tokens=64")
KINDS = {"cold": "sort", "demo": "sort", "smollm2": "smollm2", "simulated": "sort"}
"""Kinds of starts, and their examples."""
LONGEST_S = 600.0
POLL_S = 0.05


class Start(NamedTuple):
    """One start of a run: seconds and CPU seconds to its first step."""

    seconds: float
    cpu_seconds: float


def start(checkout: Path, kind: str, notes: Path) -> Start:
    """Start a run of ``checkout`` and end it after its first step. ``notes``: vLLM's directory of what it knows of
    architectures. Raises ``SystemExit`` with what the run printed where it makes no step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["run.steps=1", f'run.directory="{folder}/runs"', 'evaluation.prompts=""']
        if kind == "simulated":
            settings += SIMULATED
        recipe = checkout / "examples" / KINDS[kind] / "recipe.toml"
        command = [str(checkout / ".venv/bin/streamrl"), "train", str(recipe)]
        command += [word for setting in settings for word in ("--set", setting)]
        cache = Path(folder) / "no notes" if kind == "cold" else notes
        with (Path(folder) / "printed").open("w+") as printed:
            began = time.monotonic()
            variables = os.environ | {"VLLM_CACHE_ROOT": str(cache)}
            process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=variables, cwd=checkout)
            tree = CpuTree(process.pid).start()
            while not any(path.stat().st_size for path in Path(folder).glob("runs/*/metrics.jsonl")):
                if process.poll() is not None or time.monotonic() > began + LONGEST_S:
                    process.terminate()
                    printed.seek(0)
                    raise SystemExit(f"no step: {printed.read()[-3000:]}")
                time.sleep(POLL_S)
            seconds = time.monotonic() - began
            moment = time.time()
            process.wait()
            tree.stop()
    return Start(seconds, sum(tree.between(last=moment).values()))


def main() -> int:
    """Print one line a start, and for each kind the medians and the ratios of each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--against", type=Path, help="checkout with the code of before")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    checkouts = [ROOT] if options.against is None else [options.against.resolve(), ROOT]
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds or KINDS:
            starts: dict[Path, list[Start]] = {checkout: [] for checkout in checkouts}
            for checkout in checkouts:
                if kind != "cold":
                    start(
                        checkout, kind, Path(folder) / checkout.name
                    )  # the notes are there afterwards, and the files read
            for _ in range(options.pairs):
                for checkout in checkouts:
                    made = start(checkout, kind, Path(folder) / checkout.name)
                    print(f"{kind} {checkout.name}: {made.seconds:.1f} s, {made.cpu_seconds:.1f} CPU s", flush=True)
                    starts[checkout].append(made)
            for checkout, of_checkout in starts.items():
                seconds, cpu_seconds = (median(column) for column in zip(*of_checkout, strict=True))
                print(f"{kind} {checkout.name}: median {seconds:.1f} s, {cpu_seconds:.1f} CPU s")
            if options.against is not None:
                before, after = starts.values()
                pairs = zip(before, after, strict=True)
                ratios = [(a.seconds / b.seconds, a.cpu_seconds / b.cpu_seconds) for b, a in pairs]
                columns = [" ".join(f"{ratio:.2f}" for ratio in column) for column in zip(*ratios, strict=True)]
                print(f"{kind}: seconds as a part of before: {columns[0]}; CPU seconds: {columns[1]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
