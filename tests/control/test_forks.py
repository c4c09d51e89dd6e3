"""A fork begins from a checkpoint of any recipe: what waited there waits still, where it did, and is trained once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from oracle.control_world import World, control_settings
from test_resumed_rounds import drive

from streamrl.control.machine import fork
from streamrl.control.model import PromptPool
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import DeferredPrompts, LengthSorted, RoundKind, TailBatching

GROUPS, SIZE = 4, 4
TAIL, SORTED = RoundKind.TAIL_BATCHING, RoundKind.LENGTH_SORTED


def settings(**changes: Any) -> ControlSettings:
    return control_settings(
        **{"batch_groups": GROUPS, "group_size": SIZE, "steps": 12, "checkpoint_every": 1, **changes}
    )


def killed_at(world: World, version: int) -> World:
    """Run until the checkpoint of ``version`` is written."""
    world.begin()
    drive(world, lambda world: world.checkpoint is not None and world.checkpoint.version >= version)
    assert world.checkpoint is not None and world.checkpoint.version == version
    return world


def pool_of(world: World) -> PromptPool:
    """What a run has waiting that begins from the checkpoint of ``world``."""
    assert world.checkpoint is not None
    return fork(world.checkpoint.control, world.settings).state.prompts


def test_a_fork_of_a_fork_trains_each_copy_of_a_prompt_once() -> None:
    sorted_rounds = LengthSorted(cohort_batches=4, single=True)
    chosen = settings(rounds=SORTED, length_sorted=sorted_rounds)
    first = killed_at(World(chosen), 1)
    second = killed_at(first.killed_and_resumed(), 2)
    third = second.killed_and_resumed()
    third.begin()
    drive(third, lambda _: False)
    samples = Counter(trajectory.prompt_id for trajectory in third.trained)
    assert max(samples.values()) == SIZE, samples


@pytest.mark.parametrize(
    "rounds",
    [
        {"rounds": RoundKind.CONTINUOUS, "max_staleness": 1},
        {"rounds": TAIL, "tail_batching": TailBatching(deferred_prompts=DeferredPrompts.RESUME), "max_staleness": 2},
        {"rounds": RoundKind.SYNCHRONOUS},
        {"rounds": SORTED},
        {"rounds": RoundKind.AUTO},
    ],
    ids=lambda rounds: str(rounds["rounds"]),
)
def test_prompts_that_lost_a_race_are_trained_first_whatever_the_rounds_are_now(rounds: dict[str, Any]) -> None:
    racing = settings(
        rounds=TAIL, tail_batching=TailBatching(prompt_oversampling=1.5, deferred_prompts=DeferredPrompts.REGENERATE)
    )
    killed = killed_at(World(racing), 1)
    assert killed.checkpoint is not None
    deferred = [ref.prompt_id for ref in pool_of(killed).queue]
    assert deferred
    forked = World(settings(**rounds), prompts=20, resumed_from=killed.checkpoint)
    forked.begin()
    drive(forked, lambda _: False)
    assert forked.stopped is None and forked.finished == "prompts exhausted"
    samples = Counter(trajectory.prompt_id for trajectory in forked.trained)
    assert [samples[prompt] for prompt in deferred] == [SIZE] * len(deferred)
    firsts = [launched.ids[0].prompt_id for launched in forked.launched]
    assert set(deferred) <= set(firsts[: len(deferred) + GROUPS])


def test_losers_of_a_race_that_regenerates_wait_for_their_long_round_again() -> None:
    chosen = settings(
        rounds=TAIL, tail_batching=TailBatching(prompt_oversampling=2.0, deferred_prompts=DeferredPrompts.REGENERATE)
    )
    world = killed_at(World(chosen), 1)
    assert world.state.round_kind == "long"
    kept = pool_of(world)
    assert len(kept.queue) == GROUPS and not kept.waiting
    assert all(ref.seed_base is None for ref in kept.queue), "they draw anew"


def test_a_cohort_under_way_is_finished_before_the_next_one_is_drawn() -> None:
    chosen = settings(rounds=SORTED, length_sorted=LengthSorted(cohort_batches=3))
    world = killed_at(World(chosen), 1)
    kept = pool_of(world)
    assert (len(kept.queue), len(kept.waiting), kept.drawn) == (2 * GROUPS, 0, 3 * GROUPS)
    resumed = world.killed_and_resumed()
    resumed.begin()
    drive(resumed, lambda world: world.trainer_version == 3)
    trained = {trajectory.prompt_id for trajectory in resumed.trained}
    assert trained == {ref.prompt_id for ref in kept.queue}
