"""A set of reward functions, loaded and ready to score: in this process, and in call processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import msgspec

from streamrl.base.types import Prompt, Trajectory
from streamrl.recipe.rewards import COMBINE_SEPARATE, COMBINE_WEIGHTS, Reward, RewardLimits
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.calls.pool import CallPool
from streamrl.rewards.calls.trusted import TrustedCoroutines, call_at_once, close_functions
from streamrl.rewards.reward_exchange import outcome_of, score_message
from streamrl.rewards.reward_messages import SampleReward, ScoreGroup
from streamrl.rewards.reward_queue import RewardQueue
from streamrl.rewards.scoring import Detokenizer, Outcome, SampleTexts, SampleValue, column_failure, combine
from streamrl.rewards.signature import RewardFunction, RewardSignature
from streamrl.rewards.values import CallFailure, CallResult

COMBINING = "combine"
# orders that are all searched for special tokens; then one in so many is
_LOOKED_AT = 1024
_LOOK_EVERY = 16


def combining_rewards(rewards: Sequence[Reward], limits: RewardLimits) -> tuple[Reward, ...]:
    """The recipe's own combining function, if any, as one more reward that runs where the others do."""
    if limits.combine in (COMBINE_WEIGHTS, COMBINE_SEPARATE):
        return ()
    return (Reward(function=limits.combine, name=COMBINING, trusted=all(reward.trusted for reward in rewards)),)


class RewardSet:
    """Scores trajectories with every function of ``rewards``, side by side. ``open`` before, ``aclose`` after.

    ``tasks`` must live longer than the set: a trusted coroutine that swallows its cancellation stays there, and
    ``tasks`` ends with ``StreamRLError`` when call processes cannot be started any more. ``combines``: the recipe has a
    function of its own that makes one number of the values."""

    def __init__(
        self, rewards: Sequence[Reward], limits: RewardLimits, tokenizer: Detokenizer, tasks: asyncio.TaskGroup
    ) -> None:
        self.rewards = rewards
        self.limits = limits
        self.signatures: list[RewardSignature] = []
        self._tokenizer = tokenizer
        self._tasks = tasks
        self._all = (*rewards, *combining_rewards(rewards, limits))
        self.combines = len(self._all) > len(rewards)
        self._trusted: dict[int, RewardFunction] = {}
        self._coroutines = TrustedCoroutines(tasks)
        other = [index for index, reward in enumerate(self._all) if not reward.trusted]
        self._pool_index = {index: place for place, index in enumerate(other)}
        self._pool: CallPool | None = None
        self._queues = [RewardQueue(reward, limits.concurrency) for reward in self._all]
        self._without_tokens = ""  # names of those that see no special tokens, until there is a notice of that
        self._orders = 0
        self._searched = 0
        self._with_tokens = 0
        self._notice = ""

    async def open(self) -> None:
        """Load the functions. Raises ``RecipeError`` with every problem."""
        self._trusted = {
            i: load_reward(reward, self._queues[i].limits) for i, reward in enumerate(self._all) if reward.trusted
        }
        found: list[RewardSignature] = []
        if self._pool_index:
            self._pool = CallPool([self._all[index] for index in self._pool_index], self.limits.processes)
            self._tasks.create_task(self._pool.run())
            found = await self._pool.opened()
        self.signatures = [
            self._trusted[index].signature if index in self._trusted else found[self._pool_index[index]]
            for index in range(len(self._all))
        ]
        scoring = self.signatures[: len(self.rewards)]
        self._without_tokens = ", ".join(signature.name for signature in scoring if not signature.sees_tokens)

    @property
    def per_group(self) -> bool:
        """Return whether some function scores whole groups."""
        return any(signature.per_group for signature in self.signatures)

    @property
    def longest_s(self) -> float:
        """Time limit of the slowest function, in seconds."""
        return max(reward.timeout_s for reward in self._all)

    @property
    def stuck(self) -> int:
        """Trusted coroutines past their limit that still run."""
        return self._coroutines.stuck

    def begin(self, order: ScoreGroup, prompts: Sequence[Prompt]) -> Scoring:
        """Score one order: plain trusted functions at once. ``prompts``: of the message."""
        texts = SampleTexts(order.completions, prompts, self._tokenizer)
        self._orders += 1
        look = self._without_tokens and (self._orders <= _LOOKED_AT or self._orders % _LOOK_EVERY == 0)
        special = texts.special_tokens() if look else []
        self._searched += bool(look)
        self._with_tokens += bool(special)
        # A token that a policy samples by chance is no format that a reward reads.
        often = 2 * self._with_tokens >= self._searched or self._with_tokens >= max(8, self._searched / 20)
        if special and often:
            self._notice = (
                f"completions have special tokens ({', '.join(special)}) that the reward {self._without_tokens} does "
                "not see: set special_tokens = true below [rewards.advanced] where it looks for them"
            )
            self._without_tokens = ""
        return Scoring(self, texts, order.rank)

    def take_notice(self) -> str:
        """Return what a person should know of the completions, once; empty: nothing new."""
        notice = self._notice
        self._notice = ""
        return notice

    async def score(self, trajectories: Sequence[Trajectory], rank: int = 0) -> tuple[Outcome, ...]:
        """One outcome for each trajectory, in the same order, of version 0. Never raises for what user code does.
        ``rank``: of several orders that wait, the smallest goes first."""
        message = score_message(trajectories, rank=rank)
        rewards = await self.begin(message.groups[0], message.prompts).finish()
        return tuple(outcome_of(t, reward, 0) for t, reward in zip(trajectories, rewards, strict=True))

    def remember_limits(self, slowest_s: Mapping[str, Mapping[str, float]]) -> None:
        """Slowest correct calls by reward and key, which other workers have observed."""
        for queue in self._queues:
            queue.limits.remember(slowest_s.get(queue.reward.label, {}))

    def take_learnt_limits(self) -> dict[str, dict[str, float]]:
        """Slowest correct calls by reward and key, as far as they are news."""
        return {queue.reward.label: news for queue in self._queues if (news := queue.limits.take_updates())}

    async def aclose(self) -> None:
        """End call processes, and what built-in rewards use. Calls that have not ended are forgotten. Idempotent."""
        functions = self._trusted
        self._trusted = {}
        await close_functions(functions.values())
        if self._pool is not None:
            await self._pool.aclose()

    def call_now(
        self, index: int, completion: Any, arguments: Mapping[str, Any], *, count: int, key: str
    ) -> CallResult | None:
        """The result of a plain trusted function that need not wait; None: use ``call``."""
        queue = self._queues[index]
        function = self._trusted.get(index)
        if function is None or function.signature.is_async or not queue.free:
            return None
        return queue.call_now(partial(call_at_once, function, completion, arguments, count), key)

    async def call(
        self, index: int, completion: Any, arguments: Mapping[str, Any], *, count: int, key: str, rank: int
    ) -> CallResult:
        """The result of one call of one function about ``count`` completions, after retries."""
        function = self._trusted.get(index)

        async def once(limit_s: float) -> CallResult:
            if function is None:
                assert self._pool is not None
                place = self._pool_index[index]
                return await self._pool.call(place, completion, arguments, count=count, limit_s=limit_s, rank=rank)
            if function.signature.is_async:
                return await self._coroutines.call(function, completion, arguments, count, limit_s)
            return call_at_once(function, completion, arguments, count, limit_s)

        return await self._queues[index].call(once, key=key, rank=rank)


class _Asked(msgspec.Struct, frozen=True):
    """A call of function ``index`` about ``members`` of an order."""

    index: int
    members: Sequence[int]
    completion: Any
    arguments: Mapping[str, Any]
    key: str


class Scoring:
    """One order while it is scored. ``scored``: the rewards, once all values are there."""

    def __init__(self, rewards: RewardSet, texts: SampleTexts, rank: int) -> None:
        self.scored: tuple[SampleReward, ...] | None = None
        self._rewards = rewards
        self._texts = texts
        self._rank = rank
        self._values: list[list[SampleValue | None]] = [[None] * len(rewards.rewards) for _ in texts.completions]
        self._combined: list[CallResult | None] = [None] * len(texts.completions)
        self._left = [asked for index in range(len(rewards.rewards)) for asked in self._calls_of(index)]
        self._call_now()
        if not self._left:
            self._combine()

    async def finish(self) -> tuple[SampleReward, ...]:
        """One reward for each completion of the order, in its order, whatever user code does."""
        while self.scored is None:  # the values first, then what the recipe's function makes of them
            calls = self._left
            self._left = []
            if len(calls) == 1:
                await self._call(calls[0])
            else:
                async with anyio.create_task_group() as running:
                    for asked in calls:
                        running.start_soon(self._call, asked)
            self._combine()
        return self.scored

    def _calls_of(self, index: int) -> list[_Asked]:
        """Calls of a function that can be made: about one completion each, or about all of a group."""
        texts = self._texts
        signature = self._rewards.signatures[index]
        calls = []
        places = range(len(texts.completions))
        for members in texts.groups() if signature.per_group else [[place] for place in places]:
            arguments = texts.arguments(signature, members)
            if isinstance(arguments, CallFailure):
                self._set(index, members, column_failure(arguments, len(members)))
                continue
            prompt = texts.prompt_of(members[0])
            key = prompt.prompt_id
            if signature.limit_key:
                # A source whose rows were not all looked at before the start may have one without the column.
                key = str(prompt.columns.get(signature.limit_key, key))
            completion = texts.completion(signature, members)
            calls.append(_Asked(index, members, completion, arguments, key))
        return calls

    def _call_now(self) -> None:
        left = []
        for asked in self._left:
            result = self._rewards.call_now(
                asked.index, asked.completion, asked.arguments, count=len(asked.members), key=asked.key
            )
            if result is None:
                left.append(asked)
            else:
                self._set(asked.index, asked.members, result)
        self._left = left

    async def _call(self, asked: _Asked) -> None:
        result = await self._rewards.call(
            asked.index, asked.completion, asked.arguments, count=len(asked.members), key=asked.key, rank=self._rank
        )
        self._set(asked.index, asked.members, result)

    def _set(self, index: int, members: Sequence[int], result: CallResult) -> None:
        rewards = self._rewards.rewards
        if index == len(rewards):
            self._combined[members[0]] = result
            return
        for member, checked in zip(members, result.values, strict=True):
            self._values[member][index] = SampleValue(rewards[index], checked, result)

    def _combine(self) -> None:
        """All values are there. Where the recipe combines them by a function of its own, it is asked first."""
        samples = [[value for value in values if value is not None] for values in self._values]
        if self._rewards.combines and not any(self._combined):
            index = len(self._rewards.rewards)
            for place, values in enumerate(samples):
                trained = [value for value in values if not value.reward.shadow]
                named = {value.reward.label: v for value in trained if (v := value.value) is not None}
                if named and all(value.failure is None for value in trained):
                    arguments = self._texts.arguments(self._rewards.signatures[index], [place])
                    if isinstance(arguments, CallFailure):
                        self._set(index, [place], column_failure(arguments, 1))
                    else:
                        self._left.append(_Asked(index, [place], named, arguments, ""))
            self._call_now()
            if self._left:
                return
        separate = self._rewards.limits.combine == COMBINE_SEPARATE
        self.scored = tuple(
            [combine(values, own=own, separate=separate) for values, own in zip(samples, self._combined, strict=True)]
        )


@asynccontextmanager
async def opened_rewards(
    rewards: Sequence[Reward], limits: RewardLimits, tokenizer: Detokenizer
) -> AsyncIterator[RewardSet]:
    """A ``RewardSet`` that is open for the block, in the process of a command. Raises as ``RewardSet.open``."""
    async with asyncio.TaskGroup() as tasks:
        opened = RewardSet(rewards, limits, tokenizer, tasks)
        try:
            await opened.open()
            yield opened
        finally:
            await asyncio.shield(opened.aclose())
