"""Sampled tokens a second of trajectories of several turns against single completions of as many tokens.

    python benchmarks/turns_throughput.py --pairs 3

Both runs are the demo's model on a real engine with a learning rate of 0, ``continuous`` rounds, the same number of
trajectories in flight, equal rewards (so that nothing is trained, and the engine is what a step waits for) and fixed
lengths: one completion of 256 tokens, or four turns of 64 with a tool between them that sleeps for 0, 0.1 or 1 s. The
engine runs 48 at once. Those that are with their tool are in flight too, so that five batches of 64 are: with two, the
bound of staleness lets most of the engine idle at 1 s. A ratio is of the runs of one pair, which take turns; figures
are of the steps between the first five, while the run fills, and the last five, which launch nothing more."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

from training_run import DEMO_RECIPE, NOTHING_LEARNT, mean_figures, training_run

TURNS, TOKENS = 4, 64
STALENESS = 4
CODE = """
import anyio

async def reward(completion):
    return 0.0

async def talk(model, *, prompt):
    chat = model.chat()
    await chat.say(prompt)
    for _ in range({turns} - 1):
        await anyio.sleep({sleep})
        await chat.say("1 2 ")
"""


def rate(folder: Path, tool_s: float | None, steps: int) -> tuple[float, dict[str, float]]:
    """Sampled tokens a second of ``steps`` steps, and the means of what is shown. ``tool_s`` None: one completion."""
    code = folder / f"code_{tool_s}.py"
    code.write_text(CODE.format(turns=TURNS, sleep=tool_s or 0.0))
    talks = tool_s is not None
    tokens = TOKENS if talks else TURNS * TOKENS
    overrides: dict[str, object] = {
        "run.steps": steps + 2 * (STALENESS + 1),
        "rewards.0.function": f"{code}:reward",
        "rollout.rounds": "continuous",
        "rollout.max_staleness": STALENESS,
        "rollout.prompts_per_batch": 8,
        "rollout.group_size": 8,
        "sampling.min_tokens": tokens,
        "sampling.max_tokens": tokens,
        "engines.max_num_seqs": 48,
        **NOTHING_LEARNT,
    }
    if talks:
        overrides |= {"environment.episode": f"{code}:talk", "environment.max_tokens": 500}
    with training_run(DEMO_RECIPE, overrides) as run:
        run.wait(timeout_s=900.0)
        found = run.steps()[STALENESS + 1 :][:steps]
    sampled = sum(step["perf/samples_s"] * step["time/step_s"] * step["completion/length_mean"] for step in found)
    return sampled / sum(step["time/step_s"] for step in found), mean_figures(found, SHOWN)


def main() -> int:
    """Print each pair, and the median ratio by the time that a tool takes; 1 where one is below 0.85."""
    arguments = argparse.ArgumentParser(description="Compare trajectories of several turns with single completions.")
    arguments.add_argument("--pairs", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--tools", type=float, nargs="*", default=[0.0, 0.1, 1.0], help="seconds of a call")
    options = arguments.parse_args()
    worst = 1.0
    with tempfile.TemporaryDirectory(prefix="turns-") as name:
        for tool_s in options.tools:
            ratios = []
            for _ in range(options.pairs):
                figures: dict[bool, float] = {}
                for talks in random.sample([False, True], 2):
                    figures[talks], means = rate(Path(name), tool_s if talks else None, options.steps)
                    shown = {key: round(mean, 3) for key, mean in means.items()}
                    print(
                        f"tool of {tool_s:g} s, {'turns' if talks else 'one completion'}: {figures[talks]:.0f} {shown}"
                    )
                ratios.append(figures[True] / figures[False])
            spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
            print(f"tool of {tool_s:g} s: median ratio {statistics.median(ratios):.3f} ({spread})", flush=True)
            worst = min(worst, statistics.median(ratios))
    return int(worst < 0.85)


SHOWN = (
    "util/engine_idle_ratio",
    "util/free_slot_ratio",
    "environment/seconds_mean",
    "engines/prefix_hit_of_possible_ratio",
    "engines/prefix_miss_evicted_ratio",
)


if __name__ == "__main__":
    sys.exit(main())
