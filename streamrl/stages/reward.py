"""The reward stage, in the controller: reward workers, which are processes, compute an outcome for each trajectory.

``launch.reward_workers`` makes the stage; ``episodes`` calls it for each trajectory. A worker that must be replaced
(its function cannot be stopped) breaks its stream. Orders that it was scoring for longer than the time limit are
recorded as timed out, and its successor scores its other orders again.

A single order goes to a worker at once. While a worker is busy, orders wait, so that under load a message has many
orders, and the orders that close rounds soonest are first.

The reward functions have a version, and ``load`` replaces them while trajectories are scored. The version that is
attached when the first member of a group arrives scores the whole group, because siblings are compared."""

from __future__ import annotations

from asyncio import Future, get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial

from anyio import Event, Lock, create_task_group, current_time
from msgspec import Struct
from msgspec.structs import replace

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
"""Largest number of orders in a message: enough to make the cost of a message small, and few enough to wait for."""

ORDERS_WINDOW = 4
"""Messages with orders that a worker may have before it reads them. Only a few: while it is busy, orders wait in the
stage, where an order that closes a round sooner still goes first."""

_MOST_DEATHS = 2
"""Deaths of all workers, while they load the same functions, after which loading fails: a single death may have had
another cause."""

OpenWorker = Callable[[], AbstractAsyncContextManager[WorkerStreams]]


class RewardSettings(Struct, frozen=True, kw_only=True):
    """Settings of the reward stage.

    ``functions``: labels of the functions, for messages.
    ``per_group``: whether a function scores whole groups.
    ``timeout_s``: largest time limit of all functions.
    ``concurrency``: largest number of orders that a worker scores at once.
    ``attached``: functions that score in place of the recipe's, which workers begin with as version 0."""

    functions: str
    per_group: bool
    timeout_s: float
    concurrency: int
    attached: LoadRewardSet | None = None


class RewardStage:
    """Sends orders to reward workers; a ``Scorer`` while it is ``running``.

    ``limits``: time limits that workers have learnt.
    ``notify``: coroutine that gets notices of workers for the user."""

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
        self._openers = list(workers)
        self._waiting = ScoringOrder()
        self._unordered: dict[int, list[Trajectory]] = {}
        self._answers: dict[TrajectoryId, Future[Scored]] = {}
        self._arrivals: dict[int, int] = {}
        self._next_order = 0
        self._open_orders = 0
        self._closing = False
        self._changed = Notifier()
        self._versions = _Versions(settings.attached, per_group=settings.per_group)
        self._workers: set[_Worker] = set()
        self._sent_orders = 0
        self._changing = Lock()

    @property
    def reward_version(self) -> int:
        """Version of the functions that score groups of which no member has arrived."""
        return self._versions.attached.version

    def in_flight(self) -> int:
        """Number of trajectories, or of groups, that wait for a worker or are being scored."""
        return self._open_orders

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager that runs the stage. It ends when every order was answered and every worker has ended."""
        async with create_task_group() as children:
            for open_worker in self._openers:
                children.start_soon(self._serve, open_worker)
            yield
            self._closing = True
            self._changed.notify()

    async def score(self, trajectory: Trajectory, group_size: int) -> Scored:
        """Return the outcome of a trajectory. Functions of groups score it once its last sibling was sampled."""
        answer: Future[Scored] = get_running_loop().create_future()
        self._answers[trajectory.id] = answer
        self._unordered.setdefault(trajectory.id.group_id, []).append(trajectory)
        self._member_arrived(trajectory.id.group_id, group_size)
        return await answer

    async def lost(self, trajectory: TrajectoryId, group_size: int) -> None:
        """Note that a trajectory will not be scored, and score siblings that have waited for it."""
        group_id = trajectory.group_id
        self._member_arrived(group_id, group_size)
        is_last = self._waiting.member_ended(group_id)
        await self._close_unused(self._versions.member_ended(group_id, last=is_last))
        self._changed.notify()

    async def load(self, version: int, rewards: tuple[Reward, ...], on_attached: Callable[[], None]) -> None:
        """Attach other functions. Groups of which a member has arrived are still scored by the functions that were
        attached at its arrival.

        ``on_attached``: function that is called before the new functions score their first group. Raises
        ``RecipeError`` where the functions cannot be loaded, or end the process that loads them: then nothing has
        changed."""
        order = LoadRewardSet(reward_version=version, rewards=rewards)
        replies: list[RewardSetLoaded] = []
        deaths = 0
        while not replies:  # there may be no worker for a while, until the last one is replaced
            if deaths >= _MOST_DEATHS:
                moment = f"when they were to load {', '.join(reward.label for reward in rewards)}"
                raise RecipeError(f"reward workers ended, {deaths} times, {moment}: see the log of the last")
            while not self._workers:
                await self._changed.wait()
            async with self._changing:
                had_workers = bool(self._workers)  # the last one may have ended while this call waited for the lock
                replies = await self._ask_all(order)
                deaths += had_workers and not replies
                problems = [problem for reply in replies for problem in reply.problems]
                if problems:
                    await self._send_all(CloseRewardSet(reward_version=version))
                    raise RecipeError(*dict.fromkeys(problems))
                if replies:
                    on_attached()
                    for remembered in self.limits.messages(version):
                        await self._send_all(RememberLimits(reward_version=version, slowest_s=remembered))
                    await self._attach(order, per_group=any(reply.per_group for reply in replies))

    async def _attach(self, order: LoadRewardSet, *, per_group: bool) -> None:
        self._settings = replace(
            self._settings,
            functions="+".join(reward.label for reward in order.rewards),
            timeout_s=max(reward.timeout_s for reward in order.rewards),
        )
        replaced = self._versions.attach(order, per_group=per_group)
        await self._close_unused(replaced)

    async def _close_unused(self, attachment: _Attachment) -> None:
        """Unload functions in the workers, if they were replaced and score no group any more."""
        if self._versions.remove_unused(attachment):
            await self._send_all(CloseRewardSet(reward_version=attachment.version))

    async def _ask_all(self, order: LoadRewardSet) -> list[RewardSetLoaded]:
        replies = []
        for worker in list(self._workers):
            with suppress(StreamBroken):  # the successor of a worker that ended loads the functions after this call
                reply = await worker.load(order)
                if reply is not None:
                    replies.append(reply)
        return replies

    async def _send_all(self, order: RewardOrder) -> None:
        for worker in list(self._workers):
            with suppress(StreamBroken):  # the successor of a worker that ended does not have the version
                await worker.orders.send(order)

    # ---- what arrives ----------------------------------------------------------------------------

    def _member_arrived(self, group_id: int, group_size: int) -> None:
        """Count one more member of a group, sampled or lost, and make an order of its trajectories. Functions of groups
        get one order when all members have arrived: the group waits for members that are paused."""
        attachment = self._versions.of(group_id)
        self._waiting.member_arrived(group_id, group_size)
        arrivals = self._arrivals.get(group_id, 0) + 1
        self._arrivals[group_id] = arrivals
        is_complete = arrivals >= group_size
        if is_complete:
            del self._arrivals[group_id]
        if attachment.per_group and not is_complete:
            return
        trajectories = self._unordered.pop(group_id, None)
        if trajectories:
            self._next_order += 1
            self._open_orders += 1
            now = current_time()
            self._waiting.add(WaitingOrder(self._next_order, tuple(trajectories), attachment.version, now))
            self._changed.notify()

    # ---- workers ---------------------------------------------------------------------------------

    async def _serve(self, open_worker: OpenWorker) -> None:
        """Serve one worker, and the workers that replace it when it ends."""
        unanswered: Unanswered = {}
        while True:
            try:
                async with open_worker() as (orders, results):
                    worker = _Worker(orders)
                    try:
                        await converse(
                            partial(self._send_orders, worker, unanswered),
                            partial(self._receive_answers, worker, results, unanswered),
                        )
                    finally:
                        self._workers.discard(worker)
                        worker.loaded.set()
                    return
            except StreamBroken:
                await self._after_break(unanswered)
            if self._closing and not self._open_orders:
                return  # the worker may have ended as it should: a successor would get no order

    async def _send_orders(self, worker: _Worker, unanswered: Unanswered) -> None:
        async with self._changing:
            await self._bring_up_to_date(worker)
            self._workers.add(worker)
            self._changed.notify()
        while self._open_orders or not self._closing:
            free = self._settings.concurrency - len(unanswered)
            if not self._waiting or free <= 0:
                await self._changed.wait()
                continue
            message = self._next_message(min(free, MOST_IN_MESSAGE), unanswered)
            await worker.orders.send(message.message())
        await worker.orders.aclose()

    def _next_message(self, limit: int, unanswered: Unanswered) -> OrderMessage:
        """Take at most ``limit`` of the waiting orders, up to the size limit of a message. The orders are added to
        ``unanswered`` before the caller awaits anything, so that none is lost when the stream breaks."""
        message = OrderMessage()
        now = current_time()
        while self._waiting and len(message) < limit:
            order = self._waiting.first()
            rank = self._sent_orders + 1  # numbers orders by how soon they close a round
            if not message.add(order.order_id, order.trajectories, reward_version=order.reward_version, rank=rank):
                break
            self._sent_orders = rank
            unanswered[order.order_id] = (self._waiting.pop(), now)
        return message

    async def _bring_up_to_date(self, worker: _Worker) -> None:
        """Send a new worker the attached functions and the learnt time limits: a successor has only the recipe's
        functions."""
        for load in self._versions.orders():
            reply = await worker.load(load)
            if reply is not None and reply.problems:
                raise RecipeError(*reply.problems)
        if 0 not in self._versions.scoring:
            await worker.orders.send(CloseRewardSet(reward_version=0))
        for version in self._versions.scoring:
            for remembered in self.limits.messages(version):
                await worker.orders.send(RememberLimits(reward_version=version, slowest_s=remembered))

    async def _receive_answers(
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
                    answers = []
                    for group in result.groups:
                        order, _ = unanswered.pop(group.order_id, (None, 0.0))
                        if order is not None:
                            answers.append((order, group.rewards))
                    await self._deliver(answers)

    async def _deliver(self, answers: Iterable[tuple[WaitingOrder, Sequence[SampleReward]]]) -> None:
        """Return the outcomes of scored orders to the callers of ``score``."""
        now = current_time()
        unused: set[_Attachment] = set()
        for order, rewards in answers:
            for trajectory, reward in zip(order.trajectories, rewards, strict=True):
                outcome = outcome_of(trajectory, reward, order.reward_version)
                answer = self._answers.pop(trajectory.id)
                if not answer.done():  # done: its trajectory was cancelled
                    answer.set_result(Scored(outcome=outcome, reward_s=now - order.arrived_at))
                group_id = trajectory.id.group_id
                is_last = self._waiting.member_ended(group_id)
                unused.add(self._versions.member_ended(group_id, last=is_last))
            self._open_orders -= 1
        self._changed.notify()
        for attachment in unused:
            await self._close_unused(attachment)

    async def _after_break(self, unanswered: Unanswered) -> None:
        """Let orders of a worker that ended wait again, except for those that exceeded the time limit: they fail."""
        now = current_time()
        interrupted = list(unanswered.values())
        unanswered.clear()
        failures: list[tuple[WaitingOrder, Sequence[SampleReward]]] = []
        for order, started_at in interrupted:
            seconds = now - started_at
            if seconds < self._settings.timeout_s:
                self._waiting.add(order)
                continue
            failure = _timed_out(self._settings, seconds)
            failures.append((order, (failure,) * len(order.trajectories)))
        await self._deliver(failures)


def _timed_out(settings: RewardSettings, seconds: float) -> SampleReward:
    return SampleReward(
        kind=RewardFailureKind.TIMED_OUT,
        function=settings.functions,
        message=f"no answer within {settings.timeout_s:g} s and could not be stopped: its reward worker was replaced",
        seconds=seconds,
        policy=FailurePolicy.DROP_SAMPLE.value,
    )


Unanswered = dict[int, tuple[WaitingOrder, float]]
"""Orders that a worker has and has not answered, by order id, each with the time when it was sent."""


class _Worker:
    """A worker that is connected. ``loaded``: event that is set once it has answered an order to load, or ended."""

    def __init__(self, orders: SendStream[RewardOrder]) -> None:
        self.orders = orders
        self.loaded = Event()
        self.reply: RewardSetLoaded | None = None

    async def load(self, order: LoadRewardSet) -> RewardSetLoaded | None:
        """Send ``order`` and return the worker's reply; None: the worker has ended. Raises ``StreamBroken``."""
        self.loaded = Event()
        self.reply = None
        await self.orders.send(order)
        await self.loaded.wait()
        return self.reply


class _Attachment(Struct, frozen=True, eq=False):
    """A version of the reward functions. ``order``: order that loads them in a worker; None: the recipe's functions."""

    version: int
    order: LoadRewardSet | None
    per_group: bool


class _Versions:
    """Versions of the reward functions that score groups.

    ``attached``: functions that score groups of which no member has arrived.
    ``scoring``: all functions that groups still need, by version."""

    def __init__(self, first: LoadRewardSet | None, *, per_group: bool) -> None:
        self.attached = _Attachment(first.reward_version if first else 0, first, per_group)
        self.scoring = {self.attached.version: self.attached}
        self._of_group: dict[int, _Attachment] = {}

    def attach(self, order: LoadRewardSet, *, per_group: bool) -> _Attachment:
        """Attach other functions, and return the functions that were attached before."""
        replaced = self.attached
        self.attached = _Attachment(order.reward_version, order, per_group)
        self.scoring[order.reward_version] = self.attached
        return replaced

    def orders(self) -> list[LoadRewardSet]:
        """Orders that a worker with only the recipe's functions has to load."""
        return [attachment.order for attachment in self.scoring.values() if attachment.order is not None]

    def of(self, group_id: int) -> _Attachment:
        """Functions that score a group: the functions that were attached when its first member arrived."""
        return self._of_group.setdefault(group_id, self.attached)

    def member_ended(self, group_id: int, *, last: bool) -> _Attachment:
        """Note that a member of a group was scored or lost, and return the functions of the group. ``last``: whether it
        was the last member."""
        if last:
            return self._of_group.pop(group_id, self.attached)
        return self._of_group.get(group_id, self.attached)

    def remove_unused(self, attachment: _Attachment) -> bool:
        """Remove functions if they were replaced and no group needs them. Returns whether they were removed."""
        unused = attachment is not self.attached and attachment not in self._of_group.values()
        return unused and self.scoring.pop(attachment.version, None) is not None


async def wait_ready(orders: SendStream[RewardOrder], results: ReceiveStream[RewardResult]) -> None:
    """Wait for the hello of a worker. Raises ``StreamBroken`` when another message comes first, or when ``orders``
    breaks: a worker died while it connected, and its successor would get neither an order nor the end of orders."""
    await exchange_hello(partial(_receive_hello, results), orders)


async def _receive_hello(results: ReceiveStream[RewardResult]) -> None:
    try:
        hello = await results.receive()
    except StreamEnded as error:
        raise StreamBroken("a reward worker ended before it said that it is ready") from error
    if not isinstance(hello, RewardWorkerReady):
        raise StreamBroken(f"a reward worker said {type(hello).__name__} before it said that it is ready")
