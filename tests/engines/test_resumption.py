"""Joining completions and asking for the rest of one."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from streamrl.base.messages import Generate
from streamrl.base.types import Completion, FinishReason, VersionSpan, float_array, token_array
from streamrl.engines.resumption import join_completions, remaining_tokens, resumed_request


def completion(tokens: list[int], versions: list[int], reason: FinishReason = FinishReason.ABORT) -> Completion:
    """One token per entry of ``versions``; spans are runs of equal versions."""
    spans: list[VersionSpan] = []
    for index, version in enumerate(versions):
        if spans and spans[-1].policy_version == version:
            spans[-1] = VersionSpan(start=spans[-1].start, end=index + 1, policy_version=version)
        else:
            spans.append(VersionSpan(start=index, end=index + 1, policy_version=version))
    return Completion(
        token_ids=token_array(tokens),
        behavior_logprobs=float_array([-0.5 * token for token in tokens]),
        finish_reason=reason,
        version_spans=tuple(spans),
    )


def versions_by_token(joined: Completion) -> list[int]:
    return [span.policy_version for span in joined.version_spans for _ in range(span.end - span.start)]


def test_resumed_request_appends_tokens_and_keeps_the_limit(make_request: Callable[..., Generate]) -> None:
    request = make_request(token_ids=token_array([4, 5]), max_tokens=10, seed=1)
    resumed = resumed_request(request, completion([7, 8, 9], [0, 0, 0]), seed=99)
    assert resumed.token_ids == token_array([4, 5, 7, 8, 9])
    assert (resumed.prefix_length, resumed.max_tokens, resumed.seed) == (3, 10, 99)
    assert remaining_tokens(resumed) == 7
    twice = resumed_request(resumed, completion([6], [1]), seed=100)
    assert twice.prefix_length == 4
    assert twice.token_ids == token_array([4, 5, 7, 8, 9, 6])
    assert request.token_ids == token_array([4, 5]), "the first request must not change"


def test_join_merges_spans_of_one_version_and_shifts_the_others() -> None:
    joined = join_completions(completion([1, 2], [3, 3]), completion([4, 5, 6], [3, 4, 4], FinishReason.STOP))
    assert joined.token_ids == token_array([1, 2, 4, 5, 6])
    assert joined.behavior_logprobs == float_array([-0.5, -1.0, -2.0, -2.5, -3.0])
    assert joined.finish_reason is FinishReason.STOP
    assert joined.version_spans == (
        VersionSpan(start=0, end=3, policy_version=3),
        VersionSpan(start=3, end=5, policy_version=4),
    )


tokens_and_versions = st.lists(st.tuples(st.integers(0, 31), st.integers(0, 3)), max_size=6)


@given(tokens_and_versions, tokens_and_versions)
def test_joined_spans_cover_every_token_once(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    first, second = (completion([t for t, _ in part], [v for _, v in part]) for part in (left, right))
    joined = join_completions(first, second)
    assert versions_by_token(joined) == [version for _, version in left + right]
    ends = [0, *(span.end for span in joined.version_spans)]
    assert [span.start for span in joined.version_spans] == ends[:-1]
    assert ends[-1] == len(joined.token_ids) == len(joined.behavior_logprobs)
