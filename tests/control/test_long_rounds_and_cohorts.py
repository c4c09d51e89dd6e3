"""Long rounds do not race, and every prompt that waits has one; cohorts are trained in as many batches as they drew."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace
from oracle.control_world import World, begun, control_settings

from streamrl.buffers.rollout_buffer import PromptRef
from streamrl.control import actions as do
from streamrl.control.launch import view as view_of
from streamrl.control.policies.tail_batching import LONG, SHORT, TailBatchingRounds
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import GroupSizing, LengthSorted, RoundKind, SizingKind, TailBatching

SIZES = GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 4, 8), shares=(1.0, 1.0, 1.0), dwell=1)
COHORT = 3
SORTED = {"rounds": RoundKind.LENGTH_SORTED, "length_sorted": LengthSorted(cohort_batches=COHORT)}


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


def test_the_end_of_a_run_does_not_shorten_a_long_round() -> None:
    """The end of a run does not shorten a long round that is due."""
    cycle = [4] * 8 + [16]
    assert samples_of_steps(race(4, 9, prompt_oversampling=1.5, long_round_batches=4)) == cycle
    assert samples_of_steps(race(4, 18, prompt_oversampling=1.5, long_round_batches=4)) == 2 * cycle


def test_the_last_step_trains_prompts_that_would_wait() -> None:
    """The last step trains the prompts that would wait for a long round that never comes."""
    assert samples_of_steps(race(4, 7, prompt_oversampling=1.5, long_round_batches=4)) == [4] * 6 + [12]


def test_a_long_round_at_the_end_takes_whole_batches() -> None:
    """A long round takes whole batches once the source is empty. Twelve more than it trains would race in it."""
    settings = race(16, 50, prompt_oversampling=1.5, long_round_batches=4)
    world = World(settings)
    view = view_of(world.state, world.core.rules)
    queue = tuple(PromptRef(prompt_id=str(number)) for number in range(28))
    view = replace(view, live_version=view.trainer_version, queue=queue, exhausted=True)
    launch = TailBatchingRounds(settings).launch(view)
    assert launch is not None and (launch.round_kind, launch.groups, launch.target) == (LONG, 16, 16)


@pytest.mark.parametrize("long_round_batches", [1, 2])
def test_deferred_prompts_keep_their_group_size(long_round_batches: int) -> None:
    """A deferred prompt is trained in groups of the size at which it was deferred. Else a prompt that lost among few
    would weigh more than those that won against it."""
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


def test_a_size_has_its_long_round_when_enough_waits() -> None:
    """A size has its long round when its prompts fill one, or when half as much again waits in all."""
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


# ---- cohorts


def test_a_cohort_keeps_the_size_it_was_drawn_for() -> None:
    """Where sizes vary, a cohort keeps the size that it was drawn for. Its last prompts, which are long, would weigh
    more or less than its first ones; at a larger size they would be more batches than it promises."""
    world = World(control_settings(batch_groups=2, group_size=8, steps=48, group_sizing=SIZES, **SORTED))
    world.begin()
    world.run_to_end()
    steps = [action for action in world.answers if isinstance(action, do.StepOptimizer)]
    sizes = [step.samples // step.groups for step in steps]
    assert [step.samples for step in steps] == [16] * 48
    cohorts = [sizes[at : at + COHORT] for at in range(0, len(sizes), COHORT)]
    assert all(len(set(cohort)) == 1 for cohort in cohorts), cohorts
    assert {cohort[0] for cohort in cohorts} == set(SIZES.sizes)


def test_prompts_predicted_to_be_short_are_launched_first() -> None:
    """Prompts that are predicted to be short are launched first. Of a cohort of twelve prompts four are in flight; the
    more tokens a prompt has here, the shorter its answers."""
    rounds = LengthSorted(cohort_batches=COHORT, oversubscription=1.0)
    chosen = control_settings(
        rounds=RoundKind.LENGTH_SORTED, length_sorted=rounds, batch_groups=4, group_size=1, steps=36
    )
    world = World(chosen)
    world.begin()
    while world.finished is None:
        if not world.goes_on():
            trajectory = min(world.sampled)
            world.score(trajectory, 1.0, 1000 // tokens_of(trajectory.prompt_id) ** 2)
    launched = [action.ids[0].prompt_id for action in world.answers if isinstance(action, do.LaunchGroup)]
    prompts = list(dict.fromkeys(launched))  # without what was cut and launched again
    for at in range(24, len(prompts), 12):
        tokens = [tokens_of(prompt_id) for prompt_id in prompts[at : at + 12]]
        assert sum(tokens[:4]) / 4 >= sum(tokens[-4:]) / 4 + 3, tokens


@pytest.mark.parametrize(("environment", "in_flight"), [(0, 4), (2, 6), (99, 8)])
def test_trajectories_in_environments_leave_bounded_room(environment: int, in_flight: int) -> None:
    """Trajectories that wait in their environments leave room for as many others at most."""
    rounds = LengthSorted(cohort_batches=COHORT, oversubscription=1.0)
    world = begun(rounds=RoundKind.LENGTH_SORTED, length_sorted=rounds, batch_groups=4, group_size=1)
    assert len(world.running) == 4
    world.tell(world.measured(environment=environment))
    assert len(world.running) == in_flight
    world.score(min(world.sampled), 1.0, 5)
    assert len(world.running) == in_flight, "one more for the one that is in the batch"


def tokens_of(prompt_id: str) -> int:
    """As ``World`` draws them."""
    return 10 + int(prompt_id[1:]) % 7
