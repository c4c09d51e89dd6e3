"""What the adaptive time limit is worth: the reward part of short rounds against a fixed ceiling, in the real runtime.

    python benchmarks/adaptive_limit.py [--scale 0.1] [--rounds 6]

The run times are the reference's (RollPacker, arXiv 2509.21009): a ceiling
of 30 s, a floor of 2 s, factor 1.5; 5 % of the completions run into the ceiling (generated code in an endless loop),
1 % take 2 to 30 s, the others have a median of 0.31 s and a 90th percentile of 0.87 s. How they spread over prompts is
not published: here that is each prompt's own time, and its completions vary by a tenth around it. Two thirds of those
that are neither slow nor endless are correct. ``--scale`` shrinks all times alike; the calls are processes that sleep.

A short round is RollPacker's race: 20 prompts x 5 completions arrive at once, and it is over when 16 prompts have 4
that were scored. Nobody waits for one that hangs, but it keeps one of ``--processes``; 25 completions for each is what
1,600 requests are for 64 sandboxes. A round without a race waits for all. Each round has the same prompts; the first
are the warm-up, since no limit is known before a prompt was solved. Printed for both limits: how long the rounds were,
the calls that were cut, and how many of those were correct. The paper's own figure: 56.0 against 31.9 s."""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from pathlib import Path
from statistics import fmean

import anyio
import msgspec
from reward_throughput import write_model

from streamrl.base.types import (
    FinishReason,
    Prompt,
    RewardFailure,
    ScoredTrajectory,
    Segment,
    Trajectory,
    TrajectoryId,
    float_array,
    token_array,
)
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rewards import AdaptiveTimeout, Reward, RewardLimits
from streamrl.rewards.calls.reward_set import RewardSet

CEILING_S, FLOOR_S, FACTOR = 30.0, 2.0, 1.5
HANG_SHARE, SLOW_SHARE = 0.05, 0.01
MEDIAN_S, SIGMA = 0.31, 0.805  # P90: 0.87 s
PROMPTS, LAUNCHED = 20, 5
KEPT_PROMPTS, KEPT = 16, 4
SLEEPER = """
import time


def sleeper(completion, *, seconds, correct):
    time.sleep(seconds[int(completion)])
    return float(correct[int(completion)])
"""


class Completions(msgspec.Struct, frozen=True):
    """One prompt in one round: seconds of each completion, and whether it is correct."""

    seconds: list[float]
    correct: list[bool]


def draw_round(prompts: list[float], rng: random.Random, scale: float) -> list[Completions]:
    """``prompts``: the typical seconds of each."""
    drawn = []
    for typical in prompts:
        seconds: list[float] = []
        correct: list[bool] = []
        for _ in range(LAUNCHED):
            kind = rng.random()
            usual = kind >= HANG_SHARE + SLOW_SHARE
            if kind < HANG_SHARE:
                seconds.append(10 * CEILING_S)
            else:
                seconds.append(typical * rng.lognormvariate(0.0, 0.1) if usual else rng.uniform(FLOOR_S, CEILING_S))
            correct.append(usual and rng.random() < 2 / 3)
        drawn.append(Completions([s * scale for s in seconds], correct))
    return drawn


def trajectories_of(drawn: list[Completions], number: int) -> list[list[Trajectory]]:
    """A group for each prompt. The completion is the digit that says which one it is."""
    return [
        [
            Trajectory(
                id=TrajectoryId(prompt_id=f"p{index}", group_id=number * PROMPTS + index, sample=sample),
                prompt=Prompt(
                    prompt_id=f"p{index}",
                    token_ids=token_array([2]),
                    columns={"seconds": completions.seconds, "correct": completions.correct},
                ),
                segments=(
                    Segment(token_ids=token_array([29 + sample]), trained=True, behavior_logprobs=float_array([-1.0])),
                ),
                finish_reason=FinishReason.STOP,
            )
            for sample in range(LAUNCHED)
        ]
        for index, completions in enumerate(drawn)
    ]


class Measured(msgspec.Struct):
    """Sums over the rounds after the warm-up."""

    short_s: list[float]
    long_s: list[float]
    late: int = 0
    correct_and_late: int = 0
    calls: int = 0


async def score_round(rewards: RewardSet, groups: list[list[Trajectory]], drawn: list[Completions], into: Measured,
                      *, counted: bool) -> None:  # fmt: skip
    """Score all completions; note when the short round, and when the long one, is over."""
    started = time.monotonic()
    ended: list[list[float]] = [[] for _ in groups]

    async def score(group: int, trajectory: Trajectory) -> None:
        (outcome,) = await rewards.score([trajectory])
        ended[group].append(time.monotonic() - started)
        if not counted:
            return
        into.calls += 1
        if isinstance(outcome, RewardFailure):
            into.late += 1
            into.correct_and_late += drawn[group].correct[trajectory.id.sample]
        else:
            assert isinstance(outcome, ScoredTrajectory)

    async with asyncio.TaskGroup() as orders:
        for index, group in enumerate(groups):
            for trajectory in group:
                orders.create_task(score(index, trajectory))
    if counted:
        into.short_s.append(sorted(sorted(times)[KEPT - 1] for times in ended)[KEPT_PROMPTS - 1])
        into.long_s.append(max(max(times) for times in ended))


async def measure(directory: Path, given: argparse.Namespace, *, adaptive: bool) -> Measured:
    """Run the warm-up and then the rounds that count. Seconds in the result are not scaled."""
    scale: float = given.scale
    limit = AdaptiveTimeout(factor=FACTOR, min_s=FLOOR_S * scale) if adaptive else None
    reward = Reward(
        function=f"{directory}/sleepers.py:sleeper",
        timeout_s=CEILING_S * scale,
        adaptive_timeout=limit,
        late_is_wrong=False,
        concurrency=PROMPTS * LAUNCHED,
    )
    limits = RewardLimits(processes=given.processes, concurrency=PROMPTS * LAUNCHED)
    rng = random.Random(given.seed)
    prompts = [rng.lognormvariate(math.log(MEDIAN_S), SIGMA) for _ in range(PROMPTS)]
    measured = Measured([], [])
    async with asyncio.TaskGroup() as tasks:
        rewards = RewardSet([reward], limits, load_tokenizer(directory), tasks)
        await rewards.open()
        for number in range(given.warm_up + given.rounds):
            drawn = draw_round(prompts, rng, scale)
            groups = trajectories_of(drawn, number)
            await score_round(rewards, groups, drawn, measured, counted=number >= given.warm_up)
        await rewards.aclose()
    measured.short_s = [seconds / scale for seconds in measured.short_s]
    measured.long_s = [seconds / scale for seconds in measured.long_s]
    return measured


async def compare(given: argparse.Namespace) -> None:
    """Both limits on the same draws."""
    with tempfile.TemporaryDirectory(prefix="srl", dir="/tmp") as name:
        directory = Path(name)
        write_model(directory)
        (directory / "sleepers.py").write_text(SLEEPER)
        fixed = await measure(directory, given, adaptive=False)
        adaptive = await measure(directory, given, adaptive=True)
    for kind, of in (("fixed", fixed), ("adaptive", adaptive)):
        print(
            f"{kind:>9}: reward part of a short round {fmean(of.short_s):6.2f} s, of one that waits for all "
            f"{fmean(of.long_s):6.2f} s; {of.late} of {of.calls} calls cut, {of.correct_and_late} of them correct"
        )
    for kind in ("short_s", "long_s"):
        saved = 1 - fmean(getattr(adaptive, kind)) / fmean(getattr(fixed, kind))
        print(f"{kind.removesuffix('_s'):>9}: {saved:.0%} less")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scale", type=float, default=0.1, help="seconds of this machine for one of the reference")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    anyio.run(compare, parser.parse_args(), backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
