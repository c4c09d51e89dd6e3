"""Steps until a student has its teacher's accuracy, by reward and by distillation on its own samples.

    python benchmarks/distillation.py --out /tmp/distillation [--seeds 1 2 3] [--kinds reward sampled exact]
        [--recipe examples/smollm2/recipe.toml] [--set KEY=VALUE ...]

The teacher is the model of ``--recipe`` (default: the demo, examples/sort, 0.3 M parameters), trained by reward for all
its steps with seed 0, or ``--teacher FOLDER``. Each student begins with the model of the recipe, with the same prompts
in every kind. It is evaluated on held-out rows every 5 steps, and ends once it is within ``--within`` of the teacher.
One line of JSON a run in OUT/results.jsonl, and a table at the end. A run takes 3 to 8 minutes on two cores, and twice
as long with examples/smollm2."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "sort" / "recipe.toml"
SCORE = "eval/held_out/avg@1"
EVERY = 5
NEVER = 2.0
"""Accuracy that no run reaches: it trains to its last step."""
ROWS = 1024
KINDS = {
    "reward": [],
    "sampled": ["objective.algorithm=distillation"],
    "exact": ["objective.algorithm=distillation", "objective.advanced.divergence=exact"],
}


def held_out_scores(directory: Path, name: str = SCORE) -> dict[int, float]:
    """Held-out score by step, as far as the run in ``directory`` has come. ``name``: metric of the score."""
    metrics = directory / "latest" / "metrics.jsonl"
    if not metrics.exists():
        return {}
    lines = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line[name] for line in lines if name in line}


def run_until(recipe: Path, directory: Path, overrides: Sequence[str], until: float) -> dict[int, float]:
    """Train ``recipe`` in ``directory`` until the held-out accuracy is ``until``, or to the last step. Returns the
    accuracy by step."""
    directory.mkdir(parents=True)
    settings = [f"run.directory={directory}", f"evaluation.every={EVERY}", f"evaluation.limit={ROWS}", *overrides]
    options = [word for setting in settings for word in ("--set", setting)]
    with (directory / "log").open("w") as log:
        command = [sys.executable, "-m", "streamrl", "train", str(recipe), *options]
        run = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while run.poll() is None:
                if max(held_out_scores(directory).values(), default=-1.0) >= until:
                    run.terminate()
                    run.wait()
                time.sleep(1)
        finally:
            run.terminate()
            run.wait()
    return held_out_scores(directory)


def main() -> None:
    """Run every kind with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--steps", type=int, default=80, help="largest number of steps of a student")
    parser.add_argument("--within", type=float, default=0.05)
    parser.add_argument("--teacher", default="", help="folder of a trained model (default: it is trained first)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the students")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    teacher = arguments.teacher
    if not teacher:
        run_until(arguments.recipe, out / "teacher", ["run.seed=0"], NEVER)
        teacher = str(out / "teacher" / "latest" / "checkpoints" / "latest" / "hf")
    # The evaluation before the first step is the teacher's, on the rows of the students.
    overrides = [f"model.path={teacher}", "run.steps=1", "training.warmup_steps=0"]
    measured = run_until(arguments.recipe, out / "teacher-measured", overrides, 0.0)
    accuracy = measured[0]
    until = accuracy - arguments.within
    print(f"teacher {accuracy:.3f}; a student is done at {until:.3f}")
    rows = []
    for kind in arguments.kinds:
        for seed in arguments.seeds:
            overrides = [*KINDS[kind], f"run.seed={seed}", f"run.steps={arguments.steps}", *arguments.set]
            if kind != "reward":
                overrides.append(f"objective.reference={teacher}")
            by_step = run_until(arguments.recipe, out / f"{kind}-{seed}", overrides, until)
            reached = min((step for step, score in by_step.items() if score >= until), default=None)
            row = {"kind": kind, "seed": seed, "reached": reached, "teacher": accuracy, "by_step": by_step}
            rows.append(row)
            with (out / "results.jsonl").open("a") as results:
                results.write(json.dumps(row) + "\n")
            print(f"{kind:<8} seed {seed}: step {reached}, last {list(by_step.values())[-1]:.3f}", flush=True)
    for kind in arguments.kinds:
        steps = [str(row["reached"] or f"> {arguments.steps}") for row in rows if row["kind"] == kind]
        print(f"{kind:<8} steps to {until:.3f}: {', '.join(steps)}")


if __name__ == "__main__":
    main()
