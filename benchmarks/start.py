"""The start of a run: seconds and CPU seconds from the command to the first step, of this checkout and of another.

    python benchmarks/start.py [KIND ...] [--against CHECKOUT] [--pairs N]

Kinds: ``cold`` (the demo with an empty cache of vLLM's), ``demo`` (with a filled one), ``smollm2`` (the example of that
name, after ``make demo MODEL=smollm2`` has made its model) and ``simulated`` (the demo with simulated engines).
Runs have one step and no evaluation. The checkouts, each with a ``.venv`` of its own, alternate. CPU seconds are those
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


def start(checkout: Path, kind: str, cache: Path) -> Start:
    """Start a run of ``checkout`` and end it after its first step. ``cache``: vLLM's, which keeps
    what it has inspected; not used for ``cold``.

    Raises ``SystemExit`` with what the run printed where it makes no step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ["run.steps=1", f'run.directory="{folder}/runs"', 'evaluation.prompts=""', "evaluation.every=0"]
        if kind == "simulated":
            settings += SIMULATED
        recipe = checkout / "examples" / KINDS[kind] / "recipe.toml"
        command = [str(checkout / ".venv/bin/streamrl"), "train", str(recipe)]
        command += [word for setting in settings for word in ("--set", setting)]
        own_cache = Path(folder) / "cache" if kind == "cold" else cache
        with (Path(folder) / "printed").open("w+") as printed:
            began = time.monotonic()
            variables = os.environ | {"VLLM_CACHE_ROOT": str(own_cache)}
            process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=variables, cwd=checkout)
            tree = CpuTree(process.pid).start()
            while not any(path.stat().st_size for path in Path(folder).glob("runs/*/metrics.jsonl")):
                if process.poll() is not None or time.monotonic() > began + LONGEST_S:
                    process.terminate()
                    process.wait()
                    printed.seek(0)
                    raise SystemExit(f"no step: {printed.read()[-3000:]}")
                time.sleep(POLL_S)
            seconds = time.monotonic() - began
            moment = time.time()
            process.wait()
            tree.stop()
    return Start(seconds, sum(tree.between(last=moment).values()))


def _compare(kind: str, checkouts: dict[str, Path], pairs: int, cache: Path) -> None:
    """Start runs of ``kind`` in turns."""
    if kind != "cold":
        # Fills vLLM's caches, and those of the disk.
        for name, checkout in checkouts.items():
            start(checkout, kind, cache / name)
    starts: dict[str, list[Start]] = {name: [] for name in checkouts}
    for number in range(pairs):
        # Who comes first finds another machine than who comes second.
        for name in sorted(checkouts, reverse=bool(number % 2)):
            made = start(checkouts[name], kind, cache / name)
            print(f"{kind}, {name}: {made.seconds:.1f} s, {made.cpu_seconds:.1f} CPU s", flush=True)
            starts[name].append(made)
    for name, of_checkout in starts.items():
        seconds, cpu_seconds = (median(column) for column in zip(*of_checkout, strict=True))
        print(f"{kind}, {name}: median {seconds:.1f} s, {cpu_seconds:.1f} CPU s", flush=True)
    if len(checkouts) == 2:
        both = list(zip(*starts.values(), strict=True))
        seconds_ratios = " ".join(f"{now.seconds / before.seconds:.2f}" for before, now in both)
        cpu_ratios = " ".join(f"{now.cpu_seconds / before.cpu_seconds:.2f}" for before, now in both)
        print(f"{kind}: now / before, pair by pair: seconds {seconds_ratios}; CPU seconds {cpu_ratios}", flush=True)


def main() -> int:
    """Print one line a start, and for each kind the medians and the ratios of each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--against", type=Path, help="checkout to compare with")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    checkouts = {"now": ROOT}
    if options.against is not None:
        checkouts = {"before": options.against.resolve(), "now": ROOT}
    with tempfile.TemporaryDirectory() as cache:
        for kind in options.kinds or KINDS:
            _compare(kind, checkouts, options.pairs, Path(cache))
    return 0


if __name__ == "__main__":
    sys.exit(main())
