"""Long rounds of tail batching: everybody who waits has one, and it does not race."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace
from oracle.control_world import World, control_settings

from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.control import actions as do
from streamrl.control.launch import view as view_of
from streamrl.control.settings import ControlSettings
from streamrl.policies.tail_batching import LONG, SHORT
from streamrl.policies.tail_batching import TailBatching as TailBatchingRounds
from streamrl.recipe.scheduling import GroupSizing, RoundKind, SizingKind, TailBatching


def race(groups: int, steps: int, **options: object) -> ControlSettings:
    tail = TailBatching(**options)  # type: ignore[arg-type]
    return control_settings(
        rounds=RoundKind.TAIL_BATCHING, batch_groups=groups, group_size=1, steps=steps, tail_batching=tail
    )


def samples_of_steps(settings: ControlSettings) -> list[int]:
    world = World(settings)
    world.begin()
    world.run_to_end()
    assert not world.state.prompts.queue or settings.steps % 9, "the last cycle left prompts behind"
    return [action.samples for action in world.answers if isinstance(action, do.StepOptimizer)]


def test_the_end_of_a_run_does_not_shorten_a_long_round_that_is_due() -> None:
    cycle = [4] * 8 + [16]
    assert samples_of_steps(race(4, 9, prompt_oversampling=1.5, long_round_batches=4)) == cycle
    assert samples_of_steps(race(4, 18, prompt_oversampling=1.5, long_round_batches=4)) == 2 * cycle


def test_the_last_step_trains_those_who_would_wait_for_a_round_that_never_comes() -> None:
    assert samples_of_steps(race(4, 7, prompt_oversampling=1.5, long_round_batches=4)) == [4] * 6 + [12]


def test_a_long_round_takes_whole_batches_once_the_source_is_empty() -> None:
    """Twelve more than it trains would race in it."""
    settings = race(16, 50, prompt_oversampling=1.5, long_round_batches=4)
    world = World(settings)
    view = view_of(world.state, world.core.rules)
    queue = tuple(PromptRef(prompt_id=str(number)) for number in range(28))
    view = replace(view, live_version=view.trainer_version, queue=queue, exhausted=True)
    launch = TailBatchingRounds(settings).launch(view)
    assert launch is not None and (launch.round_kind, launch.groups, launch.target) == (LONG, 16, 16)


SIZES = GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 4, 8), shares=(1.0, 1.0, 1.0), dwell=1)


@pytest.mark.parametrize("long_round_batches", [1, 2])
def test_who_lost_is_trained_in_groups_of_the_size_at_which_it_lost(long_round_batches: int) -> None:
    """Else a prompt that lost among few would weigh more than those that won against it."""
    tail = TailBatching(prompt_oversampling=1.5, long_round_batches=long_round_batches)
    settings = control_settings(
        rounds=RoundKind.TAIL_BATCHING,
        batch_groups=2,
        group_size=8,
        steps=90,
        tail_batching=tail,
        group_sizing=SIZES,
        seed=3,
    )
    world = World(settings)
    trained: Counter[int] = Counter()
    seen = -1
    world.begin()
    while world.state.trainer_version < 80:
        world.check()
        state, batch = world.state, world.state.batch
        trained.update(group.keep for group in state.buffer.groups() if group.queued)
        waiting = Counter(ref.group_size for ref in state.prompts.queue)
        trajectories = {size: waiting[size] * size for size in SIZES.sizes}
        if batch.round_kind == SHORT and not state.batch_closed:
            assert max(trajectories.values()) < 16 * long_round_batches, "a long round of their size is due"
            in_all = sum(trajectories.values())
            assert in_all < 24 * long_round_batches or max(trajectories.values()) < 16, "they wait for their size"
        elif batch.round_kind == LONG and batch.batch_id != seen and state.steps - state.trainer_version > 1:
            seen = batch.batch_id
            trajectories[batch.group_size] += sum(group.keep for group in state.buffer.untrained.values())
            whole = trajectories[batch.group_size] >= 16 * long_round_batches
            assert whole or sum(trajectories.values()) >= 24 * long_round_batches, "it came early, and is small"
        if not world.goes_on():
            world.score(world.sampled[0], reward=1.0, tokens=3)
    assert set(trained) == set(SIZES.sizes)


def test_a_size_has_its_long_round_when_it_fills_one_or_half_as_much_again_waits_in_all() -> None:
    sizes = GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 4), shares=(1.0, 1.0), dwell=1)

    def due(waiting: list[int], batch: int, long_round_batches: int) -> int:
        tail = TailBatching(prompt_oversampling=1.5, long_round_batches=long_round_batches)
        settings = control_settings(
            rounds=RoundKind.TAIL_BATCHING,
            batch_groups=batch // 4,
            group_size=4,
            steps=90,
            tail_batching=tail,
            group_sizing=sizes,
        )
        world = World(settings)
        queue = tuple(PromptRef(prompt_id=str(n), group_size=size) for n, size in enumerate(waiting))
        view = replace(view_of(world.state, world.core.rules), live_version=0, queue=queue)
        launch = TailBatchingRounds(settings).launch(view)
        return launch.size if launch is not None and launch.round_kind == LONG else 0

    assert due([2, 4, 2, 2, 2, 4], 4, 2) == 2, "8 of size 2 fill two batches of 4; of two equals the smaller size"
    assert due([2, 4, 2, 2, 2, 4], 8, 1) == 2
    assert due([2, 4, 2, 2, 2], 8, 1) == 2, "12 in all are 1.5 times 8, and 8 wait of size 2"
    assert due([2, 4, 2], 8, 1) == 0, "too few"
    assert due([2, 2, 2, 4, 4], 4, 3) == 0, "14 in all are less than 1.5 times 12"
    assert due([2, 2, 2, 4, 4, 4], 4, 3) == 4, "18 are not, and most wait of size 4"
