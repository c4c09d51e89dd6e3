"""Values, weights, arguments: a failure is recorded, and no reward is invented. Trusted functions run here at once, so
that what is tested is the scoring; what user code may do to a process is in test_call_pool and test_reward_faults."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.base import types
from streamrl.base.types import RewardFailure, RewardFailureKind, ScoredTrajectory, Trajectory, token_array
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rewards import AdaptiveTimeout, FailurePolicy, Reward, RewardLimits
from streamrl.recipe.sections import Recipe
from streamrl.rewards.calls.loading import load_reward
from streamrl.rewards.calls.reward_set import RewardSet
from streamrl.rewards.calls.trusted import TrustedCoroutines
from streamrl.rewards.reward_exchange import outcome_of
from streamrl.rewards.reward_queue import RewardQueue
from streamrl.rewards.scoring import SampleValue, combine
from streamrl.rewards.signature import RewardSignature
from streamrl.rewards.values import CallResult, CheckedValue, check_returned, check_value
from tests.rewards.conftest import KILLERS

ALONE = RewardSignature(
    spec="score.py:score", name="score", first="completion", per_group=False, is_async=False, wants_all=False
)
IN_GROUPS = replace(ALONE, per_group=True)

MakeTrajectory = Callable[..., Trajectory]
MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def release() -> Any:
    """Lets the killers go at the end: they are loaded by path, so this is the module that the scorer uses."""
    killers = load_reward(Reward(function=f"{KILLERS}:length")).call.__globals__  # type: ignore[attr-defined]
    killers["RELEASE"].clear()
    yield killers["RELEASE"]
    killers["RELEASE"].set()


@asynccontextmanager
async def scoring(recipe: Recipe, release: Any = None) -> AsyncIterator[RewardSet]:
    async with asyncio.TaskGroup() as tasks:
        rewards = RewardSet(recipe.rewards, recipe.reward_limits, load_tokenizer(recipe.model.path), tasks)
        await rewards.open()
        try:
            yield rewards
        finally:
            if release is not None:
                release.set()
            await rewards.aclose()


async def score(recipe: Recipe, *trajectories: Trajectory) -> Sequence[ScoredTrajectory | RewardFailure]:
    async with scoring(recipe) as rewards:
        return await rewards.score(trajectories)


@pytest.fixture
def trusted(make_recipe: MakeRecipe) -> MakeRecipe:
    def make(*functions: str, **options: Any) -> Recipe:
        return make_recipe(*functions, trusted=True, **options)

    return make


def rewards_of(outcomes: Sequence[Any]) -> list[float]:
    assert all(isinstance(outcome, ScoredTrajectory) for outcome in outcomes), outcomes
    return [outcome.reward for outcome in outcomes]


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        ("length", 3.0),
        ("async_length", 3.0),
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
    trusted: MakeRecipe, make_trajectory: MakeTrajectory, function: str, reward: float
) -> None:
    (outcome,) = await score(trusted(function), make_trajectory(answer="abc", other=1))
    assert isinstance(outcome, ScoredTrajectory), outcome
    assert outcome.reward == reward
    assert type(outcome.reward) is float
    assert outcome.reward_parts == {function: reward}
    assert outcome.reward_seconds > 0
    (call,) = outcome.calls
    assert (call.function, call.value, call.failure, call.limit_s) == (function, reward, None, 300.0)


RAISED, TIMED_OUT = RewardFailureKind.RAISED, RewardFailureKind.TIMED_OUT
NOT_FINITE, WRONG_TYPE = RewardFailureKind.NOT_FINITE, RewardFailureKind.WRONG_TYPE
FAILURES = [
    ("raises", RAISED, "ValueError: no such digit (killers.py:"),
    ("raises_async", RAISED, "KeyError: 'column'"),
    ("raises_half_a_pair", RAISED, r"ValueError: no such answer: \ud83d (killers.py:"),
    ("raises_half_a_pair_async", RAISED, r"ValueError: no such answer: \ud83d (killers.py:"),
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
    ("mapping_of_text", WRONG_TYPE, 'part "style": returned a str'),
    ("mapping_of_a_long_name", WRONG_TYPE, "at most 100 characters"),
    ("mapping_of_half_a_pair", WRONG_TYPE, r"a part called '\ud83d'"),
    ("mapping_of_nothing", WRONG_TYPE, "not applicable"),
    ("array", WRONG_TYPE, "ndarray"),
    ("nested", WRONG_TYPE, "a list"),
    ("none", WRONG_TYPE, "not applicable"),
    ("group_short", WRONG_TYPE, "1 values for 2 completions"),
    ("group_number", WRONG_TYPE, "a float"),
]


@pytest.mark.parametrize("in_processes", [False, True])
async def test_failure_is_recorded_with_its_reason(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, in_processes: bool
) -> None:
    """The same records, wherever the function runs. Each is the first of the recipe once: that one is recorded."""
    trajectories = [make_trajectory(sample=0), make_trajectory(sample=1)]
    recipe = make_recipe(*(name for name, _, _ in FAILURES), trusted=not in_processes)
    async with scoring(recipe) as rewards:
        outcomes = await rewards.score(trajectories)
        for index, (name, kind, message) in enumerate(FAILURES[:-2]):
            arguments = {} if name != "match" else {"answer": 1, "bonus": float("nan")}
            result = await rewards.call(index, "abc", arguments, count=1, key="p", rank=0)
            (value,) = result.values
            if name in ("none", "mapping_of_nothing", "match"):
                continue
            assert value.failure is not None, name
            assert (value.failure.kind, message in value.failure.message) == (kind, True), value
            assert "\n" not in value.failure.message
    for trajectory, outcome in zip(trajectories, outcomes, strict=True):
        assert isinstance(outcome, RewardFailure), outcome
        assert (outcome.kind, outcome.function, outcome.trajectory) == (RAISED, "raises", trajectory)
        assert [call.failure for call in outcome.calls] == [
            None if "not applicable" in message else kind for _, kind, message in FAILURES
        ]


@pytest.mark.parametrize(
    ("function", "message"),
    [("none", "not applicable"), ("mapping_of_nothing", "not applicable"), ("match", 'no column "answer"')],
)
async def test_no_reward_is_no_zero(
    trusted: MakeRecipe, make_trajectory: MakeTrajectory, function: str, message: str
) -> None:
    (outcome,) = await score(trusted(function), make_trajectory())
    assert isinstance(outcome, RewardFailure)
    assert message in outcome.message


@pytest.mark.parametrize("function", ["hangs_async", "swallows_cancellation", "late"])
async def test_time_limit_of_trusted_coroutines_holds(
    trusted: MakeRecipe, make_trajectory: MakeTrajectory, release: Any, function: str
) -> None:
    async with scoring(trusted(function, timeout_s=0.2), release) as rewards:
        (outcome,) = await rewards.score([make_trajectory()])
        assert isinstance(outcome, RewardFailure)
        assert outcome.kind is TIMED_OUT
        assert "0.2 s" in outcome.message
        assert outcome.reward_seconds >= 0.2
        await asyncio.sleep(0.01)
        assert rewards.stuck == (function == "swallows_cancellation")


@pytest.mark.parametrize(("seconds", "kinds"), [(0.3, []), (300.0, [TIMED_OUT])])
async def test_blocked_loop_time_is_not_counted_against_others(
    trusted: MakeRecipe, make_trajectory: MakeTrajectory, seconds: float, kinds: list[RewardFailureKind]
) -> None:
    """Time in which one function holds the loop is not counted against the others."""
    async with scoring(trusted("waits", timeout_s=2.0)) as rewards:
        scored = asyncio.create_task(rewards.score([make_trajectory(seconds=seconds)]))
        await asyncio.sleep(0.05)
        time.sleep(2.5)  # noqa: ASYNC251 - as importing another function does
        outcomes = await scored
    assert [outcome.kind for outcome in outcomes if isinstance(outcome, RewardFailure)] == kinds


@pytest.mark.parametrize("in_processes", [False, True])
async def test_arguments_are_columns_and_what_is_provided(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, in_processes: bool
) -> None:
    extra = [1, 2]
    trajectory = make_trajectory(answer="x", extra=extra)
    recipe = make_recipe("everything", trusted=not in_processes)
    assert rewards_of(await score(recipe, trajectory, trajectory)) == [1.0, 1.0]
    assert extra == [1, 2]


@pytest.mark.parametrize("trusted", [True, False])
async def test_group_functions_get_one_group_as_in_trl(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, trusted: bool
) -> None:
    """A group function gets one group at a time, with lists as TRL gives them."""
    texts = ["abc", "a", "ab", "abcd", "a"]
    groups = [0, 0, 0, 1, 1]
    order = [
        make_trajectory(t, group=g, sample=i, answer="x", extra=[1])
        for i, (t, g) in enumerate(zip(texts, groups, strict=True))
    ]
    assert rewards_of(await score(make_recipe("ranks", trusted=trusted), *order)) == [2.0, 0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("trusted", [True, False])
async def test_functions_of_other_systems_get_what_these_give(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, trusted: bool
) -> None:
    names = ("verl", "verl_async", "of_chat", "of_texts", "of_ids", "last", "only_named")
    columns = {"answer": "abc", "reward_model": {"ground_truth": "abc"}, "data_source": "gsm8k"}
    chat = [{"role": "user", "content": "sort"}]
    order = [make_trajectory(text, sample=i, messages=chat, **columns) for i, text in enumerate(("abc", "abcd"))]
    outcomes = await score(make_recipe(*names, trusted=trusted), *order)
    assert [o.reward_parts for o in outcomes if isinstance(o, ScoredTrajectory)] == [
        dict.fromkeys(names, 1.0), dict.fromkeys(names, 0.0)
    ], outcomes  # fmt: skip


async def test_special_tokens_are_shown_where_the_recipe_says_so(
    trusted: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    """Special tokens are shown to rewards where the recipe says so, and mentioned where not."""
    (segment,) = make_trajectory("a").segments
    with_unk = msgspec.structs.replace(segment, token_ids=token_array([2, *segment.token_ids]))
    order = [msgspec.structs.replace(make_trajectory("a"), segments=(s,)) for s in (segment, with_unk, with_unk)]
    rewards = [
        Reward(function=f"{KILLERS}:length", name=name, trusted=True, special_tokens=name == "sees")
        for name in ("blind", "sees")
    ]
    async with scoring(with_rewards(trusted("length"), *rewards)) as scorer:
        outcomes = [(await scorer.score([trajectory]))[0] for trajectory in order]
        said = scorer.take_notice(), scorer.take_notice()
    assert [o.reward_parts["blind"] for o in outcomes if isinstance(o, ScoredTrajectory)] == [1, 1, 1]
    assert [o.reward_parts["sees"] for o in outcomes if isinstance(o, ScoredTrajectory)] == [1, 6, 6]
    assert "special tokens (<unk>) that the reward blind does not see" in said[0] and not said[1]
    async with scoring(with_rewards(trusted("length"), *rewards)) as scorer:
        for trajectory in (order[0], order[0], order[0], order[1]):
            await scorer.score([trajectory])
        assert not scorer.take_notice(), "one token in four completions is chance"


async def test_weights_and_none(trusted: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    recipe = trusted("length", "half", "group_none", weights=(2.0, -1.0, 10.0))
    outcomes = await score(recipe, make_trajectory("abc"), make_trajectory("a", sample=1))
    assert rewards_of(outcomes) == [2.0 * 3 - 0.5 + 10.0, 2.0 * 1 - 0.5]
    assert [o.reward_parts for o in outcomes if isinstance(o, ScoredTrajectory)] == [
        {"length": 3.0, "half": 0.5, "group_none": 1.0},
        {"length": 1.0, "half": 0.5},
    ]


def with_rewards(recipe: Recipe, *rewards: Reward, combine: str = "weights") -> Recipe:
    limits = RewardLimits(combine=combine, processes=2)
    return msgspec.structs.replace(recipe, rewards=rewards, reward_limits=limits)


def killer(name: str, **options: Any) -> Reward:
    return Reward(function=f"{KILLERS}:{name}", trusted=True, **options)


async def test_only_the_rewards_of_its_set_score_a_prompt(trusted: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    """Others are not called, so they cannot fail it either; a prompt without names is scored by all."""
    recipe = trusted("length", "raises", "three")
    sampled = make_trajectory()
    prompt = msgspec.structs.replace(sampled.prompt, rewards=("three", "length"))
    of_set = msgspec.structs.replace(sampled, prompt=prompt)
    (outcome,) = await score(recipe, of_set)
    assert isinstance(outcome, ScoredTrajectory), outcome
    assert outcome.reward == 6
    assert [call.function for call in outcome.calls] == ["length", "three"]
    (failure,) = await score(recipe, sampled)
    assert isinstance(failure, RewardFailure)
    assert failure.function == "raises"
    nobody = msgspec.structs.replace(prompt, rewards=("judge",))
    (failure,) = await score(recipe, msgspec.structs.replace(sampled, prompt=nobody))
    assert isinstance(failure, RewardFailure)
    assert "not applicable" in failure.message


async def test_named_parts_are_weighted_and_reported(trusted: MakeRecipe, make_trajectory: MakeTrajectory) -> None:
    recipe = with_rewards(trusted("length"), killer("mapping", weight=2.0, part_weights={"style": 0.5}))
    (outcome,) = await score(recipe, make_trajectory())
    assert isinstance(outcome, ScoredTrajectory)
    assert outcome.reward == 2.0 * (1.0 + 0.5)
    assert outcome.reward_parts == {"mapping": 1.5, "mapping.score": 1.0, "mapping.style": 1.0}


async def test_a_shadow_is_reported_and_neither_counts_nor_fails(
    trusted: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    shadows = killer("half", shadow=True), killer("raises", shadow=True)
    (outcome,) = await score(with_rewards(trusted("length"), *shadows, killer("length")), make_trajectory())
    assert isinstance(outcome, ScoredTrajectory)
    assert outcome.reward == 3.0
    assert outcome.reward_parts == {"half": 0.5, "length": 3.0}
    assert [call.failure for call in outcome.calls] == [None, RAISED, None]


@pytest.mark.parametrize("trust", [True, False])
async def test_a_function_of_the_recipe_combines_the_values(
    trusted: MakeRecipe, make_trajectory: MakeTrajectory, trust: bool
) -> None:
    rewards = (
        killer("length"),
        killer("half"),
        Reward(function=f"{KILLERS}:half", name="x", shadow=True, trusted=trust),
    )
    recipe = with_rewards(trusted("length"), *rewards, combine=f"{KILLERS}:product")
    (outcome,) = await score(recipe, make_trajectory())
    assert rewards_of([outcome]) == [1.5]
    recipe = with_rewards(trusted("length"), *rewards, combine=f"{KILLERS}:text")
    (outcome,) = await score(recipe, make_trajectory())
    assert isinstance(outcome, RewardFailure)
    assert (outcome.function, outcome.kind) == ("combine", WRONG_TYPE)


async def test_options_are_bound_and_no_column_overrides_them(
    trusted: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    recipe = with_rewards(trusted("length"), killer("scaled", options={"factor": 2.0}))
    (outcome,) = await score(recipe, make_trajectory(factor=100.0, offset=0.5))
    assert rewards_of([outcome]) == [6.5]


async def test_late_is_wrong_only_where_the_recipe_says_so(
    trusted: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    late = {"timeout_s": 0.05}
    wrong = with_rewards(trusted("length"), killer("late", late_is_wrong=True, wrong_value=-1.0, **late))
    assert rewards_of(await score(wrong, make_trajectory())) == [-1.0]
    policies = {"on_failure": FailurePolicy.STOP, "on_timeout": FailurePolicy.DROP_GROUP}
    (failed,) = await score(with_rewards(wrong, killer("late", **late, **policies)), make_trajectory())
    assert isinstance(failed, RewardFailure)
    assert (failed.kind, failed.policy) == (TIMED_OUT, "drop_group")
    raising = killer("raises", late_is_wrong=True, **policies | {"on_timeout": None})
    (raised,) = await score(with_rewards(wrong, raising), make_trajectory())
    assert isinstance(raised, RewardFailure)
    assert (raised.kind, raised.policy) == (RAISED, "stop")


async def test_the_first_failure_is_named_and_never_outvoted(
    trusted: MakeRecipe, make_trajectory: MakeTrajectory
) -> None:
    """The first failure in the order of the recipe is named, and a failure is never outvoted."""
    (outcome,) = await score(trusted("half", "nan", "raises"), make_trajectory())
    assert isinstance(outcome, RewardFailure)
    assert (outcome.function, outcome.kind) == ("nan", NOT_FINITE)


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
    st.dictionaries(st.text(max_size=2), st.floats() | st.none() | st.booleans(), max_size=3),
)


@given(value=any_value)
def test_no_reward_is_invented(make_trajectory: MakeTrajectory, value: Any) -> None:
    """One function of weight 1: the reward trained on equals what it returned, or there is none."""
    reward = Reward(function="m:f")
    (checked,) = check_returned(value, 1, ALONE)
    outcome = outcome_of(make_trajectory(), combine([SampleValue(reward, checked, CallResult((checked,)))]), 0)
    if isinstance(outcome, ScoredTrajectory):
        returned = sum(v for v in value.values() if v is not None) if isinstance(value, dict) else float(value)
        assert outcome.reward == returned
        assert math.isfinite(outcome.reward)
        assert outcome.reward_parts["f"] == returned
    else:
        assert outcome.message
        numeric = isinstance(value, (bool, int, float))
        assert not numeric or outcome.kind is NOT_FINITE


class NamedPart(str):
    __slots__ = ()

    def __repr__(self) -> str:
        raise ValueError("no")


def test_names_of_parts_are_plain_strings_that_travel() -> None:
    assert check_value({NamedPart("style"): 1}) == CheckedValue(parts={"style": 1.0})
    assert type(next(iter(check_value({NamedPart("style"): 1}).parts))) is str
    wrong: list[Any] = [3, None, "a/b", "half \ud83d", NamedPart("a/b")]
    for name in wrong:
        checked = check_value({"score": 1.0, name: 1.0})
        assert checked.failure is not None and checked.failure.kind is WRONG_TYPE
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(checked), type=CheckedValue) == checked


@given(values=st.lists(any_value, max_size=5), count=st.integers(1, 5))
def test_group_list_gives_each_sample_its_own_value(values: list[Any], count: int) -> None:
    checked = check_returned(values, count, IN_GROUPS)
    assert len(checked) == count
    if len(values) != count:
        assert {c.failure.kind for c in checked if c.failure} == {WRONG_TYPE}
        assert all(c.value is None and c.failure for c in checked)
    else:
        assert list(checked) == [check_value(value) for value in values]


def test_arrays_are_lists_of_their_numbers() -> None:
    """TRL takes what a tensor is made of: a list, an array, a tensor, and each of them in a list."""
    ones = [np.float32(1), np.array(1.0)]
    for returned in (np.array([1, 1]), np.ones(2, np.float32), ones):
        assert check_returned(returned, 2, IN_GROUPS) == (CheckedValue(1.0),) * 2
    assert check_value({"part": np.array(1)}) == CheckedValue(parts={"part": 1.0})
    for wrong in (np.ones((2, 1)), np.array([1.0, math.nan]), np.array(["a", "b"])):
        assert check_returned(wrong, 2, IN_GROUPS)[1].failure is not None


@given(parts=st.lists(st.tuples(st.none() | st.floats(-1e6, 1e6), st.floats(-10, 10)), min_size=1, max_size=4))
def test_total_is_the_weighted_sum_of_what_applies(
    make_trajectory: MakeTrajectory, parts: list[tuple[float | None, float]]
) -> None:
    values = []
    for index, (value, weight) in enumerate(parts):
        checked = check_value(value)
        reward = Reward(function="m:f" if index else "environment", name=f"f{index}", weight=weight)
        values.append(SampleValue(reward, checked, CallResult((checked,))))
    result = types.EnvironmentResult(turn_rewards=(1.0, -2.0), remark="it printed nothing")
    outcome = outcome_of(msgspec.structs.replace(make_trajectory(), environment=result), combine(values), 0)
    applicable = [(value, weight) for value, weight in parts if value is not None]
    if not applicable:
        assert isinstance(outcome, RewardFailure)
        assert outcome.message == "not applicable: every reward function returned None; it printed nothing"
    else:
        assert isinstance(outcome, ScoredTrajectory)
        assert outcome.reward == pytest.approx(math.fsum(v * w for v, w in applicable), rel=1e-9, abs=1e-6)
        assert outcome.turn_rewards == ((parts[0][1], -2.0 * parts[0][1]) if parts[0][0] is not None else (0.0, 0.0))
        assert set(outcome.reward_parts) == {f"f{i}" for i, (value, _) in enumerate(parts) if value is not None}


def result_of(value: Any, seconds: float = 0.0) -> CallResult:
    return CallResult(check_returned(value, 1, ALONE), seconds)


async def test_a_queue_bounds_calls_and_takes_the_smallest_rank() -> None:
    """A queue bounds its calls, and takes the smallest rank first."""
    queue = RewardQueue(Reward(function="m:f", concurrency=2), 64)
    began: list[int] = []
    ends = {rank: asyncio.Event() for rank in range(1, 7)}

    async def ask(rank: int) -> None:
        async def call(limit_s: float) -> CallResult:
            began.append(rank)
            await ends[rank].wait()
            return result_of(1.0)

        await queue.call(call, key="k", rank=rank)

    async def settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        asked = {rank: tasks.create_task(ask(rank)) for rank in (5, 4, 3, 1, 2)}
        await settle()
        assert began == [5, 4]
        asked[2].cancel()  # it waits no more, and takes nobody's turn
        for rank in (5, 4):
            ends[rank].set()
        await settle()
        assert began == [5, 4, 1, 3]
        asked[1].cancel()
        ends[3].set()
    assert queue.running == 0 and queue.free


async def test_calls_a_second_are_bounded() -> None:
    queue = RewardQueue(Reward(function="m:f", rate_per_s=50.0), 64)

    async def call(limit_s: float) -> CallResult:
        return result_of(1.0)

    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(queue.call(call, key="k"))
    assert time.monotonic() - started >= 5 / 50


async def test_a_short_limit_holds_beside_a_long_one(release: Any) -> None:
    function = load_reward(Reward(function=f"{KILLERS}:hangs_async"))
    ended: list[CallResult] = []
    async with asyncio.TaskGroup() as tasks:
        calls = TrustedCoroutines(tasks)

        async def call(limit_s: float) -> None:
            ended.append(await calls.call(function, "", {}, 1, limit_s))

        for limit_s in (0.15, 0.02, 0.05):
            tasks.create_task(call(limit_s))
    assert [result.limit_s for result in ended] == [0.02, 0.05, 0.15]
    assert all(r.values[0].failure and r.values[0].failure.kind is TIMED_OUT for r in ended)


def test_limits_follow_the_slowest_correct_call() -> None:
    adaptive = AdaptiveTimeout(factor=1.5, min_s=2.0)
    queue = RewardQueue(Reward(function="m:f", timeout_s=30.0, adaptive_timeout=adaptive), 64)

    def next_limit(key: str, value: Any, seconds: float) -> float:
        limits: list[float] = []

        def call(limit_s: float) -> CallResult:
            limits.append(limit_s)
            return result_of(value, seconds)

        queue.call_now(call, key)
        return limits[0]

    assert next_limit("a", 0.0, 25.0) == 30.0  # a wrong one teaches nothing
    assert next_limit("a", 1.0, 0.1) == 30.0
    assert next_limit("a", 1.0, 4.0) == 2.0  # the least
    assert next_limit("a", 1.0, 1.0) == 6.0
    assert next_limit("a", 1.0, 25.0) == 6.0  # the slowest so far
    assert next_limit("a", None, 1.0) == 30.0  # the most
    assert next_limit("b", 1.0, 1.0) == 30.0  # each for itself


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_limits_follow_the_column_that_the_recipe_names(
    make_recipe: MakeRecipe, make_trajectory: MakeTrajectory, is_trusted: bool
) -> None:
    recipe = make_recipe("takes", trusted=is_trusted)
    for key, learnt in (("task", {"sum", "p2"}), ("prompt_id", {"p0", "p1", "p2"})):
        adaptive = AdaptiveTimeout(key=key)
        rewards = (msgspec.structs.replace(recipe.rewards[0], adaptive_timeout=adaptive),)
        async with scoring(msgspec.structs.replace(recipe, rewards=rewards)) as opened:
            await opened.score([make_trajectory("a", group=group, seconds=0.0, task="sum") for group in range(2)])
            await opened.score([make_trajectory("a", group=2, seconds=0.0)])
            assert set(opened.take_learnt_limits()["takes"]) == learnt
