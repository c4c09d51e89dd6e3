"""Inspection of reward functions in a process that does nothing else:
``python -m streamrl.rewards.calls.inspect TIMEOUT_S PARENT_PID``, with rewards as JSON on stdin.

Commands that check a recipe and the controller (when it starts, and before rewards change) call
``inspect_in_subprocess``. The user's modules may import torch, call ``sys.exit`` or never return, so the calling
process neither imports the modules nor waits for them without a limit. The inspecting process writes one JSON line for
each reward, as soon as the reward is inspected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import BinaryIO

from msgspec import Struct, json

from streamrl.base.errors import UNDECODABLE, RecipeError
from streamrl.base.types import Texts
from streamrl.recipe.rewards import Reward
from streamrl.recipe.throwaway_process import answer_parent, run_throwaway
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.signature import RewardSignature
from streamrl.rewards.user_variables import variables_of_user_code


class RewardInspection(Struct, frozen=True, kw_only=True):
    """Result for one reward: its signature, or the problems for which it cannot be used (a line each, with the
    remedy)."""

    signature: RewardSignature | None = None
    problems: Texts = ()


def inspect_in_subprocess(rewards: Sequence[Reward], timeout_s: float = 60.0) -> list[RewardInspection]:
    """Inspect rewards in a throw-away process, in about ``timeout_s`` seconds for all of them.

    Returns one inspection for each reward, in order. A module that hangs, exits or crashes the process is a problem of
    its reward and not an exception; the rewards after it are inspected in another process."""
    inspections: list[RewardInspection] = []
    budget = timeout_s
    while len(inspections) < len(rewards):
        more_inspections, failure, seconds = _inspect_some(rewards[len(inspections) :], budget)
        inspections += more_inspections
        budget = max(1.0, budget - seconds)  # each further process has at least a second
        if len(inspections) < len(rewards):
            spec = rewards[len(inspections)].function
            inspections.append(RewardInspection(problems=(f'reward "{spec}" {failure}',)))
    return inspections


def _inspect_some(rewards: Sequence[Reward], timeout_s: float) -> tuple[list[RewardInspection], str, float]:
    """Inspections of the first rewards, the failure that ended the process at the next reward, and the seconds that the
    process ran."""
    arguments = [json.encode(reward).decode() for reward in rewards]
    # The process has the same variables as the processes of a reward worker that call the functions.
    variables = variables_of_user_code(rewards)
    ran = run_throwaway("streamrl.rewards.calls.inspect", arguments, timeout_s, variables=variables)
    if ran.late:
        failure = f"was not imported within {timeout_s:g} s: move slow work out of the module's top level"
    else:
        failure = f"ended the process that imported it ({ran.failure or 'exit code 0'}): import it by hand"
    # User code could write further lines.
    return read_inspections(ran.written)[: len(rewards)], failure, ran.seconds


def read_inspections(written: bytes) -> list[RewardInspection]:
    """The inspections that the process wrote before it ended, up to the first line that cannot be decoded."""
    inspections = []
    for line in filter(None, written.splitlines()):
        try:
            inspections.append(json.decode(line, type=RewardInspection))
        except UNDECODABLE:  # the line is incomplete, or the user's module wrote to the descriptor
            break
    return inspections


def _answer(answers: BinaryIO, arguments: Sequence[str]) -> None:
    for argument in arguments:
        reward = json.decode(argument, type=Reward)
        try:
            inspection = RewardInspection(signature=load_reward(reward).signature)
        except RecipeError as error:
            inspection = RewardInspection(problems=tuple(error.problems))
        answers.write(json.encode(inspection) + b"\n")


if __name__ == "__main__":
    answer_parent(_answer)
