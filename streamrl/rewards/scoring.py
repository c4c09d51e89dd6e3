"""From trajectories to scored trajectories: arguments, values, weights. A reward is a value that user code returned.

The reward is ``sum(weight * value)`` over the functions that apply. A function that returns None does not apply to
that sample and contributes nothing; where none applies there is no reward, so the sample fails (``wrong_type``,
"not applicable"). A function that fails fails the sample: the first failure, in the order of the recipe, is recorded.
"""

from __future__ import annotations

import asyncio
import copy
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamrl.config.recipe import Reward
from streamrl.rewards.calls import CallFailure, CallResult, CallRunner
from streamrl.rewards.signature import PROVIDED, RewardFunction, RewardSignature
from streamrl.tokenizer import Tokenizer
from streamrl.types import RewardFailure, RewardFailureKind, ScoredTrajectory, TokenArray, Trajectory, token_array

Outcome = ScoredTrajectory | RewardFailure


class WeightedReward(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded function with what the recipe says about it."""

    function: RewardFunction
    recipe: Reward


class CheckedValue(msgspec.Struct, frozen=True):
    """What one function gave one sample: ``value`` (None: not applicable) or a failure."""

    value: float | None = None
    failure: CallFailure | None = None
    seconds: float = 0.0


class GroupScorer:
    """Scores the trajectories of an order with every function of the recipe, side by side."""

    def __init__(self, rewards: Sequence[WeightedReward], tokenizer: Tokenizer, runner: CallRunner) -> None:
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._runner = runner

    async def score(self, trajectories: Sequence[Trajectory]) -> tuple[Outcome, ...]:
        """One outcome for each trajectory, in the same order. Never raises for what user code does."""
        token_ids = [trained_tokens(trajectory) for trajectory in trajectories]
        completions = [self._tokenizer.decode(ids) for ids in token_ids]
        columns: list[list[CheckedValue]] = []
        async with asyncio.TaskGroup() as calls:
            pending = [
                calls.create_task(self._score_with(reward, trajectories, completions, token_ids))
                for reward in self._rewards
            ]
        columns = [task.result() for task in pending]
        by_sample = zip(*columns, strict=True)
        return tuple(
            combine(trajectory, self._rewards, values)
            for trajectory, values in zip(trajectories, by_sample, strict=True)
        )

    async def _score_with(
        self,
        reward: WeightedReward,
        trajectories: Sequence[Trajectory],
        completions: list[str],
        token_ids: list[TokenArray],
    ) -> list[CheckedValue]:
        """One checked value for each trajectory: a call each, or one call for each group."""
        if not reward.function.signature.per_group:
            groups = [[index] for index in range(len(trajectories))]
        else:
            by_group: dict[tuple[int, str], list[int]] = {}
            for index, trajectory in enumerate(trajectories):
                by_group.setdefault((trajectory.id.group_id, trajectory.id.prompt_id), []).append(index)
            groups = list(by_group.values())
        checked: list[CheckedValue] = [CheckedValue()] * len(trajectories)
        async with asyncio.TaskGroup() as calls:
            pending = [
                calls.create_task(
                    self._call(
                        reward,
                        [trajectories[i] for i in group],
                        [completions[i] for i in group],
                        [token_ids[i] for i in group],
                    )
                )
                for group in groups
            ]
        for group, task in zip(groups, pending, strict=True):
            for index, value in zip(group, task.result(), strict=True):
                checked[index] = value
        return checked

    async def _call(
        self,
        reward: WeightedReward,
        trajectories: Sequence[Trajectory],
        completions: list[str],
        token_ids: list[TokenArray],
    ) -> list[CheckedValue]:
        signature = reward.function.signature
        first = trajectories[0]
        finish_reasons = [trajectory.finish_reason.value for trajectory in trajectories]
        provided: dict[str, Any] = {"prompt_id": first.id.prompt_id}
        if "prompt" in signature.provided:
            text = first.prompt.columns.get("prompt")
            provided["prompt"] = self._tokenizer.decode(first.prompt.token_ids) if text is None else text
        lists = [ids.tolist() for ids in token_ids]
        provided["token_ids"] = lists if signature.per_group else lists[0]
        provided["finish_reason"] = finish_reasons if signature.per_group else finish_reasons[0]
        arguments = choose_arguments(signature, first.prompt.columns, provided)
        if isinstance(arguments, CallFailure):
            return [CheckedValue(failure=arguments)] * len(trajectories)
        completion = completions if signature.per_group else completions[0]
        result = await self._runner.call(reward.function, reward.recipe.time_limit_s, completion, arguments)
        return check_result(result, len(trajectories), per_group=signature.per_group)


def trained_tokens(trajectory: Trajectory) -> TokenArray:
    """Token ids of all trained segments, joined: what the policy sampled."""
    joined = token_array()
    for segment in trajectory.segments:
        if segment.trained:
            joined.extend(segment.token_ids)
    return joined


def choose_arguments(
    signature: RewardSignature, columns: Mapping[str, Any], provided: Mapping[str, Any]
) -> dict[str, Any] | CallFailure:
    """Keyword arguments of one call. A name of ``PROVIDED`` always means ours, whatever columns there are, and a column
    with the name of the first parameter is not passed. Columns are copied: a function may change what it got."""
    missing = [name for name in signature.columns if name not in columns]
    if missing:
        return CallFailure(
            RewardFailureKind.RAISED, f'the prompt has no column "{missing[0]}", which {signature.name} needs: add it'
        )
    if signature.wants_all:
        chosen = [name for name in columns if name not in PROVIDED or name == "prompt"]
    else:
        chosen = [name for name in (*signature.columns, *signature.optional_columns) if name in columns]
    arguments = {name: copy.deepcopy(columns[name]) for name in chosen if name != signature.first}
    arguments.update({name: provided[name] for name in signature.provided})
    return arguments


def check_result(result: CallResult, count: int, *, per_group: bool) -> list[CheckedValue]:
    """``count`` checked values from what one call gave."""
    if result.failure is not None:
        return [CheckedValue(failure=result.failure, seconds=result.seconds)] * count
    if not per_group:
        return [check_value(result.value, result.seconds)]
    if not isinstance(result.value, (list, tuple)):
        message = (
            f"returned {_type_name(result.value)}: a group function returns a list with one value for each completion"
        )
    elif len(result.value) != count:
        message = f"returned {len(result.value)} values for {count} completions"
    else:
        return [check_value(value, result.seconds) for value in result.value]
    return [CheckedValue(failure=CallFailure(RewardFailureKind.WRONG_TYPE, message), seconds=result.seconds)] * count


def check_value(value: Any, seconds: float = 0.0) -> CheckedValue:
    """A finite float from what a function returned for one sample: a number (bool and NumPy scalars too) or None."""
    if value is None:
        return CheckedValue(seconds=seconds)
    if not isinstance(value, numbers.Real):
        message = f"returned {_type_name(value)}: return a float, an int, a bool, or None for not applicable"
        return CheckedValue(failure=CallFailure(RewardFailureKind.WRONG_TYPE, message), seconds=seconds)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except Exception as error:  # noqa: BLE001 - a user's number class may raise anything
        message = f"returned {_type_name(value)} that is no float: {type(error).__name__}"
        return CheckedValue(failure=CallFailure(RewardFailureKind.WRONG_TYPE, message), seconds=seconds)
    if not math.isfinite(number):
        message = f"returned {number}: a reward must be finite"
        return CheckedValue(failure=CallFailure(RewardFailureKind.NOT_FINITE, message), seconds=seconds)
    return CheckedValue(value=number, seconds=seconds)


def combine(trajectory: Trajectory, rewards: Sequence[WeightedReward], values: Sequence[CheckedValue]) -> Outcome:
    """The outcome of one sample. ``reward_parts`` holds the values as returned, without weights; ``reward_seconds``
    is the longest call (functions run side by side)."""
    seconds = max(value.seconds for value in values)
    for reward, value in zip(rewards, values, strict=True):
        if value.failure is not None:
            return _failure(trajectory, reward.function.name, value.failure, seconds)
    applicable = [(r, v.value) for r, v in zip(rewards, values, strict=True) if v.value is not None]
    every_name = ", ".join(reward.function.name for reward in rewards)
    if not applicable:
        none = CallFailure(RewardFailureKind.WRONG_TYPE, "not applicable: every reward function returned None")
        return _failure(trajectory, every_name, none, seconds)
    total = sum(reward.recipe.weight * value for reward, value in applicable)
    if not math.isfinite(total):
        infinite = CallFailure(RewardFailureKind.NOT_FINITE, f"the weighted sum of the rewards is {total}")
        return _failure(trajectory, every_name, infinite, seconds)
    parts = {reward.function.name: value for reward, value in applicable}
    return ScoredTrajectory(trajectory=trajectory, reward=total, reward_parts=parts, reward_seconds=seconds)


def _failure(trajectory: Trajectory, function: str, failure: CallFailure, seconds: float) -> RewardFailure:
    return RewardFailure(
        trajectory=trajectory,
        function=function,
        kind=failure.kind,
        message=failure.message,
        reward_seconds=seconds,
    )


def _type_name(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
