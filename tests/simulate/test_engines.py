"""The cost model of one engine against a loop over tokens, and its capacity, pauses and prefill."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.types import TrajectoryId
from streamrl.simulate.engines import NEVER, EngineClock, EngineModel, Request, RunningTogether

MODEL = EngineModel(base_s=1e-3, per_running_s=1e-4, per_context_token_s=1e-6, max_num_seqs=4)


def request(number: int, length: int, prompt_tokens: int = 0, group: int | None = None) -> Request:
    identity = TrajectoryId(prompt_id="p0", group_id=number if group is None else group, sample=number)
    return Request(identity, 0, prompt_tokens, length, 0.0)


def run_out(engine: EngineClock, arrivals: list[tuple[float, Request]] = []) -> dict[int, float]:  # noqa: B006
    """Drive one engine until it is empty: when each request finished, by sample number."""
    ends: dict[int, float] = {}
    coming = [(time, number, item) for number, (time, item) in enumerate(arrivals)]
    heapq.heapify(coming)
    while True:
        due = engine.next_event()
        if coming and coming[0][0] <= due:
            time, _, item = heapq.heappop(coming)
            engine.advance(time)
            engine.submit(item)
            engine.admit()
        elif due < NEVER:
            ends.update({item.id.sample: due for item in engine.finished(due)})
        else:
            return ends


def token_by_token(lengths: list[int], prompt_tokens: int, model: EngineModel) -> dict[int, float]:
    """The same, one decode step after the other; everything is there from the start."""
    waiting = list(enumerate(lengths))
    running: dict[int, list[int]] = {}
    now, ends = 0.0, {}
    while waiting or running:
        while waiting and len(running) < model.max_num_seqs:
            number, length = waiting.pop(0)
            running[number] = [length, prompt_tokens]
        context = sum(held for _, held in running.values())
        now += model.step_s(len(running), context)
        for number in list(running):
            running[number][0] -= 1
            running[number][1] += 1
            if not running[number][0]:
                del running[number]
                ends[number] = now
    return ends


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 120), min_size=1, max_size=12), st.integers(0, 50))
def test_jumps_end_where_single_steps_end(lengths: list[int], prompt_tokens: int) -> None:
    engine = EngineClock(MODEL)
    for number, length in enumerate(lengths):
        engine.submit(request(number, length, prompt_tokens))
    engine.admit()
    expected = token_by_token(lengths, prompt_tokens, MODEL)
    ends = run_out(engine)
    assert ends.keys() == expected.keys()
    for number, time in expected.items():
        # Within a jump the context grows continuously, in the loop by steps: half a step's growth a token.
        assert ends[number] == pytest.approx(time, rel=2e-2, abs=1e-9)
    assert engine.generated == pytest.approx(sum(lengths))
    assert engine.context == pytest.approx(0, abs=1e-6) and not engine.running


def test_without_context_cost_the_times_are_exact() -> None:
    model = EngineModel(base_s=1e-3, per_running_s=1e-4, max_num_seqs=2)
    together = RunningTogether()
    engine = EngineClock(model, together)
    for number, length in enumerate([10, 30, 5]):
        engine.submit(request(number, length))
    engine.admit()
    ends = run_out(engine)
    # Two run for 10 steps, then 1 and 2 for 5, then 1 alone for 15.
    assert ends == pytest.approx({0: 0.012, 2: 0.018, 1: 0.018 + 15 * 0.0011})
    assert together.busy_s == pytest.approx(2 * 0.018 + 15 * 0.0011)


def test_overload_does_not_pay_for_later_idleness() -> None:
    """Requests beyond the capacity do not pay for slots that idle later."""
    model = EngineModel(base_s=1e-3, per_running_s=0.0)
    together = RunningTogether()
    together.capacity = 2
    engines = [EngineClock(model, together), EngineClock(model, together)]
    for number, length in enumerate([10, 10, 10, 40]):
        engines[number % 2].submit(request(number, length))
    for engine in engines:
        engine.admit()
    for engine in engines:
        run_out(engine)
    assert together.busy_s == pytest.approx(2 * 0.010 + 1 * 0.030)


def test_a_full_cache_preempts_the_newest_and_loses_no_token() -> None:
    model = EngineModel(base_s=1e-3, per_running_s=0.0, max_num_seqs=8, kv_tokens=100, prefill_tokens_s=1e4)
    engine = EngineClock(model)
    for number in range(3):
        engine.submit(request(number, 60, prompt_tokens=5))
    engine.admit()
    highest = 0.0
    ends: dict[int, float] = {}
    while (due := engine.next_event()) < NEVER:
        for item in engine.finished(due):
            ends[item.id.sample] = due
        highest = max(highest, engine.held_kv)
    assert list(ends) == [0, 1, 2], "the oldest goes on"
    assert engine.preemptions >= 1 and highest <= 100 + 1e-6
    assert engine.generated == pytest.approx(180), "what was preempted is prefilled, not sampled again"


def test_siblings_share_the_prompt_in_cache_and_prefill() -> None:
    model = EngineModel(base_s=1e-3, per_running_s=0.0, max_num_seqs=8, kv_tokens=1000, prefill_tokens_s=1e4)
    alone, shared = EngineClock(model), EngineClock(model)
    for number in range(4):
        alone.submit(request(number, 10, prompt_tokens=100))
        shared.submit(request(number, 10, prompt_tokens=100, group=0))
    alone.admit()
    shared.admit()
    assert (alone.held_kv, shared.held_kv) == (400, 100)
    assert run_out(alone)[0] == pytest.approx(0.04 + 0.01)
    assert run_out(shared)[0] == pytest.approx(0.01 + 0.01)
    assert shared.held_kv == pytest.approx(0, abs=1e-6)


def test_a_paused_engine_runs_nothing() -> None:
    """A paused engine runs nothing, and then the requests that came meanwhile at low cost."""
    model = EngineModel(base_s=1e-3, per_running_s=0.0, max_num_seqs=8, admission_s=5e-3, presubmitted_s=1e-3)
    engine = EngineClock(model)
    engine.submit(request(0, 100))
    engine.admit()
    engine.pause(0.055)  # 5 ms of admission, then 50 tokens
    engine.submit(request(1, 50))
    engine.admit()
    assert engine.next_event() == NEVER and engine.generated == pytest.approx(50)
    engine.resume(1.0)
    assert engine.next_event() == pytest.approx(1.0 + 1e-3 + 0.05)
    assert [item.id.sample for item in engine.finished(1.051)] == [0, 1]


def test_prefill_due_at_a_pause_is_done_after_it() -> None:
    """Prefill that was due when an engine was paused is done after the pause."""
    model = EngineModel(base_s=1e-3, per_running_s=0.0, max_num_seqs=8, prefill_tokens_s=1e3)
    engine = EngineClock(model)
    engine.submit(request(0, 10, prompt_tokens=100))
    engine.admit()
    engine.pause(0.03)  # 70 of 100 ms of prefill are left
    engine.pause(0.05)  # twice: held by control, then by the push
    engine.resume(1.0)
    assert engine.next_event() == pytest.approx(1.0 + 0.07 + 0.01)
    engine.pause(1.02)
    engine.resume(2.0, recompute=True)  # all of it is made again, what was left once
    assert engine.next_event() == pytest.approx(2.0 + 0.1 + 0.01)
    engine.pause(2.01)
    engine.stop(next(iter(engine.running)))
    engine.submit(request(1, 10))
    engine.resume(3.0)
    assert engine.next_event() == pytest.approx(3.0 + 0.01), "what was taken off needs no prefill"


def test_a_stopped_request_keeps_its_tokens() -> None:
    """A stopped request keeps its tokens, and goes on elsewhere."""
    engine, other = EngineClock(MODEL), EngineClock(MODEL)
    first = request(0, 100, prompt_tokens=7)
    engine.submit(first)
    engine.admit()
    engine.advance(0.0401)
    engine.stop(first)
    assert not engine.running and engine.context == pytest.approx(0, abs=1e-6)
    assert 30 < first.sampled < 40
    other.submit(first)
    other.admit()
    run_out(other)
    assert engine.generated + other.generated == pytest.approx(100, abs=1)
