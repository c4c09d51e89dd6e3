"""Going on with a completion that was cut: by token ids, never by text. Pure functions."""

from __future__ import annotations

import msgspec

from streamrl.base.messages import Generate
from streamrl.base.types import Completion, VersionSpan


def resumed_request(request: Generate, partial: Completion, *, seed: int, request_id: str | None = None) -> Generate:
    """``request`` with what ``partial`` sampled appended to its tokens.

    ``max_tokens`` stays the limit of the whole completion; ``prefix_length`` says how much of it is used.
    ``seed`` must be new: a generator that starts anew with the old seed repeats the noise of the first tokens.
    """
    if partial.token_ids and request.kept:  # what of them holds is in ``partial``
        request = msgspec.structs.replace(request, token_ids=request.token_ids[: -request.kept], kept=0)
    return msgspec.structs.replace(
        request,
        request_id=request.request_id if request_id is None else request_id,
        token_ids=request.token_ids + partial.token_ids,
        prefix_length=request.prefix_length + len(partial.token_ids),
        seed=seed,
    )


def part_id(whole: str, part: int) -> str:
    """Request id of one part of a completion; part 0 is the first attempt at it."""
    return f"{whole}/{part}"


def whole_of(request_id: str) -> str:
    """What all parts of one completion have in common in their ids: the inverse of ``part_id``."""
    return request_id.rpartition("/")[0] or request_id


def remaining_tokens(request: Generate) -> int:
    """How many tokens may still be sampled for ``request``; 0 when its prefix used them up."""
    return max(0, request.max_tokens - request.prefix_length)


def join_completions(first: Completion, second: Completion) -> Completion:
    """Both as one completion: tokens, logprobs and version spans in order; finished as ``second`` is."""
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
    )
