"""Verified completions are draws of the new policy: the rule on a toy policy, and what is kept until then."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache

from builders.base import identity

from streamrl.base.messages import Generate
from streamrl.base.types import Completion, FinishReason, TokenArray, VersionSpan, float_array, token_array
from streamrl.engines.resumption import (
    FEWEST_KEPT,
    ROUNDS_KEPT,
    CancelledCompletions,
    accepted_part,
    accepted_prefix,
    join_completions,
    resumed_request,
    with_unverified_tokens,
    without_unverified_tokens,
)

END, WORDS, LONGEST = 0, 4, 5
Policy = Callable[[tuple[int, ...]], list[float]]
Noise = list[list[float]]


def policy(salt: int, sharpness: float) -> Policy:
    """Logprobs of the next token by the last two and the place: what all policies share, and a part of its own."""

    @cache
    def logprobs(recent: tuple[int, ...], place: int) -> list[float]:
        shared, own = random.Random(f"{recent} {place}"), random.Random(f"{salt} {recent} {place}")
        logits = [1.2 * shared.gauss(0, 1) + sharpness * own.gauss(0, 1) for _ in range(WORDS)]
        total = math.log(sum(map(math.exp, logits)))
        return [logit - total for logit in logits]

    return lambda context: logprobs(context[-2:], len(context))


OLD, NEW = policy(1, 0.4), policy(2, 0.4)


def noise_of(seed: int) -> Noise:
    """Gumbel noise [place, word]."""
    chance = random.Random(seed)
    return [[-math.log(-math.log(chance.random() or 0.5)) for _ in range(WORDS)] for _ in range(LONGEST)]


def choice(policy: Policy, context: tuple[int, ...], noise: list[float]) -> int:
    scores = [p + g for p, g in zip(policy(context), noise, strict=True)]
    return scores.index(max(scores))


def replay(policy: Policy, noise: Noise, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
    """What the engine samples after ``prefix``."""
    tokens = prefix
    while len(tokens) < LONGEST and tokens[-1:] != (END,):
        tokens = (*tokens, choice(policy, tokens, noise[len(tokens)]))
    return tokens


def kept_of(seed: int) -> tuple[int, ...]:
    """Deferred: cut, or without the token that ended it."""
    whole = replay(OLD, noise_of(seed))
    return whole[: min(1 + seed % LONGEST, len(whole) - 1)]


def held(noise: Noise, kept: tuple[int, ...]) -> tuple[int, ...]:
    chosen = [choice(NEW, kept[:place], noise[place]) for place in range(len(kept))]
    return kept[: accepted_prefix(kept, chosen)]


def verified(seed: int) -> tuple[int, ...]:
    return replay(NEW, noise_of(seed), held(noise_of(seed), kept_of(seed)))


def test_a_verified_completion_is_the_replayed_one() -> None:
    accepted = []
    for seed in range(1_000):
        assert verified(seed) == replay(NEW, noise_of(seed))
        accepted.append(verified(seed)[: len(kept_of(seed))] == kept_of(seed))
    assert 0.3 < sum(accepted) / len(accepted) < 0.9, "the policies are neither equal nor strangers"


def test_accepted_prefix_by_hand() -> None:
    assert accepted_prefix([4, 5, 6], [4, 5, 6]) == 3
    assert accepted_prefix([4, 5, 6], [4, 7, 6]) == 1
    assert accepted_prefix([4, 5, 6], [9, 5, 6]) == 0
    assert accepted_prefix([4, 5, 6], [4, 5]) == 2, "what was not asked for does not hold"
    assert accepted_prefix([], []) == 0


def test_kept_tokens_in_a_request(make_request: Callable[..., Generate]) -> None:
    plain = make_request(token_ids=token_array([4, 5]), max_tokens=10)
    asked = with_unverified_tokens(plain, token_array([7, 8, 9]))
    assert (asked.token_ids, asked.unverified_tokens, asked.prefix_length) == (token_array([4, 5, 7, 8, 9]), 3, 0)
    assert without_unverified_tokens(asked) == plain
    assert without_unverified_tokens(plain) is plain
    part = accepted_part(token_array([7, 8, 9]), [-1.0, -2.0, -3.0], 2, 6)
    assert part.token_ids == token_array([7, 8])
    assert part.version_spans == (VersionSpan(start=0, end=2, policy_version=6),)
    assert accepted_part(token_array([7]), [-1.0], 0, 6).version_spans == ()
    rest = resumed_request(asked, part, seed=plain.seed)
    assert (rest.token_ids, rest.prefix_length, rest.unverified_tokens) == (token_array([4, 5, 7, 8]), 2, 0)
    # Moved before anything was known: it is to be verified elsewhere.
    nothing = Completion(
        token_ids=token_array(), behavior_logprobs=float_array(), finish_reason=FinishReason.ABORT, version_spans=()
    )
    assert resumed_request(asked, nothing, seed=plain.seed).unverified_tokens == 3
    assert join_completions(nothing, part) == part


def tokens_of(count: int) -> TokenArray:
    return token_array(range(count))


def test_deferred_tokens_are_kept_until_they_are_launched_again() -> None:
    kept = CancelledCompletions()
    kept.note_open(4)
    kept.add_cancelled(11, tokens_of(50))
    kept.add_complete(identity(1), 12, tokens_of(60))
    assert kept.take(12) is None, "it is complete, and its group may win"
    kept.cancel_complete([identity(1), identity(2)])
    assert kept.take(12) == tokens_of(60)
    assert kept.take(11) == tokens_of(50)
    assert kept.take(11) is None
    kept.add_cancelled(13, tokens_of(FEWEST_KEPT - 1))
    assert len(kept) == 0


def test_kept_tokens_are_bounded() -> None:
    kept = CancelledCompletions()
    kept.note_open(3)
    for seed in range(1_000):
        kept.add_complete(identity(seed), seed, tokens_of(40))
        kept.add_cancelled(10_000 + seed, tokens_of(40))
    assert len(kept) == 3 * ROUNDS_KEPT
    kept.cancel_complete([identity(seed) for seed in range(1_000)])
    assert len(kept) == 3 * ROUNDS_KEPT
    assert [kept.take(seed) is not None for seed in (996, 997, 998, 999)] == [False, True, True, True]
