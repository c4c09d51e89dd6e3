"""Cohorts: prompts that are drawn together are trained in as many batches as they were drawn for."""

from __future__ import annotations

from oracle.control_world import World, control_settings

from streamrl.control import actions as do
from streamrl.recipe.scheduling import GroupSizing, LengthSorted, RoundKind, SizingKind

COHORT = 3
SORTED = {"rounds": RoundKind.LENGTH_SORTED, "length_sorted": LengthSorted(cohort_batches=COHORT)}
SIZES = GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 4, 8), shares=(1.0, 1.0, 1.0), dwell=1)


def test_where_sizes_vary_a_cohort_keeps_the_one_that_it_was_drawn_for() -> None:
    """Its last prompts, which are long, would weigh more or less than its first ones; at a larger size they would be
    more batches than it promises."""
    world = World(control_settings(batch_groups=2, group_size=8, steps=48, group_sizing=SIZES, **SORTED))
    world.begin()
    world.run_to_end()
    steps = [action for action in world.answers if isinstance(action, do.StepOptimizer)]
    sizes = [step.samples // step.groups for step in steps]
    assert [step.samples for step in steps] == [16] * 48
    cohorts = [sizes[at : at + COHORT] for at in range(0, len(sizes), COHORT)]
    assert all(len(set(cohort)) == 1 for cohort in cohorts), cohorts
    assert {cohort[0] for cohort in cohorts} == set(SIZES.sizes)


def test_prompts_that_are_predicted_to_be_short_are_launched_first() -> None:
    """Of a cohort of twelve prompts four are in flight; the more tokens a prompt has here, the shorter its answers."""
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


def tokens_of(prompt_id: str) -> int:
    """As ``World`` draws them."""
    return 10 + int(prompt_id[1:]) % 7
