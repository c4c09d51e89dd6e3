"""Inspection of reward functions in a process of their own:
``python -m streamrl.rewards.calls.inspect ... REWARD...`` (JSON).

The user's modules may import torch, call ``sys.exit`` or never return; the process that checks a recipe must
neither load that nor wait for it. One JSON line is written for each reward, as soon as it is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from streamrl.base.errors import UNDECODABLE, RecipeError
from streamrl.recipe.rewards import Reward
from streamrl.recipe.throwaway_process import answer_parent, run_throwaway
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.environment import passed_environment
from streamrl.rewards.signature import RewardSignature


class RewardInspection(msgspec.Struct, frozen=True, kw_only=True):
    """One reward: its signature, or why it cannot be used (one line each, with the remedy)."""

    signature: RewardSignature | None = None
    problems: tuple[str, ...] = ()


def inspect_in_subprocess(rewards: Sequence[Reward], timeout_s: float = 60.0) -> list[RewardInspection]:
    """Inspect rewards in a throw-away process, in at most ``timeout_s`` seconds for all of them.

    One inspection for each reward, in order. A module that hangs, exits or crashes the process is a problem of
    that reward and not an exception; those after it are inspected in another process."""
    inspections: list[RewardInspection] = []
    budget = timeout_s
    while len(inspections) < len(rewards):
        found, failure, seconds = _inspect_some(rewards[len(inspections) :], budget)
        inspections += found
        budget = max(1.0, budget - seconds)
        if len(inspections) < len(rewards):
            spec = rewards[len(inspections)].function
            inspections.append(RewardInspection(problems=(f'reward "{spec}" {failure}',)))
    return inspections


def _inspect_some(rewards: Sequence[Reward], timeout_s: float) -> tuple[list[RewardInspection], str, float]:
    """Inspections of the first rewards, what stopped the process at the next one, and the seconds it had."""
    given = [msgspec.json.encode(reward).decode() for reward in rewards]
    # It finds the environment in which it will score, and no more.
    ran = run_throwaway("streamrl.rewards.calls.inspect", given, timeout_s, environment=passed_environment(rewards))
    if ran.late:
        failure = f"was not imported within {timeout_s:g} s: move slow work out of the module's top level"
    else:
        failure = f"ended the process that imported it ({ran.failure or 'exit code 0'}): import it by hand"
    return read_inspections(ran.written)[: len(rewards)], failure, ran.seconds


def read_inspections(written: bytes) -> list[RewardInspection]:
    """The lines that the process wrote before it ended, up to the first that is none."""
    found = []
    for line in filter(None, written.splitlines()):
        try:
            found.append(msgspec.json.decode(line, type=RewardInspection))
        except UNDECODABLE:  # cut, or the user's module found the descriptor
            break
    return found


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    for given in arguments:
        reward = msgspec.json.decode(given, type=Reward)
        try:
            inspection = RewardInspection(signature=load_reward(reward).signature)
        except RecipeError as error:
            inspection = RewardInspection(problems=tuple(error.problems))
        answers.write(msgspec.json.encode(inspection) + b"\n")


if __name__ == "__main__":
    answer_parent(_answer)
