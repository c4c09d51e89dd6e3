"""The reward stage: trajectories in, one outcome out for each, computed by reward workers in their own processes.

A worker that must be replaced (a function that cannot be stopped) shows as a broken stream: what it had been
scoring for longer than the time limit is recorded as timed out, the rest is scored again by its successor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.errors import StreamBroken, StreamEnded
from streamrl.messages import GroupScored, RewardOrder, RewardResult, RewardWorkerReady, ScoreGroup
from streamrl.stage_messages import RewardOutcome, RolloutOutcome, Scored, TrajectoryHeld, TrajectoryLost
from streamrl.types import RewardFailure, RewardFailureKind, Trajectory

WorkerStreams = tuple[SendStream[RewardOrder], ReceiveStream[RewardResult]]
OpenWorker = Callable[[], AbstractAsyncContextManager[WorkerStreams]]


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``per_group``: some function scores whole groups. ``time_limit_s``: the largest of all functions."""

    functions: str
    per_group: bool
    time_limit_s: float
    concurrency: int


class RewardStage:
    """Feeds reward workers. ``run`` once, as a child of the nursery."""

    def __init__(self, settings: RewardSettings, workers: Sequence[OpenWorker]) -> None:
        self._settings = settings
        self._workers = workers
        self._gathering: dict[int, list[Trajectory]] = {}
        self._lost: dict[int, int] = {}
        self._next_order = 0
        self._open_orders = 0
        self._ended = False

    async def run(self, trajectories: ReceiveStream[RolloutOutcome], scored: SendStream[RewardOutcome]) -> None:
        """Until ``trajectories`` ends and every order was answered; then ends ``scored``."""
        # Bounded by the slots of control: one order for each trajectory in flight at most.
        give, take = anyio.create_memory_object_stream[ScoreGroup](math.inf)
        async with give, take, anyio.create_task_group() as children:
            for open_worker in self._workers:
                children.start_soon(self._serve, open_worker, give, take.clone(), scored)
            async for outcome in trajectories:
                order = await self._arrived(outcome, scored)
                if order is not None:
                    self._open_orders += 1
                    await give.send(order)
            self._ended = True
            self._end_when_answered(give)
        await scored.aclose()

    def _end_when_answered(self, give: MemoryObjectSendStream[ScoreGroup]) -> None:
        if self._ended and not self._open_orders:
            give.close()

    async def _arrived(self, outcome: RolloutOutcome, scored: SendStream[RewardOutcome]) -> ScoreGroup | None:
        """The order that ``outcome`` completes, if any. A held trajectory comes again: its group goes on waiting."""
        if isinstance(outcome, TrajectoryHeld):
            await scored.send(outcome)
            return None
        if isinstance(outcome, TrajectoryLost):
            await scored.send(outcome)
            if not self._settings.per_group:
                return None
            group_id = outcome.id.group_id
            self._lost[group_id] = self._lost.get(group_id, 0) + 1
        elif not self._settings.per_group:
            return self._order([outcome.trajectory])
        else:
            group_id = outcome.trajectory.id.group_id
            self._gathering.setdefault(group_id, []).append(outcome.trajectory)
        if len(self._gathering.get(group_id, ())) + self._lost.get(group_id, 0) < outcome.group_size:
            return None
        self._lost.pop(group_id, None)
        gathered = self._gathering.pop(group_id, [])
        return self._order(gathered) if gathered else None

    def _order(self, trajectories: list[Trajectory]) -> ScoreGroup:
        self._next_order += 1
        return ScoreGroup(order_id=self._next_order, trajectories=tuple(trajectories))

    async def _serve(
        self,
        open_worker: OpenWorker,
        give: MemoryObjectSendStream[ScoreGroup],
        take: MemoryObjectReceiveStream[ScoreGroup],
        scored: SendStream[RewardOutcome],
    ) -> None:
        """One worker and its successors."""
        unanswered: dict[int, tuple[ScoreGroup, float]] = {}
        with take:
            while True:
                try:
                    async with open_worker() as (orders, results):
                        await self._converse(orders, results, take, give, unanswered, scored)
                        return
                except StreamBroken:
                    await self._after_break(unanswered, give, scored)

    async def _converse(
        self,
        orders: SendStream[RewardOrder],
        results: ReceiveStream[RewardResult],
        take: MemoryObjectReceiveStream[ScoreGroup],
        give: MemoryObjectSendStream[ScoreGroup],
        unanswered: dict[int, tuple[ScoreGroup, float]],
        scored: SendStream[RewardOutcome],
    ) -> None:
        """Raises ``StreamBroken`` (alone, not in a group) when the worker is gone."""
        places = anyio.Semaphore(self._settings.concurrency)
        broken: StreamBroken | None = None

        async def order() -> None:
            nonlocal broken
            try:
                async for work in take:
                    # Registered before anything can wait: a break must find it.
                    unanswered[work.order_id] = (work, math.inf)
                    await places.acquire()
                    unanswered[work.order_id] = (work, anyio.current_time())
                    await orders.send(work)
                await orders.aclose()
            except StreamBroken as error:
                broken = broken or error
                conversation.cancel_scope.cancel()

        async def answer() -> None:
            nonlocal broken
            try:
                async for result in results:
                    if isinstance(result, RewardWorkerReady):
                        continue
                    if unanswered.pop(result.order_id, None) is None:
                        continue
                    places.release()
                    await self._deliver(result, give, scored)
            except StreamBroken as error:
                broken = broken or error
                conversation.cancel_scope.cancel()

        async with anyio.create_task_group() as conversation:
            conversation.start_soon(order)
            conversation.start_soon(answer)
        if broken is not None:
            raise broken

    async def _deliver(
        self, result: GroupScored, give: MemoryObjectSendStream[ScoreGroup], scored: SendStream[RewardOutcome]
    ) -> None:
        for outcome in result.outcomes:
            await scored.send(Scored(outcome=outcome))
        self._open_orders -= 1
        self._end_when_answered(give)

    async def _after_break(
        self,
        unanswered: dict[int, tuple[ScoreGroup, float]],
        give: MemoryObjectSendStream[ScoreGroup],
        scored: SendStream[RewardOutcome],
    ) -> None:
        now = anyio.current_time()
        left, limit = list(unanswered.values()), self._settings.time_limit_s
        unanswered.clear()
        for work, started in left:
            if now - started < limit:
                await give.send(work)
                continue
            failure = f"no answer within {limit:g} s and it could not be stopped: its reward worker was replaced"
            outcomes = tuple(
                RewardFailure(
                    trajectory=t,
                    function=self._settings.functions,
                    kind=RewardFailureKind.TIMED_OUT,
                    message=failure,
                    reward_seconds=now - started,
                )
                for t in work.trajectories
            )
            await self._deliver(GroupScored(order_id=work.order_id, outcomes=outcomes), give, scored)


async def next_ready(results: ReceiveStream[RewardResult]) -> RewardWorkerReady:
    """The greeting of a worker. Raises ``StreamBroken`` when it says something else first."""
    try:
        greeting = await results.receive()
    except StreamEnded as error:
        raise StreamBroken("a reward worker ended before it said that it is ready") from error
    if not isinstance(greeting, RewardWorkerReady):
        raise StreamBroken(f"a reward worker said {type(greeting).__name__} before it said that it is ready")
    return greeting
