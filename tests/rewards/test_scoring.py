"""Values, weights, arguments, and every way in which user code goes wrong: a failure, never a wrong reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.recipe import Recipe, Reward
from streamrl.rewards import RewardFunction, RewardSignature, load_reward
from streamrl.rewards.calls import CallResult, CallRunner
from streamrl.rewards.scoring import GroupScorer, WeightedReward, check_result, check_value, combine
from streamrl.tokenizer import load_tokenizer
from streamrl.types import RewardFailure, RewardFailureKind, ScoredTrajectory, Trajectory

MakeTrajectory = Callable[..., Trajectory]
MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def release() -> Any:
    """Lets the killers go at the end: they are loaded by path, so this is the module that the scorer uses."""
    killers = load_reward(f"{Path(__file__).parent / 'killers.py'}:length").call.__globals__  # type: ignore[attr-defined]
    killers["RELEASE"].clear()
    yield killers["RELEASE"]
    killers["RELEASE"].set()


@asynccontextmanager
async def scoring(recipe: Recipe, release: Any = None) -> AsyncIterator[tuple[GroupScorer, CallRunner]]:
    async with asyncio.TaskGroup() as tasks:
        runner = CallRunner(tasks, recipe.reward_limits.concurrency)
        rewards = [WeightedReward(function=load_reward(r.function), recipe=r) for r in recipe.rewards]
        try:
            yield GroupScorer(rewards, load_tokenizer(recipe.model.path), runner), runner
        finally:
            if release is not None:
                release.set()


async def score(recipe: Recipe, *trajectories: Trajectory) -> Sequence[ScoredTrajectory | RewardFailure]:
    async with scoring(recipe) as (scorer, _):
        return await scorer.score(trajectories)


def rewards_of(outcomes: Sequence[Any]) -> list[float]:
    assert all(isinstance(outcome, ScoredTrajectory) for outcome in outcomes), outcomes
    return [outcome.reward for outcome in outcomes]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "reward"),
    [
        ("length", 3.0),
        ("async_length", 3.0),
        ("wrapped", 3.0),
        ("match", 1.0),
        ("partial", 1.0),
        ("judge", 0.5),
        ("true", 1.0),
        ("three", 3.0),
        ("numpy_number", 0.25),
        ("fraction", 0.25),
    ],
)
async def test_value_is_what_the_function_returned(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, function: str, reward: float
) -> None:
    (outcome,) = await score(make_recipe(function), make_trajectory(answer="abc", other=1))
    assert isinstance(outcome, ScoredTrajectory), outcome
    assert outcome.reward == reward
    assert type(outcome.reward) is float
    assert outcome.reward_parts == {function: reward}
    assert outcome.reward_seconds > 0


RAISED, TIMED_OUT = RewardFailureKind.RAISED, RewardFailureKind.TIMED_OUT
NOT_FINITE, WRONG_TYPE = RewardFailureKind.NOT_FINITE, RewardFailureKind.WRONG_TYPE


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        ("raises", RAISED, "ValueError: no such digit (killers.py:"),
        ("raises_async", RAISED, "KeyError: 'column'"),
        ("raises_unreadable", RAISED, "UnreadableError"),
        ("system_exit", RAISED, "SystemExit: 3"),
        ("system_exit_async", RAISED, "SystemExit: bye"),
        ("keyboard_interrupt", RAISED, "KeyboardInterrupt"),
        ("keyboard_interrupt_async", RAISED, "KeyboardInterrupt"),
        ("generator_exit", RAISED, "GeneratorExit"),
        ("stop_iteration", RAISED, "StopAsyncIteration"),
        ("stop_iteration_sync", RAISED, "StopIteration"),
        ("cancelled_error", RAISED, "CancelledError"),
        ("cancels_itself", RAISED, "CancelledError"),
        ("recursion", RAISED, "RecursionError"),
        ("match", RAISED, 'no column "answer"'),
        ("nan", NOT_FINITE, "nan"),
        ("infinite", NOT_FINITE, "-inf"),
        ("huge", NOT_FINITE, "inf"),
        ("text", WRONG_TYPE, "a str"),
        ("mapping", WRONG_TYPE, "a dict"),
        ("array", WRONG_TYPE, "ndarray"),
        ("nested", WRONG_TYPE, "a list"),
        ("none", WRONG_TYPE, "not applicable"),
        ("group_short", WRONG_TYPE, "1 values for 2 completions"),
        ("group_number", WRONG_TYPE, "a float"),
    ],
)
async def test_failure_is_recorded_with_its_reason(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, function: str, kind: RewardFailureKind, message: str
) -> None:
    trajectories = [make_trajectory(sample=0), make_trajectory(sample=1)]
    outcomes = await score(make_recipe(function), *trajectories)
    for trajectory, outcome in zip(trajectories, outcomes, strict=True):
        assert isinstance(outcome, RewardFailure), outcome
        assert (outcome.kind, outcome.function, outcome.trajectory) == (kind, function, trajectory)
        assert message in outcome.message
        assert "\n" not in outcome.message


@pytest.mark.asyncio
@pytest.mark.parametrize("function", ["hangs_async", "hangs_sync", "swallows_cancellation", "late"])
async def test_time_limit_holds_whatever_the_function_does(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, release: Any, function: str
) -> None:
    async with scoring(make_recipe(function, time_limit_s=0.2), release) as (scorer, runner):
        async with asyncio.timeout(10):
            (outcome,) = await scorer.score([make_trajectory()])
        assert isinstance(outcome, RewardFailure)
        assert outcome.kind is TIMED_OUT
        assert "0.2 s" in outcome.message
        assert 0.2 <= outcome.reward_seconds < 5
        assert runner.stuck == (function in ("hangs_sync", "swallows_cancellation"))


@pytest.mark.asyncio
async def test_one_bad_sample_leaves_its_siblings_alone(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    outcomes = await score(make_recipe("group_one_nan"), *(make_trajectory(sample=i) for i in range(3)))
    assert isinstance(outcomes[0], RewardFailure)
    assert outcomes[0].kind is NOT_FINITE
    assert rewards_of(outcomes[1:]) == [2.0, 2.0]


@pytest.mark.asyncio
async def test_arguments_are_columns_and_what_is_provided(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    extra = [1, 2]
    trajectory = make_trajectory(answer="x", extra=extra)
    assert rewards_of(await score(make_recipe("everything"), trajectory, trajectory)) == [1.0, 1.0]
    assert extra == [1, 2]


@pytest.mark.asyncio
async def test_group_function_sees_one_group_at_a_time(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    texts = ["abc", "a", "ab", "abcd", "a"]
    groups = [0, 0, 0, 1, 1]
    order = [
        make_trajectory(t, group=g, sample=i, answer="x") for i, (t, g) in enumerate(zip(texts, groups, strict=True))
    ]
    assert rewards_of(await score(make_recipe("ranks"), *order)) == [2.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.asyncio
async def test_weights_and_none(make_recipe: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    recipe = make_recipe("length", "half", "group_none", weights=(2.0, -1.0, 10.0))
    outcomes = await score(recipe, make_trajectory("abc"), make_trajectory("a", sample=1))
    assert rewards_of(outcomes) == [2.0 * 3 - 0.5 + 10.0, 2.0 * 1 - 0.5]
    assert [o.reward_parts for o in outcomes if isinstance(o, ScoredTrajectory)] == [
        {"length": 3.0, "half": 0.5, "group_none": 1.0},
        {"length": 1.0, "half": 0.5},
    ]


@pytest.mark.asyncio
async def test_first_failure_of_the_recipe_is_named_and_a_failure_is_never_outvoted(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    (outcome,) = await score(make_recipe("half", "nan", "raises"), make_trajectory())
    assert isinstance(outcome, RewardFailure)
    assert (outcome.function, outcome.kind) == ("nan", NOT_FINITE)


@pytest.mark.asyncio
async def test_sum_that_overflows_is_a_failure(make_recipe: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    (outcome,) = await score(make_recipe("biggest", weights=(10.0,)), make_trajectory())
    assert isinstance(outcome, RewardFailure)
    assert outcome.kind is NOT_FINITE


@pytest.mark.asyncio
async def test_concurrency_bounds_the_calls(make_trajectory: MakeTrajectory) -> None:
    running = peak = 0
    everyone_waits = asyncio.Event()

    async def counted(completion: str) -> float:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if running == 3:
            everyone_waits.set()
        await everyone_waits.wait()
        running -= 1
        return 1.0

    signature = RewardSignature(spec="t:c", name="c", first="c", per_group=False, is_async=True, wants_all=False)
    function = RewardFunction(signature=signature, call=counted)
    async with asyncio.TaskGroup() as tasks, asyncio.TaskGroup() as calls:
        runner = CallRunner(tasks, 3)
        pending = [calls.create_task(runner.call(function, 10.0, "x", {})) for _ in range(20)]
    assert [task.result().value for task in pending] == [1.0] * 20
    assert peak == 3


any_value = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.fractions(),
    st.text(max_size=3),
    st.lists(st.floats(), max_size=3),
    st.complex_numbers(),
    st.decimals(),
)


@given(value=any_value)
def test_no_reward_is_invented(make_trajectory: MakeTrajectory, value: Any) -> None:
    """One function of weight 1: the reward trained on equals what it returned, or there is none."""
    function = RewardFunction(
        signature=RewardSignature(spec="m:f", name="f", first="c", per_group=False, is_async=False, wants_all=False),
        call=lambda completion: value,
    )
    weighted = WeightedReward(function=function, recipe=Reward(function="m:f"))
    (checked,) = check_result(CallResult(value=value), 1, per_group=False)
    outcome = combine(make_trajectory(), [weighted], [checked])
    if isinstance(outcome, ScoredTrajectory):
        assert outcome.reward == float(value)
        assert math.isfinite(outcome.reward)
        assert outcome.reward_parts == {"f": float(value)}
    else:
        assert outcome.message
        numeric = isinstance(value, (bool, int, float))
        assert not numeric or outcome.kind is NOT_FINITE


@given(values=st.lists(any_value, max_size=5), count=st.integers(1, 5))
def test_group_list_gives_each_sample_its_own_value(values: list[Any], count: int) -> None:
    checked = check_result(CallResult(value=values), count, per_group=True)
    assert len(checked) == count
    if len(values) != count:
        assert {c.failure.kind for c in checked if c.failure} == {WRONG_TYPE}
        assert all(c.value is None and c.failure for c in checked)
    else:
        assert checked == [check_value(value) for value in values]


@given(
    parts=st.lists(st.tuples(st.none() | st.floats(-1e6, 1e6), st.floats(-10, 10)), min_size=1, max_size=4),
)
def test_total_is_the_weighted_sum_of_what_applies(
    make_trajectory: MakeTrajectory, parts: list[tuple[float | None, float]]
) -> None:
    rewards = [
        WeightedReward(
            function=RewardFunction(
                signature=RewardSignature(
                    spec=f"m:f{i}", name=f"f{i}", first="c", per_group=False, is_async=False, wants_all=False
                ),
                call=len,
            ),
            recipe=Reward(function=f"m:f{i}", weight=weight),
        )
        for i, (_, weight) in enumerate(parts)
    ]
    outcome = combine(make_trajectory(), rewards, [check_value(value) for value, _ in parts])
    applicable = [(value, weight) for value, weight in parts if value is not None]
    if not applicable:
        assert isinstance(outcome, RewardFailure)
        assert "not applicable" in outcome.message
    else:
        assert isinstance(outcome, ScoredTrajectory)
        assert outcome.reward == pytest.approx(math.fsum(v * w for v, w in applicable), rel=1e-9, abs=1e-6)
        assert set(outcome.reward_parts) == {f"f{i}" for i, (value, _) in enumerate(parts) if value is not None}
