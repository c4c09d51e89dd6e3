"""The environment stage: the episodes of a run with an environment, each of which is run by an environment worker, a
process of its own. The worker asks for turns; the tokens of a trajectory never leave the controller but as turns.

A worker that ends (user code that blocks it, or kills it) shows as a broken stream. The episodes that it had begin
again at another one, which is given the turns and the results of tools that they had. An episode that was running
when a worker died shares the next worker with at most seven others, and after a second death runs alone; a third death
is its failure. So an episode that kills its worker fails without the others."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec import structs

from streamrl.base.errors import StreamBroken
from streamrl.base.messages import (
    BeginEpisode,
    CallReturned,
    EnvironmentEvent,
    EnvironmentOrder,
    EpisodeEnded,
    ReturnedCall,
    SampleTurn,
    StopEpisode,
    TurnSampled,
)
from streamrl.base.notifier import Notifier
from streamrl.base.types import EnvironmentResult, RewardFailureKind
from streamrl.comm.stream import ReceiveStream, SendStream, converse
from streamrl.recipe.environment import ENVIRONMENT_REWARD
from streamrl.recipe.rewards import Reward
from streamrl.stages.episodes import EpisodeEnd, EpisodeModel

EnvironmentStreams = tuple[SendStream[EnvironmentOrder], ReceiveStream[EnvironmentEvent]]
_AT_ONCE = (math.inf, 8, 1)  # episodes of a worker, where one of them was running at so many deaths
OpenEnvironment = Callable[[], AbstractAsyncContextManager[EnvironmentStreams]]


class _Worker:
    """One environment worker: orders for it, and of each of its episodes the stream of events, the model, and how many
    may run there beside it."""

    def __init__(self) -> None:
        self.send_order, self.orders = anyio.create_memory_object_stream[EnvironmentOrder](math.inf)
        self.opening = anyio.CancelScope()
        self.episodes: dict[int, tuple[MemoryObjectSendStream[EnvironmentEvent], EpisodeModel, float]] = {}

    def takes(self, at_once: float) -> bool:
        """Return whether an episode can begin here as one of ``at_once``. Paused episodes do not count: a pause may be
        long."""
        running = [most for _, model, most in self.episodes.values() if not model.paused()]
        return len(running) < min((at_once, *running))

    def order(self, order: EnvironmentOrder) -> None:
        """Send ``order`` soon; of a worker that has ended, nobody reads it."""
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            self.send_order.send_nowait(order)


class EnvironmentStage:
    """Runs episodes on ``workers`` while it is ``running``; ``episode`` is the ``Episode`` of the run. ``reward``: the
    built-in reward ``environment`` of the recipe, which says what happens when an episode fails."""

    def __init__(
        self,
        workers: Sequence[OpenEnvironment],
        reward: Reward = Reward(function=ENVIRONMENT_REWARD),  # noqa: B008
    ) -> None:
        self._open = list(workers)
        self._reward = reward
        self._workers: list[_Worker] = []
        self._opening: set[_Worker] = set()
        self._numbers = 0
        self._changed = Notifier()
        self._choosing = anyio.Lock(fast_acquire=True)

    def in_flight(self) -> int:
        """Episodes that have begun and not ended."""
        return sum(len(worker.episodes) for worker in self._workers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve for the block. Episodes must have ended at its end; the workers end with it."""
        async with anyio.create_task_group() as children:
            for open_worker in self._open:
                children.start_soon(self._serve, open_worker)
            yield
            self._open.clear()
            for worker in self._opening:
                worker.opening.cancel()
            for worker in self._workers:
                worker.send_order.close()

    async def episode(self, model: EpisodeModel) -> EpisodeEnd:
        """Have the worker with the fewest episodes run one. Raises what ``model.sample`` raises, but for a wrong turn
        that the episode asks for, which is its failure."""
        so_far = model.order.so_far
        returned = list(so_far.returned) if so_far else []
        for at_once in _AT_ONCE:
            async with self._choosing:  # first come, first served: an episode that needs an empty worker gets one
                while not (free := [worker for worker in self._workers if worker.takes(at_once)]):
                    with anyio.move_on_after(1.0):  # nobody says that control has paused an episode
                        await self._changed.wait()
            worker = min(free, key=lambda one: len(one.episodes))
            if (end := await self._run_on(worker, model, returned, at_once)) is not None:
                break
            model.begin_again()
        else:
            ended = f"{len(_AT_ONCE)} environment workers ended"
            message = f"{ended} while they ran it: see logs/environment-*.log of the run"
            end = EpisodeEnd(EnvironmentResult(), RewardFailureKind.RAISED, message)
        return structs.replace(end, policy=self._reward.failure_policy(late=end.kind is RewardFailureKind.TIMED_OUT))

    async def _run_on(
        self, worker: _Worker, model: EpisodeModel, returned: list[ReturnedCall], at_once: float
    ) -> EpisodeEnd | None:
        """Return the end of the episode; None: the worker has ended before."""
        self._numbers += 1
        number = self._numbers
        order = model.order
        sender, events = anyio.create_memory_object_stream[EnvironmentEvent](math.inf)
        worker.episodes[number] = sender, model, at_once  # before the next episode looks for a worker
        begin = BeginEpisode(
            episode=number,
            trajectory=str(order.id),
            prompt_id=order.prompt.prompt_id,
            columns=order.prompt.columns,
            seed=order.seed,
            evaluation=order.evaluation,
            returned=tuple(returned),
        )
        end = None
        try:
            with sender, events:
                worker.order(begin)
                end = await self._converse(worker, number, model, events, returned)
            return end
        finally:
            del worker.episodes[number]
            self._changed.notify()
            if end is None:
                worker.order(StopEpisode(episode=number))

    async def _converse(
        self,
        worker: _Worker,
        number: int,
        model: EpisodeModel,
        events: MemoryObjectReceiveStream[EnvironmentEvent],
        returned: list[ReturnedCall],
    ) -> EpisodeEnd | None:
        turns = 0
        async for event in events:
            match event:
                case EpisodeEnded():
                    return EpisodeEnd(event.result, event.kind, event.message, event.finish, event.turns)
                case CallReturned():
                    returned.append(event.call)
                    if not model.order.evaluation:
                        model.note(model.order.id, event.call)
                case SampleTurn():
                    try:
                        done = await model.sample(event.appended, after=event.after, most_tokens=event.most_tokens)
                    except ValueError as error:
                        worker.order(StopEpisode(episode=number))
                        return EpisodeEnd(EnvironmentResult(), RewardFailureKind.RAISED, str(error))
                    ids = done.token_ids
                    finish = done.finish_reason
                    logprobs = done.behavior_logprobs
                    worker.order(
                        TurnSampled(episode=number, turn=turns, token_ids=ids, finish_reason=finish, logprobs=logprobs)
                    )
                    turns += 1
        return None

    async def _serve(self, open_worker: OpenEnvironment) -> None:
        """One worker and its successors."""
        while self._open:
            self._opening.add(worker := _Worker())
            try:
                with worker.opening:
                    async with open_worker() as (orders, events):
                        self._opening.discard(worker)
                        self._workers.append(worker)
                        self._changed.notify()
                        await converse(partial(self._give, worker, orders), partial(self._take, worker, events))
                return
            except StreamBroken:
                continue
            finally:
                self._opening.discard(worker)
                if worker in self._workers:
                    self._workers.remove(worker)
                worker.send_order.close()
                worker.orders.close()
                for sender, _, _ in worker.episodes.values():
                    sender.close()

    async def _give(self, worker: _Worker, orders: SendStream[EnvironmentOrder]) -> None:
        async for order in worker.orders:
            await orders.send(order)
        await orders.aclose()

    async def _take(self, worker: _Worker, events: ReceiveStream[EnvironmentEvent]) -> None:
        async for event in events:
            sender, *_ = worker.episodes.get(getattr(event, "episode", 0), (None,))
            if sender is not None:
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # it is cancelled just now
                    await sender.send(event)
        if self._open:
            raise StreamBroken("an environment worker has ended its events before the run ended its orders")
