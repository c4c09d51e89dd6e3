"""The environment worker: a process that runs episodes of user code, each as a task of its event loop.

``launch/roles.py`` runs it in a process of its own, ``local_worker.py`` in the process of ``streamrl eval``. The stage
``stages/environment.py`` of the controller sends it orders (begin, answer or stop an episode) and receives its events
(a turn is requested, a tool returned, an episode ended).

====================================  ===========================================================================
user code that                        gets
====================================  ===========================================================================
raises, returns nonsense              a recorded failure of its trajectory
takes longer than its time            the same, ``timed_out``; a thread of the episode runs on until it returns
does not end when it is cancelled     an episode that is stuck; ``_MOST_STUCK`` of them end the process with code 75,
                                      as threads that do not return do (``tools.UserThread``)
uses up descriptors, memory, threads  the end of the process with code 75
blocks the event loop                 the end of the process with code 75 after ``_BLOCKED_S``
====================================  ===========================================================================

After code 75 the supervisor starts another worker. Episodes of a process that ended begin again in another worker, with
the turns and results of tools that they had."""

from __future__ import annotations

import asyncio
import logging
import math
import numbers
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import NamedTuple

import anyio
import anyio.abc
from msgspec import structs

from streamrl.base.concurrent_calls import first_error
from streamrl.base.errors import StreamBroken
from streamrl.base.messages import (
    BeginEpisode,
    CallReturned,
    EnvironmentEvent,
    EnvironmentOrder,
    EnvironmentReady,
    EpisodeEnd,
    ReturnedCall,
    StopEpisode,
    TurnReply,
)
from streamrl.base.run_process import REWARD_RESTART_EXIT_CODE
from streamrl.base.seeds import derive_seed
from streamrl.base.types import EnvironmentResult, JsonMapping, RewardFailureKind
from streamrl.comm.stream import ReceiveStream, SendStream, converse, send_hello
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.environment import Environment
from streamrl.recipe.user_code import describe_error
from streamrl.rewards.calls.trusted import open_timer
from streamrl.run.environments.agent_process import Agents
from streamrl.run.environments.chat import EpisodePolicy
from streamrl.run.environments.chat_tokens import ChatModel
from streamrl.run.environments.environment_forms import UserEpisode, load_episode
from streamrl.run.environments.tools import NOTHING_LEFT_IN_PROCESS, Tool, has_nothing_left
from streamrl.run.environments.turns import CallRecord, EpisodeLimit, OpenEpisode

_BLOCKED_S = 30.0
_HEARTBEAT_S = 0.5
_CLOSE_LIMIT_S = 5.0
_STOP_LIMIT_S = 1.0
_AGENT_STOP_LIMIT_S = 15.0  # a program has some seconds to end by itself
_MOST_STUCK = 8  # each stuck episode keeps memory and takes time from the others
_FLUSH_S = 0.5  # time for queued events to be sent before the process ends
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
    """Run an episode for every ``BeginEpisode`` until ``orders`` ends. ``owns_process``: whether this process may be
    ended because user code blocks the event loop or does not end; where it is False, such code hangs the caller. Raises
    ``RecipeError`` where the user's code cannot be loaded, ``StreamBroken`` when the controller is gone."""
    user_code = asyncio.TaskGroup()
    try:
        async with AsyncExitStack() as servers:
            environments = {}
            for name, settings in environment.by_name.items():
                environments[name] = await _load(settings, tokenizer, servers)
            worker_loop = _Worker(environments, user_code, owns_process=owns_process)
            # Closed last: an episode may end while the streams to the controller are cancelled.
            async with worker_loop.unsent, _watched(owns_process), user_code, AsyncExitStack() as agents:
                for loaded in environments.values():
                    if loaded.agents is not None:
                        await agents.enter_async_context(loaded.agents.serving())
                await send_hello(events, orders, EnvironmentReady(worker=worker))
                await converse(lambda: worker_loop.receive(orders), lambda: worker_loop.send(events))
                if worker_loop.stuck and owns_process:
                    # All orders are done, but the task group of ``user_code`` would wait for stuck episodes.
                    await anyio.sleep(_FLUSH_S)
                    os._exit(0)
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


class _LoadedEnvironment(NamedTuple):
    """An environment whose code is loaded. ``agents``: programs of the form ``agent``; None for another form."""

    settings: Environment
    chat_model: ChatModel
    episode: UserEpisode
    agents: Agents | None


async def _load(settings: Environment, tokenizer: Tokenizer, servers: AsyncExitStack) -> _LoadedEnvironment:
    """Load an environment. Its MCP servers run until ``servers`` is closed. Raises ``RecipeError``."""
    chat_model = ChatModel(tokenizer, settings)
    agents = Agents(settings) if settings.agent else None
    server_tools: Sequence[Tool] = ()
    if settings.servers:
        from streamrl.run.environments.mcp_tools import opened_servers

        running_servers = opened_servers(settings.servers, sys.stderr, settings.variables)
        server_tools = await servers.enter_async_context(running_servers)
    episode, _ = load_episode(settings, chat_model, agents, server_tools)
    return _LoadedEnvironment(settings, chat_model, episode, agents)


@asynccontextmanager
async def _watched(owns_process: bool) -> AsyncIterator[None]:
    """End the process with code 75 if the event loop is blocked for ``_BLOCKED_S``: a timer that runs outside of the
    loop (``rewards.calls.trusted.ExitTimer``) is set again and again by a task of the loop. Where the system has no
    such timer, nothing is watched."""
    timer = open_timer() if owns_process else None
    if timer is None:
        yield
        return

    async def beat() -> None:
        while True:
            timer.rearm(_BLOCKED_S)
            await anyio.sleep(_HEARTBEAT_S)

    try:
        async with anyio.create_task_group() as heartbeat:
            heartbeat.start_soon(beat)
            yield
            heartbeat.cancel_scope.cancel()
    finally:
        timer.disarm()


class _Worker:
    """The open episodes of this process, and the queue of events for the controller. ``environments``: all environments
    of the run, by name."""

    def __init__(
        self, environments: Mapping[str, _LoadedEnvironment], user_code: asyncio.TaskGroup, *, owns_process: bool
    ) -> None:
        self._environments = environments
        self._user_code = user_code
        self._owns_process = owns_process
        self.stuck = 0
        """Number of episodes that still run after they were cancelled."""
        self._used_up = ""
        """Error that says that this process has nothing left; empty: none has."""
        self._open: dict[int, OpenEpisode] = {}
        self._send_event, self.unsent = anyio.create_memory_object_stream[EnvironmentEvent](math.inf)

    async def send(self, events: SendStream[EnvironmentEvent]) -> None:
        """Send queued events until ``receive`` and all its episodes have ended."""
        async for event in self.unsent:
            await events.send(event)
        await events.aclose()

    async def receive(self, orders: ReceiveStream[EnvironmentOrder]) -> None:
        """Begin, answer and stop episodes until ``orders`` ends; then stop the open ones."""
        broken = None
        async with self._send_event, anyio.create_task_group() as tasks:
            try:
                async for order in orders:
                    self._handle(order, tasks)
            except StreamBroken as error:  # raised below, where the task group does not wrap it
                broken = error
            for episode in self._open.values():
                episode.stop()
        if broken is not None:
            raise broken

    def _handle(self, order: EnvironmentOrder, tasks: anyio.abc.TaskGroup) -> None:
        if isinstance(order, BeginEpisode):
            environment = self._environments[order.environment]
            episode = OpenEpisode(order, environment.settings, self._send_event.send_nowait)
            self._open[order.episode] = episode
            tasks.start_soon(self._run, episode)
            return
        open_episode = self._open.get(order.episode)
        if open_episode is None:  # the episode ended while the order was on its way
            return
        match order:
            case TurnReply() if not open_episode.finished:
                open_episode.replies.put_nowait(order.turn)
            case StopEpisode():
                open_episode.stop()

    async def _run(self, episode: OpenEpisode) -> None:
        """Run one episode, and report its end."""
        order = episode.order
        environment = self._environments[order.environment]
        stack = AsyncExitStack()
        model = EpisodePolicy(
            environment.chat_model.of_row(order.columns),
            episode,
            CallRecord(order.returned, partial(self._note, order.episode)),
            stack,
            trajectory=order.trajectory,
            prompt_id=order.prompt_id,
            seed=order.seed,
            prompt_seed=derive_seed("environment", order.prompt_id),  # the same for all trajectories of a prompt
            evaluation=order.evaluation,
            system=environment.settings.system,
        )
        try:
            end = await self._outcome_in_time(environment, episode, model)
        finally:
            episode.finished = True
            episode.replies.put_nowait(None)
        if self._used_up and self._owns_process:
            await _end_process(self._used_up)  # the episode begins again elsewhere
        if model.failure:
            end = EpisodeEnd(kind=RewardFailureKind.RAISED, message=model.failure)
        await _close(stack, order.trajectory)
        del self._open[order.episode]
        if episode.stopped:
            return
        refusal = f"the endpoint refused a request: {episode.refusal}" if episode.refusal else episode.limit
        if not episode.turns_sampled and end.kind is None and refusal:
            # There is nothing to train, and the reason is that the first turn was refused.
            end = EpisodeEnd(kind=RewardFailureKind.RAISED, message=refusal)
        elif end.kind is not None and episode.refusal:
            first_line, _, lines = end.message.partition("\n")
            end = structs.replace(end, message=f"{first_line}; {refusal}\n{lines}".strip())
        result = EnvironmentResult(
            reward=None if end.result is None else end.result.reward,
            seconds=round(episode.spent_s, 6),
            calls=dict(model.counts),
            notes=dict(model.notes),
            turn_rewards=_rewards_of_turns(episode, model),
            remark=episode.remark,
        )
        # ``episode.finish``: the limit of turns or tokens that refused the newest turn; None: none did.
        self._send_event.send_nowait(
            structs.replace(
                end, episode=order.episode, result=result, finish=episode.finish, turns=episode.turns_sampled
            )
        )
        if self.stuck >= _MOST_STUCK and self._owns_process:
            await _end_process(f"{self.stuck} episodes do not end")

    async def _outcome_in_time(
        self, environment: _LoadedEnvironment, episode: OpenEpisode, model: EpisodePolicy
    ) -> EpisodeEnd:
        """Return the outcome of the user's code. The code is cancelled when its time is spent (``environment.seconds``,
        without the time in which its turns are sampled), and counts as stuck if it does not end then."""
        settings = environment.settings
        task = self._user_code.create_task(self._outcome(environment.episode, model, episode.order.columns))
        with episode.time_limit:
            episode.resume_clock()
            await asyncio.wait([task])
        episode.pause_clock()
        if not episode.time_limit.cancelled_caught:
            return task.result()
        task.cancel()
        await asyncio.wait([task], timeout=_AGENT_STOP_LIMIT_S if settings.agent else _STOP_LIMIT_S)
        if not task.done():
            self.stuck += 1
            task.add_done_callback(self._unstuck)
        late = f"the environment took more than {settings.seconds:g} s (environment.seconds)"
        episode.remark = f"{late}; {episode.remark}" if episode.remark else late
        reward = episode.printed_reward  # of an agent that goes on behind it
        if reward is None:
            reward = settings.late_reward
        if reward is None:
            return EpisodeEnd(kind=RewardFailureKind.TIMED_OUT, message=episode.remark)
        model.notes["did_not_end"] += 1
        return EpisodeEnd(result=EnvironmentResult(reward=reward))

    def _unstuck(self, _: object) -> None:
        self.stuck -= 1

    async def _outcome(self, episode: UserEpisode, model: EpisodePolicy, columns: JsonMapping) -> EpisodeEnd:
        try:
            value = await episode(model, columns)
        except EpisodeLimit as error:
            return EpisodeEnd(kind=RewardFailureKind.RAISED, message=f"the episode did not handle its limit: {error}")
        except BaseException as error:  # noqa: BLE001 (user code; the outcome of a cancelled task is not read)
            if has_nothing_left(error, NOTHING_LEFT_IN_PROCESS):
                self._used_up = describe_error(error)
            return EpisodeEnd(kind=RewardFailureKind.RAISED, message=describe_error(error))
        if value is None:
            return EpisodeEnd()
        if isinstance(value, bool | numbers.Real):  # numbers of NumPy are numbers.Real, too
            reward = float(value)
            if math.isfinite(reward):
                return EpisodeEnd(result=EnvironmentResult(reward=reward))
            return EpisodeEnd(kind=RewardFailureKind.NOT_FINITE, message=f"the episode returned {reward}")
        problem = f"the episode returned a {type(value).__name__}: return a number, or None"
        return EpisodeEnd(kind=RewardFailureKind.WRONG_TYPE, message=problem)

    def _note(self, episode: int, call: ReturnedCall) -> None:
        self._send_event.send_nowait(CallReturned(episode=episode, call=call))


async def _end_process(reason: str) -> None:
    """End this process, to be started again."""
    _log.warning("%s: this worker ends, to be started again", reason)
    await anyio.sleep(_FLUSH_S)
    os._exit(REWARD_RESTART_EXIT_CODE)


def _rewards_of_turns(episode: OpenEpisode, model: EpisodePolicy) -> tuple[float, ...]:
    """Return the rewards of all turns; empty where the episode has rewarded no turn."""
    if not model.turn_rewards:
        return ()
    return tuple(model.turn_rewards.get(turn, 0.0) for turn in range(episode.turns_sampled))


async def _close(stack: AsyncExitStack, trajectory: str) -> None:
    """Close the tools of an episode. A failure of user code is logged, and changes no outcome."""
    try:
        with anyio.move_on_after(_CLOSE_LIMIT_S, shield=True):
            await stack.aclose()
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the worker itself is cancelled
            raise
        _log.warning("closing the tools of %s failed: %s", trajectory, describe_error(error))
