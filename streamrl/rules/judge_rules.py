"""Rules of ``[judge]``, and of the rewards that ask it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from streamrl.recipe.judge import CALLS_AT_ONCE, JUDGE_REWARD, Judge, asks_own_judge
from streamrl.recipe.problems import shown
from streamrl.recipe.rewards import Reward
from streamrl.recipe.sections import Recipe

Broken = Iterator[tuple[str, str]]

_CORES = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")


def are_cores(text: str) -> bool:
    """Whether ``text`` is such as ``0``, ``0-3`` or ``0,2,4-7``."""
    ranges = [_CORES.fullmatch(part) for part in text.split(",")]
    return all(found and int(found[1]) <= int(found[2] or found[1]) for found in ranges)


def judges_are_there(recipe: Recipe) -> Broken:
    """Whoever asks is answered, and whoever is started is asked."""
    asking = [index for index, reward in enumerate(recipe.rewards) if asks_own_judge(reward)]
    if recipe.judge.model:
        if not asking:
            yield (
                "judge.model",
                (
                    f'{shown(recipe.judge.model)} is asked by nobody: add a reward with function = "{JUDGE_REWARD}" '
                    "that names no endpoint, or leave [judge] out"
                ),
            )
        return
    for index in asking:
        yield (
            f"rewards.{index}.options",
            (
                f'function = "{JUDGE_REWARD}" has nobody to ask: set endpoint in [rewards.options], such as '
                '"http://host:8000/v1", or model in [judge], which this run then starts itself'
            ),
        )
    for name in Judge.__struct_fields__:
        if (value := getattr(recipe.judge, name)) != getattr(Judge(), name):
            yield f"judge.{name}", f"{shown(value)} has no effect without judge.model: name a model, or remove it"


def questions_come_in_time(recipe: Recipe) -> Broken:
    """A question that waits for a batch, or for the actor, must be asked before its reward is too late."""
    judge = recipe.judge
    if not judge.model:
        return
    if judge.batch_wait_s > judge.max_wait_s:
        yield (
            "judge.batch_wait_s",
            f"{judge.batch_wait_s:g} is above max_wait_s = {judge.max_wait_s:g}: lower it, or raise that",
        )
    for index, reward in enumerate(recipe.rewards):
        if asks_own_judge(reward) and reward.timeout_s <= judge.max_wait_s:
            yield (
                f"rewards.{index}.timeout_s",
                (
                    f"{reward.timeout_s:g} is over before a question that may wait for judge.max_wait_s = "
                    f"{judge.max_wait_s:g} is asked: raise it, or lower max_wait_s"
                ),
            )


def batches_come_together(recipe: Recipe) -> Broken:
    """As many calls must be open at once as make a batch."""
    judge, limits = recipe.judge, recipe.reward_limits
    asking = [reward for reward in recipe.rewards if asks_own_judge(reward)]
    if not judge.model or not asking:
        return
    at_once = limits.workers * sum(min(reward.concurrency or limits.concurrency, _asked(reward)) for reward in asking)
    if judge.batch > at_once:
        yield (
            "judge.batch",
            (
                f"{judge.batch} questions never wait at once, because its rewards have {at_once} calls at once: "
                "lower it, or raise concurrency in [reward_limits] and in the reward's options"
            ),
        )


def _asked(reward: Reward) -> int:
    asked = reward.options.get("concurrency", CALLS_AT_ONCE)
    return asked if isinstance(asked, int) else CALLS_AT_ONCE


def judge_cores(recipe: Recipe) -> Broken:
    """``cores`` is a list of them, and says how many threads there are."""
    judge = recipe.judge
    if judge.cores and not are_cores(judge.cores):
        yield "judge.cores", f'"{judge.cores}" is not a list of cores: write "0", "0-3" or "0,2,4-7"'
    if judge.cores and judge.threads:
        yield "judge.threads", f"{judge.threads} beside judge.cores, which say how many there are: leave one out"
