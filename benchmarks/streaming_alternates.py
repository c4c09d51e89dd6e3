"""Does streaming shorten a step of the demo? Runs in which it is on at every other step, so that both see one machine.

    python benchmarks/streaming_alternates.py --steps 23 --pairs 5

On a shared machine runs minutes apart differ by more than streaming brings. So a pair is two runs of one seed: in one
streaming is on at even steps, in the other at odd ones. Both sample the same completions, so each step is compared with
itself; what the machine does between the runs meets both arms alike. Not streaming has its best thread placement: all
cores at the close, when engines rest.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from pathlib import Path

import msgspec
from repeated_runs import interval
from training_run import DEMO_RECIPE, toml_value, training_run

from streamrl.launch.external import serve_external
from streamrl.learning.trainer import TorchTrainer
from streamrl.recipe.rules.load import load_recipe
from streamrl.recipe.topology import Role

WARM_UP_STEPS = 3


def serve_alternating(recipe: Path, overrides: list[str], parity: int) -> None:
    """Be the trainer of a run: streaming where version + ``parity`` is even."""
    opened = TorchTrainer._open_batch

    def open_batch(trainer: TorchTrainer) -> None:
        streaming = (trainer.policy_version + parity) % 2 == 0
        trainer._options = msgspec.structs.replace(trainer._options, streaming=streaming)
        opened(trainer)

    TorchTrainer._open_batch = open_batch  # type: ignore[method-assign, assignment]
    serve_external(Role.TRAINER, load_recipe(recipe, overrides))


def step_seconds(options: argparse.Namespace, seed: int, parity: int) -> list[float]:
    """Wall time of every step of one run."""
    settings: dict[str, object] = {
        "run.steps": options.steps,
        "run.seed": seed,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "checkpoint.at_end": False,
        "transport.kind": "tcp",
        "transport.port": options.port,
        "transport.training": "external",
    }
    flags = [f"--set={name}={toml_value(value)}" for name, value in settings.items()]
    command = [sys.executable, __file__, "--serve", str(parity), "--recipe", str(options.recipe), *flags]
    with training_run(options.recipe, settings) as run:
        trainer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            run.wait(timeout_s=options.timeout_s)
            return [step["time/step_s"] for step in run.steps()]
        finally:
            trainer.terminate()
            trainer.wait()


def log_ratio(even: list[float], odd: list[float]) -> float:
    """Mean over steps of log(not streaming / streaming). ``even``: seconds of the run that streams from version 0 on.

    As many steps of either kind, so that a factor between the runs cancels.
    """
    steps = range(WARM_UP_STEPS, WARM_UP_STEPS + (len(even) - WARM_UP_STEPS) // 2 * 2)
    logs = [math.log(odd[i] / even[i]) if i % 2 == 0 else math.log(even[i] / odd[i]) for i in steps]
    return sum(logs) / len(logs)


def main() -> int:
    """Run the pairs; exit code 1 when the interval is not above 1."""
    parser = argparse.ArgumentParser(description="Compare streaming with not streaming, step by step.")
    parser.add_argument("--recipe", type=Path, default=DEMO_RECIPE)
    parser.add_argument("--steps", type=int, default=23)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--port", type=int, default=5900)
    parser.add_argument("--timeout-s", type=float, default=900.0)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--set", action="append", default=[], dest="overrides", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve_alternating(options.recipe, options.overrides, options.serve)
        return 0
    logs: list[float] = []
    for seed in range(options.pairs):
        runs = {parity: step_seconds(options, seed, parity) for parity in ((0, 1) if seed % 2 == 0 else (1, 0))}
        logs.append(log_ratio(runs[0], runs[1]))
        print(f"pair {seed + 1}/{options.pairs}: a step is {math.exp(logs[-1]):.3f} times shorter", flush=True)
    found = interval(logs)
    mean, low, high = math.exp(found.mean), math.exp(found.low), math.exp(found.high)
    print(f"streaming shortens a step {mean:.3f} times (95 %: {low:.3f} to {high:.3f})")
    return 0 if low > 1 else 1


if __name__ == "__main__":
    sys.exit(main())
