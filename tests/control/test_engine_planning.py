"""Which set of engines, and which engines to free: the paper's rules, and what must hold whatever is measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.control.engine_planning import (
    EngineSet,
    KindHistory,
    Lengths,
    OpenRequest,
    PlanningSettings,
    ReleasePlan,
    RoundMeasured,
    RoundProgress,
    ServingEngine,
    check_engine_sets,
    plan_engine_set,
    plan_release,
    projected_peak,
)
from streamrl.errors import RecipeError

SETS = (
    EngineSet(name="tp1", engines=8, tensor_parallel=1, kv_tokens=1_000),
    EngineSet(name="tp2", engines=4, tensor_parallel=2, kv_tokens=3_000),
    EngineSet(name="tp4", engines=2, tensor_parallel=4, kv_tokens=8_000),
)


def follow(rounds: list[tuple[str, int]], kv_usage: float = 0.5) -> tuple[list[str], dict[str, KindHistory]]:
    """The set chosen after each ``(round kind, preemptions)``."""
    history: dict[str, KindHistory] = {}
    chosen = []
    for kind, preemptions in rounds:
        measured = RoundMeasured(round_kind=kind, preemptions=preemptions, kv_usage=kv_usage)
        plan = plan_engine_set(SETS, history, measured)
        changed = history.get(kind, KindHistory(engine_set="tp1")).engine_set != plan.engine_set
        assert (plan.because is not None) == changed, "a change has a reason, and only a change"
        history = plan.history
        chosen.append(plan.engine_set)
    return chosen, history


def test_a_rise_above_the_last_round_of_the_same_kind_asks_for_a_larger_set() -> None:
    assert follow([("short", 100), ("short", 105)])[0] == ["tp1", "tp1"], "1.05 times is not above 1.05 times"
    assert follow([("short", 100), ("short", 106)])[0] == ["tp1", "tp2"]
    assert follow([("short", 100), ("short", 106), ("short", 120), ("short", 200)])[0] == ["tp1", "tp2", "tp4", "tp4"]


def test_kinds_of_rounds_are_never_compared_with_each_other() -> None:
    rhythm = [("short", 520), ("short", 510), ("short", 505), ("short", 500), ("long", 290)] * 3
    rounds = [(kind, preemptions - i) for i, (kind, preemptions) in enumerate(rhythm)]
    chosen, history = follow(rounds)
    assert set(chosen) == {"tp1"}, "a boundary between kinds is not a rise"
    rounds += [("short", 600)]
    chosen, history = follow(rounds)
    assert (history["short"].engine_set, history["long"].engine_set) == ("tp2", "tp1")


def test_four_quiet_rounds_of_a_kind_lead_back_and_only_where_the_measured_use_fits() -> None:
    up = [("short", 10), ("short", 20)]
    quiet = [("short", 0), ("long", 5)] * 4
    chosen, _ = follow(up + quiet, kv_usage=0.5)
    assert chosen[-4] == "tp2" and chosen[-2] == "tp1", "0.5 of 12,000 tokens is 0.75 of 8,000"
    chosen, _ = follow(up + quiet, kv_usage=0.65)
    assert chosen[-2] == "tp2", "0.65 of 12,000 tokens is 0.975 of 8,000: above the headroom"


def test_a_step_back_that_failed_waits_twice_as_long_the_next_time() -> None:
    up_and_back = [("r", 1), ("r", 2), *[("r", 0)] * 4]
    chosen, history = follow([*up_and_back, ("r", 3)])
    assert chosen[-2:] == ["tp1", "tp2"] and history["r"].patience == 8
    chosen, _ = follow([*up_and_back, ("r", 3), *[("r", 0)] * 8])
    assert chosen[-2:] == ["tp2", "tp1"]


def test_sets_are_checked_and_a_foreign_history_is_refused() -> None:
    check_engine_sets(SETS)
    with pytest.raises(RecipeError, match="tp1 holds 8000 tokens, tp2 before it 12000"):
        check_engine_sets((SETS[1], SETS[0]))
    with pytest.raises(RecipeError, match="share a name"):
        check_engine_sets((SETS[0], SETS[0]))
    with pytest.raises(RecipeError, match="at least one"):
        check_engine_sets(())
    with pytest.raises(RecipeError, match="'tp9' is not among tp1, tp2, tp4"):
        measured = RoundMeasured(round_kind="r", preemptions=0, kv_usage=0.0)
        plan_engine_set(SETS, {"r": KindHistory(engine_set="tp9")}, measured)


@settings(max_examples=200, deadline=None)
@given(
    rounds=st.lists(st.tuples(st.sampled_from(["short", "long"]), st.integers(0, 3)), max_size=300),
    kv_usage=st.floats(0.0, 1.0),
)
def test_sets_settle_whatever_the_engines_measure(rounds: list[tuple[str, int]], kv_usage: float) -> None:
    chosen, _ = follow(rounds, kv_usage)
    for kind in ("short", "long"):
        mine = [name for name, (k, _) in zip(chosen, rounds, strict=True) if k == kind]
        switches = sum(a != b for a, b in zip(["tp1", *mine], mine, strict=False))
        # Each way up again after a way back doubles the patience, and each way is at most as long as there are sets.
        assert switches <= 2 * len(SETS) * (math.log2(max(len(mine) / 4, 1)) + 1)


def test_a_load_that_preempts_on_every_smaller_set_is_tried_ever_more_rarely() -> None:
    history = {"r": KindHistory(engine_set="tp2", patience=4)}
    switches = 0
    for _ in range(4_000):
        preemptions = int(history["r"].engine_set == "tp1")
        measured = RoundMeasured(round_kind="r", preemptions=preemptions, kv_usage=0.3)
        plan = plan_engine_set(SETS, history, measured)
        switches += plan.because is not None
        history = plan.history
    assert switches <= 2 * math.log2(4_000 / 4) + 1


@given(capacity_needed=st.integers(0, 2), rounds=st.integers(50, 400), preempting=st.integers(1, 1000))
def test_a_steady_load_ends_on_one_set(capacity_needed: int, rounds: int, preempting: int) -> None:
    """The engines preempt on every set below the one that is needed, ever more, and never on the others."""
    history: dict[str, KindHistory] = {}
    chosen = ["tp1"]
    for number in range(rounds):
        at = [one.name for one in SETS].index(chosen[-1])
        preemptions = preempting * (number + 2) if at < capacity_needed else 0
        plan = plan_engine_set(SETS, history, RoundMeasured(round_kind="r", preemptions=preemptions, kv_usage=0.3))
        history = plan.history
        chosen.append(plan.engine_set)
    away = sum(name != SETS[capacity_needed].name for name in chosen[len(chosen) // 2 :])
    assert away <= 3


# ---- freeing engines -------------------------------------------------------------------------------

ROOMY = Lengths(ascending=tuple(range(1, 101)), cap=100)
LENGTHS = Lengths(ascending=tuple(range(10, 410, 4)), cap=400)


def engine(
    index: int, contexts: list[tuple[int, int]], *, kv_tokens: int = 4_000, unit: str = "", max_running: int = 32
) -> ServingEngine:
    requests = tuple(
        OpenRequest(request_id=f"{index}.{i}", prompt=prompt, sampled=sampled)
        for i, (prompt, sampled) in enumerate(contexts)
    )
    return ServingEngine(name=f"e{index}", kv_tokens=kv_tokens, max_running=max_running, requests=requests, unit=unit)


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
    full = [engine(i, [(20, 100)] * 8) for i in range(2)]
    plan = plan_release(late(*full), LENGTHS)
    assert plan.free == () and plan.looked and plan.because is not None
    assert plan.because.reason == "at 30% no engine can be spared: the caches of the others would be more than 90% full"
    roomy = [engine(i, [(20, 100)] * 8, kv_tokens=8_000) for i in range(2)]
    assert plan_release(late(*roomy), LENGTHS).free == ("e0",)


def test_no_engine_is_given_more_requests_than_it_runs_at_once() -> None:
    def both(most: int) -> ReleasePlan:
        return plan_release(late(*(engine(i, [(1, 1)] * n, max_running=most) for i, n in ((0, 5), (1, 4)))), ROOMY)

    assert both(9).free == ("e1",)
    assert both(8).free == ()


def test_engines_of_one_unit_are_freed_together_and_never_more_than_the_largest_share() -> None:
    engines = [engine(0, [], unit="a"), engine(1, [(9, 9)] * 3, unit="b"), engine(2, [(9, 9)], unit="a"),
               engine(3, [(9, 9)], unit="b")]  # fmt: skip
    assert plan_release(late(*engines), LENGTHS).free == ("e0", "e2")
    thirds = [engine(i, []) for i in range(5)]
    assert len(plan_release(late(*thirds), LENGTHS).free) == 2, "half of five engines is two"


def test_expected_ends_condition_on_what_is_sampled_already() -> None:
    constants = PlanningSettings()
    assert LENGTHS.expected_end(0, constants) == LENGTHS.ascending[90]
    assert LENGTHS.expected_end(200, constants) > LENGTHS.expected_end(0, constants)
    assert LENGTHS.expected_end(380, constants) == 400, "too few were longer: the cap"


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
        ends = [known.expected_end(r.sampled, constants) for r in requests]
        assert peak_by_stepping(requests, ends, one.block_tokens) <= constants.headroom * one.kv_tokens
        assert len(requests) <= one.max_running


@given(contexts=CONTEXTS, more=st.lists(st.integers(0, 100), min_size=12, max_size=12))
def test_the_projected_peak_is_that_of_stepping_through_the_tokens(
    contexts: list[tuple[int, int]], more: list[int]
) -> None:
    requests = [OpenRequest(request_id=str(i), prompt=p, sampled=s) for i, (p, s) in enumerate(contexts)]
    ends = [s + extra for (_, s), extra in zip(contexts, more, strict=False)]
    assert projected_peak(requests, ends) == peak_by_stepping(requests, ends, 1)
    assert projected_peak(requests, ends, 16) >= peak_by_stepping(requests, ends, 16)
