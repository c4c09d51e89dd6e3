"""``group_sizing.keeps = "prompts"``: a batch is as many groups at every size. Deadlines of groups of several sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.control_walks import COMPOSITIONS
from oracle.control_world import World, control_settings

from streamrl.buffers.slots import may_take
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.recipe.scheduling import GroupSizing, Keeps, SizingKind

PROMPTS, STEPS = 5, 18
SIZES = GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 3, 8), shares=(1.0, 1.0, 1.0), dwell=1, keeps=Keeps.PROMPTS)


class BusyWorld(World):
    """Continuous rounds have as many groups under way as staleness allows, until the last steps."""

    def after(self, event: on.ControlEvent, actions: list[do.ControlAction]) -> None:
        super().after(event, actions)
        batches, state = self.settings.max_staleness + 1, self.state
        if isinstance(event, on.PromptsDrawn) and state.trainer_version + batches < STEPS:
            assert len(state.buffer.untrained) + len(state.batch.groups) == batches * PROMPTS


def trained(composition: str) -> list[list[int]]:
    """Group sizes of each step, of a run in which nothing fails."""
    settings = control_settings(
        **{"batch_groups": PROMPTS, "group_size": 8, "steps": STEPS, "group_sizing": SIZES, **COMPOSITIONS[composition]}
    )
    world = (BusyWorld if composition.startswith("continuous") else World)(settings)
    world.begin()
    world.run_to_end()
    world.check_end()
    batch: dict[int, list[int]] = {}
    for action in world.answers:
        if isinstance(action, do.TrainGroupNow):
            batch.setdefault(action.batch_id, []).append(len(action.ids))
    steps = [action for action in world.answers if isinstance(action, do.StepOptimizer)]
    assert [step.groups for step in steps] == [PROMPTS * step.batches for step in steps]
    return [batch[step.batch_id] for step in steps]


@pytest.mark.parametrize("composition", ["synchronous", "race", "elastic", "sorted", "partial", "continuous at 3"])
def test_a_step_trains_as_many_prompts_at_every_group_size(composition: str) -> None:
    steps = trained(composition)
    assert {size for step in steps for size in step} == {2, 3, 8}
    if composition in ("synchronous", "race", "elastic", "sorted"):
        assert all(len(set(step)) == 1 for step in steps), "a round of several sizes"
    assert len({sum(step) for step in steps}) > 2, "smaller groups make smaller steps"
    assert max(map(len, steps)) == PROMPTS * (2 if composition == "elastic" else 1)


@given(
    others=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), max_size=12),
    size=st.integers(1, 8),
    deadline=st.integers(0, 4),
    missing=st.integers(1, 8),
    more=st.integers(0, 8),
    ones=st.booleans(),
)
def test_batches_leave_the_others_trained_in_time(
    others: list[tuple[int, int]], size: int, deadline: int, missing: int, more: int, ones: bool
) -> None:
    """A batch leaves the other deferred groups trained in time, for any sizes. Each batch takes what is due first until
    it is full; the last one to join may take more than is missing."""
    batch = missing + more
    if ones:
        size, others = 1, [(last, 1) for last, _ in others]
    earlier = sorted((last, count) for last, count in others if last < deadline)
    now, left, in_time = 0, missing - size, True
    for last, count in earlier:
        while left <= 0:
            now, left = now + 1, batch
        in_time = in_time and now <= last
        left -= count
    due = [(last, sum(count for other, count in earlier if other == last)) for last in sorted({d for d, _ in earlier})]
    taken = may_take(size, deadline, [*due, (deadline, size)], now=0, missing=missing, batch=batch)
    assert in_time or not taken
    assert taken or not (in_time and ones), "of groups of one it is exact: nothing waits in vain"
