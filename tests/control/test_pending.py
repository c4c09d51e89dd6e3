"""What a controller that takes over orders again: ``orders_again`` of a state with something under way."""

from __future__ import annotations

from oracle.control_walks import scored_once
from oracle.control_world import control_settings

from streamrl.base.types import TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.machine import Control
from streamrl.control.settings import ControlSettings
from streamrl.policies.round_policies import make_control
from streamrl.recipe.scheduling import RoundKind, TailBatching

PROMPTS = on.PromptsDrawn(prompt_ids=("a", "b"))


def driven(settings: ControlSettings, *events: on.ControlEvent) -> Control:
    control = make_control(settings)
    for event in (on.RunBegan(), *events):
        control.handle(event)
    return control


def scored(prompt: str, group: int, sample: int, version: int = 0) -> on.ControlEvent:
    return scored_once(TrajectoryId(prompt_id=prompt, group_id=group, sample=sample), version, float(sample))


def names(actions: list[do.ControlAction]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_only_what_is_missing_is_launched_with_its_own_seeds_and_what_is_handed_over_keeps_its_order() -> None:
    control = driven(control_settings(), PROMPTS, scored("b", 1, 0), scored("b", 1, 1), scored("a", 0, 1))
    first, second = (TrajectoryId(prompt_id="b", group_id=1, sample=sample) for sample in (0, 1))
    missing = TrajectoryId(prompt_id="a", group_id=0, sample=0)
    assert control.orders_again() == [
        do.TrainGroupNow(batch_id=0, group_id=1, ids=(first, second), round_kind="synchronous"),
        do.LaunchGroup(group_id=0, ids=(missing,), policy_version=0, seed_base=0, round_kind="synchronous"),
    ]
    actions = control.handle(scored("a", 0, 0))
    assert names(actions) == ["TrainGroupNow", "StepOptimizer"]
    again = control.orders_again()
    assert [getattr(action, "group_id", "step") for action in again] == [1, 0, "step"]
    assert again[-1] == actions[-1]


def test_a_late_result_of_a_deferred_sibling_takes_no_group_out_of_the_batch() -> None:
    settings = control_settings(
        rounds=RoundKind.TAIL_BATCHING, tail_batching=TailBatching(prompt_oversampling=1.0, response_oversampling=1.5)
    )
    control = driven(settings, PROMPTS, scored("a", 0, 0), scored("a", 0, 2))
    before = control.orders_again()
    assert isinstance(before[0], do.TrainGroupNow) and before[0].group_id == 0
    control.handle(scored("a", 0, 1))
    assert control.orders_again() == before


def test_engines_are_paused_again_before_what_waits_for_the_next_version_is_launched() -> None:
    settings = control_settings(presubmit=True, batch_groups=1)
    control = driven(settings, PROMPTS, scored("a", 0, 0), scored("a", 0, 1))
    assert names(control.orders_again()) == ["TrainGroupNow", "StepOptimizer", "Pause", "LaunchGroup"]
    control.handle(on.BatchTrained(batch_id=0, policy_version=1))
    again = control.orders_again()
    assert names(again) == ["Pause", "LaunchGroup", "PublishWeights"]
    assert {getattr(action, "policy_version", None) for action in again} == {1}


def test_a_run_that_had_ended_says_so_again_and_nothing_else() -> None:
    control = driven(control_settings(), PROMPTS, on.StopRequested(reason="enough"))
    assert control.orders_again() == [do.End(reason="enough")]


def test_a_cancelled_evaluation_is_begun_and_cancelled_since_its_end_is_waited_for() -> None:
    control = driven(control_settings(evaluate_at_start=True), PROMPTS, on.StopRequested(reason="enough"))
    assert control.orders_again() == [do.Evaluate(policy_version=0, limit=0), do.CancelEvaluation(policy_version=0)]


def test_an_old_answer_does_not_stand_for_the_one_that_is_waited_for() -> None:
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
