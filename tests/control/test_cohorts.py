"""Cohorts: prompts that are drawn together are trained in as many batches as they were drawn for."""

from __future__ import annotations

import pytest
from control_world import control_settings
from policy_world import PolicyWorld

from streamrl.config.scheduling import GroupSizing, LengthSorted, RoundKind, SizingKind, TailBatching
from streamrl.control import actions as do

COHORT = 3
SIZES = GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 4, 8), shares=(1.0, 1.0, 1.0), dwell=1)


@pytest.mark.parametrize(
    "rounds",
    [
        {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": TailBatching(eta_prompts=1.5, cohort_batches=COHORT)},
        {"rounds": RoundKind.LENGTH_SORTED, "length_sorted": LengthSorted(cohort_batches=COHORT)},
    ],
    ids=["packed", "sorted"],
)
def test_where_sizes_vary_a_cohort_keeps_the_one_that_it_was_drawn_for(rounds: dict[str, object]) -> None:
    """Its last prompts, which are long, would weigh more or less than its first ones; at a larger size they would be
    more batches than it promises."""
    world = PolicyWorld(control_settings(batch_groups=2, group_size=8, steps=48, group_sizing=SIZES, **rounds))
    world.begin()
    world.run_to_end()
    steps = [action for action in world.answers if isinstance(action, do.StepOptimizer)]
    sizes = [step.samples // step.groups for step in steps]
    assert [step.samples for step in steps] == [16] * 48
    cohorts = [sizes[at : at + COHORT] for at in range(0, len(sizes), COHORT)]
    assert all(len(set(cohort)) == 1 for cohort in cohorts), cohorts
    assert {cohort[0] for cohort in cohorts} == set(SIZES.sizes)
