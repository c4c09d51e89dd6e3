"""The turns of an episode, in the environment worker that runs it. ``OpenEpisode`` gets them from the controller,
within the limits of the recipe.

``worker.py`` makes an ``OpenEpisode`` and a ``CallRecord`` for each episode; chats and agents sample with them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio

from streamrl.base.messages import BeginEpisode, DropTurn, ReturnedCall, TurnRequest
from streamrl.base.types import FinishReason, Texts, TokenArray, Turn
from streamrl.recipe.environment import Environment


class EpisodeLimit(Exception):
    """Raised in place of a turn where the trajectory has as many turns or tokens as it may have; the trajectory can be
    trained as it is."""


class OpenEpisode:
    """An episode that runs in this process: its turns, as ``contracts.TurnSampler``, and its time.

    ``order``: order that began it;
    ``environment``: section of the recipe, which has the limits;
    ``send``: function that sends a request to the controller, or drops it;
    ``time_limit``: scope that is cancelled when the episode's own time is spent, or the episode is stopped;
    ``stopped``: the controller has stopped the episode, and wants no result;
    ``finished``: the user's code has ended, or was left behind as stuck;
    ``finish``: limit of the recipe that refused the newest request; None: it was sampled;
    ``limit``: newest refusal of a turn in words; empty: no turn was refused;
    ``refusal``: newest refusal that the endpoint gave to an agent; empty: it gave none;
    ``printed_reward``: reward that an agent has printed; it counts, too, where the agent does not end in time;
    ``remark``: words about the reward, for its trajectory;
    ``spent_s``: seconds that user code ran, without the time in which turns were sampled;
    ``replies``: sampled turns; None: the turn was dropped, or the episode has ended."""

    def __init__(
        self, order: BeginEpisode, environment: Environment, send: Callable[[TurnRequest | DropTurn], None]
    ) -> None:
        self.order = order
        self._environment = environment
        self._send = send
        self.time_limit = anyio.CancelScope()
        self.stopped = False
        self.finished = False
        self.finish: FinishReason | None = None
        self.limit = ""
        self.refusal = ""
        self.printed_reward: float | None = None
        self.remark = ""
        self.spent_s = 0.0
        self._is_sampling = False
        self._awaits_reply = False
        """Whether a turn was requested whose reply has not come."""
        self._dropped_turns = 0
        self._lengths: list[int] = []
        """Number of tokens of the conversation up to the end of each turn."""
        self._running_since = anyio.current_time()
        self.replies = asyncio.Queue[Turn | None]()  # unlike a stream, it loses none to a reader that is cancelled

    @property
    def turns_sampled(self) -> int:
        """Number of turns that the episode got."""
        return len(self._lengths)

    def resume_clock(self) -> None:
        """Count time from now on: user code runs."""
        self._running_since = anyio.current_time()
        self.time_limit.deadline = self._running_since + self._environment.seconds - self.spent_s

    def pause_clock(self) -> None:
        """Count no time from now on: a turn is sampled."""
        self.spent_s += anyio.current_time() - self._running_since
        self.time_limit.deadline = math.inf

    def stop(self) -> None:
        """End the episode without a result: the controller has stopped it."""
        self.stopped = True
        self.time_limit.cancel()

    async def sample(
        self, appended: TokenArray, *, after: int | None = None, max_tokens: int = 0, stop: Texts = ()
    ) -> Turn:
        """Sample a turn, as ``TurnSampler`` says. Raises ``EpisodeLimit``, and ``RuntimeError`` where the user's code
        may not request a turn now."""
        number = len(self._lengths)
        turns = number + self._dropped_turns
        if turns >= self._environment.max_turns:
            self._refuse(FinishReason.TURNS, f"it has {turns} turns (environment.max_turns)")
        before = 0
        if number and after != -1:
            before = self._lengths[number - 1 if after is None else after]
        tokens = before + len(appended)
        room = self._environment.max_tokens - tokens
        if room <= 0:
            limit = f"{self._environment.max_tokens} (environment.max_tokens)"
            self._refuse(FinishReason.LENGTH, f"{tokens} tokens leave no room of {limit} for a turn")
        turn = await self._receive(
            TurnRequest(
                episode=self.order.episode, appended=appended, after=after, max_tokens=max_tokens, stop=stop, room=room
            )
        )
        self._lengths.append(tokens + len(turn.token_ids))
        self.finish = None
        return turn

    def _refuse(self, finish: FinishReason, message: str) -> None:
        self.finish = finish
        self.limit = message
        raise EpisodeLimit(message)

    async def _receive(self, request: TurnRequest) -> Turn:
        """Request a turn from the controller, and wait for it. A turn whose wait is cancelled is dropped."""
        if self._is_sampling:
            raise RuntimeError("a turn is being sampled: await one turn after the other")
        if self.finished or self.stopped:
            raise RuntimeError("the episode has ended: nothing is sampled for it any more")
        self._is_sampling = True
        self.pause_clock()
        try:
            if self._awaits_reply:  # the reply to a turn that was dropped
                await self.replies.get()
            self._awaits_reply = True
            self._send(request)
            turn = await self.replies.get()
            self._awaits_reply = False
            if turn is None:
                raise RuntimeError("the episode has ended while a turn was sampled")
            return turn
        finally:
            if self._awaits_reply:
                self._dropped_turns += 1
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):  # the worker ends
                    self._send(DropTurn(episode=request.episode, turn=len(self._lengths)))
            self.resume_clock()
            self._is_sampling = False


class CallRecord:
    """Calls of tools that returned in an earlier attempt at an episode and are not made again. ``note``: function that
    is called with each new call."""

    def __init__(self, returned: Sequence[ReturnedCall], note: Callable[[ReturnedCall], None]) -> None:
        self._returned = {(call.turn, call.place, call.call): call for call in returned}
        self._note = note

    def find(self, turn: int, place: int, call: str) -> ReturnedCall | None:
        """Return the record of a call; None: the call has not been made."""
        return self._returned.get((turn, place, call))

    def add(self, call: ReturnedCall) -> None:
        """Report a new call, which the controller records."""
        self._note(call)
