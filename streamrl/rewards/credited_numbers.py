"""Numbers that a reward gave to steps or tokens (``rewards.credit``), one for each sampled token. Pure.

The worker that scores a completion has its tokens and its text, and places the numbers; a ``ScoredTrajectory`` carries
them as ``token_values``."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import accumulate
from operator import itemgetter

from streamrl.base.types import FloatArray, RewardFailureKind, ScoredTrajectory, TokenArray, float_array
from streamrl.recipe.rewards import RewardCredit, credit_of
from streamrl.rewards.values import CallFailure, CheckedValue, NumberedSpan

Decode = Callable[[TokenArray], str]
"""Returns the text of tokens, as the reward saw it."""
BLOCK_TOKENS = 128
LONGEST_CHARACTER = 5
"""Number of tokens behind a block among which a character ends, and one more."""


def place_numbers(
    checked: CheckedValue, turns: Sequence[TokenArray], credit: RewardCredit, decode: Decode
) -> FloatArray | CallFailure:
    """Numbers of the sampled tokens of all ``turns``, float32; NaN for a token without a number. Numbers of one token
    are added up.

    The number of a step is at its last token. A span that reaches the end of the text of its turn also has the tokens
    behind it, which ended the turn. A failure for a number or a span that no token is for."""
    total = sum(map(len, turns))
    if checked.token_numbers:
        if len(checked.token_numbers) != total:
            message = (
                f"returned {len(checked.token_numbers)} numbers for {total} sampled tokens: return one for each of "
                "token_ids, or spans (start, end, number)"
            )
            return CallFailure(RewardFailureKind.WRONG_TYPE, message)
        return _finite(float_array([math.nan if number is None else number for number in checked.token_numbers]))
    starts = list(accumulate(map(len, turns), initial=0))
    placers = [_SpanPlacer(turn, decode) for turn in turns]
    numbers = float_array([math.nan]) * total
    for span in checked.spans:
        if not -len(turns) <= span.turn < len(turns):
            message = f"returned a span of turn {span.turn}, and the completion has {len(turns)}: count them from 0"
            return CallFailure(RewardFailureKind.WRONG_TYPE, message)
        turn = span.turn % len(turns)
        tokens = placers[turn].tokens_of(span)
        if isinstance(tokens, CallFailure):
            return tokens
        if credit is RewardCredit.STEPS:
            tokens = tokens[-1:]
        for place in tokens:
            before = numbers[starts[turn] + place]
            numbers[starts[turn] + place] = span.number if math.isnan(before) else before + span.number
    return _finite(numbers)


def _finite(numbers: FloatArray) -> FloatArray | CallFailure:
    """``numbers``; a failure for one that float32 cannot hold."""
    if any(map(math.isinf, numbers)):
        message = "returned a number above 3.4e38, the largest of float32: scale the numbers down"
        return CallFailure(RewardFailureKind.NOT_FINITE, message)
    return numbers


class _SpanPlacer:
    """Tokens of the spans of one turn, whose text is decoded when the first span needs it."""

    def __init__(self, token_ids: TokenArray, decode: Decode) -> None:
        self._token_ids = token_ids
        self._decode = cache(lambda start, stop: decode(token_ids[start:stop]))
        self._characters = cache(self._count_characters)

    @cached_property
    def _text(self) -> str:
        return self._decode(0, len(self._token_ids))

    @cached_property
    def _blocks(self) -> list[tuple[int, int]]:
        """(token, character) at which each block of tokens begins, so that no beginning is decoded again and again. The
        texts of all blocks make up the text; there is one block where they do not, as for tokens that are decoded
        otherwise at the beginning."""
        blocks = [(0, 0)]
        for stop in range(BLOCK_TOKENS, len(self._token_ids), BLOCK_TOKENS):
            start, place = blocks[-1]
            # A character may have several tokens, and a block ends with a whole one.
            pieces = (self._decode(start, stop + extra) for extra in range(LONGEST_CHARACTER))
            piece = next((piece for piece in enumerate(pieces) if self._text.startswith(piece[1], place)), None)
            if piece is None:
                return [(0, 0)]
            blocks.append((stop + piece[0], place + len(piece[1])))
        start, place = blocks[-1]
        return blocks if self._decode(start, len(self._token_ids)) == self._text[place:] else [(0, 0)]

    def tokens_of(self, span: NumberedSpan) -> range | CallFailure:
        """Indices of the tokens of ``span``; a failure where it has no characters of the text."""
        text = self._text
        if not 0 <= span.start < span.end <= len(text):
            message = (
                f"returned the span ({span.start}, {span.end}), and the text of its turn has {len(text)} characters: a "
                "span is (start, end, number) with 0 <= start < end <= the length of the text"
            )
            return CallFailure(RewardFailureKind.WRONG_TYPE, message)
        first = self._tokens_before(span.start + 1) - 1
        # Tokens with a part of a character have no text of their own: they belong to the one that completes it.
        while first and self._characters(first) == self._characters(first - 1) and "\ufffd" in self._piece(first - 1):
            first -= 1
        stop = len(self._token_ids) if span.end == len(text) else self._tokens_before(span.end)
        return range(first, stop)

    def _tokens_before(self, characters: int) -> int:
        """Least number of tokens whose text has the first ``characters`` of the text."""
        index = bisect_left(self._blocks, characters, key=itemgetter(1)) - 1
        last = index + 1 == len(self._blocks)
        counts = range(self._blocks[index][0] + 1, len(self._token_ids) if last else self._blocks[index + 1][0])
        return counts.start + bisect_left(counts, characters, key=self._characters)

    def _block_before(self, count: int) -> tuple[int, int]:
        """(token, character) at which the block of the last of the first ``count`` tokens begins."""
        return self._blocks[max(0, bisect_left(self._blocks, count, key=itemgetter(0)) - 1)]

    def _count_characters(self, count: int) -> int:
        """Number of characters of the text that the first ``count`` tokens have."""
        start, place = self._block_before(count)
        beginning = self._decode(start, count)
        length = len(beginning)
        # Texts differ at the end of the beginning, if at all: a part of a character is written as another one.
        while not self._text.startswith(beginning[:length], place):
            length -= 1
        return place + length

    def _piece(self, index: int) -> str:
        """Text that the token ``index`` adds to the text before it, also where that is a part of a character."""
        start, place = self._block_before(index + 1)
        return self._decode(start, index + 1)[max(0, self._characters(index) - place) :]


def compared_numbers(scored: ScoredTrajectory) -> tuple[dict[str, float], bool]:
    """Rewards by name as control compares them among siblings, and whether the numbers of this trajectory alone have a
    gradient: numbers of its steps differ, or tokens have a number that is not 0.

    Steps of equal numbers are compared by that number."""
    rewards = {name: value for name, (weight, value) in scored.separate_rewards.items() if weight}
    signal = False
    for name, values in scored.token_values.items():
        credit, label = credit_of(name)
        numbers = {number for number in values if not math.isnan(number)}
        if label not in rewards or not numbers:
            continue
        if credit is RewardCredit.TOKENS:
            signal = signal or numbers != {0.0}
        else:
            signal = signal or len(numbers) > 1
            rewards[label] = min(numbers)
    return rewards, signal
