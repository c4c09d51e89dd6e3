"""Which set of engines serves a round: evidence, seconds against seconds, and that it settles whatever is measured."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engines.elastic.engine_sets import RoundMeasured, SetPlan, SetPlanner, expected_seconds
from streamrl.engines.step_cost import StepCost
from streamrl.recipe.topology import PreparedSet, expected_kv_tokens

WIDE = PreparedSet(count=8, tensor_parallel_size=1, kv_tokens=40_000)
DEEP = PreparedSet(count=4, tensor_parallel_size=2, kv_tokens=120_000)
SETS = (WIDE, DEEP)
COST = StepCost(base_s=0.01, per_running_s=0.0001)

# RollPacker, Qwen3-8B at 32k on 8 devices: seconds and preemptions of short and long rounds (arXiv 2509.21009).
PAPER = {("short", "8x1"): (1029, 5199), ("long", "8x1"): (1172, 2900)}
PAPER |= {("short", "4x2"): (768, 4102), ("long", "4x2"): (1284, 2601)}


class World:
    """Rounds of whatever ``outcome`` says that a kind takes on a set: (seconds, preemptions)."""

    def __init__(
        self, outcome: Callable[[str, str], tuple[float, int]], *, switch_s: float = 5.0, steps: int = 10**6
    ) -> None:
        self.outcome, self.steps = outcome, steps
        self.planner = SetPlanner(SETS, switch_s=switch_s, cost=COST)
        self.switches: list[tuple[int, str, str]] = []
        self.seconds = 0.0

    def run(self, kinds: Iterable[str], *, kv_usage: float = 0.9) -> list[str]:
        """The set that served each round."""
        served, planner = [], self.planner
        for number, kind in enumerate(kinds):
            plan = planner.plan(kind, self.steps - number)
            assert (plan.because is not None) == (plan.engine_set != planner.current), "a change has one reason"
            if plan.because is not None:
                assert plan.because.subject == "engine_set"
                self.switches.append((number, kind, plan.because.reason))
                self.seconds += planner.switch_s
            planner.current = plan.engine_set
            seconds, preemptions = self.outcome(kind, planner.current)
            self.seconds += seconds
            served.append(planner.current)
            planner.add(
                RoundMeasured(
                    round_kind=kind,
                    engine_set=planner.current,
                    seconds=seconds,
                    preemptions=preemptions,
                    kv_usage=kv_usage,
                    requests=1600,
                    tokens=1600 * 1_200.0,
                    longest=2_000.0 if kind == "short" else 16_000.0,
                    prompt=128.0,
                )
            )
        return served


def rhythm(cycles: int) -> list[str]:
    return ["short", "short", "short", "short", "long"] * cycles


def test_figures_of_papers_select_the_suitable_set() -> None:
    """Figures of the papers lead to the set that suits each kind of round."""
    world = World(lambda kind, name: PAPER[kind, name])
    served = world.run(rhythm(12))
    assert served[:4] == ["8x1"] * 4, "nothing is tried on the first sign"
    last = served[-20:]
    assert last == ["4x2", "4x2", "4x2", "4x2", "8x1"] * 4, "short rounds gain a quarter, long ones lose a tenth"
    assert "for these rounds alone" in world.switches[-1][2] and "5199 preemptions" in world.switches[0][2]


def test_a_dear_switch_is_made_once_or_not_at_all() -> None:
    dear = World(lambda kind, name: PAPER[kind, name], switch_s=250.0)
    assert dear.run(rhythm(12))[-10:] == ["4x2"] * 10, "too dear for each change of kind"
    assert len(dear.switches) == 1 and "for good" in dear.switches[0][2]
    never = World(lambda kind, name: PAPER[kind, name], switch_s=10_000.0)
    assert set(never.run(rhythm(12))) == {"8x1"}, "it costs more than the rounds that it must pay for in bring"


def test_a_switch_must_pay_before_the_run_ends() -> None:
    def better(kind: str, name: str) -> tuple[float, int]:
        return (100.0, 50) if name == "8x1" else (50.0, 0)

    assert "4x2" in World(better, switch_s=200.0, steps=50).run(["r"] * 50)
    assert set(World(better, switch_s=200.0, steps=8).run(["r"] * 8)) == {"8x1"}


def test_without_preemption_a_larger_set_is_never_tried() -> None:
    assert set(World(lambda kind, name: (100.0, 0)).run(["r"] * 60)) == {"8x1"}


def test_rises_count_at_once_and_kinds_are_not_compared() -> None:
    """A rise is a sign at once, and kinds of rounds are not compared with each other."""

    def rising(preemptions: list[int]) -> list[str]:
        left = iter(preemptions)
        return World(lambda kind, name: (1000.0, next(left)), switch_s=1.0).run(["r"] * len(preemptions))

    assert rising([100, 105, 0, 0]) == ["8x1"] * 4, "1.05 times is not above 1.05 times"
    assert rising([100, 106, 0])[-1] == "4x2"
    falling = {("short", n): (1000.0, 520 - n) for n in range(3)} | {("long", n): (1000.0, 900) for n in range(1)}
    counts = {"short": 0, "long": 0}

    def outcome(kind: str, name: str) -> tuple[float, int]:
        counts[kind] += 1
        return falling[kind, counts[kind] - 1]

    assert set(World(outcome).run(["short", "long", "short", "short"])) == {"8x1"}


def test_the_way_back_needs_quiet_rounds_and_room() -> None:
    def served(kv_usage: float, preemptions: int = 0) -> list[str]:
        world = World(lambda kind, name: (100.0 if name == "4x2" else 70.0, preemptions), switch_s=1.0)
        world.planner.current = "4x2"
        world.planner.cost = StepCost(
            base_s=1e-4, per_running_s=1e-3
        )  # every token costs, so eight engines decode more at once
        return world.run(["r"] * 8, kv_usage=kv_usage)

    assert served(0.55) == ["4x2"] * 4 + ["8x1"] * 4
    assert served(0.65) == ["4x2"] * 8, "0.65 of 480,000 tokens is 0.975 of 320,000"
    assert served(0.55, preemptions=1) == ["4x2"] * 8


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), preempting=st.booleans())
def test_sets_that_are_equally_fast_are_not_taken_in_turns(seed: int, preempting: bool) -> None:
    """Rounds scatter by a fifth, and a switch costs next to nothing: still it settles."""
    noise = random.Random(seed)

    def outcome(kind: str, name: str) -> tuple[float, int]:
        return 100 * noise.lognormvariate(0, 0.2), int(preempting) * noise.randrange(1, 20)

    world = World(outcome, switch_s=0.1)
    world.run(rhythm(120))
    assert len(world.switches) <= 24, "of 600 rounds"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), faster=st.floats(0.6, 0.8))
def test_a_set_that_is_better_by_far_is_found_and_kept(seed: int, faster: float) -> None:
    noise = random.Random(seed)

    def outcome(kind: str, name: str) -> tuple[float, int]:
        return 100 * (faster if name == "4x2" else 1.0) * noise.lognormvariate(0, 0.1), int(name == "8x1")

    world = World(outcome, switch_s=20.0)
    served = world.run(["r"] * 200)
    assert served[100:].count("4x2") >= 95
    assert len(world.switches) <= 3


def test_a_trial_that_failed_is_taken_back_and_not_repeated() -> None:
    world = World(lambda kind, name: (100.0, 9) if name == "8x1" else (180.0, 0), switch_s=10.0)
    served = world.run(["r"] * 100)
    assert 1 <= served.count("4x2") <= 6 and served[-1] == "8x1"
    assert len(world.switches) == 2, "there and back"


def test_rounds_that_belong_to_a_set_are_served_by_it() -> None:
    sets = (WIDE, msgspec.structs.replace(DEEP, rounds=("long",)))

    def plan(current: str, kind: str) -> SetPlan:
        planner = SetPlanner(sets, switch_s=1e9, cost=COST)
        planner.current = current
        return planner.plan(kind, 1)

    assert plan("8x1", "long").engine_set == "4x2" and plan("4x2", "long").because is None
    because = plan("8x1", "long").because
    assert because is not None and because.reason == "long rounds belong to set 4x2 (engines.advanced.sets)"


LOADS = st.builds(
    RoundMeasured,
    round_kind=st.just("r"),
    engine_set=st.just("8x1"),
    seconds=st.just(1.0),
    preemptions=st.just(0),
    kv_usage=st.just(0.5),
    requests=st.integers(1, 4096),
    tokens=st.floats(1, 1e7),
    longest=st.floats(1, 32_768),
    prompt=st.floats(1, 1_000),
)


@given(load=LOADS, kv_tokens=st.integers(100, 10**6), more=st.integers(0, 10**6))
def test_more_room_never_takes_longer(load: RoundMeasured, kv_tokens: int, more: int) -> None:
    """More room never takes longer, and the longest completion bounds the time."""

    def seconds(tokens: int, base_s: float = 0.01) -> float:
        one = PreparedSet(count=4, tensor_parallel_size=1, kv_tokens=tokens)
        return expected_seconds(one, load, StepCost(base_s=base_s, per_running_s=0.0001))

    assert seconds(0) <= seconds(kv_tokens + more) <= seconds(kv_tokens)
    assert seconds(0) >= 0.01 * load.longest
    workers = [PreparedSet(count=1, tensor_parallel_size=n, kv_tokens=0) for n in (1, 2, 4)]
    one, two, four = (expected_seconds(w, load, COST) for w in workers)
    assert two == pytest.approx(one / 1.6) and four == pytest.approx(one / 1.6**2)


def test_memory_saved_on_weights_is_room_for_kv() -> None:
    """Memory that no second copy of the weights takes is room for KV cache."""
    assert expected_kv_tokens(40_000, 2, of=1, weight_tokens=10_000) == 90_000
    assert expected_kv_tokens(90_000, 1, of=2, weight_tokens=10_000) == 40_000
    assert expected_kv_tokens(0, 2, of=1, weight_tokens=10_000) == 0, "no limit is known"
