"""A set of reward functions, loaded and ready to score, and the scoring of one order by them.

The reward worker has one ``RewardSet`` for each version of the rewards. Commands that score (``try``, ``reward test``,
``eval``) open one in their own process. Trusted functions run in the calling process, all others in call processes
(``pool``)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
from msgspec import Struct

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
"""Name of the recipe's own combining function."""

# The first orders are all searched for special tokens; after them every 16th is.
_SEARCH_EACH = 1024
_SEARCH_EVERY = 16


def combining_rewards(rewards: Sequence[Reward], limits: RewardLimits) -> tuple[Reward, ...]:
    """The recipe's own combining function, if it has one, as one more reward. It is trusted where all rewards are."""
    if limits.combine in (COMBINE_WEIGHTS, COMBINE_SEPARATE):
        return ()
    return (Reward(function=limits.combine, name=COMBINING, trusted=all(reward.trusted for reward in rewards)),)


class RewardSet:
    """Scores trajectories with every function of ``rewards``, side by side, after ``open`` and until ``aclose``.

    ``tasks``: task group of trusted coroutines and of the pool. It must live longer than the set, because a trusted
    coroutine that swallows its cancellation stays in it, and it ends with ``StreamRLError`` when call processes cannot
    be started any more. ``attached``: names of rewards that a running run got, which score every prompt, also one whose
    training set names its rewards. ``signatures``: signatures of all functions, once they are loaded; ``combines``: the
    recipe has its own combining function, which is the last function of the set."""

    def __init__(
        self,
        rewards: Sequence[Reward],
        limits: RewardLimits,
        tokenizer: Detokenizer,
        tasks: asyncio.TaskGroup,
        attached: Set[str] = frozenset(),
    ) -> None:
        self.rewards = rewards
        self.attached = attached
        self.limits = limits
        self.signatures: list[RewardSignature] = []
        self._tokenizer = tokenizer
        self._tasks = tasks
        self._all_rewards = (*rewards, *combining_rewards(rewards, limits))
        self.combines = len(self._all_rewards) > len(rewards)
        self._trusted: dict[int, RewardFunction] = {}
        self._coroutines = TrustedCoroutines(tasks)
        untrusted = [index for index, reward in enumerate(self._all_rewards) if not reward.trusted]
        self._pool_index = {index: place for place, index in enumerate(untrusted)}
        self._pool: CallPool | None = None
        self._queues = [RewardQueue(reward, limits.concurrency) for reward in self._all_rewards]
        # Names of the rewards that see no special tokens; empty after a notice about them.
        self._rewards_without_tokens = ""
        self._orders = 0
        self._searched_orders = 0
        self._orders_with_tokens = 0
        self._notice = ""

    async def open(self) -> None:
        """Load the functions. Raises ``RecipeError`` with every problem."""
        self._trusted = {
            i: load_reward(reward, self._queues[i].limits)
            for i, reward in enumerate(self._all_rewards)
            if reward.trusted
        }
        signatures = {index: function.signature for index, function in self._trusted.items()}
        if self._pool_index:
            self._pool = CallPool([self._all_rewards[index] for index in self._pool_index], self.limits.processes)
            self._tasks.create_task(self._pool.run())
            pool_signatures = await self._pool.loaded_signatures()
            signatures |= zip(self._pool_index, pool_signatures, strict=True)
        self.signatures = [signatures[index] for index in range(len(self._all_rewards))]
        scoring = self.signatures[: len(self.rewards)]  # without the combining function
        self._rewards_without_tokens = ", ".join(signature.name for signature in scoring if not signature.sees_tokens)

    @property
    def per_group(self) -> bool:
        """Return whether some function scores whole groups."""
        return any(signature.per_group for signature in self.signatures)

    @property
    def longest_s(self) -> float:
        """Time limit of the slowest function, in seconds."""
        return max(reward.timeout_s for reward in self._all_rewards)

    @property
    def stuck(self) -> int:
        """Trusted coroutines past their limit that still run."""
        return self._coroutines.stuck

    def begin(self, order: ScoreGroup, prompts: Sequence[Prompt]) -> Scoring:
        """Begin to score one order; plain trusted functions are called at once. ``prompts``: prompts of the message to
        which the order belongs."""
        texts = SampleTexts(order.completions, prompts, self._tokenizer)
        self._orders += 1
        if self._rewards_without_tokens and (self._orders <= _SEARCH_EACH or self._orders % _SEARCH_EVERY == 0):
            self._search_special_tokens(texts)
        return Scoring(self, texts, order.rank)

    def _search_special_tokens(self, texts: SampleTexts) -> None:
        """Make a notice where completions often have special tokens that a reward does not see."""
        special_tokens = texts.special_tokens()
        self._searched_orders += 1
        if not special_tokens:
            return
        self._orders_with_tokens += 1
        # A policy may sample a special token by chance; such a token belongs to no format that a reward reads.
        in_half_of_orders = 2 * self._orders_with_tokens >= self._searched_orders
        if in_half_of_orders or self._orders_with_tokens >= max(8, self._searched_orders / 20):
            self._notice = (
                f"completions have special tokens ({', '.join(special_tokens)}) that the reward "
                f"{self._rewards_without_tokens} does not see: set special_tokens = true below [rewards.advanced] "
                "where it looks for them"
            )
            self._rewards_without_tokens = ""

    def take_notice(self) -> str:
        """Return a warning about the completions for the user of the run, once; empty: no new warning."""
        notice = self._notice
        self._notice = ""
        return notice

    async def score(self, trajectories: Sequence[Trajectory], rank: int = 0) -> tuple[Outcome, ...]:
        """One outcome for each trajectory, in the same order, of reward version 0. Raises nothing for what user code
        does. ``rank``: rank of the order among those that wait, the smallest begins first."""
        message = score_message(trajectories, rank=rank)
        rewards = await self.begin(message.groups[0], message.prompts).finish()
        pairs = zip(trajectories, rewards, strict=True)
        return tuple(outcome_of(trajectory, reward, 0) for trajectory, reward in pairs)

    def remember_limits(self, slowest_s: Mapping[str, Mapping[str, float]]) -> None:
        """Add the slowest correct calls, by reward and key, that other workers have observed."""
        for queue in self._queues:
            queue.limits.remember(slowest_s.get(queue.reward.label, {}))

    def take_learnt_limits(self) -> dict[str, dict[str, float]]:
        """Slowest correct calls, by reward and key, that were observed since the last call of this method."""
        updates = {}
        for queue in self._queues:
            slowest_s = queue.limits.take_updates()
            if slowest_s:
                updates[queue.reward.label] = slowest_s
        return updates

    async def aclose(self) -> None:
        """End call processes, and close what built-in rewards use. Unfinished calls get no result. Idempotent."""
        functions = self._trusted
        self._trusted = {}
        await close_functions(functions.values())
        if self._pool is not None:
            await self._pool.aclose()

    def call_now(
        self, index: int, completion: Any, arguments: Mapping[str, Any], *, count: int, key: str
    ) -> CallResult | None:
        """The result of a plain trusted function whose queue is free; None: the caller must use ``call``."""
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

        async def attempt(limit_s: float) -> CallResult:
            if function is None:
                assert self._pool is not None
                place = self._pool_index[index]
                return await self._pool.call(place, completion, arguments, count=count, limit_s=limit_s, rank=rank)
            if function.signature.is_async:
                return await self._coroutines.call(function, completion, arguments, count, limit_s)
            return call_at_once(function, completion, arguments, count, limit_s)

        return await self._queues[index].call(attempt, key=key, rank=rank)


class _PendingCall(Struct, frozen=True):
    """A call of one function that is to be made. ``index``: index of the function in the set; ``members``: indices of
    the completions in the order; ``key``: key of the adaptive time limit."""

    index: int
    members: Sequence[int]
    completion: Any
    arguments: Mapping[str, Any]
    key: str


class Scoring:
    """Scoring of one order. ``scored``: rewards of its completions, once all values are known."""

    def __init__(self, rewards: RewardSet, texts: SampleTexts, rank: int) -> None:
        self.scored: tuple[SampleReward, ...] | None = None
        self._rewards = rewards
        self._texts = texts
        self._rank = rank
        self._values: list[list[SampleValue | None]] = [[None] * len(rewards.rewards) for _ in texts.completions]
        self._combined: list[CallResult | None] = [None] * len(texts.completions)
        self._pending = [call for index in range(len(rewards.rewards)) for call in self._calls_of(index)]
        self._call_now()
        if not self._pending:
            self._combine()

    async def finish(self) -> tuple[SampleReward, ...]:
        """One reward for each completion of the order, in its order, whatever user code does."""
        while self.scored is None:  # first the functions, then the recipe's own combining function
            calls = self._pending
            self._pending = []
            if len(calls) == 1:
                await self._call(calls[0])
            else:
                async with anyio.create_task_group() as running:
                    for call in calls:
                        running.start_soon(self._call, call)
            self._combine()
        return self.scored

    def _calls_of(self, index: int) -> list[_PendingCall]:
        """Calls of a function, each about one completion or about all completions of a group. A call that cannot be
        made has its failure set instead."""
        texts = self._texts
        signature = self._rewards.signatures[index]
        calls = []
        places = range(len(texts.completions))
        groups = texts.groups() if signature.per_group else [[place] for place in places]
        label = self._rewards.rewards[index].label
        for members in groups:
            labels = texts.prompt_of(members[0]).rewards
            if labels and label not in labels and label not in self._rewards.attached:
                continue
            arguments = texts.arguments(signature, members)
            if isinstance(arguments, CallFailure):
                self._set(index, members, column_failure(arguments, len(members)))
                continue
            prompt = texts.prompt_of(members[0])
            key = prompt.prompt_id
            if signature.limit_key:
                # Not every row of a source is checked before the start, so a row may lack the column.
                key = str(prompt.columns.get(signature.limit_key, key))
            completion = texts.completion(signature, members)
            calls.append(_PendingCall(index, members, completion, arguments, key))
        return calls

    def _call_now(self) -> None:
        """Make the pending calls that need not wait."""
        pending = []
        for call in self._pending:
            result = self._rewards.call_now(
                call.index, call.completion, call.arguments, count=len(call.members), key=call.key
            )
            if result is None:
                pending.append(call)
            else:
                self._set(call.index, call.members, result)
        self._pending = pending

    async def _call(self, call: _PendingCall) -> None:
        result = await self._rewards.call(
            call.index, call.completion, call.arguments, count=len(call.members), key=call.key, rank=self._rank
        )
        self._set(call.index, call.members, result)

    def _set(self, index: int, members: Sequence[int], result: CallResult) -> None:
        rewards = self._rewards.rewards
        if index == len(rewards):
            self._combined[members[0]] = result
            return
        signature = self._rewards.signatures[index]
        for place, member in enumerate(members):
            self._values[member][index] = self._texts.value(rewards[index], signature, member, result, place)

    def _combine(self) -> None:
        """Combine the values, all of which are known now. Where the recipe has its own combining function, its calls
        are made first; if they have to wait, this method is called again with their results."""
        samples = [[value for value in values if value is not None] for values in self._values]
        if self._rewards.combines and not any(self._combined):
            index = len(self._rewards.rewards)
            for place, values in enumerate(samples):
                trained = [value for value in values if not value.reward.shadow]
                by_name = {value.reward.label: number for value in trained if (number := value.value) is not None}
                if by_name and all(value.failure is None for value in trained):
                    arguments = self._texts.arguments(self._rewards.signatures[index], [place])
                    if isinstance(arguments, CallFailure):
                        self._set(index, [place], column_failure(arguments, 1))
                    else:
                        self._pending.append(_PendingCall(index, [place], by_name, arguments, ""))
            self._call_now()
            if self._pending:
                return
        separate = self._rewards.limits.combine == COMBINE_SEPARATE
        self.scored = tuple(
            [
                combine(values, combined=result, separate=separate)
                for values, result in zip(samples, self._combined, strict=True)
            ]
        )


@asynccontextmanager
async def opened_rewards(
    rewards: Sequence[Reward], limits: RewardLimits, tokenizer: Detokenizer
) -> AsyncIterator[RewardSet]:
    """A ``RewardSet`` that is open for the block, in the process of a command. Raises as ``RewardSet.open`` does."""
    async with asyncio.TaskGroup() as tasks:
        reward_set = RewardSet(rewards, limits, tokenizer, tasks)
        try:
            await reward_set.open()
            yield reward_set
        finally:
            await asyncio.shield(reward_set.aclose())
