"""Runs whose controller is killed at any event: what it orders again brings everything to where it was."""

from __future__ import annotations

from random import Random

import pytest
from control_world import control_settings
from policy_world import COMBINATIONS, random_run
from recovery_world import CrashWorld
from test_whole_state import ON_POLICY

from streamrl.base.types import FinishReason, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.settings import ControlSettings
from streamrl.control.state import ControlState
from streamrl.journal.outstanding import Outstanding
from streamrl.recipe.scheduling import RoundKind, TailBatching


@pytest.mark.parametrize(("composition", "sizing"), COMBINATIONS)
def test_a_run_goes_on_after_crashes_as_if_nothing_had_happened(composition: str, sizing: str) -> None:
    before = CrashWorld.crashes
    for seed in range(3):
        world = random_run(Random(seed), composition, sizing, world_of=CrashWorld)
        assert isinstance(world, CrashWorld)
        world.crash(Random(seed))  # also after its end
        world.check_end()
    assert CrashWorld.crashes > before + 3, "hardly a crash"


@pytest.mark.parametrize(("composition", "sizing"), ON_POLICY)
def test_a_deterministic_run_goes_on_after_crashes(composition: str, sizing: str) -> None:
    random_run(Random(7), composition, sizing, world_of=CrashWorld, deterministic=True).check_end()


def driven(settings: ControlSettings, *events: on.ControlEvent) -> tuple[ControlState, Outstanding]:
    state, outstanding = ControlState(settings), Outstanding()
    for event in (on.RunBegan(), *events):
        tell(state, outstanding, event)
    return state, outstanding


def tell(state: ControlState, outstanding: Outstanding, event: on.ControlEvent) -> list[do.ControlAction]:
    outstanding.told(event)
    actions = state.handle(event)
    outstanding.ordered(actions)
    return actions


def scored(prompt: str, group: int, sample: int, *, tokens: int = 5, version: int = 0) -> on.TrajectoryScored:
    return on.TrajectoryScored(
        id=TrajectoryId(prompt_id=prompt, group_id=group, sample=sample),
        reward=float(sample),
        tokens=tokens,
        finish_reason=FinishReason.STOP,
        oldest_version=version,
        newest_version=version,
    )


PROMPTS = on.PromptsDrawn(prompt_ids=("a", "b"))


def test_only_what_is_missing_is_launched_again_with_its_own_seeds_and_what_is_handed_over_keeps_its_order() -> None:
    told = (PROMPTS, scored("b", 1, 0), scored("b", 1, 1), scored("a", 0, 1))
    state, outstanding = driven(control_settings(), *told)
    first = TrajectoryId(prompt_id="a", group_id=0, sample=0)
    assert outstanding.again(state) == [
        do.TrainGroupNow(batch_id=0, group_id=1, ids=(told[1].id, told[2].id)),  # type: ignore[union-attr]
        do.LaunchGroup(group_id=0, ids=(first,), policy_version=0, noise=0),
    ]
    actions = tell(state, outstanding, scored("a", 0, 0))
    assert [type(action).__name__ for action in actions] == ["TrainGroupNow", "StepOptimizer"]
    again = outstanding.again(state)
    assert [getattr(action, "group_id", "step") for action in again] == [1, 0, "step"]
    assert again[-1] == actions[-1]


def test_batches_since_a_version_are_remembered_until_a_checkpoint_is_durable() -> None:
    settings = control_settings(batch_groups=1, group_size=1, steps=9)
    state, outstanding = driven(settings)
    for step in range(3):
        name = f"p{step}"
        tell(state, outstanding, on.PromptsDrawn(prompt_ids=(name,)))
        tell(state, outstanding, scored(name, step, 0, version=step))
        tell(state, outstanding, on.BatchTrained(batch_id=step, policy_version=step + 1))
        tell(state, outstanding, on.WeightsLive(policy_version=step + 1))
    assert [batch.policy_version for batch in outstanding.trained_since(0)] == [1, 2, 3]
    assert [batch.policy_version for batch in outstanding.trained_since(1)] == [2, 3]
    outstanding.told(on.CheckpointDone(policy_version=2))
    assert [batch.policy_version for batch in outstanding.trained_since(0)] == [3]
    (batch,) = outstanding.trained_since(2)
    assert [group.ids[0].prompt_id for group in batch.groups] == ["p2"] and batch.step.batch_id == 2


def test_a_late_result_of_a_sibling_that_lost_takes_no_group_out_of_the_batch() -> None:
    settings = control_settings(
        rounds=RoundKind.TAIL_BATCHING, tail_batching=TailBatching(prompt_oversampling=1.0, response_oversampling=1.5)
    )
    state, outstanding = driven(settings, PROMPTS, scored("a", 0, 0), scored("a", 0, 2))
    before = outstanding.again(state)
    assert isinstance(before[0], do.TrainGroupNow) and before[0].group_id == 0
    tell(state, outstanding, scored("a", 0, 1))
    assert outstanding.again(state) == before


def test_engines_are_held_again_before_what_waits_for_the_next_version_is_launched() -> None:
    settings = control_settings(presubmit=True, batch_groups=1)
    state, outstanding = driven(settings, on.PromptsDrawn(prompt_ids=("a", "b")), scored("a", 0, 0), scored("a", 0, 1))
    names = [type(action).__name__ for action in outstanding.again(state)]
    assert names == ["TrainGroupNow", "StepOptimizer", "HoldEngines", "LaunchGroup"]
    tell(state, outstanding, on.BatchTrained(batch_id=0, policy_version=1))
    again = outstanding.again(state)
    assert [type(action).__name__ for action in again] == ["HoldEngines", "LaunchGroup", "PublishWeights"]
    assert {getattr(action, "policy_version", None) for action in again} == {1}


def test_a_run_that_had_ended_says_so_again_and_nothing_else() -> None:
    state, outstanding = driven(control_settings(), PROMPTS, on.StopRequested(reason="enough"))
    assert outstanding.again(state) == [do.FinishRun(reason="enough")]


def test_a_cancelled_evaluation_is_begun_and_cancelled_since_its_end_is_waited_for() -> None:
    settings = control_settings(evaluate_at_start=True)
    state, outstanding = driven(settings, PROMPTS, on.StopRequested(reason="enough"))
    assert outstanding.again(state) == [do.Evaluate(policy_version=0, limit=0), do.CancelEvaluation(policy_version=0)]


def test_an_old_answer_does_not_stand_for_the_one_that_is_waited_for() -> None:
    settings = control_settings(batch_groups=1, group_size=1, steps=9, checkpoint_every=1)
    state, outstanding = driven(settings)
    for step in range(2):
        tell(state, outstanding, on.PromptsDrawn(prompt_ids=(f"p{step}",)))
        tell(state, outstanding, scored(f"p{step}", step, 0, version=step))
        if step:
            tell(state, outstanding, on.CheckpointDone(policy_version=1))
        tell(state, outstanding, on.BatchTrained(batch_id=step, policy_version=step + 1))
        tell(state, outstanding, on.WeightsLive(policy_version=step + 1))
    assert state.due.checkpointing == 2
    for old in (on.CheckpointDone(policy_version=1), on.WeightsLive(policy_version=1)):
        assert tell(state, outstanding, old) == []
    assert state.due.checkpointing == 2 and state.live_version == 2
