"""Which engines to free late in a round: the paper's rule, and what must hold whatever is measured."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.types import TrajectoryId
from streamrl.engines.elastic.freeing import (
    Freeing,
    FreeingSettings,
    Lengths,
    OpenRequest,
    ReleasePlan,
    ServingEngine,
    plan_release,
    projected_peak,
)

ROOMY = Lengths(ascending=tuple(range(1, 101)), cap=100)
LENGTHS = Lengths(ascending=tuple(range(10, 410, 4)), cap=400)


def engine(
    index: int, contexts: list[tuple[int, int]], *, kv_tokens: int = 4_000, max_num_seqs: int = 32
) -> ServingEngine:
    requests = tuple(
        OpenRequest(request_id=f"{index}.{i}", prompt=prompt, sampled=sampled)
        for i, (prompt, sampled) in enumerate(contexts)
    )
    return ServingEngine(name=f"e{index}", kv_tokens=kv_tokens, max_num_seqs=max_num_seqs, requests=requests)


def plan_of(*engines: ServingEngine, lengths: Lengths = LENGTHS, finished: int = 30) -> ReleasePlan:
    return plan_release(finished, 100, engines, lengths)


def test_engines_with_the_least_to_move_are_freed() -> None:
    """The engines with the least to move are freed, and each request has a destination."""
    plan = plan_of(*(engine(i, [(20, 100)] * n) for i, n in enumerate((4, 1, 3, 2))))
    assert plan.free == ("e1", "e3")
    assert sorted(move.request_id for move in plan.moves) == ["1.0", "3.0", "3.1"]
    assert {move.to for move in plan.moves} <= {"e0", "e2"}
    assert plan.because.subject == "engines_freed"
    assert "30 of 100 are finished (30%); 3 requests of e1, e3 fit on the 2 that go on" in plan.because.reason


def test_an_engine_that_serves_nothing_is_free_at_once() -> None:
    plan = plan_of(engine(0, [(20, 100)] * 4), engine(1, []))
    assert (plan.free, plan.moves) == (("e1",), ())


class Round:
    """A round of 100 trajectories, of which a number has finished; ``known`` lengths are of rounds before it."""

    def __init__(self, known: int = 20) -> None:
        self.freeing = Freeing(400)
        self.freeing.note_launch("long", identities("before", known))
        for identity in identities("before", known):
            self.freeing.note_end(identity, 100)
        self.freeing.begin_round()
        self.freeing.note_launch("long", identities("now", 100))
        self.finished = 0

    def due_at(self, finished: int) -> bool:
        for identity in identities("now", 100)[self.finished : finished]:
            self.freeing.note_end(identity, None)
        self.finished = finished
        return self.freeing.is_due


def identities(prompt: str, count: int) -> list[TrajectoryId]:
    return [TrajectoryId(prompt_id=prompt, group_id=0, sample=number) for number in range(count)]


def test_engines_are_freed_once_in_their_window() -> None:
    """Engines are freed in the window after each step of progress, and only once."""
    full, spare = engine(0, [(20, 100)]), engine(1, [])
    one = Round()
    assert not one.due_at(19) and one.due_at(20)
    assert one.freeing.plan([full]).free == (), "never the last one"
    assert not one.due_at(24) and one.due_at(25)
    assert one.freeing.plan([full, spare]).free == ("e1",)
    assert not one.due_at(40), "one time is all there is"
    assert Round().due_at(50) and not Round().due_at(51)
    assert not Round(known=19).due_at(30), "too little is known"


def test_late_results_of_the_last_round_do_not_count() -> None:
    one = Round()
    one.freeing.begin_round()
    one.freeing.note_launch("long", identities("next", 100))
    assert not one.due_at(40) and one.freeing.progress == 0.0


def test_what_would_not_fit_is_not_freed_and_the_reason_says_so() -> None:
    full = [engine(i, [(20, 100)] * 8, kv_tokens=2_500) for i in range(2)]
    plan = plan_of(*full)
    assert plan.free == ()
    assert plan.because.reason == "at 30% no engine can be spared: the caches of the others would be more than 90% full"
    roomy = [engine(i, [(20, 100)] * 8, kv_tokens=4_000) for i in range(2)]
    assert plan_of(*roomy).free == ("e0",)


def test_no_engine_is_given_more_requests_than_it_runs_at_once() -> None:
    def both(most: int) -> ReleasePlan:
        return plan_of(*(engine(i, [(1, 1)] * n, max_num_seqs=most) for i, n in ((0, 5), (1, 4))), lengths=ROOMY)

    assert both(9).free == ("e1",)
    assert both(8).free == ()


def test_never_more_than_the_largest_share() -> None:
    assert len(plan_of(*(engine(i, []) for i in range(5))).free) == 2, "half of five engines is two"


def test_expected_ends_condition_on_what_is_sampled_already() -> None:
    def end(sampled: int) -> int:
        return LENGTHS.expected_ends([sampled], FreeingSettings())[0]

    assert end(0) == LENGTHS.ascending[90]
    assert end(200) > end(0)
    assert end(380) == 400, "too few were longer: the cap"


def test_of_many_requests_not_all_are_the_longest() -> None:
    ends = LENGTHS.expected_ends([0] * 10, FreeingSettings())
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
)
def test_plans_respect_capacity_and_move_requests_once(
    engines: list[tuple[list[tuple[int, int]], int]], finished: int, lengths: list[int]
) -> None:
    """A plan never exceeds the capacity and moves every request once."""
    known, constants = Lengths(ascending=tuple(sorted(lengths)), cap=400), FreeingSettings()
    serving = [engine(i, contexts, kv_tokens=kv_tokens) for i, (contexts, kv_tokens) in enumerate(engines)]
    plan = plan_release(finished, 100, serving, known, constants)
    assert len(plan.free) <= len(serving) / 2
    freed = [one for one in serving if one.name in plan.free]
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
def test_the_projected_peak_equals_a_token_walk(contexts: list[tuple[int, int]], more: list[int]) -> None:
    """The projected peak equals the peak of stepping through the tokens."""
    requests = [OpenRequest(request_id=str(i), prompt=p, sampled=s) for i, (p, s) in enumerate(contexts)]
    ends = [s + extra for (_, s), extra in zip(contexts, more, strict=False)]
    assert projected_peak(requests, ends) == peak_by_stepping(requests, ends, 1)
    assert projected_peak(requests, ends, 16) >= peak_by_stepping(requests, ends, 16)
