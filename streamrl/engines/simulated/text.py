"""Text of a simulated engine, and its logprobs. Pure: a completion depends on its request's seed alone,
and at temperature 0, which is greedy, on the tokens before it."""

from __future__ import annotations

import math
import random
import zlib
from itertools import islice
from typing import TYPE_CHECKING, Protocol

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.base.messages import Generate
from streamrl.base.types import FloatArray, TokenArray, float_array, token_array
from streamrl.engines.resumption import remaining_tokens

if TYPE_CHECKING:
    from streamrl.pretrained.tokenizer import Tokenizer

FIRST_STOP = 0.25
"""Chance that a completion begins with a full stop: an empty answer."""
STOP = 1 / 40
"""Chance of a full stop after any other token: sentences of 40 tokens on average."""
END = 0.9
"""Chance that a full stop ends the completion."""
WORDS = 64
_SCANNED = 4096


class LengthMixture(msgspec.Struct, frozen=True, kw_only=True):
    """Completion lengths in tokens: log-normal, and with probability ``long_share`` another, longer log-normal."""

    median: float = 45.0
    sigma: float = 0.8
    long_share: float = 0.1
    long_median: float = 250.0
    long_sigma: float = 0.5

    def sample(self, random_source: random.Random) -> int:
        """One length, at least 1."""
        long = random_source.random() < self.long_share
        median, sigma = (self.long_median, self.long_sigma) if long else (self.median, self.sigma)
        return max(1, round(random_source.lognormvariate(math.log(median), sigma)))


class Draft(msgspec.Struct, frozen=True, eq=False):
    """All that a request will sample. ``ends``: by itself, and not at the limit."""

    token_ids: TokenArray
    logprobs: FloatArray
    ends: bool


class SampledText(Protocol):
    """Draws whole completions."""

    def draft(self, request: Generate, room: int) -> Draft:
        """Sample ``request``, of which nothing is kept, in the ``room`` tokens that the context leaves it."""
        ...


def _chance(request: Generate) -> random.Random:
    return random.Random(request.seed if request.temperature else zlib.crc32(request.token_ids.tobytes()))


class UniformText:
    """Tokens uniform over ``[0, vocabulary)``, as many as ``lengths`` says; ``end_token`` is the last one of a
    completion that ends by itself. Logprobs are those of the uniform distribution."""

    def __init__(self, lengths: LengthMixture, *, vocabulary: int, end_token: int) -> None:
        self._lengths = lengths
        self._vocabulary = vocabulary
        self._end_token = end_token
        self._logprob = -math.log(vocabulary)

    def draft(self, request: Generate, room: int) -> Draft:
        source = _chance(request)
        length = self._lengths.sample(source)
        # A resumed completion is longer than what it already has; draw again a few times, as conditioning would.
        for _ in range(64):
            if length > request.prefix_length:
                break
            length = self._lengths.sample(source)
        own = max(1, length - request.prefix_length)
        limit = min(remaining_tokens(request), room)
        tokens = token_array(self._token(source) for _ in range(min(own, limit)))
        if own <= limit:
            tokens[-1] = self._end_token
        return Draft(tokens, float_array([self._logprob]) * len(tokens), own <= limit)

    def _token(self, source: random.Random) -> int:
        token = source.randrange(self._vocabulary - 1)
        return token if token < self._end_token else token + 1


class Sentences:
    """An untrained policy as a table: tokens of ``words``, all equally likely, and full stops, after which a completion
    may end with ``end_token``. The chances depend on the token before only, so that logprobs are exact, also of a
    completion that is resumed. Temperatures above 0 and weights change nothing."""

    def __init__(self, words: tuple[int, ...], *, full_stop: int, end_token: int) -> None:
        self._words = words
        self._full_stop = full_stop
        self._end_token = end_token

    def chances(self, previous: int | None) -> tuple[float, float]:
        """Probabilities of a full stop and of the end after ``previous`` (None: at the start of the completion)."""
        if previous is None:
            return FIRST_STOP, 0.0
        return (0.0, END) if previous == self._full_stop else (STOP, 0.0)

    def draft(self, request: Generate, room: int) -> Draft:
        source = _chance(request)
        limit = min(remaining_tokens(request), room)
        previous = request.token_ids[-1] if request.prefix_length else None
        tokens = token_array()
        logprobs = float_array()
        while len(tokens) < limit and previous != self._end_token:
            stop, end = self.chances(previous)
            drawn = source.random()
            if drawn < end:
                previous = self._end_token
                chance = end
            elif drawn < end + stop:
                previous = self._full_stop
                chance = stop
            else:
                previous = source.choice(self._words)
                chance = (1 - stop - end) / len(self._words)
            tokens.append(previous)
            logprobs.append(math.log(chance))
        return Draft(tokens, logprobs, previous == self._end_token)


def sentences_of(tokenizer: Tokenizer) -> Sentences:
    """Sentences of the first tokens that ``tokenizer`` decodes to text, ended by its own end token. Raises
    ``RecipeError`` where it has no end token or next to no text."""
    if not tokenizer.eos_token_ids:
        raise RecipeError("model.path: the model names no end token, so simulated engines could never end a completion")
    scanned = range(min(tokenizer.vocabulary_size, _SCANNED))
    readable = (token for token in scanned if _is_text(tokenizer.decode(token_array([token]))))
    words = [token for token in islice(readable, WORDS) if token not in tokenizer.eos_token_ids]
    stops = [t for t in tokenizer.encode(".") if tokenizer.decode(token_array([t])).strip() == "."]
    if len(words) < 2:
        raise RecipeError("model.path: its tokenizer has no text that simulated engines could sample")
    full_stop = stops[-1] if stops else words.pop()
    return Sentences(
        tuple(word for word in words if word != full_stop), full_stop=full_stop, end_token=tokenizer.eos_token_ids[0]
    )


def _is_text(text: str) -> bool:
    return bool(text) and text.isprintable() and "\ufffd" not in text
