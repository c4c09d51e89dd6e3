"""What the run waits for: one thing at every instant, the right one, and the shares sum to the wall time."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from builders.observe import unregistered
from oracle.control_walks import COMBINATIONS, random_run
from oracle.control_world import World, control_settings

from streamrl.base.run_events import StepFinished
from streamrl.base.types import FinishReason, TrajectoryId
from streamrl.control import actions as do
from streamrl.control import events as on
from streamrl.control.policies.round_policies import make_control
from streamrl.control.run_state import RunState
from streamrl.recipe.scheduling import RoundKind
from streamrl.run.wait_reason import RunWaits, ShellView, WaitReason, wait_reason
from tests.run.scripted_parts import SimulatedRun

BUSY = ShellView(sampling=8, capacity=16)


class Course:
    """A core with what it launched; prompts come when they are asked for."""

    def __init__(self, **settings: object) -> None:
        self.control = make_control(control_settings(**settings))
        self.core = self.control.state
        self.running: list[TrajectoryId] = []
        self.drawn = 0

    def tell(self, event: on.ControlEvent) -> None:
        for action in self.control.handle(event):
            if isinstance(action, do.LaunchGroup):
                self.running.extend(action.ids)

    def draw(self) -> None:
        numbers = range(self.drawn, self.drawn + self.core.pending.draw)
        self.drawn = numbers.stop
        self.tell(on.PromptsDrawn(prompt_ids=tuple(f"p{n}" for n in numbers)))

    def fill(self) -> None:
        """Trajectories end until the batch is full."""
        batch = self.core.batch
        while batch.missing > 0:
            if self.core.pending.draw:
                self.draw()
            ended = self.running.pop(0)
            version = self.core.live_version
            self.tell(
                on.TrajectoryScored(
                    id=ended,
                    reward=float(ended.sample),
                    tokens=3,
                    finish_reason=FinishReason.STOP,
                    oldest_version=version,
                    newest_version=version,
                )
            )


def reason(course: Course, shell: ShellView = BUSY) -> WaitReason:
    return wait_reason(course.core, shell)


def test_the_course_of_a_run_by_what_it_waits_for() -> None:
    world = Course(steps=1, evaluate_at_end=True, checkpoint_at_end=True)
    assert reason(world) is WaitReason.ENGINE_START
    assert reason(world, ShellView(recovering=True)) is WaitReason.RECOVERY
    world.tell(on.RunBegan())
    assert reason(world, ShellView()) is WaitReason.PROMPTS
    world.draw()
    assert reason(world, ShellView(capacity=16)) is WaitReason.SAMPLING, "on the way to the engines"
    assert reason(world) is WaitReason.SAMPLING
    assert reason(world, ShellView(sampling=3, capacity=16)) is WaitReason.TAIL
    assert reason(world, ShellView(scoring=3, capacity=16)) is WaitReason.REWARD
    assert reason(world, ShellView(sampling=3, scoring=1, capacity=16)) is WaitReason.TAIL
    assert reason(world, ShellView(sampling=8, capacity=16, engines=0)) is WaitReason.RECOVERY
    assert reason(world, ShellView(sampling=3, environment=5, capacity=16)) is WaitReason.ENVIRONMENT
    assert reason(world, ShellView(sampling=8, environment=9, capacity=16)) is WaitReason.SAMPLING
    world.fill()
    assert reason(world) is WaitReason.TRAINING
    world.tell(on.BatchTrained(batch_id=0, policy_version=1))
    assert reason(world) is WaitReason.PUSH
    world.tell(on.WeightsLive(policy_version=1))
    assert reason(world) is WaitReason.EVALUATION
    world.tell(on.EvaluationDone(policy_version=1))
    assert reason(world) is WaitReason.CHECKPOINT
    world.tell(on.CheckpointDone(policy_version=1))
    assert world.core.finished and reason(world) is WaitReason.SHUTDOWN


def test_a_full_batch_waits_for_what_keeps_it_from_closing() -> None:
    world = Course(rounds=RoundKind.CONTINUOUS, max_staleness=2, checkpoint_every=1, steps=5)
    world.tell(on.RunBegan())
    world.fill()
    world.tell(on.BatchTrained(batch_id=0, policy_version=1))
    assert reason(world) is WaitReason.SAMPLING, "the next batch is sampled while the version is pushed"
    world.fill()
    assert reason(world) is WaitReason.PUSH, "nothing more is missing but the push"
    world.tell(on.WeightsLive(policy_version=1))
    assert reason(world) is WaitReason.CHECKPOINT
    world.tell(on.CheckpointDone(policy_version=1))
    assert reason(world) is WaitReason.TRAINING


def test_an_evaluation_beside_the_rollout_holds_nothing_up() -> None:
    world = Course(evaluate_at_start=True)
    world.tell(on.RunBegan())
    assert world.core.evaluating == 0
    assert reason(world, ShellView(sampling=8, capacity=8)) is WaitReason.PROMPTS
    world.fill()
    world.tell(on.BatchTrained(batch_id=0, policy_version=1))
    assert reason(world) is WaitReason.EVALUATION, "weights never change under an evaluation"


def test_what_was_submitted_in_advance_waits_for_the_push() -> None:
    world = Course(presubmit=True)
    world.tell(on.RunBegan())
    world.fill()
    assert reason(world) is WaitReason.TRAINING
    world.draw()
    assert len(world.running) == 4, "the next round waits in the paused engines"
    world.tell(on.BatchTrained(batch_id=0, policy_version=1))
    assert reason(world, ShellView(sampling=4, capacity=4)) is WaitReason.PUSH
    world.tell(on.WeightsLive(policy_version=1))
    assert reason(world, ShellView(sampling=4, capacity=4)) is WaitReason.SAMPLING


@pytest.mark.parametrize(("name", "sizing"), COMBINATIONS)
def test_every_run_has_a_named_wait_at_every_instant(name: str, sizing: str) -> None:
    """Every run waits for something with a name at every instant. Replayed event by event: what is said fits what
    control has open, and the seconds sum to the wall time."""
    random = Random(f"{name} {sizing}")
    world = random_run(random, name, sizing, world_of=Watched)
    assert isinstance(world, Watched)
    for waits in world.lives:
        shares = waits.take(world.now_s)
        assert not shares or sum(shares.values()) == pytest.approx(1.0)
        assert unregistered(list(shares)) == []


class Watched(World):
    """Looks after every event, with a shell that shows anything."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.now_s = 0.0
        self.lives: list[RunWaits] = []
        self.random = Random(7)
        self.core_of_life: RunState | None = None
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def tell(self, event: on.ControlEvent) -> list[do.ControlAction]:
        if self.core_of_life is not self.state:
            self.core_of_life = self.state
            self.lives.append(RunWaits(lambda: self.now_s, self._shell))
        actions = super().tell(event)
        self.now_s += self.random.expovariate(1.0)
        self.lives[-1].update(self.state)
        found, _ = self.lives[-1].waits_for()
        assert_fits(self.state, found, in_turns=self.settings.in_turns)
        return actions

    def _shell(self) -> ShellView:
        return ShellView(sampling=self.random.randrange(20), scoring=self.random.randrange(5), capacity=16, engines=1)


def assert_fits(state: RunState, found: WaitReason, *, in_turns: bool = False) -> None:
    """Said the other way round than the classifier has it: what each reason promises must be open."""
    open_members = any(group.open and not group.paused for group in state.buffer.untrained.values())
    match found:
        case WaitReason.TRAINING:
            assert state.batch_closed
        case WaitReason.PUSH:
            assert state.pending.push is not None
        case WaitReason.EVALUATION:
            assert state.evaluating is not None
        case WaitReason.CHECKPOINT:
            assert state.pending.checkpoint is not None
        case WaitReason.PROMPTS:
            assert state.pending.draw
        case WaitReason.SAMPLING | WaitReason.TAIL | WaitReason.REWARD:
            assert open_members and not state.batch_closed and (state.batch.missing > 0 or in_turns)
        case WaitReason.SHUTDOWN:
            assert state.finished
        case WaitReason.ENGINE_START:
            assert state.live_version < 0
        case _:
            raise AssertionError(f"{found}: nothing explains it")


@pytest.mark.parametrize("rounds", [RoundKind.SYNCHRONOUS, RoundKind.CONTINUOUS])
async def test_the_shares_of_a_step_sum_to_its_time(rounds: RoundKind, tmp_path: Path) -> None:
    staleness = 2 if rounds is RoundKind.CONTINUOUS else 0
    settings = control_settings(steps=4, batch_groups=4, group_size=4, rounds=rounds, max_staleness=staleness)
    run = SimulatedRun(settings, tmp_path, engines=2, kept=False)
    await run.run()
    steps = [event for event in run.events if isinstance(event, StepFinished)]
    assert len(steps) == 4
    all_s = sampled_s = 0.0
    for step in steps:
        shares = {name: value for name, value in step.metrics.items() if name.startswith("util/wait_reason/")}
        assert sum(shares.values()) == pytest.approx(1.0), shares
        sampled = sum(shares.get(f"util/wait_reason/{r}", 0.0) for r in ("sampling", "tail"))
        all_s, sampled_s = all_s + step.metrics["time/step_s"], sampled_s + sampled * step.metrics["time/step_s"]
    assert sampled_s > 0.3 * all_s, "engines take virtual time, everything else nearly none"
