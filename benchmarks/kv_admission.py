"""Admission by KV caches against fixed slots, on a real engine whose cache holds a part of the contexts.

    python benchmarks/kv_admission.py --pairs 2 [--group-size 1]

Both runs are the demo's model with a learning rate of 0, ``continuous`` rounds, equal rewards and five batches of 32
trajectories in flight. A trajectory has eight turns of 24 tokens, each followed by 24 tokens of a tool that takes
0.1 s, so that contexts grow to eight times those of the first turn. The runs of a pair take turns. Printed: seconds a
trained trajectory, preemptions so far, and the shares of later turns' prompt tokens that were in the prefix cache, and
that had been evicted from it; beside each run the goodput of a simulation that is fitted to it. With ``--group-size 1``
the rounds have no groups, and baselines of prompts (``objective.advantages = "tracked"``)."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

from training_run import DEMO_RECIPE, NOTHING_LEARNT, mean_figures, training_run

from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.simulate.calibrate import calibrate
from streamrl.simulate.recording import agreement, load_recording

STALENESS = 4
CODE = """
import anyio

async def reward(completion):
    return 0.0

async def talk(model, *, prompt):
    chat = model.chat()
    said = prompt
    for _ in range(8):
        await chat.say(said)
        await anyio.sleep(0.1)
        said = "1 2 3 4 5 6 7 8 9 0 1 2 "
"""
SHOWN = (
    "perf/samples_s",
    "engines/preemptions_total",
    "engines/prefix_hit_ratio",
    "engines/prefix_miss_evicted_ratio",
    "admission/limit",
    "admission/pauses_total",
)


def measure(code: Path, admission: str, kv_tokens: int, steps: int, group_size: int) -> dict[str, float]:
    """Means over ``steps`` steps of a run, between the first ones and the last ones."""
    overrides: dict[str, object] = {
        "run.steps": steps + 2 * (STALENESS + 1),
        "rewards.0.function": f"{code}:reward",
        "environment.episode": f"{code}:talk",
        "environment.max_tokens": 480,
        "rollout.rounds": "continuous",
        "rollout.admission": admission,
        "rollout.max_staleness": STALENESS,
        "rollout.prompts_per_batch": 32 // group_size,
        "rollout.group_size": group_size,
        "sampling.min_tokens": 24,
        "sampling.max_tokens": 24,
        "engines.advanced.kv_tokens": kv_tokens,
        "engines.max_num_seqs": 96,
        **NOTHING_LEARNT,
    }
    if group_size == 1:
        overrides["objective.advantages"] = "tracked"
    with training_run(DEMO_RECIPE, overrides) as run:
        run.wait(timeout_s=900.0)
        records = run.steps()[STALENESS + 1 :][:steps]
        assert run.directory is not None
        recorded = load_recording(run.directory)
        recipe = load_recipe(run.directory / "recipe.toml")
    match = agreement(recorded, recipe, calibrate(recorded, recipe).model)
    ratio = match.goodput[1] / match.goodput[0]
    return {"simulated goodput over the recorded one": ratio, **mean_figures(records, SHOWN)}


def main() -> int:
    """Print each pair and the median ratio of seconds; 1 where admission is slower."""
    arguments = argparse.ArgumentParser(description="Compare admission by KV caches with fixed slots.")
    arguments.add_argument("--pairs", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--kv-tokens", type=int, default=12_000)
    arguments.add_argument("--group-size", type=int, default=4)
    options = arguments.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory(prefix="admission-") as folder:
        code = Path(folder, "code.py")
        code.write_text(CODE)
        for _ in range(options.pairs):
            seconds: dict[str, float] = {}
            for admission in random.sample(["slots", "kv"], 2):
                means = measure(code, admission, options.kv_tokens, options.steps, options.group_size)
                seconds[admission] = 1 / means["perf/samples_s"]
                shown = {name: round(mean, 3) for name, mean in means.items()}
                print(f"{admission}: {seconds[admission]:.4f} s a trajectory {shown}", flush=True)
            ratios.append(seconds["slots"] / seconds["kv"])
    print(f"slots / kv: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return int(statistics.median(ratios) < 1)


if __name__ == "__main__":
    sys.exit(main())
