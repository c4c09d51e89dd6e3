"""Continuation of completions: after an abort, on another engine, or under new weights. Pure functions of token ids.

The coroutines of trajectories (``stages.episodes``, controller) build the next request of a completion here and join
its parts. Engines (engine processes) compute their answers with the same functions.

**Verified deferred prompts** (``tail_batching.deferred_prompts = "verify"``). A completion is a function of the weights
and of the noise: at position t the engine takes the token with the largest ``log p(v | tokens before t) + G(t, v)``,
where the Gumbel noise G depends on the request's seed, on t and on v alone. The chosen token is a draw from p, whatever
the seed. A *replay* of a deferred completion evaluates this function again, with the new weights and the same noise.
*Verification* computes the same completion for less: one prefill gives the new p at all positions of the unverified
tokens, and the new choices follow from p and G. Before the first position where a choice differs, the replay would have
sampled the unverified tokens. From this position on the engine samples with the random numbers of the position. So the
verified completion equals the replayed one token by token, and is as strictly on-policy as any other. Speculative
acceptance, min(1, p_new / p_old), would need the residual distribution of the old weights, which no longer exist;
without the residual distribution, or with new noise at the rejected position, acceptance is biased. An engine may stop
the verification at any position: it then samples the remaining tokens itself, and gets the same ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

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
"""Shortest completion, in tokens, that is kept for verification. A shorter one is sampled again sooner than it is
verified, since verification takes two requests instead of one."""

ROUNDS_KEPT = 8
"""Number of completions that are kept for verification, as a multiple of the largest number of open trajectories. Older
completions are dropped, and their prompts are replayed."""


def resumed_request(request: Generate, partial: Completion, *, seed: int, request_id: str | None = None) -> Generate:
    """Return ``request`` with the tokens of ``partial`` appended to its own.

    ``max_tokens`` stays the limit of the full completion; ``prefix_length`` is the used part of this limit. ``seed``
    must be new: a generator that starts again with the old seed repeats the random numbers of the first tokens."""
    if partial.token_ids:  # these include the unverified tokens that the current weights choose, too
        request = without_unverified_tokens(request)
    routed_tokens = request.routed_tokens
    if routed_tokens is not None:
        routed_tokens = max([routed_tokens, *(part.stop for part in partial.routed)])
    return replace(
        request,
        request_id=request.request_id if request_id is None else request_id,
        token_ids=request.token_ids + partial.token_ids,
        prefix_length=request.prefix_length + len(partial.token_ids),
        seed=seed,
        routed_tokens=routed_tokens,
    )


def empty_completion(reason: FinishReason) -> Completion:
    """Return a completion without tokens."""
    return Completion(token_ids=token_array(), behavior_logprobs=float_array(), finish_reason=reason, version_spans=())


def part_id(completion_id: str, part: int) -> str:
    """Return the request id of one part of a completion; part 0 is the first attempt."""
    return f"{completion_id}/{part}"


def completion_id_of(request_id: str) -> str:
    """Return the common id of all parts of one completion: the inverse of ``part_id``."""
    return request_id.rpartition("/")[0] or request_id


def remaining_tokens(request: Generate) -> int:
    """Return the number of tokens that may still be sampled for ``request``; 0 when its prefix used them up."""
    return max(0, request.max_tokens - request.prefix_length)


def join_completions(first: Completion, second: Completion) -> Completion:
    """Join two parts of a completion: tokens, logprobs and version spans in order, with the finish reason of
    ``second``. Adjacent spans of the same version become one span."""
    offset = len(first.token_ids)
    spans = list(first.version_spans)
    for span in second.version_spans:
        start = span.start + offset
        if spans and spans[-1].policy_version == span.policy_version and spans[-1].end == start:
            start = spans.pop().start
        spans.append(VersionSpan(start=start, end=span.end + offset, policy_version=span.policy_version))
    return Completion(
        token_ids=first.token_ids + second.token_ids,
        behavior_logprobs=first.behavior_logprobs + second.behavior_logprobs,
        finish_reason=second.finish_reason,
        version_spans=tuple(spans),
        routed=first.routed + second.routed,
        kept_sets=first.kept_sets.followed_by(second.kept_sets, offset),
    )


def accepted_prefix(unverified: Sequence[int], choices: Sequence[int]) -> int:
    """Count the tokens at the start of ``unverified`` that the new weights choose, too. ``choices[t]`` is the choice of
    the new weights at t, given the unverified tokens before t and the random numbers of t. Positions without a choice,
    at the end, do not count."""
    for position, (token, choice) in enumerate(zip(unverified, choices, strict=False)):
        if token != choice:
            return position
    return min(len(unverified), len(choices))


def with_unverified_tokens(request: Generate, tokens: TokenArray) -> Generate:
    """Return ``request`` with ``tokens`` of an earlier completion, which older weights sampled with the same seed."""
    return replace(request, token_ids=request.token_ids + tokens, unverified_tokens=len(tokens))


def without_unverified_tokens(request: Generate) -> Generate:
    """Return ``request`` without its unverified tokens. The completion is the same, and takes longer."""
    if not request.unverified_tokens:
        return request
    return replace(request, token_ids=request.token_ids[: -request.unverified_tokens], unverified_tokens=0)


def accepted_part(
    tokens: TokenArray,
    logprobs: Sequence[float],
    count: int,
    policy_version: int,
    routed: tuple[RoutedTokens, ...] = (),
) -> Completion:
    """Return the first ``count`` of ``tokens`` as an aborted completion that ``policy_version`` has sampled so far."""
    spans: tuple[VersionSpan, ...] = ()
    if count:
        spans = (VersionSpan(start=0, end=count, policy_version=policy_version),)
    return Completion(
        token_ids=tokens[:count],
        behavior_logprobs=float_array(logprobs[:count]),
        finish_reason=FinishReason.ABORT,
        version_spans=spans,
        routed=routed,
    )


class CancelledCompletions:
    """Tokens of cancelled trajectories, by the seed that they were sampled with, in bounded memory. Tokens of a
    complete trajectory are held while its group may still be cancelled. A completion that is missing here is replayed
    from its start: the result is the same."""

    def __init__(self) -> None:
        self._complete: OrderedDict[TrajectoryId, tuple[int, TokenArray]] = OrderedDict()
        self._cancelled: OrderedDict[int, TokenArray] = OrderedDict()
        self._most_open = 0

    def __len__(self) -> int:
        """Number of cancelled completions."""
        return len(self._cancelled)

    def note_open(self, trajectories: int) -> None:
        """Note the number of open trajectories."""
        self._most_open = max(self._most_open, trajectories)

    def add_complete(self, trajectory: TrajectoryId, seed: int, tokens: TokenArray) -> None:
        """Hold a complete trajectory, whose group may still be cancelled. ``tokens``: token ids without the end
        token."""
        self._complete[trajectory] = (seed, tokens)
        while len(self._complete) > self._most_open:
            self._complete.popitem(last=False)

    def cancel_complete(self, trajectories: Iterable[TrajectoryId]) -> None:
        """Keep the tokens of those ``trajectories`` that were complete, since their groups were cancelled."""
        for trajectory in trajectories:
            seed_and_tokens = self._complete.pop(trajectory, None)
            if seed_and_tokens is not None:
                self.add_cancelled(*seed_and_tokens)

    def add_cancelled(self, seed: int, tokens: TokenArray) -> None:
        """Keep the ``tokens`` of a cancelled trajectory."""
        if len(tokens) < FEWEST_KEPT:
            return
        self._cancelled[seed] = tokens
        self._cancelled.move_to_end(seed)
        while len(self._cancelled) > ROUNDS_KEPT * self._most_open:
            self._cancelled.popitem(last=False)

    def take(self, seed: int) -> TokenArray | None:
        """Return the tokens that were sampled with ``seed`` before, and forget them."""
        return self._cancelled.pop(seed, None)
