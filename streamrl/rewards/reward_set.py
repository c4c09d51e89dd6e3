"""A versioned set of reward functions, loaded and ready to score: in this process, and in call processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.base.stage_messages import SampleReward, ScoreGroup
from streamrl.base.types import Prompt, Trajectory
from streamrl.prompts.tokenizer import Tokenizer
from streamrl.recipe.rewards import COMBINE_SEPARATE, COMBINE_WEIGHTS, Reward, RewardLimits
from streamrl.rewards.calls.call_pool import CallPool
from streamrl.rewards.calls.trusted_calls import TrustedCalls
from streamrl.rewards.lanes import RewardLane
from streamrl.rewards.reward_exchange import outcome_of, score_message
from streamrl.rewards.scoring import Outcome, SampleTexts, SampleValue, column_failure, combine
from streamrl.rewards.signature import RewardFunction, RewardSignature, load_reward
from streamrl.rewards.values import CallFailure, CallResult

OnScored = Callable[[tuple[SampleReward, ...]], None]

COMBINING = "combine"


class RewardsOf(msgspec.Struct, frozen=True, kw_only=True):
    """What is attached: a value with a version, which changes as a whole."""

    version: int
    rewards: tuple[Reward, ...]
    limits: RewardLimits = RewardLimits()

    @property
    def combining(self) -> Reward | None:
        """The recipe's own combining function, as one more reward that runs where the others do."""
        spec = self.limits.combine
        if spec in (COMBINE_WEIGHTS, COMBINE_SEPARATE):
            return None
        return Reward(function=spec, name=COMBINING, trusted=all(reward.trusted for reward in self.rewards))


class RewardSet:
    """Scores trajectories with every function of ``attached``, side by side. ``open`` before, ``aclose`` after.

    ``tasks`` must outlive it: a trusted coroutine that swallows its cancellation stays there. ``combines``: the recipe
    has a function of its own that makes one number of the values.
    """

    def __init__(self, attached: RewardsOf, tokenizer: Tokenizer, tasks: asyncio.TaskGroup) -> None:
        self.attached = attached
        self._tokenizer = tokenizer
        self._tasks = tasks
        combining = attached.combining
        self._all = (*attached.rewards, *([combining] if combining is not None else []))
        self.combines = combining is not None
        self._trusted = {index: reward for index, reward in enumerate(self._all) if reward.trusted}
        self._calls: TrustedCalls | None = None
        self._pool: CallPool | None = None
        self._lanes: list[RewardLane] = []
        self._signatures: list[RewardSignature] = []

    async def open(self) -> None:
        """Load the functions. Raises ``RecipeError`` with every problem."""
        functions: dict[int, RewardFunction] = {i: load_reward(reward) for i, reward in self._trusted.items()}
        signatures = {index: function.signature for index, function in functions.items()}
        self._calls = TrustedCalls(self._tasks, functions)
        other = [index for index in range(len(self._all)) if index not in self._trusted]
        pool_index = {index: place for place, index in enumerate(other)}
        if other:
            self._pool = CallPool([self._all[index] for index in other], self.attached.limits.processes)
            found = await self._pool.open()
            signatures |= {index: found[place] for place, index in enumerate(other)}
        concurrency = self.attached.limits.concurrency
        for index, reward in enumerate(self._all):
            if index in self._trusted:
                lane = RewardLane(index, reward, self._calls.submit, concurrency)
            else:
                assert self._pool is not None
                lane = RewardLane(pool_index[index], reward, self._pool.submit, concurrency)
            self._lanes.append(lane)
            self._signatures.append(signatures[index])

    @property
    def per_group(self) -> bool:
        """Whether some function scores whole groups."""
        return any(signature.per_group for signature in self._signatures)

    @property
    def longest_s(self) -> float:
        """What the slowest function may take."""
        return max(reward.timeout_s for reward in self._all)

    @property
    def stuck(self) -> int:
        """Trusted coroutines past their limit that still run."""
        return self._calls.stuck if self._calls is not None else 0

    @property
    def running(self) -> dict[str, int]:
        """Calls that have begun, by reward."""
        return {lane.reward.label: lane.running for lane in self._lanes}

    async def watch(self) -> None:
        """Raises ``StreamRLError`` when call processes cannot be started any more; otherwise it never returns."""
        pool = self._pool
        await (pool.failed_for_good if pool is not None else asyncio.get_running_loop().create_future())
        raise StreamRLError("reward processes cannot be started any more")

    def begin(self, order: ScoreGroup, prompts: Sequence[Prompt], on_scored: OnScored) -> None:
        """Score one order. ``on_scored(rewards)`` is called once, now or later, with one for each completion in the
        same order, whatever user code does; never where the set is closed before. ``prompts``: of the message."""
        _Scoring(self, SampleTexts(order.completions, prompts, self._tokenizer), order.rank, on_scored).begin()

    async def score(self, trajectories: Sequence[Trajectory], rank: int = 0) -> tuple[Outcome, ...]:
        """One outcome for each trajectory, in the same order. Never raises for what user code does.

        ``rank``: of several orders that wait, the smallest goes first.
        """
        message = score_message(trajectories, rank=rank)
        scored: asyncio.Future[tuple[SampleReward, ...]] = asyncio.get_running_loop().create_future()
        self.begin(message.groups[0], message.prompts, partial(_unless_cancelled, scored))
        version = self.attached.version
        rewards = await scored
        return tuple(outcome_of(t, reward, version) for t, reward in zip(trajectories, rewards, strict=True))

    def remember_limits(self, slowest_s: Mapping[str, Mapping[str, float]]) -> None:
        """Slowest correct calls by reward and key, which other workers have observed."""
        for lane in self._lanes:
            lane.limits.remember(slowest_s.get(lane.reward.label, {}))

    def take_learnt_limits(self) -> dict[str, dict[str, float]]:
        """Slowest correct calls by reward and key, as far as they are news."""
        return {lane.reward.label: news for lane in self._lanes if (news := lane.limits.take_news())}

    async def aclose(self) -> None:
        """End call processes, and what built-in rewards hold. Calls that have not ended are forgotten. Idempotent."""
        for lane in self._lanes:
            lane.close()
        if self._calls is not None:
            await self._calls.aclose()
        if self._pool is not None:
            await self._pool.aclose()

    def call(
        self, index: int, texts: SampleTexts, members: list[int], rank: int, on_done: Callable[[CallResult], None]
    ) -> None:
        """One call of one function about ``members`` of an order."""
        signature, lane = self._signatures[index], self._lanes[index]
        arguments = texts.arguments(signature, members)
        if isinstance(arguments, CallFailure):
            on_done(column_failure(arguments, len(members)))
            return
        prompt = texts.prompt_of(members[0])
        completion = [texts.texts[m] for m in members] if signature.per_group else texts.texts[members[0]]
        key = prompt.prompt_id
        if signature.limit_key:
            # A source whose rows were not all looked at before the start may have one without the column.
            key = str(prompt.columns.get(signature.limit_key, key))
        lane.call(completion, arguments, on_done, count=len(members), key=key, rank=rank)

    def members_of_calls(self, index: int, texts: SampleTexts) -> list[list[int]]:
        """Whom each call of a function is about: one completion, or all of a group."""
        if self._signatures[index].per_group:
            return texts.groups()
        return [[place] for place in range(len(texts.completions))]

    def call_combining(
        self,
        texts: SampleTexts,
        place: int,
        named: dict[str, float],
        rank: int,
        on_done: Callable[[CallResult], None],
    ) -> None:
        """Let the recipe's own function make one number of the values of a sample."""
        index = len(self.attached.rewards)
        arguments = texts.arguments(self._signatures[index], [place])
        if isinstance(arguments, CallFailure):
            on_done(column_failure(arguments, 1))
        else:
            self._lanes[index].call(named, arguments, on_done, count=1, key="", rank=rank)


class _Scoring:
    """One order while its calls are made: counts what is missing, without a task or a future of its own."""

    def __init__(self, rewards: RewardSet, texts: SampleTexts, rank: int, on_scored: OnScored) -> None:
        self._rewards = rewards
        self._texts = texts
        self._rank = rank
        self._on_scored = on_scored
        self._missing = 1  # until all calls were asked for
        self._values: list[list[SampleValue | None]] = []
        self._own: list[CallResult | None] = []

    def begin(self) -> None:
        """Ask for all calls of all functions."""
        attached = self._rewards.attached.rewards
        self._values = [[None] * len(attached) for _ in self._texts.completions]
        for index in range(len(attached)):
            for members in self._rewards.members_of_calls(index, self._texts):
                self._missing += 1
                self._rewards.call(index, self._texts, members, self._rank, partial(self._called, index, members))
        self._one_less(self._combine)

    def _called(self, index: int, members: Sequence[int], result: CallResult) -> None:
        reward = self._rewards.attached.rewards[index]
        for member, checked in zip(members, result.values, strict=True):
            self._values[member][index] = SampleValue(reward, checked, result)
        self._one_less(self._combine)

    def _one_less(self, then: Callable[[], None]) -> None:
        self._missing -= 1
        if not self._missing:
            then()

    def _combine(self) -> None:
        """All values are there. Where the recipe combines them by a function of its own, ask it first."""
        if not self._rewards.combines:
            self._finish()
            return
        self._own = [None] * len(self._values)
        self._missing = 1
        for place, values in enumerate(self._values):
            trained = [value for value in values if value is not None and not value.reward.shadow]
            named = {value.reward.label: v for value in trained if (v := value.value) is not None}
            if named and all(value.failure is None for value in trained):
                self._missing += 1
                self._rewards.call_combining(self._texts, place, named, self._rank, partial(self._combined, place))
        self._one_less(self._finish)

    def _combined(self, place: int, result: CallResult) -> None:
        self._own[place] = result
        self._one_less(self._finish)

    def _finish(self) -> None:
        separate = self._rewards.attached.limits.combine == COMBINE_SEPARATE
        own = self._own or [None] * len(self._values)
        self._on_scored(
            tuple(
                [
                    combine([value for value in values if value is not None], own=made, separate=separate)
                    for values, made in zip(self._values, own, strict=True)
                ]
            )
        )


def _unless_cancelled(scored: asyncio.Future[tuple[SampleReward, ...]], rewards: tuple[SampleReward, ...]) -> None:
    if not scored.done():
        scored.set_result(rewards)
