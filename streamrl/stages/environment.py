"""The environment stage: environment workers, which are processes, run the episodes of trajectories.

``launch.processes`` makes the stage in the controller, for a run with an environment, and
``cli.trained_models.model_evaluation`` in the process of the evaluation command. ``episodes`` calls
``EnvironmentStage.episode`` for each trajectory. The worker requests turns. The tokens of a trajectory leave the
controller only as turns.

A worker that ends (user code blocks or kills it) breaks its stream. Its episodes begin again at another worker, which
gets the turns and the results of tools that they had. An episode that was running when a worker died shares the next
worker with at most seven others; after a second death it runs alone, and with a third death it fails. So an episode
that kills its worker fails without the other episodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import Any, NamedTuple

from anyio import (
    BrokenResourceError,
    CancelScope,
    ClosedResourceError,
    Lock,
    create_memory_object_stream,
    create_task_group,
    move_on_after,
)
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec.structs import replace

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import StreamBroken
from streamrl.base.messages import (
    BeginEpisode,
    CallReturned,
    DropTurn,
    EnvironmentEvent,
    EnvironmentOrder,
    EpisodeEnd,
    ReturnedCall,
    StopEpisode,
    TurnReply,
    TurnRequest,
)
from streamrl.base.notifier import Notifier
from streamrl.base.types import EnvironmentResult, RewardFailureKind
from streamrl.comm.stream import ReceiveStream, SendStream, converse
from streamrl.recipe.environment import ENVIRONMENT_REWARD
from streamrl.recipe.rewards import Reward
from streamrl.stages.episodes import OpenTrajectory

EnvironmentStreams = tuple[SendStream[EnvironmentOrder], ReceiveStream[EnvironmentEvent]]
_EPISODES_AT_ONCE = (inf, 8, 1)
"""Largest number of episodes that run on the worker of an episode: by the number of workers that died with it."""
OpenEnvironment = Callable[[], AbstractAsyncContextManager[EnvironmentStreams]]


class _RunningEpisode(NamedTuple):
    """An episode of a worker. ``limit``: largest number of episodes that may run on the worker at once."""

    events: MemoryObjectSendStream[EnvironmentEvent]
    trajectory: OpenTrajectory
    limit: float


class _Worker:
    """One environment worker: its orders, and its episodes by number. ``opening``: scope while it connects."""

    def __init__(self) -> None:
        self.send_order, self.orders = create_memory_object_stream[EnvironmentOrder](inf)
        self.opening = CancelScope()
        self.episodes: dict[int, _RunningEpisode] = {}

    def accepts(self, limit: float) -> bool:
        """Return whether one more episode can begin here, with at most ``limit`` episodes at once. Paused episodes do
        not count: a pause may be long."""
        limits = [episode.limit for episode in self.episodes.values() if not episode.trajectory.paused]
        return len(limits) < min((limit, *limits))

    def order(self, order: EnvironmentOrder) -> None:
        """Send ``order`` soon. Orders for a worker that has ended are dropped."""
        with suppress(ClosedResourceError, BrokenResourceError):
            self.send_order.send_nowait(order)


class EnvironmentStage:
    """Runs episodes on ``workers`` while it is ``running``; ``episode`` is the ``Episode`` of the run.

    ``reward``: built-in reward ``environment`` of the recipe, which has the policy for failed episodes."""

    def __init__(
        self,
        workers: Sequence[OpenEnvironment],
        reward: Reward = Reward(function=ENVIRONMENT_REWARD),  # noqa: B008
    ) -> None:
        self._openers = list(workers)
        self._reward = reward
        self._workers: list[_Worker] = []
        self._opening: set[_Worker] = set()
        self._numbers = 0
        self._changed = Notifier()
        self._choosing = Lock(fast_acquire=True)

    def in_flight(self) -> int:
        """Number of episodes that have begun and not ended."""
        return sum(len(worker.episodes) for worker in self._workers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager that runs the stage. All episodes must have ended at its end; the workers end with it."""
        async with create_task_group() as children:
            for open_worker in self._openers:
                children.start_soon(self._serve, open_worker)
            yield
            self._openers.clear()
            for worker in self._opening:
                worker.opening.cancel()
            for worker in self._workers:
                worker.send_order.close()

    async def episode(self, trajectory: OpenTrajectory) -> EpisodeEnd:
        """Run an episode on the worker with the fewest episodes. Raises the errors of ``trajectory.sample``, except
        for a turn that cannot be sampled: then the episode fails."""
        returned_calls: list[ReturnedCall] = []
        if trajectory.order.episode_so_far is not None:
            returned_calls.extend(trajectory.order.episode_so_far.returned)
        for limit in _EPISODES_AT_ONCE:
            # The lock makes episodes wait in order: an episode that needs an empty worker gets one.
            async with self._choosing:
                while not (free := [worker for worker in self._workers if worker.accepts(limit)]):
                    with move_on_after(1.0):  # no notification comes when control pauses an episode
                        await self._changed.wait()
            worker = min(free, key=lambda candidate: len(candidate.episodes))
            end = await self._run_on(worker, trajectory, returned_calls, limit)
            if end is not None:
                break
            trajectory.begin_again()
        else:
            workers = f"{len(_EPISODES_AT_ONCE)} environment workers"
            message = f"{workers} ended while they ran it: see logs/environment-*.log of the run"
            end = _failed(0, message)
        return replace(end, policy=self._reward.failure_policy(late=end.kind is RewardFailureKind.TIMED_OUT))

    async def _run_on(
        self, worker: _Worker, trajectory: OpenTrajectory, returned_calls: list[ReturnedCall], limit: float
    ) -> EpisodeEnd | None:
        """Return the end of the episode; None: the worker ended before the episode."""
        self._numbers += 1
        number = self._numbers
        order = trajectory.order
        sender, events = create_memory_object_stream[EnvironmentEvent](inf)
        # Registered before the first await, so that the next episode that chooses a worker counts this one.
        worker.episodes[number] = _RunningEpisode(sender, trajectory, limit)
        begin = BeginEpisode(
            episode=number,
            trajectory=str(order.id),
            prompt_id=order.prompt.prompt_id,
            columns=order.prompt.columns,
            seed=order.seed,
            environment=order.prompt.environment,
            evaluation=order.evaluation,
            returned=tuple(returned_calls),
        )
        end = None
        try:
            with sender, events:
                worker.order(begin)
                end = await self._converse(worker, number, trajectory, events, returned_calls)
            return end
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        finally:
            del worker.episodes[number]
            self._changed.notify()
            if end is None:
                worker.order(StopEpisode(episode=number))

    async def _converse(
        self,
        worker: _Worker,
        number: int,
        trajectory: OpenTrajectory,
        events: MemoryObjectReceiveStream[EnvironmentEvent],
        returned_calls: list[ReturnedCall],
    ) -> EpisodeEnd | None:
        """Answer the worker's requests for turns until the episode ends. ``returned_calls`` is extended."""

        async def reply(turn: Any) -> None:
            worker.order(TurnReply(episode=number, turn=await trajectory.complete(turn)))

        async with create_task_group() as sampling:
            async for event in events:
                match event:
                    case EpisodeEnd():
                        if event.turns is not None:
                            trajectory.drop(event.turns)
                        return event
                    case CallReturned():
                        returned_calls.append(event.call)
                        if not trajectory.order.evaluation:
                            trajectory.note(trajectory.order.id, event.call)
                    case DropTurn():
                        trajectory.drop(event.turn)
                    case TurnRequest():
                        try:
                            turn = trajectory.next_turn(
                                event.appended, event.after, event.max_tokens, event.stop, event.room
                            )
                        except ValueError as error:
                            worker.order(StopEpisode(episode=number))
                            return _failed(number, str(error))
                        sampling.start_soon(reply, turn)
        return None

    async def _serve(self, open_worker: OpenEnvironment) -> None:
        """Serve one worker, and the workers that replace it when it ends."""
        while self._openers:
            worker = _Worker()
            self._opening.add(worker)
            try:
                with worker.opening:
                    async with open_worker() as (orders, events):
                        self._opening.discard(worker)
                        self._workers.append(worker)
                        self._changed.notify()
                        await converse(
                            partial(self._send_orders, worker, orders), partial(self._dispatch, worker, events)
                        )
                return
            except StreamBroken:
                continue
            finally:
                self._opening.discard(worker)
                if worker in self._workers:
                    self._workers.remove(worker)
                worker.send_order.close()
                worker.orders.close()
                for episode in worker.episodes.values():
                    episode.events.close()

    async def _send_orders(self, worker: _Worker, orders: SendStream[EnvironmentOrder]) -> None:
        async for order in worker.orders:
            await orders.send(order)
        await orders.aclose()

    async def _dispatch(self, worker: _Worker, events: ReceiveStream[EnvironmentEvent]) -> None:
        """Pass each event of the worker to the coroutine of its episode."""
        async for event in events:
            episode = worker.episodes.get(getattr(event, "episode", 0))
            if episode is not None:
                # An episode that is being cancelled has closed its stream.
                with suppress(ClosedResourceError, BrokenResourceError):
                    await episode.events.send(event)
        if self._openers:
            raise StreamBroken("an environment worker has ended its events before the run ended its orders")


def _failed(number: int, message: str) -> EpisodeEnd:
    """Return the end of an episode whose turn could not be sampled, or whose workers ended."""
    return EpisodeEnd(episode=number, result=EnvironmentResult(), kind=RewardFailureKind.RAISED, message=message)
