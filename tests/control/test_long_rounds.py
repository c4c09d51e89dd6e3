"""Long rounds of tail batching: everybody who waits has one, and it does not race."""

from __future__ import annotations

from collections import Counter

import pytest
from control_world import control_settings
from msgspec.structs import replace
from policy_world import PolicyWorld

from streamrl.buffers.rollout_buffer import PromptTicket
from streamrl.control import actions as do
from streamrl.control.prompt_queue import DomainShares, LoserQueues
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
    world = PolicyWorld(settings)
    world.begin()
    world.run_to_end()
    assert not len(world.core.supply.queue) or settings.steps % 9, "the last cycle left prompts behind"
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
    view = PolicyWorld(settings).core.launching.view()
    view = replace(view, live_version=view.trainer_version, queued=28, exhausted=True)
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
    world = PolicyWorld(settings)
    trained: Counter[int] = Counter()
    seen = -1
    world.begin()
    while world.core.trainer_version < 80:
        world.check()
        core, batch = world.core, world.core.batch
        trained.update(group.keep for group in core.buffer.groups.values() if group.queued)
        waiting = Counter(ticket.group_size for ticket in core.supply.queue.tickets())
        trajectories = {size: waiting[size] * size for size in SIZES.sizes}
        if batch.round_kind == SHORT and not batch.closed:
            assert max(trajectories.values()) < 16 * long_round_batches, "a long round of their size is due"
            in_all = sum(trajectories.values())
            assert in_all < 24 * long_round_batches or max(trajectories.values()) < 16, "they wait for their size"
        elif batch.round_kind == LONG and batch.batch_id != seen and core.steps - core.trainer_version > 1:
            seen = batch.batch_id
            trajectories[batch.group_size] += sum(core.buffer.groups[i].keep for i in core.buffer.untrained)
            whole = trajectories[batch.group_size] >= 16 * long_round_batches
            assert whole or sum(trajectories.values()) >= 24 * long_round_batches, "it came early, and is small"
        if not world.goes_on():
            world.score(world.sampled[0], reward=1.0, tokens=3)
    assert set(trained) == set(SIZES.sizes)


def test_once_no_more_prompts_come_those_of_every_size_fill_a_batch_together() -> None:
    domains = DomainShares({})
    queues = LoserQueues(domains, (2, 4))
    for number, size in enumerate((2, 4, 2, 0)):
        queues.append(PromptTicket(prompt_id=str(number), group_size=size))
    assert [ticket.prompt_id for ticket in queues.tickets()] == ["0", "2", "3", "1"], "of no known size: the first one"
    assert [queues.due(4, 2), queues.due(6, 1), queues.due(5, 2), queues.due(9, 1), queues.due(4, 3)] == [0, 2, 0, 0, 0]
    assert len({ticket.prompt_id for ticket in iter(queues.take_any, None)}) == 4


def test_a_size_has_its_long_round_when_it_fills_one_or_half_as_much_again_waits_in_all() -> None:
    queues = LoserQueues(DomainShares({}), (2, 4))
    for number, size in enumerate((2, 4, 2, 2, 2, 4)):
        queues.append(PromptTicket(prompt_id=str(number), group_size=size))
    assert queues.due(4, 2) == 2, "8 of size 2 fill two batches of 4; of two equals the smaller size"
    assert queues.due(5, 2) == 2, "none fills 10, but 16 wait in all"
    assert queues.due(4, 3) == 0, "16 in all are less than 1.5 times 12"
    queues.append(PromptTicket(prompt_id="6", group_size=4))
    assert queues.due(4, 3) == 4, "20 are not"
    assert queues.due(14, 1) == 0, "a batch of one size at least"
    assert LoserQueues(DomainShares({}), (2,)).due(1, 1) == 0
