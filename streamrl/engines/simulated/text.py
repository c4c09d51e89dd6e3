"""Tokens of a simulated engine, and their logprobs. Pure: a completion depends on the seed of its request alone, and at
temperature 0, which is greedy, on the tokens before it.

``simulated.engine`` draws the full completion of a request when the request begins."""

from __future__ import annotations

import math
import zlib
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from streamrl.base.errors import RecipeError
from streamrl.base.messages import Generate
from streamrl.base.types import FloatArray, TokenArray, float_array, token_array
from streamrl.engines.resumption import remaining_tokens

if TYPE_CHECKING:
    from streamrl.pretrained.tokenizer import Tokenizer

FIRST_STOP = 0.25
"""Probability that a completion begins with a full stop: an empty answer."""
STOP = 1 / 40
"""Probability of a full stop after any other token: sentences have 40 tokens on average."""
END = 0.9
"""Probability that a full stop ends the completion."""
WORDS = 64
"""Largest number of tokens that sentences consist of."""
_SCANNED = 4096  # tokens of the vocabulary that are searched for such words


class LengthMixture(Struct, frozen=True, kw_only=True):
    """Completion lengths in tokens: log-normal, and with probability ``long_share`` a second, longer log-normal."""

    median: float = 45.0
    sigma: float = 0.8
    long_share: float = 0.1
    long_median: float = 250.0
    long_sigma: float = 0.5

    def sample(self, random_source: Random) -> int:
        """Return one length, at least 1."""
        median = self.median
        sigma = self.sigma
        if random_source.random() < self.long_share:
            median = self.long_median
            sigma = self.long_sigma
        return max(1, round(random_source.lognormvariate(math.log(median), sigma)))


class Draft(Struct, frozen=True, eq=False):
    """All tokens that a request will sample. ``ends``: whether the completion ends before its limit."""

    token_ids: TokenArray
    logprobs: FloatArray
    ends: bool


class SampledText(Protocol):
    """Draws full completions."""

    def draft(self, request: Generate, room: int) -> Draft:
        """Sample ``request``, which has no unverified tokens. ``room``: tokens that are left in the context."""


def _random_source(request: Generate) -> Random:
    return Random(request.seed if request.temperature else zlib.crc32(request.token_ids.tobytes()))


class UniformText:
    """Tokens uniform over ``[0, vocabulary)``, with the logprobs of the uniform distribution.

    ``lengths``: distribution of the number of tokens
    ``end_token``: last token of a completion that ends before its limit"""

    def __init__(self, lengths: LengthMixture, *, vocabulary: int, end_token: int) -> None:
        self._lengths = lengths
        self._vocabulary = vocabulary
        self._end_token = end_token
        self._logprob = -math.log(vocabulary)

    def draft(self, request: Generate, room: int) -> Draft:
        source = _random_source(request)
        length = self._lengths.sample(source)
        # A resumed completion is longer than its prefix: drawing again conditions the length on it.
        for _ in range(64):
            if length > request.prefix_length:
                break
            length = self._lengths.sample(source)
        remaining = max(1, length - request.prefix_length)
        limit = min(remaining_tokens(request), room)
        ends = remaining <= limit
        tokens = token_array(self._token(source) for _ in range(min(remaining, limit)))
        if ends:
            tokens[-1] = self._end_token
        return Draft(tokens, float_array([self._logprob]) * len(tokens), ends)

    def _token(self, source: Random) -> int:
        """Return one token, which is not the end token."""
        token = source.randrange(self._vocabulary - 1)
        return token if token < self._end_token else token + 1


class Sentences:
    """An untrained policy as a table: the tokens ``words``, all equally likely, and full stops, after which a
    completion may end with ``end_token``. The probabilities depend only on the token before, so logprobs are exact even
    for a resumed completion. Temperatures above 0 and weights have no effect."""

    def __init__(self, words: tuple[int, ...], *, full_stop: int, end_token: int) -> None:
        self._words = words
        self._full_stop = full_stop
        self._end_token = end_token

    def probabilities(self, previous: int | None) -> tuple[float, float]:
        """Return the probabilities of a full stop and of the end after the token ``previous`` (None: at the start)."""
        if previous is None:
            return FIRST_STOP, 0.0
        if previous == self._full_stop:
            return 0.0, END
        return STOP, 0.0

    def draft(self, request: Generate, room: int) -> Draft:
        source = _random_source(request)
        limit = min(remaining_tokens(request), room)
        previous = request.token_ids[-1] if request.prefix_length else None
        tokens = token_array()
        logprobs = float_array()
        while len(tokens) < limit and previous != self._end_token:
            stop, end = self.probabilities(previous)
            number = source.random()
            if number < end:
                previous = self._end_token
                probability = end
            elif number < end + stop:
                previous = self._full_stop
                probability = stop
            else:
                previous = source.choice(self._words)
                probability = (1 - stop - end) / len(self._words)
            tokens.append(previous)
            logprobs.append(math.log(probability))
        return Draft(tokens, logprobs, previous == self._end_token)


def sentences_of(tokenizer: Tokenizer) -> Sentences:
    """Return sentences of the first tokens that ``tokenizer`` decodes to text, with its end token. Raises
    ``RecipeError`` when the tokenizer has no end token, or fewer than two tokens with text."""
    if not tokenizer.eos_token_ids:
        raise RecipeError("model.path: the model names no end token, so simulated engines could never end a completion")
    scanned = range(min(tokenizer.vocabulary_size, _SCANNED))
    readable = (token for token in scanned if _is_text(tokenizer.decode(token_array([token]))))
    words = [token for token in islice(readable, WORDS) if token not in tokenizer.eos_token_ids]
    stops = [token for token in tokenizer.encode(".") if tokenizer.decode(token_array([token])).strip() == "."]
    if len(words) < 2:
        raise RecipeError("model.path: its tokenizer has no text that simulated engines could sample")
    full_stop = stops[-1] if stops else words.pop()
    return Sentences(
        tuple(word for word in words if word != full_stop), full_stop=full_stop, end_token=tokenizer.eos_token_ids[0]
    )


def _is_text(text: str) -> bool:
    return bool(text) and text.isprintable() and "\ufffd" not in text
