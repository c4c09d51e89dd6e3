"""Access of an episode to the policy by token ids, on which all forms of environments are built.

``worker.py`` makes ``LimitedTurns`` and ``CallRecord`` for each episode, in the process of the environment worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from streamrl.base.messages import ReturnedCall
from streamrl.base.types import FinishReason, FloatArray, TokenArray, float_array


class SampledTurn(msgspec.Struct, frozen=True):
    """A turn of the model.

    ``number``: number of the turn in its trajectory, from 0;
    ``token_ids``: sampled token ids, the end token included;
    ``logprobs``: float32 logprobs of the token ids (empty: they are not known here)."""

    number: int
    token_ids: TokenArray
    finish_reason: FinishReason
    logprobs: FloatArray = msgspec.field(default_factory=float_array)


class TurnSampler(Protocol):
    """An object that samples the turns of one trajectory."""

    async def sample(self, appended: TokenArray, *, after: int | None = None, most_tokens: int = 0) -> SampledTurn:
        """Sample a turn after ``appended``, which is not trained. Raises ``EpisodeLimit``.

        ``after``: number of the turn whose token sequence is continued (None: the newest turn; -1: no turn, a sequence
        begins);
        ``most_tokens``: limit of the turn's tokens (0: the limit of the recipe)."""
        ...


class EpisodeLimit(Exception):
    """Raised in place of a turn where the trajectory has as many turns or tokens as it may have; the trajectory can be
    trained as it is. ``finish``: finish reason of the trajectory."""

    def __init__(self, finish: FinishReason, message: str) -> None:
        super().__init__(message)
        self.finish = finish


class LimitedTurns:
    """A ``TurnSampler`` within the limits of the recipe.

    ``ask``: function that gets a turn from the controller;
    ``max_turns``: largest number of turns of the trajectory;
    ``max_tokens``: largest number of tokens of one conversation;
    ``finish``: limit that refused the newest request; None: it was sampled;
    ``limit``: newest refusal in words; empty: nothing was refused."""

    def __init__(
        self, ask: Callable[[TokenArray, int | None, int], Awaitable[SampledTurn]], *, max_turns: int, max_tokens: int
    ) -> None:
        self._ask = ask
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._lengths: list[int] = []
        """Number of tokens of the conversation up to the end of each turn."""
        self.finish: FinishReason | None = None
        self.limit = ""

    async def sample(self, appended: TokenArray, *, after: int | None = None, most_tokens: int = 0) -> SampledTurn:
        """Sample a turn, as described in ``TurnSampler``."""
        number = len(self._lengths)
        if number >= self._max_turns:
            self._refuse(FinishReason.TURNS, f"it has {number} turns (environment.max_turns)")
        before = 0
        if number and after != -1:
            before = self._lengths[number - 1 if after is None else after]
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
