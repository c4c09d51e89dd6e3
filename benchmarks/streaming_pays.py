"""Does streaming training make a step of the demo faster, and does it learn the same?

    python benchmarks/streaming_pays.py --steps 22 --pairs 5 --out streaming.json

First a short sweep finds the best thread placement of a run that does not stream. Then ``--pairs`` pairs of runs take
turns, one streaming at the recipe's own placement and one not streaming at its best one; a pair shares its seed.
Passes when the 95 % interval of the ratio of their median step times is above 1 and that of the difference of their
accuracies holds 0.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec
from repeated_runs import Interval, LearningRun, interval, learning_run
from training_run import DEMO_RECIPE

WARM_UP_STEPS = 3
"""The first steps of a run compile, warm caches and grow memory pools."""


class Placement(NamedTuple):
    """Torch threads of the trainer, and the cores of the engine (empty: the recipe's default)."""

    threads: int
    engine_cores: str

    @property
    def overrides(self) -> dict[str, object]:
        """As ``--set`` says it."""
        cores = {"engines.cores": [self.engine_cores]} if self.engine_cores else {}
        return {"training.advanced.threads": self.threads, **cores}

    def __str__(self) -> str:
        threads = f"{self.threads} trainer threads" if self.threads != 1 else "1 trainer thread"
        return f"{threads}, engine on {f'cores {self.engine_cores}' if self.engine_cores else 'its default cores'}"


class Pair(msgspec.Struct, frozen=True):
    """Two runs of one seed."""

    streaming: LearningRun
    at_close: LearningRun

    @property
    def ratio(self) -> float:
        """How many times a step is shorter with streaming."""
        return median_step(self.at_close) / median_step(self.streaming)

    @property
    def accuracy_difference(self) -> float:
        """Streaming minus not."""
        return self.streaming.accuracy - self.at_close.accuracy

    @property
    def accuracy_error(self) -> float:
        """Standard error of the difference from the held-out samples alone."""
        return math.sqrt(self.streaming.accuracy_variance + self.at_close.accuracy_variance)

    @property
    def reward_difference(self) -> float:
        """Mean over the steps of the difference of their training rewards: how far the learning curves lie apart."""
        steps = zip(self.streaming.rewards, self.at_close.rewards, strict=True)
        differences = [streaming - at_close for streaming, at_close in steps]
        return sum(differences) / len(differences)


def median_step(run: LearningRun) -> float:
    """Median wall time of a step, without the first ones."""
    return median(run.step_seconds[WARM_UP_STEPS:])


def placements() -> list[Placement]:
    """What a run that does not stream may be given: half or all cores to either side, which take turns."""
    cores = os.cpu_count() or 1
    threads = sorted({max(1, cores // 2), cores})
    return [Placement(count, engine) for engine in ("", f"0-{cores - 1}") for count in threads]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare runs that stream with runs that do not.")
    parser.add_argument("--recipe", type=Path, default=DEMO_RECIPE)
    parser.add_argument("--steps", type=int, default=22, help="of each run of a pair")
    parser.add_argument("--sweep-steps", type=int, default=10, help="of each run of the sweep")
    parser.add_argument("--pairs", type=int, default=5, help="seeds 0, 1, ...")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for each run")
    parser.add_argument("--out", type=Path, help="write every run and the verdict as JSON")
    options = parser.parse_args()
    if min(options.steps, options.sweep_steps) <= WARM_UP_STEPS or options.pairs < 2:
        parser.error(f"--steps and --sweep-steps must be above {WARM_UP_STEPS}, --pairs at least 2")
    return options


def best_placement(options: argparse.Namespace) -> tuple[Placement, dict[str, float]]:
    """The placement at which a run without streaming has the shortest steps, and the step time of each in seconds."""
    seconds: dict[Placement, float] = {}
    for placement in placements():
        settings = {
            **placement.overrides,
            "training.advanced.streaming": False,
            "run.steps": options.sweep_steps,
            "evaluation.at_end": False,
        }
        run = learning_run("sweep", 0, options.recipe, settings, timeout_s=options.timeout_s)
        seconds[placement] = median_step(run)
        print(f"not streaming, {placement}: {seconds[placement]:.3f} s a step", flush=True)
    return min(seconds, key=seconds.__getitem__), {str(placement): value for placement, value in seconds.items()}


def run_pair(options: argparse.Namespace, seed: int, placement: Placement) -> Pair:
    """Both arms, the first of them in turns, so that a drift of the machine meets both."""
    arms: dict[str, dict[str, object]] = {
        "streaming": {"training.advanced.streaming": True},
        "at close": {"training.advanced.streaming": False, **placement.overrides},
    }
    runs: dict[str, LearningRun] = {}
    for arm in list(arms)[:: 1 if seed % 2 == 0 else -1]:
        settings = {**arms[arm], "run.steps": options.steps, "evaluation.at_end": True}
        runs[arm] = learning_run(arm, seed, options.recipe, settings, timeout_s=options.timeout_s)
    return Pair(runs["streaming"], runs["at close"])


def ratio_interval(pairs: list[Pair]) -> Interval:
    """Geometric mean of the ratios: a ratio and its inverse count alike."""
    logs = interval([math.log(pair.ratio) for pair in pairs])
    return Interval(math.exp(logs.mean), logs.standard_error, math.exp(logs.low), math.exp(logs.high))


def table(pairs: list[Pair]) -> str:
    """One row a pair."""
    lines = [
        "| seed | streaming | at close | ratio | accuracy streaming | at close | difference | reward difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {pair.streaming.seed} | {median_step(pair.streaming):.3f} s | {median_step(pair.at_close):.3f} s "
        f"| {pair.ratio:.3f} | {pair.streaming.accuracy:.3f} | {pair.at_close.accuracy:.3f} "
        f"| {pair.accuracy_difference:+.3f} ± {pair.accuracy_error:.3f} | {pair.reward_difference:+.3f} |"
        for pair in pairs
    ]
    return "\n".join(lines)


def main() -> int:
    """Sweep, run the pairs, report; exit code 1 when streaming does not pay or does not learn the same."""
    options = parse_arguments()
    placement, sweep = best_placement(options)
    print(f"not streaming is best with {placement}", flush=True)
    pairs: list[Pair] = []
    for seed in range(options.pairs):
        pairs.append(run_pair(options, seed, placement))
        print(f"pair {seed + 1}/{options.pairs}: ratio {pairs[-1].ratio:.3f}", flush=True)
    ratio = ratio_interval(pairs)
    accuracy = interval([pair.accuracy_difference for pair in pairs])
    reward = interval([pair.reward_difference for pair in pairs])
    faster, same = ratio.low > 1, accuracy.holds_zero
    print(f"\n{table(pairs)}\n")
    print(f"a step is {ratio.mean:.3f} times shorter with streaming (95 %: {ratio.low:.3f} to {ratio.high:.3f})")
    print(f"accuracy after {options.steps} steps, streaming minus not: {accuracy}; training reward: {reward}")
    print(f"{'faster' if faster else 'NOT FASTER'}, {'learns the same' if same else 'LEARNS OTHERWISE'}")
    if options.out:
        found = {"sweep": sweep, "pairs": pairs, "ratio": ratio, "accuracy": accuracy, "reward": reward}
        verdict = {"placement": str(placement), "passed": faster and same}
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode({**found, **verdict}), indent=1))
    return 0 if faster and same else 1


if __name__ == "__main__":
    sys.exit(main())
