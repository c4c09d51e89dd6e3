"""Completions that are sampled on: after a cut, or under new weights. By token ids, never by text; pure.

**Deferred prompts verified** (``tail_batching.deferred_prompts = "verify"``). A completion is a function of its weights
and of its noise: at position t the engine takes the token with the largest ``log p(v | tokens before t) + G(t, v)``,
where the Gumbel noise G depends on the request's seed, on t and on v alone. That is a draw from p, whatever the seed. A
deferred completion that is *replayed* is this function once more, of the new weights and the same noise. *Verifying*
computes the same value for less: one prefill gives the new p at all positions of the tokens that were kept, the new
choices follow from p and G, and up to the first position where they differ the replay would have sampled just these.
From there the engine samples on with the random numbers of that position. So the verified completion equals the
replayed one token by token, and is as strictly on-policy as any other. Speculative acceptance, min(1, p_new / p_old),
would need the residual distribution of weights that are gone; without it, or with new noise at the rejected position,
it is biased. Stopping early is always right: the engine then samples itself what the rest of the kept tokens would
have said."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from streamrl.base.messages import Generate
from streamrl.base.types import (
    Completion,
    FinishReason,
    RoutedTokens,
    TokenArray,
    TrajectoryId,
    VersionSpan,
    float_array,
    token_array,
)

FEWEST_KEPT = 32
"""Tokens: shorter completions are sampled again sooner than they are verified (two requests instead of one)."""

ROUNDS_KEPT = 8
"""Deferred prompts are kept for so many times the most trajectories that were ever open at once; older ones are
replayed."""


def resumed_request(request: Generate, partial: Completion, *, seed: int, request_id: str | None = None) -> Generate:
    """``request`` with what ``partial`` sampled appended to its tokens.

    ``max_tokens`` stays the limit of the whole completion; ``prefix_length`` says how much of it is used.
    ``seed`` must be new: a generator that starts again with the old seed repeats the random numbers of the first
    tokens."""
    if partial.token_ids and request.kept:  # what of them holds is in ``partial``
        request = msgspec.structs.replace(request, token_ids=request.token_ids[: -request.kept], kept=0)
    return msgspec.structs.replace(
        request,
        request_id=request.request_id if request_id is None else request_id,
        token_ids=request.token_ids + partial.token_ids,
        prefix_length=request.prefix_length + len(partial.token_ids),
        seed=seed,
        routed=None if request.routed is None else max([request.routed, *(one.stop for one in partial.routed)]),
    )


def empty_completion(reason: FinishReason) -> Completion:
    """A completion without a token."""
    return Completion(token_ids=token_array(), behavior_logprobs=float_array(), finish_reason=reason, version_spans=())


def part_id(whole: str, part: int) -> str:
    """Request id of one part of a completion; part 0 is the first attempt at it."""
    return f"{whole}/{part}"


def whole_of(request_id: str) -> str:
    """Common id of all parts of one completion: the inverse of ``part_id``."""
    return request_id.rpartition("/")[0] or request_id


def remaining_tokens(request: Generate) -> int:
    """Return the number of tokens that may still be sampled for ``request``; 0 when its prefix used them up."""
    return max(0, request.max_tokens - request.prefix_length)


def join_completions(first: Completion, second: Completion) -> Completion:
    """Join two parts of a completion: tokens, logprobs and version spans in order; finished as ``second`` is."""
    offset = len(first.token_ids)
    spans = list(first.version_spans)
    for span in second.version_spans:
        moved = VersionSpan(start=span.start + offset, end=span.end + offset, policy_version=span.policy_version)
        if spans and spans[-1].policy_version == moved.policy_version and spans[-1].end == moved.start:
            moved = VersionSpan(start=spans.pop().start, end=moved.end, policy_version=moved.policy_version)
        spans.append(moved)
    return Completion(
        token_ids=first.token_ids + second.token_ids,
        behavior_logprobs=first.behavior_logprobs + second.behavior_logprobs,
        finish_reason=second.finish_reason,
        version_spans=tuple(spans),
        routed=first.routed + second.routed,
    )


def accepted_prefix(kept: Sequence[int], chosen: Sequence[int]) -> int:
    """Count the tokens of ``kept`` that the new weights choose too, from the start. ``chosen[t]``: their choice at t
    with the random numbers of t, given the kept tokens before it; a part that is missing at its end counts as not
    chosen."""
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


def accepted_part(
    kept: TokenArray, logprobs: Sequence[float], count: int, policy_version: int, routed: tuple[RoutedTokens, ...] = ()
) -> Completion:
    """The first ``count`` tokens of ``kept`` as what ``policy_version`` has sampled so far."""
    spans = (VersionSpan(start=0, end=count, policy_version=policy_version),) if count else ()
    return Completion(
        token_ids=kept[:count],
        behavior_logprobs=float_array(logprobs[:count]),
        finish_reason=FinishReason.ABORT,
        version_spans=spans,
        routed=routed,
    )


class CancelledCompletions:
    """Tokens of trajectories that were cancelled, by the seed that they were sampled with, in bounded memory. What
    ended is held for as long as its round may still lose it. A completion that is missing here is replayed from its
    start: the result is the same."""

    def __init__(self) -> None:
        self._ended: OrderedDict[TrajectoryId, tuple[int, TokenArray]] = OrderedDict()
        self._lost: OrderedDict[int, TokenArray] = OrderedDict()
        self._most = 0

    def __len__(self) -> int:
        """Number of kept partial completions."""
        return len(self._lost)

    def open(self, trajectories: int) -> None:
        """Note the number of open trajectories."""
        self._most = max(self._most, trajectories)

    def ended(self, trajectory: TrajectoryId, seed: int, tokens: TokenArray) -> None:
        """Note a complete trajectory, which may still lose with its group. ``tokens`` without the one that ended it."""
        self._ended[trajectory] = (seed, tokens)
        while len(self._ended) > self._most:
            self._ended.popitem(last=False)

    def cancelled(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Keep the tokens of those that were complete and now lose."""
        for trajectory in trajectories:
            found = self._ended.pop(trajectory, None)
            if found is not None:
                self.lost(*found)

    def lost(self, seed: int, tokens: TokenArray) -> None:
        """Keep the ``tokens`` of a cancelled trajectory."""
        if len(tokens) < FEWEST_KEPT:
            return
        self._lost[seed] = tokens
        self._lost.move_to_end(seed)
        while len(self._lost) > ROUNDS_KEPT * self._most:
            self._lost.popitem(last=False)

    def take(self, seed: int) -> TokenArray | None:
        """Return what was sampled with ``seed`` before, and forget it."""
        return self._lost.pop(seed, None)
