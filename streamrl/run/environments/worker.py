"""The environment worker: a process that runs episodes of user code, each a task of its event loop.

====================================  ===========================================================================
user code that                        gets
====================================  ===========================================================================
raises, returns nonsense              a recorded failure of its trajectory
takes longer than its time            the same, ``timed_out``; a thread that it left behind goes on until it returns
does not end when it is cancelled     it is left behind; with ``_MOST_STUCK`` of them the process ends with code 75
blocks the event loop                 the process ends with code 75 after ``_BLOCKED_S``
====================================  ===========================================================================

After code 75 the supervisor starts another worker. The episodes of a process that ended begin again at another one,
with the turns and results of tools that they had."""

from __future__ import annotations

import asyncio
import logging
import math
import numbers
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import anyio
import anyio.abc
import anyio.to_thread

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import StreamBroken
from streamrl.base.messages import (
    BeginEpisode,
    CallReturned,
    EnvironmentEvent,
    EnvironmentOrder,
    EnvironmentReady,
    EpisodeEnded,
    ReturnedCall,
    SampleTurn,
    StopEpisode,
    TurnSampled,
)
from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE
from streamrl.base.seeds import derive_seed
from streamrl.base.types import EnvironmentResult, RewardFailureKind, TokenArray
from streamrl.comm.stream import ReceiveStream, SendStream, converse, send_hello
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.environment import Environment
from streamrl.recipe.user_code import describe_error
from streamrl.rewards.calls.trusted import open_timer
from streamrl.run.environments.agent_process import Agents
from streamrl.run.environments.chat import EpisodePolicy
from streamrl.run.environments.chat_tokens import ChatModel
from streamrl.run.environments.forms import UserEpisode, load_episode
from streamrl.run.environments.tools import Tool
from streamrl.run.environments.turns import CallRecord, EpisodeLimit, LimitedTurns, SampledTurn

_BLOCKED_S = 30.0
_HEARTBEAT_S = 0.5
_CLOSE_LIMIT_S = 5.0
_STOP_LIMIT_S = 1.0
_MOST_STUCK = 8  # coroutines that never end; each keeps memory and takes time from the others
_FLUSH_S = 0.5  # for events on their way, before the process ends
_THREADS = 1024  # of functions that are no coroutines: a call that sleeps may not keep others waiting
_log = logging.getLogger(__name__)


async def run_environment_worker(
    environment: Environment,
    tokenizer: Tokenizer,
    worker: int,
    orders: ReceiveStream[EnvironmentOrder],
    events: SendStream[EnvironmentEvent],
    *,
    owns_process: bool = True,
) -> None:
    """Run every ``BeginEpisode`` until ``orders`` ends. ``owns_process`` False (tests): user code that blocks the event
    loop hangs. Raises ``RecipeError`` where the user's code cannot be loaded, ``StreamBroken`` when the controller is
    gone."""
    chat_model = ChatModel(tokenizer, environment)
    agents = Agents(environment) if environment.agent else None
    servers: AbstractAsyncContextManager[Sequence[Tool]] = nullcontext(())
    if environment.servers:
        from streamrl.run.environments.mcp_tools import opened_servers

        servers = opened_servers(environment.servers, sys.stderr)
    user_code = asyncio.TaskGroup()
    threads = anyio.to_thread.current_default_thread_limiter()
    threads.total_tokens = max(threads.total_tokens, _THREADS)
    try:
        async with servers as served:
            episode, _ = load_episode(environment, chat_model, agents, served)
            serving = _Serving(environment, chat_model, episode, user_code, owns_process=owns_process)
            async with _watched(owns_process), user_code, agents.serving() if agents else nullcontext():
                await send_hello(events, orders, EnvironmentReady(worker=worker))
                await converse(lambda: serving.receive(orders), lambda: serving.send(events))
                if serving.stuck and owns_process:
                    await anyio.sleep(_FLUSH_S)
                    os._exit(0)  # the group would wait for them; all work is done
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


@asynccontextmanager
async def _watched(owns_process: bool) -> AsyncIterator[None]:
    """End the process where the event loop does not run for ``_BLOCKED_S``."""
    timer = open_timer() if owns_process else None
    if timer is None:
        yield
        return

    async def beat() -> None:
        while True:
            timer.rearm(_BLOCKED_S)
            await anyio.sleep(_HEARTBEAT_S)

    try:
        async with anyio.create_task_group() as beside:
            beside.start_soon(beat)
            yield
            beside.cancel_scope.cancel()
    finally:
        timer.disarm()


class _OpenEpisode:
    """An episode under way. ``clock``: ends it when its environment has had its time."""

    def __init__(self, order: BeginEpisode, seconds: float) -> None:
        self.order = order
        self.clock = anyio.CancelScope()
        self.stopped = False
        self.ended = False
        self.asks = False
        self.given_up = ""
        self.turns_given = 0
        self.spent_s = 0.0
        self._seconds = seconds
        self._since = anyio.current_time()
        self.send_turn, self.turns = anyio.create_memory_object_stream[TurnSampled](math.inf)

    def runs(self) -> None:
        """Count time from now on: user code runs."""
        self._since = anyio.current_time()
        self.clock.deadline = self._since + self._seconds - self.spent_s

    def waits(self) -> None:
        """Count no time from now on: a turn is sampled."""
        self.spent_s += anyio.current_time() - self._since
        self.clock.deadline = math.inf

    def stop(self) -> None:
        self.stopped = True
        self.clock.cancel()


class _Serving:
    """Episodes of this process, and the events that go to the controller."""

    def __init__(
        self,
        environment: Environment,
        chat_model: ChatModel,
        episode: UserEpisode,
        user_code: asyncio.TaskGroup,
        *,
        owns_process: bool,
    ) -> None:
        self._environment = environment
        self._chat_model = chat_model
        self._episode = episode
        self._user_code = user_code
        self._owns_process = owns_process
        self.stuck = 0
        """Episodes past their limit that still run."""
        self._open: dict[int, _OpenEpisode] = {}
        self._send_event, self._events = anyio.create_memory_object_stream[EnvironmentEvent](math.inf)

    async def send(self, events: SendStream[EnvironmentEvent]) -> None:
        """Send events until there will be no more."""
        async with self._events:
            async for event in self._events:
                await events.send(event)
        await events.aclose()

    async def receive(self, orders: ReceiveStream[EnvironmentOrder]) -> None:
        """Begin, answer and stop episodes until ``orders`` ends; those that are open then are stopped."""
        broken = None
        async with self._send_event, anyio.create_task_group() as tasks:
            try:
                async for order in orders:
                    self._take(order, tasks)
            except StreamBroken as error:  # raised below, alone and not in a group
                broken = error
            for episode in self._open.values():
                episode.stop()
        if broken is not None:
            raise broken

    def _take(self, order: EnvironmentOrder, tasks: anyio.abc.TaskGroup) -> None:
        match order:
            case BeginEpisode():
                self._open[order.episode] = opened = _OpenEpisode(order, self._environment.seconds)
                tasks.start_soon(self._run, opened)
            case TurnSampled() if (asking := self._open.get(order.episode)) and not asking.ended:
                asking.send_turn.send_nowait(order)
            case StopEpisode() if order.episode in self._open:
                self._open[order.episode].stop()
            case _:
                pass  # it has ended

    async def _run(self, opened: _OpenEpisode) -> None:
        """Run one episode, and say how it ended."""
        order = opened.order
        environment = self._environment
        turns = LimitedTurns(
            partial(self._ask, opened), max_turns=environment.max_turns, max_tokens=environment.max_tokens
        )
        stack = AsyncExitStack()
        model = EpisodePolicy(
            self._chat_model,
            turns,
            CallRecord(order.returned, partial(self._note, order.episode)),
            stack,
            trajectory=order.trajectory,
            prompt_id=order.prompt_id,
            seed=order.seed,
            prompt_seed=derive_seed("environment", order.prompt_id),
            evaluation=order.evaluation,
            system=environment.system,
        )
        with opened.send_turn, opened.turns:
            end = await self._bounded(opened, model)
            opened.ended = True
        await _close(stack, order.trajectory)
        del self._open[order.episode]
        if opened.stopped:
            return
        if not opened.turns_given and end.kind is None and turns.limit:
            end = _End(kind=RewardFailureKind.RAISED, message=turns.limit)
        seconds = round(opened.spent_s, 6)
        calls = dict(model.counts)
        notes = dict(model.notes)
        # Turns that earned 0 have a reward: only an episode that rewards no turn has none.
        rewarded_turns = range(opened.turns_given) if model.turn_rewards else ()
        turns_earned = tuple([model.turn_rewards.get(turn, 0.0) for turn in rewarded_turns])
        self._send_event.send_nowait(
            EpisodeEnded(
                episode=order.episode,
                result=EnvironmentResult(
                    reward=end.reward, seconds=seconds, calls=calls, notes=notes, turn_rewards=turns_earned
                ),
                kind=end.kind,
                message=end.message,
                finish=turns.finish,
                turns=opened.turns_given,
            )
        )
        if self.stuck >= _MOST_STUCK and self._owns_process:
            _log.warning("%d episodes do not end: this worker ends, to be started again", self.stuck)
            await anyio.sleep(_FLUSH_S)
            os._exit(REWARD_RESTART_EXIT_CODE)

    async def _bounded(self, opened: _OpenEpisode, model: EpisodePolicy) -> _End:
        """Return the outcome of the user's code, which has its time, and is left behind where it does not stop then."""
        task = self._user_code.create_task(self._outcome(model, opened.order.columns))
        with opened.clock:
            opened.runs()
            await asyncio.wait([task])
        opened.waits()
        if not opened.clock.cancelled_caught:
            return task.result()
        task.cancel()
        await asyncio.wait([task], timeout=_STOP_LIMIT_S)
        if not task.done():
            self.stuck += 1
            task.add_done_callback(self._unstuck)
        late = f"the environment took more than {self._environment.seconds:g} s (environment.seconds)"
        return _End(kind=RewardFailureKind.TIMED_OUT, message=late)

    def _unstuck(self, _: object) -> None:
        self.stuck -= 1

    async def _outcome(self, model: EpisodePolicy, columns: Mapping[str, Any]) -> _End:
        try:
            value = await self._episode(model, columns)
        except EpisodeLimit as error:
            return _End(kind=RewardFailureKind.RAISED, message=f"the episode did not expect its limit: {error}")
        except BaseException as error:  # noqa: BLE001 (code of a user; one that is cancelled has its outcome already)
            return _End(kind=RewardFailureKind.RAISED, message=describe_error(error))
        if value is None:
            return _End()
        if isinstance(value, bool | numbers.Real):  # also NumPy's
            reward = float(value)
            if math.isfinite(reward):
                return _End(reward)
            return _End(kind=RewardFailureKind.NOT_FINITE, message=f"the episode returned {reward}")
        what = f"the episode returned a {type(value).__name__}: return a number, or None"
        return _End(kind=RewardFailureKind.WRONG_TYPE, message=what)

    async def _ask(
        self, opened: _OpenEpisode, appended: TokenArray, after: int | None, most_tokens: int
    ) -> SampledTurn:
        if opened.given_up:
            raise RuntimeError(opened.given_up)
        if opened.asks:
            raise RuntimeError("a turn is being sampled: await one turn after the other")
        if opened.ended or opened.stopped:
            raise RuntimeError("the episode has ended: nothing is sampled for it any more")
        opened.asks = True
        ask = SampleTurn(episode=opened.order.episode, appended=appended, after=after, most_tokens=most_tokens)
        self._send_event.send_nowait(ask)
        opened.waits()
        try:
            turn = await opened.turns.receive()
        except BaseException:
            opened.given_up = "a turn was not waited for (a time limit around it?), so that no other may follow it"
            raise
        finally:
            opened.runs()
            opened.asks = False
        opened.turns_given += 1
        return SampledTurn(turn.turn, turn.token_ids, turn.finish_reason, turn.logprobs)

    def _note(self, episode: int, call: ReturnedCall) -> None:
        self._send_event.send_nowait(CallReturned(episode=episode, call=call))


class _End(NamedTuple):
    """The end of an episode: its reward, or how it failed."""

    reward: float | None = None
    kind: RewardFailureKind | None = None
    message: str = ""


async def _close(stack: AsyncExitStack, trajectory: str) -> None:
    """Close the tools of an episode, also of one that was cancelled."""
    try:
        with anyio.move_on_after(_CLOSE_LIMIT_S, shield=True):
            await stack.aclose()
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        _log.warning("closing the tools of %s failed: %s", trajectory, describe_error(error))
