"""A versioned set of reward functions, loaded and ready to score: in this process, and in call processes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from streamrl.config.rewards import COMBINE_SEPARATE, COMBINE_WEIGHTS, Reward, RewardLimits
from streamrl.errors import StreamRLError
from streamrl.rewards.call_pool import CallPool
from streamrl.rewards.lanes import RewardLane
from streamrl.rewards.scoring import Outcome, SampleTexts, SampleValue, column_failure, combine
from streamrl.rewards.signature import RewardFunction, RewardSignature, load_reward
from streamrl.rewards.trusted_calls import TrustedCalls
from streamrl.rewards.values import CallFailure, CallResult
from streamrl.tokenizer import Tokenizer
from streamrl.types import Trajectory

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

    ``tasks`` must outlive it: a trusted coroutine that swallows its cancellation stays there.
    """

    def __init__(self, attached: RewardsOf, tokenizer: Tokenizer, tasks: asyncio.TaskGroup) -> None:
        self.attached = attached
        self._tokenizer = tokenizer
        self._tasks = tasks
        combining = attached.combining
        self._all = (*attached.rewards, *([combining] if combining is not None else []))
        self._combines = combining is not None
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

    async def score(self, trajectories: Sequence[Trajectory], rank: int = 0) -> tuple[Outcome, ...]:
        """One outcome for each trajectory, in the same order. Never raises for what user code does.

        ``rank``: of several orders that wait, the smallest goes first.
        """
        texts = SampleTexts(trajectories, self._tokenizer)
        count = len(self.attached.rewards)
        started = [self._begin(index, texts, rank) for index in range(count)]
        by_sample: list[list[SampleValue]] = [[] for _ in trajectories]
        for index, calls in enumerate(started):
            reward = self._all[index]
            for members, result in calls:
                found = result if isinstance(result, CallResult) else await result
                for member, checked in zip(members, found.values, strict=True):
                    by_sample[member].append(SampleValue(reward, checked, found))
        own = await self._combined(texts, by_sample, rank) if self._combines else None
        version, separate = self.attached.version, self.attached.limits.combine == COMBINE_SEPARATE
        return tuple(
            combine(
                trajectory,
                values,
                version=version,
                own=own[place] if own is not None else None,
                separate=separate,
            )
            for place, (trajectory, values) in enumerate(zip(trajectories, by_sample, strict=True))
        )

    async def aclose(self) -> None:
        """End every call process. Idempotent."""
        if self._pool is not None:
            await self._pool.aclose()

    def _begin(
        self, index: int, texts: SampleTexts, rank: int
    ) -> list[tuple[list[int], asyncio.Future[CallResult] | CallResult]]:
        """A call for each trajectory, or for each group; and whom it is about."""
        signature, lane = self._signatures[index], self._lanes[index]
        groups = texts.groups() if signature.per_group else [[place] for place in range(len(texts.trajectories))]
        calls: list[tuple[list[int], asyncio.Future[CallResult] | CallResult]] = []
        for members in groups:
            arguments = texts.arguments(signature, members)
            if isinstance(arguments, CallFailure):
                calls.append((members, column_failure(arguments, len(members))))
                continue
            trajectory = texts.trajectories[members[0]]
            completion = (
                [texts.completions[m] for m in members] if signature.per_group else texts.completions[members[0]]
            )
            key = trajectory.id.prompt_id
            if (adaptive := lane.reward.adaptive_limit) is not None and adaptive.key != "prompt_id":
                key = str(trajectory.prompt.columns.get(adaptive.key, key))
            calls.append((members, lane.call(completion, arguments, count=len(members), key=key, rank=rank)))
        return calls

    async def _combined(
        self, texts: SampleTexts, by_sample: Sequence[Sequence[SampleValue]], rank: int
    ) -> list[CallResult | None]:
        """What the combining function makes of the values of each sample; None where there is nothing to combine."""
        index = len(self.attached.rewards)
        signature, lane = self._signatures[index], self._lanes[index]
        calls: list[asyncio.Future[CallResult] | CallResult | None] = []
        for place, values in enumerate(by_sample):
            trained = [value for value in values if not value.reward.shadow]
            named = {value.reward.label: v for value in trained if (v := value.value) is not None}
            if not named or any(value.failure is not None for value in trained):
                calls.append(None)
                continue
            arguments = texts.arguments(signature, [place])
            if isinstance(arguments, CallFailure):
                calls.append(column_failure(arguments, 1))
            else:
                calls.append(lane.call(named, arguments, count=1, key="", rank=rank))
        return [await call if isinstance(call, asyncio.Future) else call for call in calls]
