"""What a resumed run may not do: copy prompts again, or fall over a checkpoint of other rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from oracle.control_world import World, control_settings

from streamrl.base.seeds import derive_seed
from streamrl.base.types import TrajectoryId
from streamrl.policies.group_sizing import make_group_sizer
from streamrl.policies.round_policies import make_round_policy
from streamrl.recipe.scheduling import GroupSizing, LengthSorted, RoundKind, SizingKind

Draw = tuple[str, int, int]
STEPS = 8


def length_of(world: World, trajectory: TrajectoryId) -> int:
    """What the seeds give: the prompt, the noise and the sample decide it, as in the engine."""
    noise = world.of_group[trajectory.group_id].seed_base
    return 1 + derive_seed(trajectory.prompt_id, noise, trajectory.sample) % 1000


def drive(world: World, until: Callable[[World], bool]) -> dict[int, list[Draw]]:
    """The shortest ends first. What each batch trained: (prompt, noise, sample)."""
    batches: dict[int, list[Draw]] = {}
    while world.finished is None and not until(world):
        closed = world.to_step
        if closed is not None and closed.batch_id not in batches:
            ids = [t for group in world.batches[closed.batch_id] for t in group]
            batches[closed.batch_id] = sorted(
                (t.prompt_id, world.of_group[t.group_id].seed_base, t.sample) for t in ids
            )
        if not world.goes_on():
            first = min(world.sampled, key=lambda t: length_of(world, t))
            world.score(first, float(first.sample), length_of(world, first))
    return batches


def test_copies_of_a_prompt_are_not_copied_again() -> None:
    settings = control_settings(
        rounds=RoundKind.LENGTH_SORTED,
        batch_groups=2,
        group_size=4,
        steps=STEPS,
        checkpoint_every=1,
        length_sorted=LengthSorted(cohort_batches=2, single=True),
    )
    killed = World(settings)
    killed.begin()
    drive(killed, lambda world: world.checkpoint is not None)
    resumed = killed.killed_and_resumed()
    resumed.begin()
    drive(resumed, lambda _: False)
    samples = Counter(trajectory.prompt_id for trajectory in resumed.trained)
    assert max(samples.values()) == 4, samples


def test_a_checkpoint_of_other_rounds_or_sizing_can_be_resumed_from() -> None:
    synchronous, auto = control_settings(), control_settings(rounds=RoundKind.AUTO)
    make_round_policy(auto).restore(make_round_policy(synchronous).snapshot())
    sagc = GroupSizing(kind=SizingKind.SAGC, sizes=(4, 8))
    chance = GroupSizing(kind=SizingKind.RANDOM, sizes=(4, 8), shares=(1.0, 1.0))
    for one, other in ((sagc, chance), (chance, sagc)):
        make_group_sizer(other, 8, 16, 0).restore(make_group_sizer(one, 8, 16, 0).snapshot())
