"""Advantages against numbers computed by hand and plain float64 loops."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from streamrl.base.errors import RecipeError  # noqa: E402
from streamrl.learning.objective.advantages import (  # noqa: E402
    FloatVector,
    Moments,
    group_advantages,
    moments_of,
    separate_advantages,
    turn_advantages,
    whiten,
)
from streamrl.recipe.environment import Credit  # noqa: E402
from streamrl.recipe.objectives.catalog import ADVANTAGES  # noqa: E402
from streamrl.recipe.objectives.method import token_returns  # noqa: E402
from streamrl.recipe.objectives.ppo import generalized_advantages  # noqa: E402

pytestmark = pytest.mark.torch
WITHIN_GROUPS = ("group_mean", "group_std", "group_then_batch", "leave_one_out")


def vector(*values: float) -> FloatVector:
    return np.array(values, dtype=np.float32)


def advantages(rewards: list[float], kind: str) -> list[float]:
    found = group_advantages(torch.tensor(rewards, dtype=torch.float64), ADVANTAGES[kind])
    assert found.dtype == torch.float32
    return list(found.tolist())


def test_group_advantages_by_hand() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    # mean 0.25, unbiased variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25, standard deviation 0.5
    by_std = [0.75 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001, -0.25 / 0.5001]
    assert advantages(rewards, "group_std") == pytest.approx(by_std, rel=1e-6)
    assert advantages(rewards, "group_mean") == [0.75, -0.25, -0.25, -0.25]
    assert advantages(rewards, "group_then_batch") == [0.75, -0.25, -0.25, -0.25]
    # the others' mean: 0 for the first, 1/3 for the rest
    assert advantages(rewards, "leave_one_out") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-6)
    for kind in ("batch", "cohort", "gae"):
        assert advantages(rewards, kind) == rewards


EIGHTHS = st.integers(-16, 16).map(lambda number: number / 8)  # exact in every sum here
SIBLINGS = st.lists(st.tuples(EIGHTHS, st.lists(EIGHTHS, min_size=1, max_size=5)), min_size=2, max_size=5)


def of_turns(siblings: list[tuple[float, list[float]]], kind: str, credit: str) -> Any:
    """``siblings``: what no turn earned, and what each turn did."""
    totals = [rest + sum(earned) for rest, earned in siblings]
    return turn_advantages(totals, [earned for _, earned in siblings], Credit(credit), ADVANTAGES[kind])


@given(SIBLINGS, st.sampled_from(sorted(set(ADVANTAGES) - {"group_ratio"})))
def test_turns_have_their_share_of_a_trajectory(siblings: list[tuple[float, list[float]]], kind: str) -> None:
    whole = torch.tensor(advantages([rest + sum(earned) for rest, earned in siblings], kind))
    to_go, of_turn = (of_turns(siblings, kind, credit) for credit in ("return_to_go", "turn"))
    assert torch.equal(to_go[:, 0], whole)
    at_the_end = [(rest + sum(t[:-1]), [0.0] * (len(t) - 1) + t[-1:]) for rest, t in siblings]
    for found, (_, t), value in zip(of_turns(at_the_end, kind, "return_to_go"), siblings, whole, strict=True):
        assert torch.equal(found[: len(t)], value.expand(len(t)))
    if kind in WITHIN_GROUPS:
        assert torch.cat([to_go, of_turn], 1).sum(0).abs().max() < 1e-5
    if kind != "group_std":
        rest_S1 = torch.tensor(advantages([rest for rest, _ in siblings], kind))[:, None]
        assert torch.allclose((of_turn - rest_S1).sum(1) + rest_S1[:, 0], whole, atol=1e-5)


@given(SIBLINGS, st.data(), st.sampled_from(["turn", "return_to_go"]))
def test_a_baseline_has_nothing_of_its_own_trajectory(siblings: Any, data: st.DataObject, credit: str) -> None:
    """What a turn earns more is its advantage more, with ``return_to_go`` that of earlier turns too, and no other's."""
    index = data.draw(st.integers(0, len(siblings) - 1))
    (rest, earned), before = siblings[index], of_turns(siblings, "leave_one_out", credit)[index]
    changed = data.draw(st.integers(0, len(earned) - 1))
    siblings[index] = (rest, [r + 4.0 * (turn == changed) for turn, r in enumerate(earned)])
    risen = (of_turns(siblings, "leave_one_out", credit)[index] - before)[: len(earned)].tolist()
    expected = [4.0 * (t == changed or (t < changed and credit == "return_to_go")) for t in range(len(earned))]
    assert risen == pytest.approx(expected, abs=1e-5)


def test_what_rounding_leaves_of_a_reward_is_no_signal() -> None:
    turns, totals, kind = [[0.1, 0.2, 0.0], [0.1, 0.2]], [0.1 + 0.2, 0.3], ADVANTAGES["leave_one_out"]
    assert not turn_advantages(totals, turns, Credit.TURN, kind).any()
    # In a third turn nothing is left to the first, as 0.2 was to the second in its last one.
    assert turn_advantages(totals, turns, Credit.RETURN_TO_GO, kind)[0].tolist() == [0.0, 0.0, pytest.approx(-0.2)]


def test_separate_advantages_by_hand() -> None:
    """GDPO: a reward of 0 or 1 counts as much as one of 0 or 100, where their sum would drown it."""
    right, length = [1.0, 0.0, 0.0, 0.0], [0.0, 100.0, 0.0, 0.0]
    rewards = [{"right": (1.0, r), "length": (2.0, n)} for r, n in zip(right, length, strict=True)]
    alone = np.array([advantages(values, "group_std") for values in (right, length)])
    found = separate_advantages(rewards, ADVANTAGES["group_std"])
    assert found.tolist() == pytest.approx(list(alone[0] + 2.0 * alone[1]), rel=1e-6)
    # Two of the four have no value of the second: they are compared by the first alone.
    partly = [r if index < 2 else {"right": r["right"]} for index, r in enumerate(rewards)]
    pair = np.array([*advantages(length[:2], "group_std"), 0.0, 0.0])
    found = separate_advantages(partly, ADVANTAGES["group_std"])
    assert found.tolist() == pytest.approx(list(alone[0] + 2.0 * pair), rel=1e-6)


@pytest.mark.parametrize("kind", WITHIN_GROUPS)
@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [1 / 3] * 7])
def test_no_signal_is_exactly_zero(rewards: list[float], kind: str) -> None:
    assert advantages(rewards, kind) == [0.0] * len(rewards)


def test_moments_of_ranks_add_up() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(3.0, 2.0, 1000).astype(np.float32)
    parts = [moments_of(part) for part in np.split(values, [0, 10, 700])]
    moments = Moments(*(sum(column) for column in zip(*parts, strict=True)))
    exact = values.tolist()
    expected = (values - statistics.fmean(exact)) / statistics.pstdev(exact)
    np.testing.assert_allclose(whiten(values, moments), expected, rtol=1e-5, atol=1e-6)
    # a part is whitened with the moments of the whole
    np.testing.assert_allclose(whiten(values[10:20], moments), expected[10:20], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [0, 1, 7, 1000])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -0.57])
def test_whitening_without_deviation_is_exactly_zero(size: int, value: float) -> None:
    values = np.full(size, value, np.float32)
    parts = [moments_of(values[: size // 3]), moments_of(values[size // 3 :])]
    white = whiten(values, Moments(*(sum(column) for column in zip(*parts, strict=True))))
    assert white.dtype == np.float32
    assert white.tolist() == [0.0] * size


def test_small_deviation_is_a_signal() -> None:
    values = vector(100.0, 100.001)
    assert whiten(values, moments_of(values)).tolist() == pytest.approx([-1, 1], rel=1e-3)


def test_token_returns_by_hand() -> None:
    # the reward, minus what this token and those after it cost
    found = token_returns(1.0, vector(0.1, 0.2, 0.4))
    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([0.3, 0.4, 0.6], rel=1e-6)
    assert token_returns(1.0, vector()).tolist() == []


def test_generalized_advantages_by_hand() -> None:
    # errors: 0 + 0.5 * 2 - 1 = 0, 0 + 0.5 * 4 - 2 = 0, 3 - 4 = -1; each passes on 0.5 * 0.8 = 0.4 of the next
    found, returns = generalized_advantages(vector(0, 0, 3), vector(1, 2, 4), discount=0.5, gae_lambda=0.8)
    assert found.tolist() == pytest.approx([-0.16, -0.4, -1.0], rel=1e-6)
    assert returns.tolist() == pytest.approx([0.84, 1.6, 3.0], rel=1e-6)
    assert found.dtype == returns.dtype == np.float32
    assert [part.tolist() for part in generalized_advantages(vector(), vector(), discount=1, gae_lambda=1)] == [[], []]


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_generalized_advantages_are_the_sum_of_their_definition(discount: float, gae_lambda: float) -> None:
    rng = np.random.default_rng(1)
    rewards, values = rng.normal(size=(2, 9)).astype(np.float32)
    expected = []
    for start in range(9):
        total = 0.0
        for later in range(start, 9):
            following = float(values[later + 1]) if later < 8 else 0.0
            error = float(rewards[later]) + discount * following - float(values[later])
            total += (discount * gae_lambda) ** (later - start) * error
        expected.append(total)
    found, returns = generalized_advantages(rewards, values, discount=discount, gae_lambda=gae_lambda)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(returns, np.array(expected) + values, rtol=1e-5, atol=1e-6)
    if discount == gae_lambda == 1:
        # Monte Carlo: the return is the sum of what follows, whatever the critic says
        np.testing.assert_allclose(returns, rewards[::-1].cumsum()[::-1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", WITHIN_GROUPS)
def test_rewards_that_differ_by_rounding_alone_have_no_advantage(kind: str) -> None:
    """Sums of the same parts in another order; whitened by their own tiny deviation they would be of full size."""
    assert 0.1 + 0.2 != 0.3
    for scale in (1.0, -1.0, 1e-6, 1e6):
        rewards = [scale * (0.1 + 0.2), scale * 0.3, scale * 0.3, scale * 0.3]
        assert advantages(rewards, kind) == [0.0] * 4
    assert advantages([0.3, 0.3 + 1e-9, 0.3, 0.3], kind) != [0.0] * 4


def test_a_mean_reward_that_divides_is_of_rewards_from_0() -> None:
    """MaxRL weighs by the success rate: a reward below 0 is refused by its value, groups of equal rewards are 0."""
    estimator = ADVANTAGES["group_ratio"]
    assert group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), estimator).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert group_advantages(torch.zeros(3), estimator).tolist() == [0.0] * 3
    with pytest.raises(RecipeError, match=r"a reward is -0\.5: give rewards of 0 or more"):
        group_advantages(torch.tensor([1.0, -0.5]), estimator)
