"""Scoring of completions outside of a run, called by ``reward test`` and ``try`` in the command's own process."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

from streamrl.base.printable import printable
from streamrl.cli.try_rewards.trial_completions import CompletedGroup
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.rewards.calls.reward_set import opened_rewards
from streamrl.rewards.scoring import Outcome


def say(text: str) -> None:
    """Print progress on stderr: stdout is the report."""
    print(printable(text), file=sys.stderr, flush=True)


async def score_groups(
    scoring: Sequence[Reward], limits: RewardLimits, groups: Sequence[CompletedGroup], tokenizer: Tokenizer
) -> tuple[list[tuple[Outcome, ...]], float]:
    """Return the outcomes of each group, and the seconds that scoring all groups took."""
    async with opened_rewards(scoring, limits, tokenizer) as rewards:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as calls:
            tasks = [calls.create_task(rewards.score(group.trajectories)) for group in groups]
        seconds = time.perf_counter() - started
        if notice := rewards.take_notice():
            say(f"warning: {notice}")
        return [task.result() for task in tasks], seconds
