"""Does the trainer compute the logprobs that the engine sampled with? Runs with the learning rate at 0.

    python benchmarks/on_policy_ratio.py --steps 5

Reads ``policy/is_weight_mean`` (mean of exp(trainer - behaviour logprob) over sampled tokens, which must be
1 +- 1e-3) and ``policy/logprob_diff_abs_p99`` from ``metrics.jsonl``, at temperature 1, and where top-p, top-k or
min-p remove tokens."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from training_run import DEMO_RECIPE, training_run

TOLERANCE = 1e-3
SETTINGS: list[dict[str, object]] = [
    {"sampling.temperature": 1.0, "sampling.top_p": 1.0},
    {"sampling.temperature": 0.7, "sampling.top_p": 0.9},
    {"sampling.top_k": 5},
    {"sampling.min_p": 0.1},
]


def measure(recipe: Path, sampling: dict[str, object], steps: int, timeout_s: float) -> list[dict[str, Any]]:
    """The step metrics of a run that cannot learn."""
    overrides: dict[str, object] = {
        **sampling,
        "run.steps": steps,
        "training.learning_rate": 0.0,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "checkpoint.at_end": False,
    }
    with training_run(recipe, overrides) as run:
        run.wait(timeout_s=timeout_s)
        return run.steps()


def main() -> int:
    """Report both settings; exit code 1 when a mean is off or a step had no gradient signal at all."""
    arguments = argparse.ArgumentParser(description="Compare engine and trainer logprobs at learning rate 0.")
    arguments.add_argument("--recipe", type=Path, default=DEMO_RECIPE)
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--timeout-s", type=float, default=600.0)
    options = arguments.parse_args()
    passed = True
    for sampling in SETTINGS:
        steps = measure(options.recipe, sampling, options.steps, options.timeout_s)
        if any("policy/is_weight_mean" not in step for step in steps):
            print(f"FAILED: {sampling}: a step without a gradient signal: each group has equal rewards")
            passed = False
            continue
        worst = max(abs(step["policy/is_weight_mean"] - 1) for step in steps)
        p99 = max(step["policy/logprob_diff_abs_p99"] for step in steps)
        passed = passed and worst <= TOLERANCE
        print(
            f"{', '.join(f'{key} {value}' for key, value in sampling.items())}, {len(steps)} steps: "
            f"|mean ratio - 1| at most {worst:.2e}; 99th percentile of |difference| at most {p99:.2e}; share of tokens "
            f"with the engine's kept set at least {min(step.get('policy/kept_set_ratio', 0.0) for step in steps):.4f}"
        )
    print("passed" if passed else f"FAILED: a mean ratio is further than {TOLERANCE} from 1")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
