"""What a run that begins from a checkpoint orders again, and what waited there: it waits still, and is trained once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from oracle.control_walks import scored_once
from oracle.control_world import World, control_settings

from streamrl.base.seeds import derive_seed
from streamrl.base.types import TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.machine import Control, fork
from streamrl.control.policies.group_sizing import make_group_sizer
from streamrl.control.policies.round_policies import make_control, make_round_policy
from streamrl.control.run_state import PromptPool
from streamrl.control.settings import ControlSettings
from streamrl.recipe.scheduling import DeferredPrompts, GroupSizing, LengthSorted, RoundKind, SizingKind, TailBatching

Draw = tuple[str, int, int]
GROUPS, SIZE = 4, 4
TAIL, SORTED = RoundKind.TAIL_BATCHING, RoundKind.LENGTH_SORTED
PROMPTS = on.PromptsDrawn(prompt_ids=("a", "b"))


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
def test_deferred_prompts_are_trained_first_after_a_resume(rounds: dict[str, Any]) -> None:
    """Prompts that a race deferred are trained first, whatever the rounds are after the resume."""
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


def test_regenerated_prompts_wait_for_their_long_round_again() -> None:
    """Deferred prompts of a race that regenerates wait for their long round again."""
    chosen = settings(
        rounds=TAIL, tail_batching=TailBatching(prompt_oversampling=2.0, deferred_prompts=DeferredPrompts.REGENERATE)
    )
    world = killed_at(World(chosen), 1)
    assert world.state.round_kind == "long"
    kept = pool_of(world)
    assert len(kept.queue) == GROUPS and not kept.waiting
    assert all(ref.seed_base is None for ref in kept.queue), "they draw anew"


def test_a_cohort_is_finished_before_the_next_one() -> None:
    """A cohort under way is finished before the next one is drawn."""
    chosen = settings(rounds=SORTED, length_sorted=LengthSorted(cohort_batches=3))
    world = killed_at(World(chosen), 1)
    kept = pool_of(world)
    assert (len(kept.queue), len(kept.waiting), kept.drawn) == (2 * GROUPS, 0, 3 * GROUPS)
    resumed = world.killed_and_resumed()
    resumed.begin()
    drive(resumed, lambda world: world.trainer_version == 3)
    trained = {trajectory.prompt_id for trajectory in resumed.trained}
    assert trained == {ref.prompt_id for ref in kept.queue}


def test_checkpoints_of_other_rounds_can_be_resumed() -> None:
    """A run can be resumed from a checkpoint of other rounds or another group sizing."""
    synchronous, auto = control_settings(), control_settings(rounds=RoundKind.AUTO)
    make_round_policy(auto).restore(make_round_policy(synchronous).snapshot())
    sagc = GroupSizing(kind=SizingKind.SAGC, sizes=(4, 8))
    chance = GroupSizing(kind=SizingKind.RANDOM, sizes=(4, 8), shares=(1.0, 1.0))
    for one, other in ((sagc, chance), (chance, sagc)):
        make_group_sizer(other, 8, 0, 9).restore(make_group_sizer(one, 8, 0, 9).snapshot())


# ---- what is ordered again


def driven(settings: ControlSettings, *events: on.ControlEvent) -> Control:
    control = make_control(settings)
    for event in (on.RunBegan(), *events):
        control.handle(event)
    return control


def scored(prompt: str, group: int, sample: int, version: int = 0) -> on.ControlEvent:
    return scored_once(TrajectoryId(prompt_id=prompt, group_id=group, sample=sample), version, float(sample))


def names(actions: list[do.ControlAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_only_missing_members_are_launched_again() -> None:
    """Only missing members are launched, with their own seeds, and finished ones keep their order."""
    control = driven(control_settings(), PROMPTS, scored("b", 1, 0), scored("b", 1, 1), scored("a", 0, 1))
    first, second = (TrajectoryId(prompt_id="b", group_id=1, sample=sample) for sample in (0, 1))
    missing = TrajectoryId(prompt_id="a", group_id=0, sample=0)
    assert control.unanswered_orders() == [
        do.TrainGroupNow(batch_id=0, group_id=1, ids=(first, second), round_kind="synchronous"),
        do.LaunchGroup(group_id=0, ids=(missing,), policy_version=0, seed_base=0, round_kind="synchronous"),
    ]
    actions = control.handle(scored("a", 0, 0))
    assert names(actions) == ["TrainGroupNow", "StepOptimizer"]
    again = control.unanswered_orders()
    assert [getattr(action, "group_id", "step") for action in again] == [1, 0, "step"]
    assert again[-1] == actions[-1]


def test_a_late_deferred_sibling_removes_no_group() -> None:
    """A late result of a deferred sibling removes no group from the batch."""
    settings = control_settings(
        rounds=RoundKind.TAIL_BATCHING, tail_batching=TailBatching(prompt_oversampling=1.0, response_oversampling=1.5)
    )
    control = driven(settings, PROMPTS, scored("a", 0, 0), scored("a", 0, 2))
    before = control.unanswered_orders()
    assert isinstance(before[0], do.TrainGroupNow) and before[0].group_id == 0
    control.handle(scored("a", 0, 1))
    assert control.unanswered_orders() == before


def test_engines_are_paused_before_next_version_prompts() -> None:
    """Engines are paused again before the prompts that wait for the next version are launched."""
    settings = control_settings(presubmit=True, batch_groups=1)
    control = driven(settings, PROMPTS, scored("a", 0, 0), scored("a", 0, 1))
    assert names(control.unanswered_orders()) == ["TrainGroupNow", "StepOptimizer", "PauseEngines", "LaunchGroup"]
    control.handle(on.BatchTrained(batch_id=0, policy_version=1))
    again = control.unanswered_orders()
    assert names(again) == ["PauseEngines", "LaunchGroup", "PublishWeights"]
    assert {getattr(action, "policy_version", None) for action in again} == {1}


def test_a_run_that_had_ended_says_so_again_and_nothing_else() -> None:
    control = driven(control_settings(), PROMPTS, on.StopRequested(reason="enough"))
    assert control.unanswered_orders() == [do.End(reason="enough")]


def test_a_cancelled_evaluation_is_begun_and_cancelled_again() -> None:
    """A cancelled evaluation is begun and cancelled again, since its end is waited for."""
    control = driven(control_settings(evaluate_at_start=True), PROMPTS, on.StopRequested(reason="enough"))
    assert control.unanswered_orders() == [
        do.Evaluate(policy_version=0, limit=0),
        do.CancelEvaluation(policy_version=0),
    ]


def test_an_old_answer_does_not_replace_the_awaited_one() -> None:
    """An old answer does not replace the answer that is waited for."""
    control = driven(control_settings(batch_groups=1, group_size=1, steps=9, checkpoint_every=1))
    for step in range(2):
        control.handle(on.PromptsDrawn(prompt_ids=(f"p{step}",)))
        control.handle(scored(f"p{step}", step, 0, version=step))
        if step:
            control.handle(on.CheckpointDone(policy_version=1))
        control.handle(on.BatchTrained(batch_id=step, policy_version=step + 1))
        control.handle(on.WeightsLive(policy_version=step + 1))
    assert control.state.pending.checkpoint == 2
    for old in (on.CheckpointDone(policy_version=1), on.WeightsLive(policy_version=1)):
        assert control.handle(old) == []
    assert control.state.pending.checkpoint == 2 and control.state.live_version == 2
