"""The reward stage: one outcome for each trajectory, computed by reward workers in their own processes.

A worker that must be replaced (a function that cannot be stopped) shows as a broken stream: what it had been scoring
for longer than the time limit is recorded as timed out, the rest is scored again by its successor.

Results that end together are sent together: an order goes to a worker at once when it is alone, and while a worker is
busy the orders gather, so that under load a message carries as many as there are, in the order that closes rounds
soonest.

The functions are a value with a version. ``load`` replaces it while trajectories flow. The version that is attached
when the first of a group arrives scores all of the group, because siblings are compared with each other."""

from __future__ import annotations

from asyncio import Future, get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial

import anyio
import msgspec

from streamrl.base.errors import RecipeError, StreamBroken, StreamEnded
from streamrl.base.notifier import Notifier
from streamrl.base.stage_messages import Scored
from streamrl.base.types import RewardFailureKind, Trajectory, TrajectoryId
from streamrl.comm.stream import ReceiveStream, SendStream, converse, exchange_hello
from streamrl.recipe.rewards import FailurePolicy, Reward
from streamrl.rewards.reward_exchange import OrderMessage, outcome_of
from streamrl.rewards.reward_messages import (
    CloseRewardSet,
    GroupsScored,
    LimitsLearnt,
    LoadRewardSet,
    RememberLimits,
    RewardOrder,
    RewardResult,
    RewardSetLoaded,
    RewardWorkerReady,
    SampleReward,
)
from streamrl.rewards.time_limits import LearntLimits
from streamrl.stages.scoring_order import ScoringOrder, WaitingOrder

WorkerStreams = tuple[SendStream[RewardOrder], ReceiveStream[RewardResult]]
MOST_IN_MESSAGE = 64
"""Enough that the price of a message is small beside that of what it carries, and little to wait for."""

ORDERS_WINDOW = 4
"""Messages with orders that a worker may not have taken yet. A few: while it is busy, orders gather here, where what
closes a round sooner still overtakes them."""

_MOST_DEATHS = 2  # of all workers while they load the same functions: once may have been for another reason

OpenWorker = Callable[[], AbstractAsyncContextManager[WorkerStreams]]


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``per_group``: some function scores whole groups. ``timeout_s``: the largest of all functions.
    ``attached``: what scores instead of the recipe's functions, which workers begin with as version 0."""

    functions: str
    per_group: bool
    timeout_s: float
    concurrency: int
    attached: LoadRewardSet | None = None


class RewardStage:
    """Feeds reward workers; a ``Scorer`` while it is ``running``. ``limits``: what they learnt of time limits;
    ``notify``: gets what a person should know of the completions."""

    def __init__(
        self,
        settings: RewardSettings,
        workers: Sequence[OpenWorker],
        limits: LearntLimits | None = None,
        notify: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self.limits = limits or LearntLimits()
        self._notify = notify
        self._settings = settings
        self._open = list(workers)
        self._waiting = ScoringOrder()
        self._gathering: dict[int, list[Trajectory]] = {}
        self._answers: dict[TrajectoryId, Future[Scored]] = {}
        self._heard: dict[int, int] = {}
        self._next_order = 0
        self._open_orders = 0
        self._ended = False
        self._changed = Notifier()
        self._versions = _Versions(settings.attached, per_group=settings.per_group)
        self._workers: set[_Worker] = set()
        self._given_out = 0
        self._changing = anyio.Lock()

    @property
    def reward_version(self) -> int:
        """The version that scores groups of which nothing has arrived yet."""
        return self._versions.attached.version

    def in_flight(self) -> int:
        """Trajectories, or groups, that wait for their reward or are being scored."""
        return self._open_orders

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Score for the block, which ends when every order was answered and every worker has ended."""
        async with anyio.create_task_group() as children:
            for open_worker in self._open:
                children.start_soon(self._serve, open_worker)
            yield
            self._ended = True
            self._changed.notify()

    async def score(self, trajectory: Trajectory, group_size: int) -> Scored:
        """Return the outcome of a trajectory. Functions of groups score it when its last sibling was sampled."""
        answer: Future[Scored] = get_running_loop().create_future()
        self._answers[trajectory.id] = answer
        self._gathering.setdefault(group_id := trajectory.id.group_id, []).append(trajectory)
        self._ended_sampling(group_id, group_size)
        return await answer

    async def lost(self, trajectory: TrajectoryId, group_size: int) -> None:
        """Note that a sibling will not be scored, and score those that have waited for it."""
        self._ended_sampling(group_id := trajectory.group_id, group_size)
        await self._close_unused(self._versions.ended(group_id, last=self._waiting.ended(group_id)))
        self._changed.notify()

    async def load(self, version: int, rewards: tuple[Reward, ...], noted: Callable[[], None]) -> None:
        """Attach other functions; groups of which something has arrived are scored by those that were attached then.

        ``noted`` is called before the first group is theirs. Raises ``RecipeError`` where they cannot be loaded, or
        end the process that loads them: then nothing has changed."""
        order = LoadRewardSet(reward_version=version, rewards=rewards)
        replies: list[RewardSetLoaded] = []
        deaths = 0
        while not replies:  # also where the last worker is just being replaced
            if deaths >= _MOST_DEATHS:
                what = f"when they were to load {', '.join(reward.label for reward in rewards)}"
                raise RecipeError(f"reward workers ended, {deaths} times, {what}: see the log of the last")
            while not self._workers:
                await self._changed.wait()
            async with self._changing:
                had_workers = bool(self._workers)  # the last may have gone while others changed functions
                replies = await self._ask_all(order)
                deaths += had_workers and not replies
                problems = [problem for reply in replies for problem in reply.problems]
                if problems:
                    await self._send_all(CloseRewardSet(reward_version=version))
                    raise RecipeError(*dict.fromkeys(problems))
                if replies:
                    noted()
                    for remembered in self.limits.pieces(version):
                        await self._send_all(RememberLimits(reward_version=version, slowest_s=remembered))
                    await self._attach(order, per_group=any(reply.per_group for reply in replies))

    async def _attach(self, order: LoadRewardSet, *, per_group: bool) -> None:
        self._settings = msgspec.structs.replace(
            self._settings,
            functions="+".join(reward.label for reward in order.rewards),
            timeout_s=max(reward.timeout_s for reward in order.rewards),
        )
        before = self._versions.attach(order, per_group=per_group)
        await self._close_unused(before)

    async def _close_unused(self, attachment: _Attachment) -> None:
        """End functions that were replaced and have no group left."""
        if self._versions.remove_unused(attachment):
            await self._send_all(CloseRewardSet(reward_version=attachment.version))

    async def _ask_all(self, order: LoadRewardSet) -> list[RewardSetLoaded]:
        replies = []
        for worker in list(self._workers):
            with suppress(StreamBroken):  # its successor loads it as soon as this is over
                if (reply := await worker.load(order)) is not None:
                    replies.append(reply)
        return replies

    async def _send_all(self, order: RewardOrder) -> None:
        for worker in list(self._workers):
            with suppress(StreamBroken):  # its successor never had that version
                await worker.orders.send(order)

    # ---- what arrives ----------------------------------------------------------------------------

    def _ended_sampling(self, group_id: int, group_size: int) -> None:
        """Make the order that one more of a group completes, if any. A group waits for those that are paused."""
        attachment = self._versions.of(group_id)
        self._waiting.launched(group_id, group_size)
        heard = self._heard[group_id] = self._heard.get(group_id, 0) + 1
        if whole := heard >= group_size:
            del self._heard[group_id]
        if (whole or not attachment.per_group) and (gathered := self._gathering.pop(group_id, None)):
            self._next_order += 1
            self._open_orders += 1
            now = anyio.current_time()
            self._waiting.add(WaitingOrder(self._next_order, tuple(gathered), attachment.version, now))
            self._changed.notify()

    # ---- workers ---------------------------------------------------------------------------------

    async def _serve(self, open_worker: OpenWorker) -> None:
        """One worker and its successors."""
        unanswered: Unanswered = {}
        while True:
            try:
                async with open_worker() as (orders, results):
                    worker = _Worker(orders)
                    try:
                        await converse(
                            partial(self._give_orders, worker, unanswered),
                            partial(self._take_answers, worker, results, unanswered),
                        )
                    finally:
                        self._workers.discard(worker)
                        worker.loaded.set()
                    return
            except StreamBroken:
                await self._after_break(unanswered)
            if self._ended and not self._open_orders:
                return  # it may have ended well: nobody would answer

    async def _give_orders(self, worker: _Worker, unanswered: Unanswered) -> None:
        async with self._changing:
            await self._bring_up_to_date(worker)
            self._workers.add(worker)
            self._changed.notify()
        while self._open_orders or not self._ended:
            free = self._settings.concurrency - len(unanswered)
            if not self._waiting or free <= 0:
                await self._changed.wait()
                continue
            message = self._next_message(min(free, MOST_IN_MESSAGE), unanswered)
            await worker.orders.send(message.message())
        await worker.orders.aclose()

    def _next_message(self, most: int, unanswered: Unanswered) -> OrderMessage:
        """Take at most ``most`` of the orders that wait, and no more than a message may be large. They are registered
        before anything can wait: a break must find them."""
        message = OrderMessage()
        now = anyio.current_time()
        while self._waiting and len(message) < most:
            order = self._waiting.first()
            rank = self._given_out + 1  # they are numbered in the order in which they close rounds
            if not message.add(order.order_id, order.trajectories, reward_version=order.reward_version, rank=rank):
                break
            self._given_out = rank
            unanswered[order.order_id] = (self._waiting.pop(), now)
        return message

    async def _bring_up_to_date(self, worker: _Worker) -> None:
        """A successor has loaded what the recipe says, and knows nothing of what its predecessor learnt."""
        for load in self._versions.orders():
            reply = await worker.load(load)
            if reply is not None and reply.problems:
                raise RecipeError(*reply.problems)
        if 0 not in self._versions.scoring:
            await worker.orders.send(CloseRewardSet(reward_version=0))
        for version in self._versions.scoring:
            for remembered in self.limits.pieces(version):
                await worker.orders.send(RememberLimits(reward_version=version, slowest_s=remembered))

    async def _take_answers(
        self, worker: _Worker, results: ReceiveStream[RewardResult], unanswered: Unanswered
    ) -> None:
        async for result in results:
            match result:
                case RewardSetLoaded():
                    worker.reply = result
                    worker.loaded.set()
                case LimitsLearnt():
                    self.limits.observed(result.reward_version, result.slowest_s)
                case GroupsScored():
                    if result.notice and self._notify is not None:
                        await self._notify(result.notice)
                    known = [
                        (order[0], group.rewards)
                        for group in result.groups
                        if (order := unanswered.pop(group.order_id, None)) is not None
                    ]
                    await self._deliver(known)

    async def _deliver(self, answered: Iterable[tuple[WaitingOrder, Sequence[SampleReward]]]) -> None:
        """Answer those who wait for what was scored."""
        now = anyio.current_time()
        unused: set[_Attachment] = set()
        for order, rewards in answered:
            for trajectory, reward in zip(order.trajectories, rewards, strict=True):
                outcome = outcome_of(trajectory, reward, order.reward_version)
                answer = self._answers.pop(trajectory.id)
                if not answer.done():  # its trajectory was cancelled
                    answer.set_result(Scored(outcome=outcome, reward_s=now - order.arrived_at))
                last = self._waiting.ended(group_id := trajectory.id.group_id)
                unused.add(self._versions.ended(group_id, last=last))
            self._open_orders -= 1
        self._changed.notify()
        for attachment in unused:
            await self._close_unused(attachment)

    async def _after_break(self, unanswered: Unanswered) -> None:
        now = anyio.current_time()
        left = list(unanswered.values())
        limit = self._settings.timeout_s
        unanswered.clear()
        late: list[tuple[WaitingOrder, Sequence[SampleReward]]] = []
        for work, started in left:
            if now - started < limit:
                self._waiting.add(work)
                continue
            failure = _timed_out(self._settings, now - started)
            late.append((work, (failure,) * len(work.trajectories)))
        await self._deliver(late)


def _timed_out(settings: RewardSettings, seconds: float) -> SampleReward:
    return SampleReward(
        kind=RewardFailureKind.TIMED_OUT,
        function=settings.functions,
        message=f"no answer within {settings.timeout_s:g} s and could not be stopped: its reward worker was replaced",
        seconds=seconds,
        policy=FailurePolicy.DROP_SAMPLE.value,
    )


Unanswered = dict[int, tuple[WaitingOrder, float]]
"""What a worker was given and has not answered, by order id, and when."""


class _Worker:
    """A worker that is connected. ``loaded`` is set when it answered an order to load, or is gone."""

    def __init__(self, orders: SendStream[RewardOrder]) -> None:
        self.orders = orders
        self.loaded = anyio.Event()
        self.reply: RewardSetLoaded | None = None

    async def load(self, order: LoadRewardSet) -> RewardSetLoaded | None:
        """Send ``order`` and return the worker's reply; None: it is gone. Raises ``StreamBroken``."""
        self.loaded = anyio.Event()
        self.reply = None
        await self.orders.send(order)
        await self.loaded.wait()
        return self.reply


class _Attachment(msgspec.Struct, frozen=True, eq=False):
    """Functions that score. ``order``: what loads them in a worker (None: the recipe)."""

    version: int
    order: LoadRewardSet | None
    per_group: bool


class _Versions:
    """Versions of the functions that score groups. ``attached``: for groups of which nothing has arrived; ``scoring``:
    all that some group still needs, by version."""

    def __init__(self, first: LoadRewardSet | None, *, per_group: bool) -> None:
        self.attached = _Attachment(first.reward_version if first else 0, first, per_group)
        self.scoring = {self.attached.version: self.attached}
        self._of_group: dict[int, _Attachment] = {}

    def attach(self, order: LoadRewardSet, *, per_group: bool) -> _Attachment:
        """Let other functions score from now on: those that did before."""
        before = self.attached
        self.attached = self.scoring[order.reward_version] = _Attachment(order.reward_version, order, per_group)
        return before

    def orders(self) -> list[LoadRewardSet]:
        """Orders that a worker with the recipe's functions has to load."""
        return [a.order for a in self.scoring.values() if a.order is not None]

    def of(self, group_id: int) -> _Attachment:
        """The functions that score a group: those attached when its first member arrived."""
        return self._of_group.setdefault(group_id, self.attached)

    def ended(self, group_id: int, *, last: bool) -> _Attachment:
        """A member of a group has ended, perhaps the last: the functions that scored it."""
        if last:
            return self._of_group.pop(group_id, self.attached)
        return self._of_group.get(group_id, self.attached)

    def remove_unused(self, attachment: _Attachment) -> bool:
        """Forget functions that were replaced and have no group left. Whether they were."""
        unused = attachment is not self.attached and attachment not in self._of_group.values()
        return unused and self.scoring.pop(attachment.version, None) is not None


async def wait_ready(orders: SendStream[RewardOrder], results: ReceiveStream[RewardResult]) -> None:
    """Wait for the hello of a worker. Raises ``StreamBroken`` when it says something else first, or when ``orders``
    breaks before: a worker died while it connected, and its successor would never be given an order, nor an end."""
    await exchange_hello(partial(_receive_hello, results), orders)


async def _receive_hello(results: ReceiveStream[RewardResult]) -> None:
    try:
        hello = await results.receive()
    except StreamEnded as error:
        raise StreamBroken("a reward worker ended before it said that it is ready") from error
    if not isinstance(hello, RewardWorkerReady):
        raise StreamBroken(f"a reward worker said {type(hello).__name__} before it said that it is ready")
