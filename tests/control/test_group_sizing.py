"""Group sizing: the straggler event, what is learnt from groups of any size, the budget over a long run, resuming.

The simulations draw lognormal lengths: spread 0.5 between prompts, another one inside a prompt that may drift, cut at
four times the median. No model and no engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.control.fixed_size import FixedSize
from streamrl.control.model import GroupLengths
from streamrl.observe.metrics.all_metrics import unregistered
from streamrl.policies import sagc
from streamrl.policies.group_sizing import (
    GroupSizer,
    RandomSize,
    StragglerAwareSize,
    make_group_sizer,
)
from streamrl.recipe.scheduling import GroupSizing, SizingKind

BATCH = 128
SIZES = (4, 8, 16, 32)


def sagc_settings(**changes: object) -> GroupSizing:
    return GroupSizing(**{"kind": SizingKind.SAGC, "sizes": SIZES, **changes})  # type: ignore[arg-type]


def random_settings(shares: tuple[float, ...] = (0.5, 0.3, 0.2), dwell: int = 1) -> GroupSizing:
    return GroupSizing(kind=SizingKind.RANDOM, sizes=(4, 8, 16), shares=shares, dwell=dwell)


def group(*lengths: int, truncated: Sequence[int] = ()) -> GroupLengths:
    return GroupLengths(lengths=lengths, truncated=tuple(i in truncated for i in range(len(lengths))))


def calm(size: int, number: int = 1) -> list[GroupLengths]:
    return [group(*[100] * size)] * number


def straggling(size: int, number: int = 1) -> list[GroupLengths]:
    """Groups whose first member is a straggler, so that one part of each partition straggles."""
    return [group(400, *[100] * (size - 1))] * number


def sampled_groups(rng: np.random.Generator, size: int, spread: float, batch: int = BATCH) -> list[GroupLengths]:
    scale = rng.normal(0, 0.5, (batch // size, 1)) + rng.normal(0, spread, (batch // size, size))
    lengths = np.maximum(1, np.minimum(np.exp(scale), 4) * 400).astype(int)
    untruncated = (False,) * size
    return [GroupLengths(lengths=tuple(row), truncated=untruncated) for row in lengths.tolist()]


class Simulated(msgspec.Struct):
    """Straggler rate and size of each step, and the largest queue."""

    rates: list[float]
    sizes: list[int]
    largest_queue: float

    @property
    def utility(self) -> float:
        return float(np.mean(np.log(np.array(self.sizes) / SIZES[0])) / math.log(SIZES[-1] / SIZES[0]))

    def switches(self) -> int:
        return int(np.count_nonzero(np.diff(self.sizes)))


def simulate(sizer: GroupSizer, steps: int, spread: Callable[[int], float], seed: int = 0) -> Simulated:
    rng = np.random.default_rng(seed)
    seen = Simulated(rates=[], sizes=[], largest_queue=0.0)
    for step in range(steps):
        seen.sizes.append(sizer.size)
        figures = sizer.observe(sampled_groups(rng, sizer.size, spread(step))).figures
        seen.rates.append(figures["sizing/straggler_rate"])
        seen.largest_queue = max(seen.largest_queue, figures["sizing/queue"])
    return seen


# ---- (a) the straggler event


@pytest.mark.parametrize(
    ("lengths", "straggles"),
    [
        ([10, 10, 10, 20], True),
        ([10, 10, 10, 19], False),
        # Between 10 and 30 the median is 20, neither of the two.
        ([10, 10, 30, 40], True),
        ([10, 10, 30, 39], False),
        ([40, 30, 10, 10], True),
        ([10, 10, 20, 30, 40], True),
        ([10, 10, 20, 30, 39], False),
    ],
)
def test_a_group_straggles_when_its_longest_is_twice_its_median(lengths: list[int], straggles: bool) -> None:
    assert sagc.straggler_rate([np.array([lengths], dtype=float)], 2.0) == float(straggles)


def by_chance(size: int) -> RandomSize:
    """A sizer that only measures."""
    return RandomSize(GroupSizing(kind=SizingKind.RANDOM, sizes=(size,), shares=(1.0,), straggler_ratio=2.0), 8, 0)


def test_a_truncated_member_makes_its_group_straggle_whatever_the_lengths() -> None:
    sizer = by_chance(4)
    rate = "sizing/straggler_rate"
    assert sizer.observe([group(10, 10, 10, 10, truncated=[3])]).figures[rate] == 1
    # Where most reach the cap, longest and median are equal, and the step is at its slowest.
    assert sizer.observe([group(10, 10, 10, 10, truncated=[0, 1, 2, 3])]).figures[rate] == 1
    assert sizer.observe([group(10, 10, 10, 10)]).figures[rate] == 0
    assert sizer.observe([group(10, 10, 10, 10, truncated=[0]), *calm(4, 3)]).figures[rate] == 0.25


def test_groups_too_small_to_show_a_straggler_are_not_judged() -> None:
    # (1, 1000) and (1, 1, 1000): of two the longest is never twice the median, however long.
    decision = by_chance(2).observe([group(1, 1000), group(1, 1, 1000)])
    assert decision.figures == {"sizing/size": 2.0}
    sizer = StragglerAwareSize(sagc_settings(), 8, BATCH)
    before = sizer.snapshot()
    assert "no group" in sizer.observe([group(1, 1, 1000)]).reason
    assert "no group" in sizer.observe([]).reason
    assert sizer.snapshot() == before


# ---- what is learnt


def test_a_group_is_split_by_generation_index_and_informs_every_smaller_size() -> None:
    # Members 0-3 straggle, 4-7 are calm, and so is the whole: longest 300, median 250.
    table = np.array([[100, 100, 100, 300, 250, 250, 250, 250]], dtype=float)
    assert sagc.count_stragglers([table], 4, 2.0) == (1, 2)
    assert sagc.count_stragglers([table], 8, 2.0) == (0, 1)
    assert sagc.count_stragglers([table], 16, 2.0) == (0, 0)


def test_the_members_that_are_left_of_a_group_are_split_and_the_rest_not_counted() -> None:
    sizer = StragglerAwareSize(sagc_settings(discount=1.0), 8, BATCH)
    # One of 8 lost a member (7 are one part of 4), one came at another size.
    decision = sizer.observe([*straggling(7), *calm(16), *calm(8)])
    memory = sizer._memory
    counts = {size: (memory.straggling[size], memory.calm[size]) for size in SIZES}
    assert counts == {4: (1, 6), 8: (0, 3), 16: (0, 1), 32: (0, 0)}
    assert decision.figures["sizing/straggler_rate"] == pytest.approx(1 / 3)


def test_without_reuse_a_size_learns_from_itself_alone() -> None:
    sizer = StragglerAwareSize(sagc_settings(discount=1.0), 8, BATCH, reuse=False)
    sizer.observe(straggling(8, 2))
    assert sizer._memory.straggling == {4: 0, 8: 2, 16: 0, 32: 0}
    assert sizer._memory.calm == {4: 0, 8: 0, 16: 0, 32: 0}


def test_a_step_that_trained_several_batches_spends_as_much_of_the_budget() -> None:
    """Four calm batches, and one step with four of those that lost against them: half of all groups straggle."""
    sizer = StragglerAwareSize(sagc_settings(budget=0.25, tightening=0.0), 8, BATCH)
    for _ in range(4):
        sizer.observe(calm(8, 4))
    sizer.observe(straggling(8, 16), 4)
    memory = sizer._memory
    assert memory.rate_sum / memory.steps == 0.5
    assert memory.queue == pytest.approx(4 * 0.75)


def test_old_steps_are_forgotten() -> None:
    sizer = StragglerAwareSize(sagc_settings(sizes=(4, 8), discount=0.5, dwell=1000), 8, BATCH)
    sizer.observe(straggling(8, 4))
    sizer.observe(calm(8, 4))
    assert (sizer._memory.straggling[8], sizer._memory.calm[8]) == (2, 4)
    assert sizer.observe([]).figures["sizing/risk_8"] == pytest.approx(2.5 / 7)


def test_risk_is_bounded_from_below_and_never_falls_with_the_size() -> None:
    memory = sagc.SizingMemory(size=4, budget=0.3, straggling={4: 30, 8: 1}, calm={4: 70, 8: 99})
    risks = sagc.risks_of(memory, (4, 8, 16), optimism=1.0)
    assert risks[4].mean == pytest.approx(30.5 / 101)
    assert risks[4].low == pytest.approx(30.5 / 101 - math.sqrt(30.5 / 101 * 70.5 / 101 / 102))
    assert risks[8].mean == pytest.approx(1.5 / 101)
    assert risks[8].low == risks[4].low
    assert (risks[16].mean, risks[16].low) == (0.5, pytest.approx(max(risks[4].low, 0.5 - math.sqrt(0.25 / 2))))


def test_utility_is_concave_from_0_to_1() -> None:
    utilities = sagc.utilities_of((4, 8, 12, 16, 32))
    slopes = [(utilities[b] - utilities[a]) / (b - a) for a, b in pairwise((4, 8, 12, 16, 32))]
    assert (utilities[4], utilities[32]) == (0, 1)
    assert slopes == sorted(slopes, reverse=True)


# ---- (b) boundaries and the batch


def test_a_size_is_held_for_dwell_steps() -> None:
    sizer = StragglerAwareSize(sagc_settings(dwell=5, tradeoff=0.5), 32, BATCH)
    spread = simulate(sizer, 200, lambda _: 0.45)
    changes = [step for step in range(1, 200) if spread.sizes[step] != spread.sizes[step - 1]]
    assert len(changes) > 10
    assert min(np.diff(changes)) == 5


@given(
    sizes=st.lists(st.sampled_from([4, 8, 12, 16, 24, 48]), min_size=2, unique=True).map(sorted),
    start=st.integers(0, 5),
    kind=st.sampled_from([SizingKind.SAGC, SizingKind.RANDOM]),
    drawn=st.randoms(use_true_random=False),
    calibration=st.integers(0, 3),
    dwell=st.integers(1, 3),
)
@settings(deadline=None, max_examples=40)
def test_any_step_is_a_batch_of_whole_groups_and_resumes_anywhere(
    sizes: list[int], start: int, kind: SizingKind, drawn: object, calibration: int, dwell: int
) -> None:
    """B is preserved; at any point a new sizer, given what the old one saved (as JSON), decides the same ever after."""
    random = drawn
    chosen = GroupSizing(
        kind=kind, sizes=tuple(sizes), calibration_steps=calibration, dwell=dwell, shares=(0.3,) * len(sizes)
    )

    def new() -> GroupSizer:
        return make_group_sizer(chosen, sizes[start % len(sizes)], 96, seed=7)

    sizer = new()
    for _ in range(12):
        assert 96 % sizer.size == 0 and sizer.size in sizes
        # Mixed sizes, lost members, an empty step: whatever a race or continuous rounds may bring.
        seen = [
            group(*[random.choice([50, 100, 300]) for _ in range(random.choice([sizer.size, sizes[-1], 5, 1]))])  # type: ignore[attr-defined]
            for _ in range(random.randrange(5))  # type: ignore[attr-defined]
        ]
        twin = new()
        twin.restore(msgspec.json.decode(msgspec.json.encode(sizer.snapshot())))
        assert twin.size == sizer.size and twin.snapshot() == sizer.snapshot()
        # (d) Equal inputs, in any order, give equal decisions.
        assert twin.observe(seen[::-1]) == sizer.observe(seen)
        assert twin.snapshot() == sizer.snapshot()


def test_restoring_into_other_sizes_keeps_what_is_still_known() -> None:
    old = StragglerAwareSize(sagc_settings(sizes=(4, 8, 16), discount=1.0), 16, BATCH)
    old.observe(straggling(16, 8))
    assert old.size == 16
    new = StragglerAwareSize(sagc_settings(sizes=(4, 8), discount=1.0), 8, BATCH)
    new.restore(old.snapshot())
    assert new.size == 8
    assert new.observe(calm(8, 16)).figures["sizing/risk_8"] == pytest.approx(8.5 / (16 + 16 + 1))
    new = StragglerAwareSize(sagc_settings(sizes=(4, 8)), 8, BATCH)
    new.restore({})  # the checkpoint of a run with a fixed size
    assert new.size == 8


def test_a_fork_with_another_budget_keeps_what_is_known_of_the_sizes_and_owes_nothing() -> None:
    old = StragglerAwareSize(sagc_settings(budget=0.3), 16, BATCH)
    for _ in range(6):
        old.observe(straggling(old.size, 8))
    assert old._memory.queue > 0
    new = StragglerAwareSize(sagc_settings(budget=0.6), 16, BATCH)
    new.restore(old.snapshot())
    assert new.budget == 0.6
    expected = msgspec.structs.replace(old._memory, budget=0.6, asked=0.6, queue=0.0, steps=0, rate_sum=0.0)
    assert new._memory == expected
    again = StragglerAwareSize(sagc_settings(budget=0.6), 16, BATCH)
    again.restore(new.snapshot())
    assert again._memory == new._memory, "resumed with its own recipe nothing changes"
    calibrating = StragglerAwareSize(sagc_settings(budget=0.6, calibration_steps=3), 16, BATCH)
    calibrating.restore(old.snapshot())
    assert calibrating.size == 32 and "step 1 of 3" in calibrating.observe(calm(32, 4)).reason


def test_the_budget_of_an_older_checkpoint_stays() -> None:
    old = StragglerAwareSize(sagc_settings(budget=0.3), 16, BATCH)
    kept = old.snapshot() | {"budget": 0.4, "queue": 1.0}
    del kept["asked"]
    new = StragglerAwareSize(sagc_settings(budget=0.3), 16, BATCH)
    new.restore(kept)
    assert (new.budget, new._memory.queue) == (0.4, 1.0), "what calibration put in its place"


# ---- (e) the simulation of the reference


@pytest.mark.parametrize(
    ("spread", "rates"),
    [(0.3, (0.03, 0.08, 0.15, 0.27)), (0.4, (0.11, 0.25, 0.44, 0.68)), (0.5, (0.21, 0.43, 0.67, 0.85))],
)
def test_rates_by_size_are_those_of_the_reference(spread: float, rates: tuple[float, ...]) -> None:
    rng = np.random.default_rng(1)
    largest = [sampled_groups(rng, 32, spread) for _ in range(150)]
    table = np.array([g.lengths for groups in largest for g in groups], dtype=float)
    for size, rate in zip(SIZES, rates, strict=True):
        # Groups of 32, split: the same rates as groups that were sampled at that size.
        straggled, number = sagc.count_stragglers([table], size, 2.0)
        assert straggled / number == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize(
    ("changes", "utility", "rate", "second_half", "overshoot", "switches"),
    [
        ({"optimism": 0.0, "tradeoff": 5.0}, 0.46, 0.332, 0.302, 9.5, 50),
        ({"tradeoff": 1.0}, 0.39, 0.308, 0.298, 2.3, 130),
        ({"tradeoff": 2.0}, 0.42, 0.316, 0.301, 4.9, 107),
        ({"tradeoff": 5.0}, 0.47, 0.341, 0.303, 12.3, 81),
        ({"tradeoff": 2.0, "dwell": 5}, 0.40, 0.317, 0.300, 5.1, 46),
        # The tightening ends once the overshoot is paid back: the reference's, always on, ended at 0.297 and 0.280.
        ({"tradeoff": 2.0, "tightening": 0.02}, 0.39, 0.300, 0.290, 0.0, 110),
    ],
)
def test_the_controller_does_what_it_does_in_the_reference(
    changes: dict[str, float], utility: float, rate: float, second_half: float, overshoot: float, switches: int
) -> None:
    chosen = sagc_settings(**{"tightening": 0.0, "dwell": 1, **changes})
    runs = [simulate(StragglerAwareSize(chosen, 8, BATCH), 300, lambda _: 0.4, seed) for seed in range(4)]
    assert np.mean([run.utility for run in runs]) == pytest.approx(utility, abs=0.04)
    assert np.mean([np.mean(run.rates) for run in runs]) == pytest.approx(rate, abs=0.012)
    assert np.mean([np.mean(run.rates[150:]) for run in runs]) == pytest.approx(second_half, abs=0.015)
    assert np.mean([sum(run.rates) - 300 * 0.3 for run in runs]) == pytest.approx(overshoot, abs=2.5)
    assert np.mean([run.switches() for run in runs]) == pytest.approx(switches, rel=0.3)


# ---- acceptance, and (f)

DRIFTS: dict[str, Callable[[int], float]] = {
    "waves": lambda step: 0.40 + 0.06 * math.sin(2 * math.pi * step / 1000),
    "jump up": lambda step: 0.34 + 0.08 * step / 1000 if step < 1000 else 0.50 - 0.08 * (step - 1000) / 1000,
    "jump down": lambda step: 0.48 if step < 800 else 0.34 + 0.06 * (step - 800) / 1200,
}


def budget_gap(sizer: StragglerAwareSize, drift: str) -> float:
    """Long-run straggler rate minus the budget, over 2,000 steps."""
    return float(np.mean(simulate(sizer, 2000, DRIFTS[drift]).rates)) - sizer.budget


@pytest.mark.parametrize("drift", DRIFTS)
def test_the_long_run_rate_is_within_2_points_of_the_budget_under_drift(drift: str) -> None:
    assert abs(budget_gap(StragglerAwareSize(sagc_settings(), 8, BATCH), drift)) <= 0.02
    calibrated = StragglerAwareSize(sagc_settings(calibration_steps=10), 8, BATCH)
    assert abs(budget_gap(calibrated, drift)) <= 0.02
    # (f) The same test fails for the plain posterior mean of each size's own groups: a small size that is never tried
    # (or forgotten) keeps the prior's risk, and is never chosen.
    plain = StragglerAwareSize(sagc_settings(optimism=0.0), 8, BATCH, reuse=False)
    assert budget_gap(plain, drift) > 0.05


# ---- (g) what cannot be met


def test_a_budget_that_no_size_meets_pins_the_smallest_size_and_recovers() -> None:
    chosen = sagc_settings(budget=0.3, dwell=1, tradeoff=2.0)
    sizer = StragglerAwareSize(chosen, 8, BATCH)
    hard = simulate(sizer, 200, lambda _: 0.8)
    assert hard.sizes[10:] == [4] * 190
    assert hard.largest_queue == sagc.QUEUE_CAP * chosen.tradeoff
    easy = simulate(sizer, 100, lambda _: 0.15, seed=1)
    # Every size meets it now, and what was seen of them before is forgotten.
    assert easy.sizes[60:] == [32] * 40


@pytest.mark.parametrize("truncated", [0.0, 0.2, 0.35, 0.4])
@pytest.mark.parametrize("spread", [0.8, 1.3, 1.6, 2.0])
def test_heavier_tails_never_choose_larger_groups(spread: float, truncated: float) -> None:
    """Above the budget at every size the queue stays at its cap, and what decided was the utility of size 16."""
    rng, budget = np.random.default_rng(7), 0.4
    lengths = np.ceil(100 * np.exp(rng.normal(0, 0.5, (4000, 1)) + rng.normal(0, spread, (4000, 16)))).astype(int)
    cap = np.quantile(lengths, 1 - truncated) if truncated else np.inf
    sizer = StragglerAwareSize(sagc_settings(sizes=(4, 8, 16), budget=budget), 8, BATCH)
    chosen, rates, told = list[int](), list[float](), list[str]()
    for _ in range(300):
        drawn = rng.permutation(lengths)[: BATCH // sizer.size, : sizer.size]
        groups = [GroupLengths(lengths=tuple(row.tolist()), truncated=tuple((row >= cap).tolist())) for row in drawn]
        chosen.append(sizer.size)
        decision = sizer.observe(groups)
        rates.append(decision.figures["sizing/straggler_rate"])
        told += [decision.reason] if decision.notify else []
    risk = decision.figures["sizing/risk_4"]
    if risk > budget + 0.05:
        assert chosen[100:].count(4) >= 0.9 * 200
        assert len(told) == 1
        assert told[0].startswith("no size meets group_sizing.budget = 0.4: size 4 straggles in 0.")
    elif risk < budget - 0.05:
        assert abs(np.mean(rates) - budget) <= 0.02 or set(chosen[100:]) == {16}
        assert not told


LONG = 4
"""Batches of a long round, which comes after eight short ones."""


def overspent_with_long_rounds(seed: int) -> float:
    """Straggler rate above the budget over 72 batches in which every long round is of stragglers."""
    chosen = sagc_settings(budget=0.6, tradeoff=0.5, sizes=(4, 8, 16))
    sizer = StragglerAwareSize(chosen, 8, BATCH)
    rng = np.random.default_rng(seed)
    spent = 0.0
    for number in range(54):
        is_long = number % 9 == 8
        groups = straggling(sizer.size, 8) if is_long else sampled_groups(rng, sizer.size, 0.6)
        batches = LONG if is_long else 1
        spent += batches * sizer.observe(groups, batches).figures["sizing/straggler_rate"]
    return spent / (6 * 12) - chosen.budget


def test_what_a_long_round_of_several_batches_overspends_is_paid_back() -> None:
    """A cap on the queue would forget most of it at once."""
    assert np.mean([overspent_with_long_rounds(seed) for seed in range(8)]) <= 0.02


@pytest.mark.parametrize(
    ("calm", "queue", "after"),
    [
        # Nine of ten groups of the smallest size are calm: its debt can be paid back, and none of it is forgotten.
        (9.0, 0.5, 0.9),
        # One of ten is: the queue stops at its cap, and one that is above it stays there.
        (1.0, 0.5, 0.6),
        (1.0, 0.8, 0.8),
    ],
)
def test_a_debt_is_forgotten_only_while_the_smallest_size_is_above_the_budget(
    calm: float, queue: float, after: float
) -> None:
    memory = sagc.SizingMemory(size=8, budget=0.6, queue=queue, straggling={4: 10 - calm}, calm={4: calm})
    spent = sagc.spend(memory, 1.0, 1, smallest=4, tightening=0.0, tradeoff=0.12)
    assert spent.queue == pytest.approx(after)


def close_groups(rng: np.random.Generator, size: int) -> list[GroupLengths]:
    """Risks of 0.49, 0.66 and 0.75 at sizes 4, 8, 16, as on the demo: prompts that hardly ever straggle, or always."""
    number = BATCH // size
    spread_G = rng.choice([0.08, 0.65, 2.5], size=number, p=[0.22, 0.40, 0.38])
    lengths_GL = np.maximum(1, np.round(30 * np.exp(spread_G[:, None] * rng.standard_normal((number, size)))))
    return [GroupLengths(lengths=tuple(map(int, row)), truncated=(False,) * size) for row in lengths_GL]


@pytest.mark.parametrize("tradeoff", [0.5, 1.0])
def test_the_budget_is_kept_in_the_long_run_where_risks_are_close(tradeoff: float) -> None:
    """There the smallest size is chosen at a queue of V / 0.26 and one ``dwell`` adds up to 2: a cap of 5 V on it ended
    at 0.64."""
    chosen = sagc_settings(budget=0.6, tradeoff=tradeoff, sizes=(4, 8, 16))
    rates = []
    for seed in range(4):
        sizer, rng = StragglerAwareSize(chosen, 8, BATCH), np.random.default_rng(seed)
        seen = [sizer.observe(close_groups(rng, sizer.size)) for _ in range(400)]
        rates.append(np.mean([decision.figures["sizing/straggler_rate"] for decision in seen]))
    assert np.mean(rates) <= 0.61


# ---- calibration


def test_calibration_keeps_a_workable_budget_and_counts_its_own_steps() -> None:
    sizer = StragglerAwareSize(sagc_settings(calibration_steps=6, budget=0.3), 8, BATCH)
    seen = simulate(sizer, 6, lambda _: 0.45)
    assert seen.sizes == [32] * 6, "the largest size informs all of them at once"
    assert sizer.budget == 0.3
    assert sizer._memory.queue == pytest.approx(sum(seen.rates) - 6 * 0.3)
    assert sizer.size < 32, "six steps at 0.8 are a debt, and may be acted on at once"


def calibrate(budget: float, spread: float) -> tuple[StragglerAwareSize, str]:
    sizer = StragglerAwareSize(sagc_settings(calibration_steps=5, budget=budget), 8, BATCH)
    rng = np.random.default_rng(3)
    reasons = [sizer.observe(sampled_groups(rng, 32, spread)).reason for _ in range(5)]
    assert reasons[0] == "stays 32: calibrating, step 1 of 5"
    return sizer, reasons[-1]


def test_a_budget_that_no_size_meets_is_replaced_and_told() -> None:
    sizer, reason = calibrate(budget=0.1, spread=0.5)
    assert "the budget of 0.1, which no size meets, is replaced by" in reason
    assert 0.45 < sizer.budget < 0.6  # between 0.21 and 0.85
    twin = StragglerAwareSize(sagc_settings(calibration_steps=5, budget=0.1), 8, BATCH)
    twin.restore(sizer.snapshot())
    assert twin.budget == sizer.budget


def test_a_budget_that_every_size_meets_is_replaced_and_told() -> None:
    sizer, reason = calibrate(budget=0.9, spread=0.4)
    assert "the budget of 0.9, which every size meets, is replaced by" in reason
    assert 0.3 < sizer.budget < 0.5  # between 0.11 and 0.68


def test_where_sizes_hardly_differ_the_budget_stays() -> None:
    sizer, reason = calibrate(budget=0.3, spread=0.1)
    assert sizer.budget == 0.3
    assert "too near for sizes to matter" in reason


# ---- chance, and a fixed size


@given(seed=st.integers(0, 2**40), steps=st.integers(1, 80), shares=st.permutations([0.6, 0.25, 0.15]))
@settings(deadline=None, max_examples=30)
def test_random_sizes_have_their_shares_after_any_number_of_draws(seed: int, steps: int, shares: list[float]) -> None:
    sizer = RandomSize(random_settings(tuple(shares)), BATCH, seed)
    drawn: Counter[int] = Counter()
    for _ in range(steps):
        drawn[sizer.size] += 1
        sizer.observe([])
    for size, share in zip((4, 8, 16), shares, strict=True):
        assert abs(drawn[size] - share * steps) <= 1.5


def test_random_sizes_are_a_function_of_the_seed_and_held_for_dwell_steps() -> None:
    def sizes(seed: int, dwell: int) -> list[int]:
        sizer = RandomSize(random_settings(dwell=dwell), BATCH, seed)
        return [sizer.observe(calm(sizer.size, 4)).size for _ in range(40)]

    assert sizes(1, 1) == sizes(1, 1)
    assert len({tuple(sizes(seed, 1)) for seed in range(10)}) == 10
    held = sizes(1, 5)
    changes = [step + 1 for step in range(39) if held[step] != held[step + 1]]
    assert changes and all((step + 1) % 5 == 0 for step in changes)
    # Lengths do not matter: that is what makes it the control experiment.
    calm_sizer, long_sizer = (RandomSize(random_settings(), BATCH, 3) for _ in range(2))
    for _ in range(20):
        assert calm_sizer.observe(calm(4)).size == long_sizer.observe(straggling(8)).size


def test_every_kind_is_made_and_its_figures_are_registered() -> None:
    fixed = make_group_sizer(GroupSizing(), 6, 96, seed=0)
    assert isinstance(fixed, FixedSize) and fixed.size == 6
    assert isinstance(make_group_sizer(random_settings(), 6, 96, seed=0), RandomSize)
    aware = make_group_sizer(sagc_settings(), 8, 96, seed=0)
    assert isinstance(aware, StragglerAwareSize) and aware.size == 8
    for sizer in (by_chance(8), aware):
        decision = sizer.observe(straggling(8, 2))
        assert decision.figures["sizing/straggler_rate"] == 1
        assert decision.figures["sizing/size"] == decision.size == sizer.size
        assert unregistered(list(decision.figures)) == []
    assert {f"sizing/risk_{size}" for size in SIZES} | {"sizing/queue"} <= set(aware.observe([]).figures)


@pytest.mark.parametrize(
    ("sizes", "start", "message"),
    [
        ((4, 8, 20), 4, "size 20 does not divide a batch of 128"),
        ((2, 4), 4, "drop smaller sizes"),
        ((8, 4), 4, "each larger than the one before"),
        ((8,), 8, "give two or more"),
        ((4, 8), 16, r"16, which a run starts with, is none of \[4, 8\]"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, ...], start: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_group_sizer(sagc_settings(sizes=sizes), start, BATCH, seed=0)


def test_shares_that_do_not_fit_are_refused() -> None:
    for shares in ((0.5, 0.5), (0.0, 0.0, 0.0), (1.0, -0.5, 0.5)):
        with pytest.raises(ValueError, match="shares for 3 sizes"):
            RandomSize(random_settings(shares), BATCH, 0)
    with pytest.raises(ValueError, match="does not divide"):
        RandomSize(random_settings(), 24, 0)
