"""Does the off-policy correction keep what staleness would cost? The demo task, on-policy and at staleness 4.

    python benchmarks/off_policy.py --seeds 3 --out off_policy.json

Arms take the same number of optimizer steps. Stale ones run in continuous rounds with a reward that waits
``--reward-delay-s`` seconds, as a slow judge does: a finished trajectory grows old while it is scored, so that the
bound ``--staleness`` is nearly reached. How stale the trained tokens were is reported. ``plain`` is PPO as verl, SkyRL
and slime run it by default: its old logprobs are the trainer's own before the step, so that staleness is neither
clipped nor weighted. ``behavior_clip`` is PPO with the ratio against the version that sampled (TRL, PipelineRL). Passes
when plain PPO ends below on-policy and the corrected objective does not (95 % intervals of the differences, paired by
seed).
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path
from statistics import fmean

import msgspec
from repeated_runs import Interval, LearningRun, interval, learning_run
from training_run import DEMO_RECIPE

ON_POLICY, PLAIN, CORRECTED = "on_policy", "plain", "corrected"
ARMS: dict[str, dict[str, object]] = {
    ON_POLICY: {},
    PLAIN: {"off_policy.proximal": "decoupled", "off_policy.truncate": "none"},
    CORRECTED: {},  # the defaults: interpolated proximal policy, truncated importance weights
    "behavior_clip": {"off_policy.proximal": "behavior", "off_policy.truncate": "none"},
    "decoupled": {"off_policy.proximal": "decoupled"},
    "masked": {"off_policy.proximal": "decoupled", "off_policy.mask": "token"},
    "geometric": {
        "off_policy.mask": "geometric",
        "off_policy.advanced.mask_low": 0.9,
        "off_policy.advanced.mask_high": 1.1,
    },
}
NAMES = (
    "async/staleness_mean",
    "async/staleness_max",
    "async/staleness_oldest_max",
    "policy/is_weight_mean",
    "policy/ess",
    "policy/clip_ratio",
    "policy/kl_rollout",
)
SLOW_REWARD = '''"""The demo's reward after a wait."""

import asyncio
import runpy

reward = runpy.run_path({path!r})["sorted_trace"]


async def sorted_trace(completion, *, prompt, answer, finish_reason, **columns):
    await asyncio.sleep({seconds!r})
    return await reward(completion, prompt=prompt, answer=answer, finish_reason=finish_reason, **columns)
'''


class Comparison(msgspec.Struct, frozen=True):
    """One arm against on-policy. ``staleness``: mean of trained samples, largest, and largest by their oldest token."""

    arm: str
    accuracy: Interval
    difference: Interval | None
    staleness: tuple[float, float, float]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Compare stale training, plain and corrected, with on-policy training."
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=[ON_POLICY, PLAIN, CORRECTED])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=4, help="rollout.max_staleness of the stale arms")
    parser.add_argument("--reward-delay-s", type=float, default=8.0, help="how long a reward of the stale arms takes")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--updates-per-batch", type=int, default=1, help="of every arm")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="for each run")
    parser.add_argument("--out", type=Path, help="write every run and the comparisons as JSON")
    return parser.parse_args()


def arm_settings(arm: str, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """The overrides of one arm."""
    settings: dict[str, object] = {
        "run.steps": options.steps,
        "training.learning_rate": options.learning_rate,
        "training.updates_per_batch": options.updates_per_batch,
        "evaluation.at_end": True,
        **ARMS[arm],
    }
    if arm == ON_POLICY:
        return settings
    reward = folder / "slow_reward.py"
    original = DEMO_RECIPE.with_name("reward.py")
    reward.write_text(SLOW_REWARD.format(path=str(original), seconds=options.reward_delay_s))
    return settings | {
        "rollout.rounds": "continuous",
        "rollout.max_staleness": options.staleness,
        "rewards.0.function": f"{reward}:sorted_trace",
        # No reward waits for another one's wait.
        "reward_limits.concurrency": 4096,
    }


def run_all(options: argparse.Namespace) -> list[LearningRun]:
    """Every arm of a seed before the next seed, so that a drift of the machine meets all arms."""
    runs: list[LearningRun] = []
    with tempfile.TemporaryDirectory(prefix="streamrl-off-policy-") as name:
        for seed in range(options.seeds):
            for arm in options.arms:
                settings = arm_settings(arm, options, Path(name))
                run = learning_run(arm, seed, DEMO_RECIPE, settings, names=NAMES, timeout_s=options.timeout_s)
                runs.append(run)
                print(
                    f"seed {seed}, {arm}: accuracy {run.accuracy:.3f}, staleness "
                    f"{fmean(run.metrics['async/staleness_mean']):.2f}, {sum(run.step_seconds):.0f} s of steps",
                    flush=True,
                )
    return runs


def compare(arm: str, runs: list[LearningRun]) -> Comparison:
    """One arm's accuracy, its difference to on-policy (None without that arm), and how stale it was."""
    by_seed = {run.seed: run.accuracy for run in runs if run.arm == ON_POLICY}
    own = [run for run in runs if run.arm == arm]
    paired = arm != ON_POLICY and bool(by_seed)
    mean, largest, oldest = (
        [value for run in own for value in run.metrics[f"async/staleness_{name}"]]
        for name in ("mean", "max", "oldest_max")
    )
    return Comparison(
        arm=arm,
        accuracy=interval([run.accuracy for run in own]),
        difference=interval([run.accuracy - by_seed[run.seed] for run in own]) if paired else None,
        staleness=(fmean(mean), max(largest), max(oldest)),
    )


def table(comparisons: list[Comparison], runs: list[LearningRun]) -> str:
    """One row an arm."""
    lines = [
        "| arm | accuracies | mean ± standard error | minus on-policy | staleness: mean, max, oldest | ESS | clipped |",
        "|---|---|---|---|---|---|---|",
    ]
    for found in comparisons:
        own = [run for run in runs if run.arm == found.arm]
        each = " ".join(f"{run.accuracy:.3f}" for run in own)
        mean, largest, oldest = found.staleness
        ess, clipped = (_mean_of(own, name) for name in ("policy/ess", "policy/clip_ratio"))
        lines.append(
            f"| {found.arm} | {each} | {found.accuracy.mean:.3f} ± {found.accuracy.standard_error:.3f} "
            f"| {found.difference or '-'} | {mean:.2f}, {largest:.0f}, {oldest:.0f} | {ess:.3f} | {clipped:.4f} |"
        )
    return "\n".join(lines)


def _mean_of(runs: list[LearningRun], name: str) -> float:
    values = [value for run in runs for value in run.metrics[name]]
    return fmean(values) if values else math.nan


def verdict(comparisons: list[Comparison]) -> bool | None:
    """Whether plain PPO lost and the correction did not; None where an arm of the three is missing."""
    differences = {found.arm: found.difference for found in comparisons}
    plain, corrected = differences.get(PLAIN), differences.get(CORRECTED)
    return None if plain is None or corrected is None else plain.high < 0 and corrected.holds_zero


def main() -> int:
    """Run, report; exit code 1 when the claim does not hold."""
    options = parse_arguments()
    runs = run_all(options)
    comparisons = [compare(arm, runs) for arm in options.arms]
    passed = verdict(comparisons)
    print(
        f"\n{options.steps} steps, learning rate {options.learning_rate}, {options.updates_per_batch} updates a batch\n"
    )
    print(table(comparisons, runs))
    print({None: "", True: "\npassed", False: "\nFAILED: not (plain below on-policy, corrected not)"}[passed])
    if options.out:
        result = {"arms": comparisons, "runs": runs, "passed": passed}
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    return 1 if passed is False else 0


if __name__ == "__main__":
    sys.exit(main())
