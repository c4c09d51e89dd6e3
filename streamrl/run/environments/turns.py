"""Access of an episode to the policy, by token ids: what all forms of an environment are written on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from streamrl.base.messages import ReturnedCall
from streamrl.base.types import FinishReason, FloatArray, TokenArray, float_array


class SampledTurn(msgspec.Struct, frozen=True):
    """``number``: of the turn in its trajectory, from 0; ``token_ids``: as they were sampled, the end token among
    them; ``logprobs``: float32, of each (empty: they are not known here)."""

    number: int
    token_ids: TokenArray
    finish_reason: FinishReason
    logprobs: FloatArray = msgspec.field(default_factory=float_array)


class TurnSampler(Protocol):
    """Samples the turns of one trajectory."""

    async def sample(self, appended: TokenArray, *, after: int | None = None, most_tokens: int = 0) -> SampledTurn:
        """Sample a turn after ``appended``, which is not trained. ``after``: number of the turn that it goes on from
        (None: the newest; -1: none, it begins at the prompt); ``most_tokens``: of the turn (0: of the recipe). Raises
        ``EpisodeLimit``."""
        ...


class EpisodeLimit(Exception):
    """The trajectory has as many turns or tokens as it may have: no turn was sampled, and it may be trained as it is.
    ``finish``: the finish reason of the trajectory."""

    def __init__(self, finish: FinishReason, message: str) -> None:
        super().__init__(message)
        self.finish = finish


class LimitedTurns:
    """Turns of one trajectory, within ``max_turns`` and ``max_tokens`` of a conversation. ``ask``: of the controller.
    ``finish``: the limit that the last request met, None: none; ``limit``: the same in words, of any request."""

    def __init__(
        self, ask: Callable[[TokenArray, int | None, int], Awaitable[SampledTurn]], *, max_turns: int, max_tokens: int
    ) -> None:
        self._ask = ask
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._lengths: list[int] = []  # of the conversation up to the end of each turn
        self.finish: FinishReason | None = None
        self.limit = ""

    async def sample(self, appended: TokenArray, *, after: int | None = None, most_tokens: int = 0) -> SampledTurn:
        """Sample a turn, as ``TurnSampler`` says."""
        number = len(self._lengths)
        if number >= self._max_turns:
            self._refuse(FinishReason.TURNS, f"it has {number} turns (environment.max_turns)")
        before = 0 if after == -1 or not number else self._lengths[number - 1 if after is None else after]
        room = self._max_tokens - before - len(appended)
        if room <= 0:
            tokens = before + len(appended)
            self._refuse(FinishReason.LENGTH, f"{tokens} tokens leave no room of {self._max_tokens} for a turn")
        turn = await self._ask(appended, after, min(most_tokens or room, room))
        self._lengths.append(before + len(appended) + len(turn.token_ids))
        self.finish = None
        return turn

    def _refuse(self, finish: FinishReason, message: str) -> None:
        self.finish = finish
        self.limit = message
        raise EpisodeLimit(finish, message)


class CallRecord:
    """Calls of tools that returned in an earlier run of an episode, which are not made again, and those of this run.
    ``note``: is called with each that is new."""

    def __init__(self, returned: Sequence[ReturnedCall], note: Callable[[ReturnedCall], None]) -> None:
        self._returned = {(one.turn, one.place, one.call): one for one in returned}
        self._note = note

    def find(self, turn: int, place: int, call: str) -> ReturnedCall | None:
        """Return what the call returned; None: it has not been made."""
        return self._returned.get((turn, place, call))

    def add(self, call: ReturnedCall) -> None:
        """Record a call."""
        self._note(call)
