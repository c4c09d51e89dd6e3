"""Which engines to free late in a round: the paper's rule, and what must hold whatever is measured."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.elastic.engine_planning import (
    Lengths,
    OpenRequest,
    PlanningSettings,
    ReleasePlan,
    RoundProgress,
    ServingEngine,
    plan_release,
    projected_peak,
)

ROOMY = Lengths(ascending=tuple(range(1, 101)), cap=100)
LENGTHS = Lengths(ascending=tuple(range(10, 410, 4)), cap=400)


def engine(
    index: int, contexts: list[tuple[int, int]], *, kv_tokens: int = 4_000, unit: str = "", max_num_seqs: int = 32
) -> ServingEngine:
    requests = tuple(
        OpenRequest(request_id=f"{index}.{i}", prompt=prompt, sampled=sampled)
        for i, (prompt, sampled) in enumerate(contexts)
    )
    return ServingEngine(name=f"e{index}", kv_tokens=kv_tokens, max_num_seqs=max_num_seqs, requests=requests, unit=unit)


def late(*engines: ServingEngine, finished: int = 30, **fields: object) -> RoundProgress:
    return RoundProgress(round_kind="long", finished=finished, launched=100, engines=engines, **fields)


def test_the_engines_with_the_least_to_move_are_freed_and_each_request_is_told_where_it_goes() -> None:
    plan = plan_release(late(*(engine(i, [(20, 100)] * n) for i, n in enumerate((4, 1, 3, 2)))), LENGTHS)
    assert plan.free == ("e1", "e3") and plan.looked
    assert sorted(move.request_id for move in plan.moves) == ["1.0", "3.0", "3.1"]
    assert {move.to for move in plan.moves} <= {"e0", "e2"}
    assert plan.because is not None and plan.because.subject == "engines_freed"
    assert "30 of 100 are finished (30%); 3 requests of e1, e3 fit on the 2 that go on" in plan.because.reason


def test_an_engine_that_serves_nothing_is_free_at_once() -> None:
    plan = plan_release(late(engine(0, [(20, 100)] * 4), engine(1, [])), LENGTHS)
    assert (plan.free, plan.moves) == (("e1",), ())


def test_nothing_outside_of_the_window_between_steps_or_twice() -> None:
    spare = [engine(0, [(20, 100)]), engine(1, [])]
    assert plan_release(late(*spare, finished=19), LENGTHS) == ReleasePlan()
    assert plan_release(late(*spare, finished=51), LENGTHS) == ReleasePlan()
    assert plan_release(late(*spare, finished=34, looked_at=0.30), LENGTHS) == ReleasePlan()
    assert plan_release(late(*spare, finished=35, looked_at=0.30), LENGTHS).free == ("e1",)
    assert plan_release(late(*spare, freed=True), LENGTHS) == ReleasePlan()
    assert plan_release(late(*spare), Lengths(ascending=(5,) * 19, cap=400)) == ReleasePlan(), "too little is known"
    assert plan_release(late(engine(0, [])), LENGTHS).free == (), "never the last one"


def test_what_would_not_fit_is_not_freed_and_the_reason_says_so() -> None:
    full = [engine(i, [(20, 100)] * 8, kv_tokens=2_500) for i in range(2)]
    plan = plan_release(late(*full), LENGTHS)
    assert plan.free == () and plan.looked and plan.because is not None
    assert plan.because.reason == "at 30% no engine can be spared: the caches of the others would be more than 90% full"
    roomy = [engine(i, [(20, 100)] * 8, kv_tokens=4_000) for i in range(2)]
    assert plan_release(late(*roomy), LENGTHS).free == ("e0",)


def test_no_engine_is_given_more_requests_than_it_runs_at_once() -> None:
    def both(most: int) -> ReleasePlan:
        return plan_release(late(*(engine(i, [(1, 1)] * n, max_num_seqs=most) for i, n in ((0, 5), (1, 4)))), ROOMY)

    assert both(9).free == ("e1",)
    assert both(8).free == ()


def test_engines_of_one_unit_are_freed_together_and_never_more_than_the_largest_share() -> None:
    engines = [engine(0, [], unit="a"), engine(1, [(9, 9)] * 3, unit="b"), engine(2, [(9, 9)], unit="a"),
               engine(3, [(9, 9)], unit="b")]  # fmt: skip
    assert plan_release(late(*engines), LENGTHS).free == ("e0", "e2")
    thirds = [engine(i, []) for i in range(5)]
    assert len(plan_release(late(*thirds), LENGTHS).free) == 2, "half of five engines is two"


def test_expected_ends_condition_on_what_is_sampled_already() -> None:
    def end(sampled: int) -> int:
        return LENGTHS.expected_ends([sampled], PlanningSettings())[0]

    assert end(0) == LENGTHS.ascending[90]
    assert end(200) > end(0)
    assert end(380) == 400, "too few were longer: the cap"


def test_of_many_requests_not_all_are_the_longest() -> None:
    ends = LENGTHS.expected_ends([0] * 10, PlanningSettings())
    assert ends == [min(LENGTHS.ascending[place], 400) for place in range(9, 100, 10)]
    assert sum(ends) / 10 > sum(LENGTHS.ascending) / 100, "and still more than the mean"


CONTEXTS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 399)), max_size=12)


def peak_by_stepping(requests: list[OpenRequest], ends: list[int], block: int) -> int:
    """Token by token: the blocks of all that have not ended, at every step."""
    most = 0
    for step in range(max((end - r.sampled for r, end in zip(requests, ends, strict=True)), default=0) + 1):
        held = [r.prompt + r.sampled + step for r, end in zip(requests, ends, strict=True) if r.sampled + step <= end]
        most = max(most, sum(block * math.ceil(tokens / block) for tokens in held))
    return most


@settings(max_examples=150, deadline=None)
@given(
    engines=st.lists(st.tuples(CONTEXTS, st.sampled_from([600, 2_000, 6_000])), min_size=1, max_size=6),
    finished=st.integers(20, 50),
    lengths=st.lists(st.integers(1, 400), min_size=20, max_size=60),
    units=st.integers(1, 6),
)
def test_a_plan_never_goes_beyond_capacity_and_moves_everything_once(
    engines: list[tuple[list[tuple[int, int]], int]], finished: int, lengths: list[int], units: int
) -> None:
    known, constants = Lengths(ascending=tuple(sorted(lengths)), cap=400), PlanningSettings()
    serving = [
        engine(i, contexts, kv_tokens=kv_tokens, unit=f"u{i % units}")
        for i, (contexts, kv_tokens) in enumerate(engines)
    ]
    plan = plan_release(late(*serving, finished=finished), known, constants)
    assert len(plan.free) <= len(serving) / 2
    freed = [one for one in serving if one.name in plan.free]
    assert all(other.name in plan.free for one in freed for other in serving if one.unit == other.unit)
    assert sorted(m.request_id for m in plan.moves) == sorted(r.request_id for one in freed for r in one.requests)
    by_id = {r.request_id: r for one in serving for r in one.requests}
    for one in serving if plan.free else ():
        if one.name in plan.free:
            continue
        requests = [*one.requests, *(by_id[m.request_id] for m in plan.moves if m.to == one.name)]
        ends = known.expected_ends([r.sampled for r in requests], constants)
        assert peak_by_stepping(requests, ends, one.block_tokens) <= constants.headroom * one.kv_tokens
        assert len(requests) <= one.max_num_seqs


@given(contexts=CONTEXTS, more=st.lists(st.integers(0, 100), min_size=12, max_size=12))
def test_the_projected_peak_is_that_of_stepping_through_the_tokens(
    contexts: list[tuple[int, int]], more: list[int]
) -> None:
    requests = [OpenRequest(request_id=str(i), prompt=p, sampled=s) for i, (p, s) in enumerate(contexts)]
    ends = [s + extra for (_, s), extra in zip(contexts, more, strict=False)]
    assert projected_peak(requests, ends) == peak_by_stepping(requests, ends, 1)
    assert projected_peak(requests, ends, 16) >= peak_by_stepping(requests, ends, 16)
