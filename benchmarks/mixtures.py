"""Held-out accuracy of two tasks that are learnt in one run, and of each in a run of its own.

    python benchmarks/mixtures.py --out /tmp/mixtures [--seeds 1 2 3]

The tasks are those of examples/calculator (0.3 M parameters): ``tool`` answers questions with a calculator, in turns,
and ``alone`` answers them in one completion, without it. ``both`` draws as many prompts of each task in a step as
``tool`` and ``alone`` do, which train on one task. All have the same steps. One line of JSON a run in
OUT/results.jsonl, and a table at the end. A run takes 1 to 4 minutes on two cores."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from distillation import NEVER, ROOT, held_out_scores, run_until

RECIPE = ROOT / "examples" / "calculator" / "recipe.toml"
SOURCE = "train.jsonl?chat=true"
SETS = {"tool": f'{{prompts="{SOURCE}"}}', "alone": f'{{prompts="{SOURCE}", environment=false, rewards=["right"]}}'}
HELD_OUT = {"hard": 340, "easy": 172}
"""Number of the held-out questions of each file."""
RUNS: dict[str, Sequence[str]] = {"both": ("tool", "alone"), "tool": ("tool",), "alone": ("alone",)}


def overrides(tasks: Sequence[str], seed: int, steps: int) -> list[str]:
    """Settings of a run on ``tasks``, with 32 prompts a step of each."""
    train = ", ".join(f"{task} = {SETS[task]}" for task in tasks)
    held_out = ", ".join(
        f'{task}_{level} = {{prompts="held_out_{level}.jsonl?chat=true", like="{task}"}}'
        for task in tasks
        for level in HELD_OUT
    )
    rewards = []
    if "tool" not in tasks:  # the price of a call would score nothing
        rewards = ['rewards=[{function = "calculator_reward.py:right"}]']
    return [
        *rewards,
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"rollout.prompts_per_batch={32 * len(tasks)}",
        f"prompts.train={{{train}}}",
        f"evaluation.prompts={{{held_out}}}",
        "evaluation.every=20",
    ]


def scores_of_task(directory: Path, task: str) -> dict[int, float]:
    """Share of all held-out questions that are right in ``task``, by step."""
    by_level = {level: held_out_scores(directory, f"eval/{task}_{level}/avg@1") for level in HELD_OUT}
    total = sum(HELD_OUT.values())
    return {
        step: sum(by_level[level][step] * count for level, count in HELD_OUT.items()) / total
        for step in by_level["hard"]
    }


def main() -> None:
    """Train every run with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    results: dict[tuple[str, str], list[float]] = {}
    for seed in arguments.seeds:
        for name, tasks in RUNS.items():
            directory = out / f"{name}-{seed}"
            run_until(RECIPE, directory, overrides(tasks, seed, arguments.steps), NEVER)
            for task in tasks:
                by_step = scores_of_task(directory, task)
                results.setdefault((task, name), []).append(list(by_step.values())[-1])
                row = {"run": name, "task": task, "seed": seed, "by_step": by_step}
                with (out / "results.jsonl").open("a") as lines:
                    lines.write(json.dumps(row) + "\n")
                print(f"seed {seed}, {task} in {name}: {by_step}", flush=True)
    for (task, name), scores in sorted(results.items()):
        listed = ", ".join(f"{score:.3f}" for score in scores)
        print(f"{task:<6} in {name:<6} after {arguments.steps} steps: {listed}; mean {sum(scores) / len(scores):.3f}")


if __name__ == "__main__":
    main()
