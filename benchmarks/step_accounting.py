"""Where the wall time of a step goes, and whose CPU time it takes: one run of a recipe with real engines.

    python benchmarks/step_accounting.py [RECIPE] [--steps 30] [--skip 5] [--set KEY=JSON ...]

Every moment counts once, for the first row of the table that happens then. What the engine core does is seen by a tap
(``step_tap``); close and push are what the run itself reports. The first ``--skip`` steps and the last do not count."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from training_run import DEMO_RECIPE, ROOT, training_run

TAP = Path(__file__).with_name("step_tap.py")
DECODE = {128: "decode, 128 requests or more", 32: "decode, 32 to 127", 8: "decode, 8 to 31", 1: "decode, 1 to 7"}
PREFILL, CLOSE, EVALUATION, PUSH = "prefill", "close: the rest of the training", "wait for an evaluation", "weight push"
GAP = "none of these"
ROWS = (*DECODE.values(), PREFILL, CLOSE, EVALUATION, PUSH, GAP)


class Span(NamedTuple):
    """Something that happens from one moment to another."""

    first: float
    last: float
    what: str


def core_spans(lines: Iterable[str]) -> list[Span]:
    """Steps of the engine core. One of more tokens than requests has a prompt in it."""
    spans = []
    for first, last, requests, tokens in (map(float, line.split()) for line in lines):
        decode = next(what for least, what in DECODE.items() if requests >= least)
        spans.append(Span(first, last, PREFILL if tokens > requests else decode))
    return spans


def reported_spans(steps: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Close, wait for an evaluation, and push of each step, from its line of ``metrics.jsonl``."""
    spans = []
    for step in steps:
        closed = step["time"] - step["time/step_s"] + step["time/wait_batch_s"]
        trained = closed + step["time/close_batch_s"]
        spans.append(Span(closed, trained, CLOSE))
        spans.append(Span(trained, trained + step["time/wait_eval_s"], EVALUATION))
        spans.append(Span(step["time"] - step["time/weight_sync_s"], step["time"], PUSH))
    return spans


def seconds_of(spans: Iterable[Span], first: float, last: float) -> dict[str, float]:
    """Seconds between two moments for each of ``ROWS``: of what happens at once the first row counts."""
    moments = [(min(max(at, first), last), by, s.what) for s in spans for at, by in ((s.first, 1), (s.last, -1))]
    seconds, open_now, before = dict.fromkeys(ROWS, 0.0), Counter[str](), first
    for at, change, what in sorted([*moments, (last, 0, GAP)]):
        seconds[next((row for row in ROWS if open_now[row] > 0), GAP)] += at - before
        open_now[what] += change
        before = at
    return seconds


def wall_table(seconds: Mapping[str, float], spans: Sequence[Span], steps: int) -> str:
    """Seconds a step and share; of the engine core also how many steps it makes, and what one takes."""
    lines = ["| in a step | s | share | times | ms each |", "|---|---|---|---|---|"]
    whole = sum(seconds.values())
    for row in ROWS:
        each = [span.last - span.first for span in spans if span.what == row]
        counts = f"{len(each) / steps:.1f} | {1e3 * fmean(each):.1f}" if each else "0 | "
        lines.append(f"| {row} | {seconds[row] / steps:.3f} | {seconds[row] / whole:.1%} | {counts} |")
    return "\n".join([*lines, f"| all | {whole / steps:.3f} | | | |"])


def cpu_table(cpu: Mapping[str, float], wall_s: float, samples: float) -> str:
    """CPU time by process: milliseconds a trained sample, share, and cores that it keeps busy."""
    whole = sum(cpu.values())
    lines = ["| process | CPU ms a sample | share | cores |", "|---|---|---|---|"]
    for name, used in [*cpu.items(), ("all", whole)]:
        lines.append(f"| {name} | {1e3 * used / samples:.2f} | {used / whole:.0%} | {used / wall_s:.2f} |")
    return "\n".join(lines)


def account(recipe: Path, settings: Mapping[str, object], skip: int) -> str:
    """Run the recipe; return both tables. Raises ``RunFailed``."""
    with tempfile.TemporaryDirectory() as folder:
        tap, path = Path(folder, "steps"), os.pathsep.join((folder, str(ROOT)))
        tap.touch()
        Path(folder, "sitecustomize.py").write_text(TAP.read_text())
        with training_run(recipe, settings, variables={"PYTHONPATH": path, "STREAMRL_STEP_TAP": str(tap)}) as run:
            run.wait(timeout_s=3600.0)
            steps = run.steps()
        core = core_spans(tap.read_text().splitlines())
    measured, first, last = steps[skip:-1], steps[skip - 1]["time"], steps[-2]["time"]
    inside = [span for span in [*core, *reported_spans(measured)] if first <= span.first < last]
    samples = sum(step["perf/samples_s"] * step["time/step_s"] for step in measured)
    idle, free = (fmean(step[f"util/{name}_ratio"] for step in measured) for name in ("engine_idle", "free_slot"))
    head = (
        f"{len(measured)} steps of {samples / len(measured):.0f} samples, {1e3 * (last - first) / samples:.2f} ms each"
    )
    wall = wall_table(seconds_of(inside, first, last), inside, len(measured))
    cpu = cpu_table(run.cpu.between(first, last), last - first, samples)
    return f"{head}; engine-idle {idle:.1%}, free-slots {free:.1%}\n\n{wall}\n\n{cpu}"


def main() -> int:
    """Run, print."""
    parser = argparse.ArgumentParser(description="Where the wall time and the CPU time of a step go.")
    parser.add_argument("recipe", nargs="?", type=Path, default=DEMO_RECIPE)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skip", type=int, default=5, help="steps at the start that do not count, 1 or more")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="an override of the recipe")
    options = parser.parse_args()
    if not 1 <= options.skip <= options.steps - 2:
        parser.error("--skip must be 1 or more, and --steps at least 2 more")
    settings = {"run.steps": options.steps, "checkpoint.at_end": False}
    settings |= {"evaluation.at_start": False, "evaluation.at_end": False}
    settings |= {key: msgspec.json.decode(value) for key, _, value in (one.partition("=") for one in options.set)}
    print(account(options.recipe, settings, options.skip))
    return 0


if __name__ == "__main__":
    sys.exit(main())
