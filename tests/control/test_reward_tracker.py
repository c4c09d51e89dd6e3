"""Baselines of prompts over the steps of a run, against sums over the whole history."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.control_world import control_settings

from streamrl.buffers.rollout_buffer import Group, Member, PromptRef
from streamrl.control.machine import fork
from streamrl.control.reward_tracker import RewardTracker
from streamrl.control.run_state import SNAPSHOT_SCHEMA, Batch, RunState, Snapshot
from streamrl.recipe.objectives.spo import TrackedBaseline

RULE = TrackedBaseline(half_change=0.05, least_memory=0.5, most_memory=0.9, prior=1.5)
REWARDS = st.lists(st.floats(-2, 2), min_size=1, max_size=3)
BATCHES = st.lists(st.dictionaries(st.sampled_from("abc"), REWARDS, min_size=1), min_size=1, max_size=8)


def group_of(prompt: str, rewards: list[float]) -> Group:
    """A group whose members have rewards."""
    size = len(rewards)
    members = {index: Member(oldest_version=0, reward=reward) for index, reward in enumerate(rewards)}
    return Group(
        group_id=0, prompt=PromptRef(prompt_id=prompt), launch_version=0, oldest_version=0, size=size, keep=size,
        weight=size, round_kind="", members=members, open=0,
    )  # fmt: skip


def memory_of(change: float) -> float:
    return min(max(2 ** (-change / RULE.half_change), RULE.least_memory), RULE.most_memory)


@given(BATCHES, st.lists(st.floats(0, 0.2), min_size=8, max_size=8))
def test_a_baseline_is_the_discounted_mean_of_the_history(
    batches: list[dict[str, list[float]]], changes: list[float]
) -> None:
    """Also after a snapshot in the middle."""
    tracker = RewardTracker()
    history: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in "abc"}
    everything: list[tuple[float, list[float]]] = []
    changed = 0.0
    for batch, change in zip(batches, changes, strict=False):
        tracker = msgspec.json.decode(msgspec.json.encode(tracker), type=RewardTracker)
        groups = [group_of(prompt, rewards) for prompt, rewards in batch.items()]
        for group in groups:
            group.baseline = tracker.baseline(group.prompt.prompt_id, RULE)
        tracker.learn(groups, change, RULE)
        changed += change
        for prompt, rewards in batch.items():
            history[prompt].append((changed, rewards))
        everything.append((changed, [reward for rewards in batch.values() for reward in rewards]))
    for prompt, visits in history.items():
        total, weight = discounted(visits, changed)
        all_total, all_weight = discounted(everything, changed)
        baseline = tracker.baseline(prompt, RULE)
        assert baseline.total == pytest.approx(total + RULE.prior * all_total / all_weight, abs=1e-9)
        assert baseline.weight == pytest.approx(weight + RULE.prior)
        assert baseline.deviation > 0


def discounted(visits: list[tuple[float, list[float]]], now: float) -> tuple[float, float]:
    """Sum and number of the rewards of ``visits``, each with the product of the memories since; the last one's is that
    of a baseline that is asked for now."""
    moments = [moment for moment, _ in visits] + [now]
    total = 0.0
    weight = 0.0
    for place, (_, rewards) in enumerate(visits):
        memory = math.prod(
            memory_of(after - before) for before, after in zip(moments[place:-1], moments[place + 1 :], strict=True)
        )
        total += memory * sum(rewards)
        weight += memory * len(rewards)
    return total, weight


def test_the_deviation_is_that_of_what_baselines_missed() -> None:
    """Errors are relative to baselines without the sample itself; a prompt of which nothing is known has none."""
    tracker = RewardTracker()
    first = group_of("a", [1.0])
    first.baseline = tracker.baseline("a", RULE)
    assert (first.baseline.total, first.baseline.weight, first.baseline.deviation) == (0, 0, 1)
    tracker.learn([first], 0.0, RULE)
    assert tracker.squared_errors.weight == 0
    second = group_of("a", [0.0, 1.0])
    second.baseline = tracker.baseline("a", RULE)
    known = second.baseline
    assert known.weight == pytest.approx(0.9 + 1.5) and known.total == pytest.approx(0.9 + 1.5)
    tracker.learn([second], 0.0, RULE)
    errors = [0.0 - (known.total + 1.0) / (known.weight + 1), 1.0 - known.total / (known.weight + 1)]
    expected = math.sqrt(sum(error**2 for error in errors) / 2)
    assert tracker.baseline("a", RULE).deviation == pytest.approx(expected)


def test_a_run_that_begins_from_a_checkpoint_keeps_the_baselines() -> None:
    """Unless its objective tracks no prompts."""
    tracker = RewardTracker()
    tracker.learn([group_of("a", [1.0, 0.0])], 0.01, RULE)
    state = RunState(steps=1, batch=Batch(batch_id=0, target=4), tracker=tracker)
    snapshot = Snapshot(schema=SNAPSHOT_SCHEMA, state=state)
    assert fork(snapshot, control_settings(tracked=RULE)).state.tracker == tracker
    assert fork(snapshot, control_settings()).state.tracker == RewardTracker()
