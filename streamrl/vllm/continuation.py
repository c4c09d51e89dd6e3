"""Deferred prompts of a race verified under new weights and continued (``tail_batching.deferred_prompts = "verify"``).
Pure.

A completion is a function of its weights and of its noise: at position t the engine takes the token with the largest
``log p(v | tokens before t) + G(t, v)``, where the Gumbel noise G depends on the request's seed, on t and on v alone.
That is a draw from p, whatever the seed. A loser that is *replayed* is this function once more, of the new weights and
the same noise. *Verifying* computes the same value for less: one prefill gives the new p at all positions of the tokens
that are kept, the new choices follow from p and G, and up to the first position where they differ from the kept tokens
the replay would have sampled just these. From there the engine goes on with the noise of that position.

So the verified completion equals the replayed one token by token, its logprobs are those of the new weights, and it is
as strictly on-policy as any other (tests/engines/test_continuation.py). The rule needs no distribution of the old
policy. Speculative acceptance, min(1, p_new / p_old), would: where it rejects, the residual max(0, p_new - p_old) over
the whole vocabulary, at each position, of weights that are gone. It would keep a little more (the share of tokens
rejected at a position is the total variation distance d there, by common noise at most 2 d / (1 + d)); without the
residual, or with new noise at the position that was rejected, it is biased.

Stopping early is always right: the engine then samples itself what the rest of the kept tokens would have told.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from streamrl.base.messages import Generate
from streamrl.base.types import Completion, FinishReason, TokenArray, TrajectoryId, VersionSpan, float_array

FEWEST_KEPT = 32
"""Tokens: shorter completions are sampled again sooner than they are verified (two requests instead of one)."""

ROUNDS_KEPT = 8
"""Deferred prompts are kept for so many times the most trajectories that were ever open at once; older ones are
replayed."""


def accepted_prefix(kept: Sequence[int], chosen: Sequence[int]) -> int:
    """How many tokens of ``kept`` the new weights choose too, from the start. ``chosen[t]``: their choice at t with the
    noise of t, given the kept tokens before it; the part that is missing at its end counts as not chosen."""
    for place, (old, new) in enumerate(zip(kept, chosen, strict=False)):
        if old != new:
            return place
    return min(len(kept), len(chosen))


def with_kept(request: Generate, kept: TokenArray) -> Generate:
    """``request`` with tokens of an earlier completion of it, by other weights and with the same seed."""
    return msgspec.structs.replace(request, token_ids=request.token_ids + kept, kept=len(kept))


def without_kept(request: Generate) -> Generate:
    """The request that is answered the same, and takes longer."""
    if not request.kept:
        return request
    return msgspec.structs.replace(request, token_ids=request.token_ids[: -request.kept], kept=0)


def accepted_part(kept: TokenArray, logprobs: Sequence[float], count: int, policy_version: int) -> Completion:
    """The first ``count`` tokens of ``kept`` as what ``policy_version`` has sampled so far."""
    spans = (VersionSpan(start=0, end=count, policy_version=policy_version),) if count else ()
    return Completion(
        token_ids=kept[:count],
        behavior_logprobs=float_array(logprobs[:count]),
        finish_reason=FinishReason.ABORT,
        version_spans=spans,
    )


class KeptTokens:
    """Tokens of trajectories that were cancelled, by the seed that they were sampled with, in bounded memory.

    What ended is held for as long as its round may still lose it. What is missing here is replayed from its start: the
    result is the same.
    """

    def __init__(self) -> None:
        self._ended: OrderedDict[TrajectoryId, tuple[int, TokenArray]] = OrderedDict()
        self._lost: OrderedDict[int, TokenArray] = OrderedDict()
        self._most = 0

    def __len__(self) -> int:
        """DeferredPrompts that are kept."""
        return len(self._lost)

    def open(self, trajectories: int) -> None:
        """So many are open now."""
        self._most = max(self._most, trajectories)

    def ended(self, trajectory: TrajectoryId, seed: int, tokens: TokenArray) -> None:
        """It is complete; it may still lose, with its group. ``tokens`` without the one that ended it."""
        self._ended[trajectory] = (seed, tokens)
        while len(self._ended) > self._most:
            self._ended.popitem(last=False)

    def cancelled(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Those of them that were complete lose, too."""
        for trajectory in trajectories:
            found = self._ended.pop(trajectory, None)
            if found is not None:
                self.lost(*found)

    def lost(self, seed: int, tokens: TokenArray) -> None:
        """It was cancelled with ``tokens``."""
        if len(tokens) < FEWEST_KEPT:
            return
        self._lost[seed] = tokens
        self._lost.move_to_end(seed)
        while len(self._lost) > ROUNDS_KEPT * self._most:
            self._lost.popitem(last=False)

    def take(self, seed: int) -> TokenArray | None:
        """What was sampled with ``seed`` before; it is not kept any longer."""
        return self._lost.pop(seed, None)
