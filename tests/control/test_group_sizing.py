"""Group sizing: the straggler event, what is learnt from groups of any size, the budget over a long run, resuming.

The simulations draw lognormal lengths: spread 0.5 between prompts, another one inside a prompt that may drift, cut at
four times the median. No model and no engine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from builders.observe import unregistered
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.control_world import World, control_settings
from tiers import quick_only

from streamrl.control.policies import sagc
from streamrl.control.policies.group_sizing import GroupSizer, RandomSize, StragglerAwareSize, make_group_sizer
from streamrl.control.round_policy import FixedSize, SizingDecision
from streamrl.control.run_state import GroupLengths
from streamrl.recipe.scheduling import GroupSizing, Keeps, RoundKind, SizingKind, Straggler, TailBatching

BATCH = 128
SIZES = (4, 8, 16, 32)


def sagc_settings(**changes: object) -> GroupSizing:
    return GroupSizing(**{"kind": SizingKind.SAGC, "sizes": SIZES, "budget": 0.3, **changes})  # type: ignore[arg-type]


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
    return RandomSize(GroupSizing(kind=SizingKind.RANDOM, sizes=(size,), shares=(1.0,), straggler_ratio=2.0), 0)


def test_a_truncated_member_makes_its_group_a_straggler() -> None:
    """A truncated member makes its group a straggler, whatever the lengths are."""
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
    sizer = StragglerAwareSize(sagc_settings(), 8, 1000)
    before = sizer.snapshot()
    assert "no group" in sizer.observe([group(1, 1, 1000)]).reason
    assert "no group" in sizer.observe([]).reason
    assert sizer.snapshot() == before


# ---- what is learnt


def test_groups_are_split_by_index_for_smaller_sizes() -> None:
    """A group is split by generation index and informs every smaller size."""
    # Members 0-3 straggle, 4-7 are calm, and so is the whole: longest 300, median 250.
    table = np.array([[100, 100, 100, 300, 250, 250, 250, 250]], dtype=float)
    assert sagc.count_stragglers([table], 4, 2.0) == (1, 2)
    assert sagc.count_stragglers([table], 8, 2.0) == (0, 1)
    assert sagc.count_stragglers([table], 16, 2.0) == (0, 0)


def test_the_rest_of_a_split_group_is_not_counted() -> None:
    """The members that are left in a group are split, and the remainder is not counted."""
    sizer = StragglerAwareSize(sagc_settings(discount=1.0), 8, 1000)
    # One of 8 lost a member (7 are one part of 4), one came at another size.
    decision = sizer.observe([*straggling(7), *calm(16), *calm(8)])
    memory = sizer._memory
    counts = {size: (memory.straggling[size], memory.calm[size]) for size in SIZES}
    assert counts == {4: (1, 6), 8: (0, 3), 16: (0, 1), 32: (0, 0)}
    assert decision.figures["sizing/straggler_rate"] == pytest.approx(1 / 3)


def test_without_reuse_a_size_learns_from_itself_alone() -> None:
    sizer = StragglerAwareSize(sagc_settings(discount=1.0), 8, 1000, reuse=False)
    sizer.observe(straggling(8, 2))
    assert sizer._memory.straggling == {4: 0, 8: 2, 16: 0, 32: 0}
    assert sizer._memory.calm == {4: 0, 8: 0, 16: 0, 32: 0}
    sizer.observe([*calm(16, 2), *calm(8)])  # of a round before, when the size was 16
    assert sizer._memory.calm == {4: 0, 8: 1, 16: 2, 32: 0}


def test_a_step_of_several_batches_spends_as_much_budget() -> None:
    """A step that trained several batches spends the budget of as many batches. Four calm batches, and one step with
    four of those that lost against them: half of all groups straggle."""
    sizer = StragglerAwareSize(sagc_settings(budget=0.25, tightening=0.0), 8, 1000)
    for _ in range(4):
        sizer.observe(calm(8, 4))
    sizer.observe(straggling(8, 16), 4)
    memory = sizer._memory
    assert memory.rate_sum / memory.steps == 0.5
    assert memory.queue == pytest.approx(4 * 0.75)


def test_old_steps_are_forgotten() -> None:
    sizer = StragglerAwareSize(sagc_settings(sizes=(4, 8), discount=0.5, dwell=1000), 8, 1000)
    sizer.observe(straggling(8, 4))
    sizer.observe(calm(8, 4))
    assert (sizer._memory.straggling[8], sizer._memory.calm[8]) == (2, 4)
    assert sizer.observe([]).figures["sizing/risk_8"] == pytest.approx(2.5 / 7)


def test_risk_has_a_lower_bound_and_grows_with_size() -> None:
    """Risk has a lower bound and never falls with the group size."""
    memory = sagc.SizingMemory(size=4, budget=0.3, straggling={4: 30, 8: 1}, calm={4: 70, 8: 99})
    risks = sagc.risks_of(memory, (4, 8, 16), optimism=1.0)
    assert risks[4].mean == pytest.approx(30.5 / 101)
    assert risks[4].low == pytest.approx(30.5 / 101 - math.sqrt(30.5 / 101 * 70.5 / 101 / 102))
    assert risks[8].mean == pytest.approx(1.5 / 101)
    assert risks[8].low == risks[4].low
    assert (risks[16].mean, risks[16].low) == (0.5, pytest.approx(max(risks[4].low, 0.5 - math.sqrt(0.25 / 2))))


@pytest.mark.parametrize("keeps", Keeps)
def test_utility_is_the_variance_saved_by_a_larger_group(keeps: Keeps) -> None:
    """Utility is the variance of the gradient that a larger group removes."""
    sizes, rng = (4, 8, 16), np.random.default_rng(0)
    variances = []
    for size in sizes:
        groups = 48 // size if keeps is Keeps.TRAJECTORIES else 6
        rewards = rng.random((20_000, groups, size)) < 0.3
        scores = rng.standard_normal((20_000, groups, size))
        baselines = (rewards.sum(axis=2, keepdims=True) - rewards) / (size - 1)
        variances.append(np.mean((rewards - baselines) * scores, axis=(1, 2)).var())
    gained = [(variances[0] - variance) / (variances[0] - variances[-1]) for variance in variances]
    assert list(sagc.utilities_of(sizes).values()) == pytest.approx(gained, abs=0.05)


@pytest.mark.parametrize("known", [1, 4, 12])
def test_earlier_samples_of_a_prompt_take_the_place_of_siblings(known: int) -> None:
    """With a baseline of earlier samples the utility is the variance that siblings still remove, from a group of 1."""
    sizes, samples, rng = (1, 2, 8), 48, np.random.default_rng(0)
    variances = []
    for size in sizes:
        shape = (20_000, samples // size, size)
        rewards = rng.random(shape) < 0.3
        earlier = (rng.random((*shape[:2], known)) < 0.3).sum(axis=2, keepdims=True)
        baselines = (earlier + rewards.sum(axis=2, keepdims=True) - rewards) / (known + size - 1)
        scores = rng.standard_normal(shape)
        variances.append(np.mean((rewards - baselines) * scores, axis=(1, 2)).var() * samples / (0.3 * 0.7))
    gained = [variances[0] - variance for variance in variances]
    assert list(sagc.utilities_of(sizes, known).values()) == pytest.approx(gained, abs=0.05)


def test_groups_of_one_are_chosen_once_baselines_are_good() -> None:
    """A group of one never straggles, and it takes a shorter queue to choose it where prompts are known well."""
    settings = sagc_settings(sizes=(1, 4, 8), budget=0.1, tradeoff=0.5, dwell=1)
    longest_queues = {}
    for known in (1.0, 20.0):
        sizer = StragglerAwareSize(settings, 8, 100)
        sizes = set()
        queues = []
        for _ in range(60):
            groups = [group(5, truncated=[0]), group(50)]
            if sizer.size > 1:
                groups = [*straggling(sizer.size), *calm(sizer.size, 5)]
            decision = sizer.observe(groups, earlier_samples=known)
            sizes.add(decision.size)
            queues.append(decision.figures["sizing/queue"])
        longest_queues[known] = max(queues)
        assert 1 in sizes
        assert decision.figures["sizing/risk_1"] < 0.05
    assert longest_queues[20.0] < 0.5 * longest_queues[1.0], longest_queues


# ---- (b) boundaries and the batch


def test_a_size_is_held_for_dwell_steps() -> None:
    sizer = StragglerAwareSize(sagc_settings(dwell=5, tradeoff=0.5), 32, 1000)
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
def test_steps_are_whole_groups_and_resume_anywhere(
    sizes: list[int], start: int, kind: SizingKind, drawn: object, calibration: int, dwell: int
) -> None:
    """Every step is a batch of whole groups, and sizing resumes at any point. B is preserved; at any point a new sizer,
    given what the old one saved (as JSON), decides the same ever after."""
    random = drawn
    chosen = GroupSizing(
        kind=kind,
        sizes=tuple(sizes),
        budget=None if calibration else 0.3,
        calibration_steps=calibration or None,
        dwell=dwell,
        shares=(0.3,) * len(sizes),
    )

    def new() -> GroupSizer:
        return make_group_sizer(chosen, sizes[start % len(sizes)], seed=7, steps=1000)

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
    old = StragglerAwareSize(sagc_settings(sizes=(4, 8, 16), discount=1.0), 16, 1000)
    old.observe(straggling(16, 8))
    assert old.size == 16
    new = StragglerAwareSize(sagc_settings(sizes=(4, 8), discount=1.0), 8, 1000)
    new.restore(old.snapshot())
    assert new.size == 8
    assert new.observe(calm(8, 16)).figures["sizing/risk_8"] == pytest.approx(8.5 / (16 + 16 + 1))
    new = StragglerAwareSize(sagc_settings(sizes=(4, 8)), 8, 1000)
    new.restore({})  # the checkpoint of a run with a fixed size
    assert new.size == 8


def test_a_fork_keeps_statistics_and_drops_the_debt() -> None:
    """A fork with another budget keeps its statistics of the sizes and has no debt."""
    old = StragglerAwareSize(sagc_settings(budget=0.3), 16, 1000)
    for _ in range(6):
        old.observe(straggling(old.size, 8))
    assert old._memory.queue > 0
    new = StragglerAwareSize(sagc_settings(budget=0.6), 16, 1000)
    new.restore(old.snapshot())
    assert new.budget == 0.6
    expected = msgspec.structs.replace(old._memory, budget=0.6, asked=0.6, queue=0.0, steps=0, rate_sum=0.0)
    assert new._memory == expected
    again = StragglerAwareSize(sagc_settings(budget=0.6), 16, 1000)
    again.restore(new.snapshot())
    assert again._memory == new._memory, "resumed with its own recipe nothing changes"
    measuring = StragglerAwareSize(sagc_settings(budget=None, calibration_steps=3), 16, 1000)
    measuring.restore(old.snapshot())
    assert measuring.size == 32 and "step 1 without a budget" in measuring.observe(calm(32, 4)).reason
    measuring.observe(straggling(32, 4))
    measuring.observe(calm(32, 4))
    new.restore(measuring.snapshot())
    assert (new.budget, measuring.budget > 0, new._memory.queue) == (0.6, True, 0), "and back to one of the recipe"


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
    ("changes", "expected"),  # utility, rate, rate of the second half, overshoot, switches
    [
        ({"optimism": 0.0, "tradeoff": 5.0}, (0.46, 0.332, 0.302, 9.5, 50)),
        ({"tradeoff": 1.0}, (0.39, 0.308, 0.298, 2.3, 130)),
        ({"tradeoff": 2.0}, (0.42, 0.316, 0.301, 4.9, 107)),
        ({"tradeoff": 5.0}, (0.47, 0.341, 0.303, 12.3, 81)),
        ({"tradeoff": 2.0, "dwell": 5}, (0.40, 0.317, 0.300, 5.1, 46)),
        # The tightening ends once the overshoot is paid back: the reference's, always on, ended at 0.297 and 0.280.
        ({"tradeoff": 2.0, "tightening": 0.02}, (0.39, 0.300, 0.290, 0.0, 110)),
    ],
)
def test_the_controller_does_what_it_does_in_the_reference(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, float], expected: tuple[float, ...]
) -> None:
    logarithmic = {size: math.log(size / SIZES[0], SIZES[-1] / SIZES[0]) for size in SIZES}
    monkeypatch.setattr(sagc, "utilities_of", lambda sizes, earlier: {size: logarithmic[size] for size in sizes})
    chosen = sagc_settings(**{"tightening": 0.0, "dwell": 1, **changes})
    runs = [simulate(StragglerAwareSize(chosen, 8, 1000), 300, lambda _: 0.4, seed) for seed in range(4)]
    means = np.mean(
        [
            (run.utility, np.mean(run.rates), np.mean(run.rates[150:]), sum(run.rates) - 300 * 0.3, run.switches())
            for run in runs
        ],
        axis=0,
    )
    allowed = (0.04, 0.012, 0.015, 2.5, 0.3 * expected[-1])
    assert (abs(means - expected) <= allowed).all(), means


# ---- acceptance, and (f)

DRIFTS: dict[str, Callable[[int], float]] = {
    "waves": lambda step: 0.40 + 0.06 * math.sin(2 * math.pi * step / 1000),
    "jump up": lambda step: 0.34 + 0.08 * step / 1000 if step < 1000 else 0.50 - 0.08 * (step - 1000) / 1000,
    "jump down": lambda step: 0.48 if step < 800 else 0.34 + 0.06 * (step - 800) / 1200,
}


def budget_gap(sizer: StragglerAwareSize, drift: str) -> float:
    """Long-run straggler rate minus the budget, over 2,000 steps."""
    return float(np.mean(simulate(sizer, 2000, DRIFTS[drift]).rates)) - sizer.budget


@pytest.mark.long
@pytest.mark.parametrize("drift", DRIFTS)
def test_the_long_run_rate_meets_the_budget_under_drift(drift: str) -> None:
    """The long-run rate stays within 2 points of the budget under drift."""
    assert abs(budget_gap(StragglerAwareSize(sagc_settings(), 8, 1000), drift)) <= 0.02
    assert abs(budget_gap(StragglerAwareSize(sagc_settings(budget=None), 8, 1000), drift)) <= 0.02
    # (f) The same test fails for the plain posterior mean of each size's own groups: a small size that is never tried
    # (or forgotten) keeps the prior's risk, and is never chosen.
    plain = StragglerAwareSize(sagc_settings(optimism=0.0), 8, 1000, reuse=False)
    assert budget_gap(plain, drift) > 0.05


# ---- (g) what cannot be met


def test_an_unreachable_budget_pins_the_smallest_size() -> None:
    """A budget that no size meets pins the smallest size; later the sizer recovers."""
    chosen = sagc_settings(budget=0.3, dwell=1, tradeoff=2.0)
    sizer = StragglerAwareSize(chosen, 8, 1000)
    hard = simulate(sizer, 200, lambda _: 0.8)
    assert hard.sizes[10:] == [4] * 190
    assert hard.largest_queue == sagc.QUEUE_CAP * 2
    easy = simulate(sizer, 100, lambda _: 0.15, seed=1)
    # Every size meets it now, and what was seen of them before is forgotten.
    assert easy.sizes[60:] == [32] * 40


def test_where_every_group_straggles_the_key_that_helps_is_named() -> None:
    sizer = StragglerAwareSize(sagc_settings(), 8, 1000)
    reasons = [sizer.observe(straggling(4, 32)).reason for _ in range(5)]
    assert "raise group_sizing.advanced.straggler_ratio" in reasons[-1]


@pytest.mark.parametrize("budget", ["feasible", "out of reach", "measured"])
@pytest.mark.parametrize("truncated", quick_only([0.0, 0.2, 0.4], [0.2]))
@pytest.mark.parametrize("spread", quick_only([0.8, 1.3, 2.0], [1.3]))
def test_the_budget_is_met_or_the_smallest_size_used(spread: float, truncated: float, budget: str) -> None:
    """For any lengths, the budget is met or the smallest size is used. 2,000 steps. Without the branch for what is out
    of reach, the utility of size 16 decides in the heavy tails."""
    rng, sizes = np.random.default_rng(7), (4, 8, 16)
    lengths_PL = np.ceil(100 * np.exp(rng.normal(0, 0.5, (4000, 1)) + rng.normal(0, spread, (4000, 16)))).astype(int)
    cap = np.quantile(lengths_PL, 1 - truncated) if truncated else np.inf
    known_PL = np.where(lengths_PL < cap, lengths_PL, np.inf)
    smallest, largest = (sagc.straggler_rate([known_PL[:, :size]], 2.0) or 0 for size in (4, 16))
    asked = {"feasible": smallest + (largest - smallest) / 3, "out of reach": smallest - 0.1, "measured": None}[budget]
    sizer = StragglerAwareSize(sagc_settings(sizes=sizes, budget=asked), 8, 2000)
    chosen, rates, told = list[int](), list[float](), list[str]()
    for _ in range(2000):
        rows = lengths_PL[rng.integers(4000, size=BATCH // sizer.size), : sizer.size]
        chosen.append(sizer.size)
        groups = [GroupLengths(lengths=tuple(row.tolist()), truncated=tuple((row >= cap).tolist())) for row in rows]
        decision = sizer.observe(groups)
        rates.append(decision.figures["sizing/straggler_rate"])
        told += [decision.reason] if decision.notify else []
    if budget == "out of reach":
        assert chosen.count(4) >= 0.9 * 2000
        assert len(told) == 1 and told[0].startswith(f"no size meets group_sizing.budget = {asked:g}: size 4 straggles")
        return
    assert abs(np.mean(rates) - sizer.budget) <= 0.02
    assert len(told) == (budget == "measured")
    middle = (smallest + largest) / 2
    assert asked or abs(sizer.budget - middle) <= 0.06


LONG = 4
"""Batches of a long round, which comes after eight short ones."""


def overspent_with_long_rounds(seed: int) -> float:
    """Straggler rate above the budget over 72 batches in which every long round is of stragglers."""
    chosen = sagc_settings(budget=0.6, tradeoff=0.5, sizes=(4, 8, 16))
    sizer = StragglerAwareSize(chosen, 8, 1000)
    rng = np.random.default_rng(seed)
    spent = 0.0
    for number in range(54):
        is_long = number % 9 == 8
        groups = straggling(sizer.size, 8) if is_long else sampled_groups(rng, sizer.size, 0.6)
        batches = LONG if is_long else 1
        spent += batches * sizer.observe(groups, batches).figures["sizing/straggler_rate"]
    return spent / (6 * 12) - sizer.budget


def test_long_rounds_pay_back_what_they_overspend() -> None:
    """A long round of several batches pays back the budget that it overspent. A cap on the queue would forget most of
    it at once."""
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
def test_debt_is_forgotten_at_the_smallest_size_only(calm: float, queue: float, after: float) -> None:
    """A debt is forgotten only while the smallest size is above the budget."""
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
def test_the_budget_holds_where_risks_are_close(tradeoff: float) -> None:
    """The budget is kept in the long run where the risks of the sizes are close. There the smallest size is chosen at a
    queue of V / 0.26 and one ``dwell`` adds up to 2: a cap of 5 V on it ended at 0.64."""
    chosen = sagc_settings(budget=0.6, tradeoff=tradeoff, sizes=(4, 8, 16))
    rates = []
    for seed in range(4):
        sizer, rng = StragglerAwareSize(chosen, 8, 1000), np.random.default_rng(seed)
        seen = [sizer.observe(close_groups(rng, sizer.size)) for _ in range(400)]
        rates.append(np.mean([decision.figures["sizing/straggler_rate"] for decision in seen]))
    assert np.mean(rates) <= 0.61


# ---- a budget that is measured


def measured(spread: float, batch: int = BATCH, **changes: object) -> tuple[StragglerAwareSize, list[SizingDecision]]:
    """The sizer after the steps at the largest size, and what it decided in them."""
    sizer = StragglerAwareSize(sagc_settings(budget=None, **changes), 8, 1000)
    rng = np.random.default_rng(3)
    return sizer, [sizer.observe(sampled_groups(rng, sizer.size, spread, batch)) for _ in range(8)]


def test_a_measured_budget_is_reported_and_kept() -> None:
    """A budget that is not set is measured, reported once and kept in checkpoints."""
    sizer, decisions = measured(spread=0.45)
    assert [decision.notify for decision in decisions] == [False] * 7 + [True]
    assert decisions[0].reason == "stays 32: step 1 without a budget, 8 are to measure it"
    assert decisions[-1].reason.startswith(f"group_sizing.budget = {sizer.budget:g}, measured: size 4 straggles in 0.1")
    assert sizer.budget == pytest.approx((0.16 + 0.78) / 2, abs=0.05)
    rates = sum(decision.figures["sizing/straggler_rate"] for decision in decisions)
    assert sizer._memory.queue == pytest.approx(rates - 8 * sizer.budget), "these steps count as well"
    assert sizer.size < 32, "eight steps at 0.8 are a debt, and may be acted on at once"
    twin = StragglerAwareSize(sagc_settings(budget=None), 8, 1000)
    twin.restore(msgspec.json.decode(msgspec.json.encode(sizer.snapshot())))
    assert twin.snapshot() == sizer.snapshot() and not twin.observe(calm(8, 16)).notify


def test_the_largest_of_similar_sizes_meets_the_budget() -> None:
    """Where sizes hardly differ, the largest one meets the measured budget."""
    sizer, decisions = measured(spread=0.1)
    assert "too near for sizes to matter" in decisions[-1].reason
    assert sizer.size == 32 and sizer.budget > decisions[-1].figures["sizing/risk_32"]


def test_too_few_groups_measure_no_budget() -> None:
    """Too few groups measure no budget, and the middle size stays."""
    sizer, decisions = measured(spread=0.4, batch=16, sizes=(4, 8, 16), discount=0.9)
    assert decisions[-1].notify and sizer.size == 8 and sizer.budget == 0
    told = "group size stays 8: 6 groups of size 16 are too few to measure a budget by; set group_sizing.budget"
    assert decisions[-1].reason.startswith(told)
    later = sizer.observe(straggling(8, 2))
    assert later.reason.startswith("stays 8: step 9 without a budget") and not later.notify
    assert (sizer.size, sizer._memory.queue) == (8, 0)
    again = StragglerAwareSize(
        sagc_settings(budget=None, sizes=(4, 8, 16), discount=0.9, calibration_steps=12), 8, 1000
    )
    again.restore(sizer.snapshot())
    assert again.size == 16, "what the message tells the user to do measures anew"
    for _ in range(11):
        assert not again.observe(calm(16)).notify
    twin = StragglerAwareSize(again._settings, 8, 1000)
    twin.restore(again.snapshot())
    assert twin.snapshot() == again.snapshot()
    assert twin.observe(calm(16)).notify and twin.budget > 0


def test_seconds_are_measured_at_both_ends_of_the_sizes() -> None:
    """Seconds of batches that grow with the size are measured at the smallest and the largest size. What a member of a
    large batch takes says nothing of a small one: here groups of 32 are calm, those of 4 not."""
    growing = sagc_settings(budget=None, straggler=Straggler.SECONDS, keeps=Keeps.PROMPTS)
    sizer, sizes = StragglerAwareSize(growing, 8, 1000), list[int]()
    for _ in range(8):
        sizes.append(sizer.size)
        sizer.observe([*straggling(32, 1), *calm(32, 3)] if sizer.size == 32 else [*straggling(4, 2), *calm(4, 2)])
    assert sizes == [32] * 4 + [4] * 4
    assert sizer.budget > sizer.observe(calm(32, 4)).figures["sizing/risk_4"] > 0.4
    alike = StragglerAwareSize(msgspec.structs.replace(growing, keeps=Keeps.TRAJECTORIES), 8, 1000)
    alike.observe(calm(32, 4))
    assert alike._memory.calm[4] == 32, "with as many samples at every size the largest informs all"


@pytest.mark.parametrize(
    ("calibration", "rounds", "sizes", "is_measured"),
    [
        (1, [1, 1], [32, 4], True),
        (3, [1, 1, 1], [32, 32, 4], True),
        # A long round takes the run past all 8 steps at the largest size.
        (8, [1, 1, 1, 5, 1, 1, 1, 1], [32] * 4 + [4] * 4, True),
        (8, [1, 1, 1, 5, 4], [32] * 4 + [4], True),
        # The first rounds after the change are of groups that were launched before it.
        (2, [1, -1, 1], [32, 4, 4], True),
        (1, [1, -1], [32, 4], False),
    ],
)
def test_a_budget_in_seconds_rests_on_whole_rounds_at_both_ends(
    calibration: int, rounds: list[int], sizes: list[int], is_measured: bool
) -> None:
    """Batches of each round, negative where its groups are still of 32; none straggles, so the budget is near 0."""
    chosen = sagc_settings(budget=None, straggler=Straggler.SECONDS, keeps=Keeps.PROMPTS, calibration_steps=calibration)
    sizer, had = StragglerAwareSize(chosen, 8, 1000), list[int]()
    for batches in rounds:
        assert sizer.budget == 0 and not sizer._memory.warned
        had.append(sizer.size)
        decision = sizer.observe(calm(32 if batches < 0 else sizer.size, 8 * abs(batches)), abs(batches))
    assert had == sizes and decision.notify
    assert 0 < sizer.budget < 0.1 if is_measured else "0 groups of size 4 are too few" in decision.reason


def test_constants_follow_the_length_of_the_run() -> None:
    left_out = GroupSizing(kind=SizingKind.SAGC)
    assert [left_out.tradeoff_over(steps) for steps in (99, 100)] == [0.5, 1.0]
    assert [left_out.calibration_over(steps) for steps in (2, 10, 24, 1000)] == [1, 2, 6, 8]
    assert sagc_settings(tradeoff=2.0).tradeoff_over(5) == 2 and sagc_settings().calibration_over(1000) == 0


# ---- a race that cuts the longest members


@pytest.mark.parametrize("launched", [10, 12])
@pytest.mark.parametrize("spread", [0.3, 0.5, 0.8])
def test_a_race_hides_no_stragglers(launched: int, spread: float) -> None:
    """Of so many samples the first 8 are kept. Judged by those alone, at most six in ten stragglers would be seen."""
    rng = np.random.default_rng(5)
    lengths_GL = np.maximum(1, 400 * np.exp(spread * rng.standard_normal((3000, launched)))).astype(int)
    kept_GL = np.sort(lengths_GL, axis=1)[:, :8]
    seen_GL = np.where(lengths_GL <= kept_GL[:, -1:], lengths_GL, 0)
    raced = [np.array([sagc.with_dropped_members(row) for row in seen_GL[:, :8].tolist()])]
    for size in (4, 8):
        straggled, number = sagc.count_stragglers([lengths_GL[:, :8].astype(float)], size, 2.0)
        estimated, _ = sagc.count_stragglers(raced, size, 2.0)
        assert estimated / number == pytest.approx(straggled / number, abs=0.06)
    hidden = sagc.straggler_rate([kept_GL.astype(float)], 2.0)
    assert hidden is not None and hidden < 0.65 * straggled / number


@pytest.mark.parametrize("straggler", list(Straggler))
def test_as_many_groups_are_judged_as_a_batch_takes(straggler: Straggler) -> None:
    """Control judges as many of the launched groups as a batch takes. Of four the first two that end are kept,
    whichever samples they are; tokens or milliseconds from the events."""
    race = TailBatching(prompt_oversampling=1.0, response_oversampling=2.0)
    sizing = sagc_settings(sizes=(4, 8), straggler=straggler)
    chosen = {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": race, "group_sizing": sizing}
    world = World(control_settings(batch_groups=2, group_size=4, steps=3, **chosen))
    world.begin()
    world.answer_draw()
    first = [trajectory for trajectory in sorted(world.running) if trajectory.group_id == 0]
    assert len(first) == 8
    for tokens, sample in ((8, 7), (16, 0), (24, 5), (32, 2)):
        world.score(first[sample], 1.0, tokens)
    unit = {Straggler.TOKENS: 1, Straggler.SECONDS: 125}[straggler]
    assert [seen.lengths for seen in world.state.lengths] == [(16 * unit, 0, 32 * unit, 0)]


def test_a_truncated_member_is_no_shorter_than_the_others() -> None:
    """A truncated member is no shorter than the members that ended."""
    assert sagc.with_dropped_members([100, 0, 50, 80]) == [100, 160, 50, 80]
    assert sagc.with_dropped_members([100, 0, 90, 0, 60, 80]) == [100, 150, 90, 112.5, 60, 80]
    assert sagc.with_dropped_members([0, 0, 0, 70]) == [70, 70, 70, 70], "too many were cut to say more"
    assert by_chance(4).observe([group(0, 0, 0, 0), *calm(4)]).figures["sizing/straggler_rate"] == 0


# ---- chance, and a fixed size


@given(seed=st.integers(0, 2**40), steps=st.integers(1, 80), shares=st.permutations([0.6, 0.25, 0.15]))
@settings(deadline=None, max_examples=30)
def test_random_sizes_have_their_shares(seed: int, steps: int, shares: list[float]) -> None:
    """Random sizes have their shares after any number of draws."""
    sizer = RandomSize(random_settings(tuple(shares)), seed)
    drawn: Counter[int] = Counter()
    for _ in range(steps):
        drawn[sizer.size] += 1
        sizer.observe([])
    for size, share in zip((4, 8, 16), shares, strict=True):
        assert abs(drawn[size] - share * steps) <= 1.5


def test_random_sizes_depend_on_the_seed_and_dwell() -> None:
    """Random sizes are a function of the seed, and are held for ``dwell`` steps."""

    def sizes(seed: int, dwell: int) -> list[int]:
        sizer = RandomSize(random_settings(dwell=dwell), seed)
        return [sizer.observe(calm(sizer.size, 4)).size for _ in range(40)]

    assert sizes(1, 1) == sizes(1, 1)
    assert len({tuple(sizes(seed, 1)) for seed in range(10)}) == 10
    held = sizes(1, 5)
    changes = [step + 1 for step in range(39) if held[step] != held[step + 1]]
    assert changes and all((step + 1) % 5 == 0 for step in changes)
    four = RandomSize(random_settings(dwell=5), 1)
    assert "4 of them done" in four.observe([], 4).reason and "by chance" in four.observe([]).reason
    # Lengths do not matter: that is what makes it the control experiment.
    calm_sizer, long_sizer = (RandomSize(random_settings(), 3) for _ in range(2))
    for _ in range(20):
        assert calm_sizer.observe(calm(4)).size == long_sizer.observe(straggling(8)).size


def test_every_kind_is_made_and_its_figures_are_registered() -> None:
    fixed = make_group_sizer(GroupSizing(), 6, seed=0, steps=1000)
    assert isinstance(fixed, FixedSize) and fixed.size == 6
    assert isinstance(make_group_sizer(random_settings(), 6, seed=0, steps=1000), RandomSize)
    aware = make_group_sizer(sagc_settings(), 8, seed=0, steps=1000)
    assert isinstance(aware, StragglerAwareSize) and aware.size == 8
    for sizer in (by_chance(8), aware):
        decision = sizer.observe(straggling(8, 2))
        assert decision.figures["sizing/straggler_rate"] == 1
        assert decision.figures["sizing/size"] == decision.size == sizer.size
        assert unregistered(list(decision.figures)) == []
    assert {f"sizing/risk_{size}" for size in SIZES} | {"sizing/queue"} <= set(aware.observe([]).figures)
