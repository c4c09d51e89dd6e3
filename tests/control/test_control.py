"""The invariants of README, "What always holds", on the pure core, against a world that answers in any order."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import msgspec
import pytest
from builders.base import trajectory as finished
from builders.files import SORT_RECIPE as DEMO
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle.control_walks import (
    COMBINATIONS,
    ON_POLICY,
    QUICK_COMBINATIONS,
    CrashWorld,
    TurnsWorld,
    TwinWorld,
    random_run,
    random_settings,
)
from oracle.control_world import World, begun, control_settings
from oracle.steered_world import SteeredWorld
from tiers import quick_only

from streamrl.base.errors import StreamRLError
from streamrl.base.stage_messages import Scored
from streamrl.base.types import ScoredTrajectory, TrajectoryId, float_array
from streamrl.control import events as on
from streamrl.control.policies.deterministic import check_order
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import control_settings as settings_of
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.scheduling import (
    GroupSizing,
    Keeps,
    LengthSorted,
    RoundKind,
    SizingKind,
    StalePolicy,
    TailBatching,
)
from streamrl.run.controller import event_of
from streamrl.run.journal.records import JOURNAL_SCHEMA, JournalBase, JournalCodec


@pytest.mark.parametrize(("composition", "sizing"), quick_only(COMBINATIONS, QUICK_COMBINATIONS))
def test_random_runs_end_with_everything_accounted_for(composition: str, sizing: str) -> None:
    """Also where control is encoded and restored, and where the controller is killed at any event."""
    TwinWorld.random, crashes = Random(1), CrashWorld.crashes
    events = sum(len(random_run(Random(seed), composition, sizing).log) for seed in range(3))
    assert events > 30, "the runs were too short to mean anything"
    twins = random_run(Random(1), composition, sizing, world_of=TwinWorld)
    assert isinstance(twins, TwinWorld) and twins.twins
    for seed in range(3):
        world = random_run(Random(seed), composition, sizing, world_of=CrashWorld)
        assert isinstance(world, CrashWorld)
        world.crash(Random(seed))  # also after its end
        world.check_end()
        random_run(Random(seed), composition, sizing, world_of=TurnsWorld)
    assert CrashWorld.crashes > crashes + 3, "hardly a crash"


@pytest.mark.parametrize(("composition", "sizing"), ON_POLICY)
def test_deterministic_runs_are_restored_and_go_on_after_crashes(composition: str, sizing: str) -> None:
    TwinWorld.random = Random(3)
    random_run(Random(3), composition, sizing, world_of=TwinWorld, deterministic=True)
    random_run(Random(7), composition, sizing, world_of=CrashWorld, deterministic=True)


class ControlMachine(RuleBasedStateMachine):
    """Any combination, any interleaving; what fails is shrunk to the fewest events."""

    @initialize(
        combination=st.sampled_from(COMBINATIONS),
        choices=st.randoms(use_true_random=False),
        prompts=st.none() | st.integers(0, 60),
        start=st.sampled_from([0, 0, 1, 4]),
    )
    def begin(self, combination: tuple[str, str], choices: Random, prompts: int | None, start: int) -> None:
        self.world = SteeredWorld(random_settings(*combination, choices), prompts, start)
        self.world.begin()

    @precondition(lambda self: self.world.sampled)
    @rule(choices=st.randoms(use_true_random=False), times=st.integers(1, 6))
    def score(self, choices: Random, times: int) -> None:
        for _ in range(times):
            if self.world.sampled:
                self.world.score_any(choices, self.world.sampled)
                self.world.check()

    @precondition(lambda self: not self.world.over_now)
    @rule(choices=st.randoms(use_true_random=False), changes=st.booleans())
    def steer(self, choices: Random, changes: bool) -> None:
        self.world.tell(self.world.change(choices) if changes else self.world.order(choices))

    @rule(choices=st.randoms(use_true_random=False), place=st.integers(0, 9))
    def move(self, choices: Random, place: int) -> None:
        moves = self.world.moves(choices)
        if moves:
            moves[place % len(moves)][1]()

    @rule(choices=st.randoms(use_true_random=False))
    def measure(self, choices: Random) -> None:
        self.world.measure(choices)

    @precondition(lambda self: self.world.checkpoint is not None)
    @rule()
    def kill_and_resume(self) -> None:
        self.world = self.world.killed_and_resumed()
        self.world.begin()

    @rule(never=st.integers(0, 30))
    def stop(self, never: int) -> None:
        if never == 30:
            self.world.tell(on.StopRequested(reason="drained"))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_to_end()
            self.world.check_end()


ControlMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestControlMachine = pytest.mark.seconds(8)(pytest.mark.timeout(300)(ControlMachine.TestCase))


def test_incompatible_snapshots_are_refused() -> None:
    """A snapshot with another schema, order or number of slots is refused."""
    chosen = control_settings()
    snapshot = make_control(chosen).snapshot()
    with pytest.raises(StreamRLError, match="schema 99"):
        make_control(chosen, msgspec.structs.replace(snapshot, schema=99))
    with pytest.raises(StreamRLError, match="deterministic = true: resume with its own recipe"):
        check_order(snapshot, deterministic=True)
    snapshot.state.slots.in_use = 5
    with pytest.raises(ValueError, match="5 slots were in use, and this recipe has 4"):
        make_control(chosen, snapshot)
    base = JournalBase(schema=JOURNAL_SCHEMA, control=snapshot, events=0, elapsed_s=0.0)
    written = JournalCodec().encode(base)
    for problem, other in (
        ("`schema`", written.replace(b"schema", b"scheme")),  # as those before 4, which did not have it
        ("has schema 3", JournalCodec().encode(msgspec.structs.replace(base, schema=3))),
    ):
        with pytest.raises(StreamRLError, match=f"{problem}.*use the streamrl that wrote it"):
            JournalCodec().decode(other)


def test_a_continuous_run_uses_all_slots_and_its_staleness() -> None:
    """A continuous run keeps every slot busy and uses its permitted staleness."""
    world = begun(rounds=RoundKind.CONTINUOUS, max_staleness=1, steps=6)
    assert len(world.running) == 8  # (1 + 1) batches of 2 groups of 2
    world.run_to_end()
    assert world.finished == "finished"
    assert max(world.staleness) == 1


def test_groups_that_go_on_leave_room_for_others_at_once() -> None:
    cohort = LengthSorted(cohort_batches=4, partial=True, oversubscription=2.0)
    rounds = {"rounds": RoundKind.LENGTH_SORTED, "length_sorted": cohort, "max_staleness": 3}
    world = begun(steps=9, batch_groups=8, group_size=1, **rounds)
    while world.live_version < 1:
        if world.to_publish is not None:
            world.go_live()
        elif world.to_step is not None:
            world.step()
        else:
            world.score(world.sampled[0], 1.0, 3)
    assert len(world.running) == 16, "as many as before, though half of them go on"


def test_a_straggler_is_waited_for_before_it_would_be_too_old() -> None:
    world = begun(rounds=RoundKind.CONTINUOUS, max_staleness=1, steps=6, group_size=1, batch_groups=1)
    straggler, *others = sorted(world.running)
    for trajectory in others:
        world.score(trajectory, 1.0, 1)
    world.step()  # version 1 came from the quick one: the straggler may be one version old
    world.go_live()
    world.answer_draw()
    quick = next(t for t in world.running if t != straggler)
    world.score(quick, 1.0, 1)
    assert world.to_step is None, "the last place that the straggler can still take was given away"
    world.score(straggler, 1.0, 1)
    assert world.to_step is not None
    world.step()
    assert max(world.staleness) == 1


@pytest.mark.parametrize("when_stale", [StalePolicy.DROP, StalePolicy.REGENERATE])
def test_stragglers_are_dropped_or_sampled_again(when_stale: StalePolicy) -> None:
    """A straggler is dropped or sampled again, as the recipe says."""
    world = begun(
        rounds=RoundKind.CONTINUOUS, max_staleness=1, steps=6, group_size=1, batch_groups=1, when_stale=when_stale
    )
    straggler = min(world.running)
    for _ in range(2):
        world.score(next(t for t in world.running if t != straggler), 1.0, 1)
        world.step()
        world.go_live()
        if world.draw is not None:
            world.answer_draw()
    assert straggler not in world.running
    assert world.state.accounting().dropped == {"stale": 1}
    again = [t for t in world.issued if t.prompt_id == straggler.prompt_id and t.attempt == 1]
    assert len(again) == (1 if when_stale is StalePolicy.REGENERATE else 0)
    world.run_to_end()


def test_dynamic_sampling_refills_groups_without_signal() -> None:
    world = begun(dynamic_sampling=True, steps=1)
    first = sorted(world.running)[:2]
    for trajectory in first:
        world.score(trajectory, 1.0, 1)
    assert world.draw is not None and world.draw.count == 1, "the dropped group is refilled inside the round"
    world.run_to_end()
    assert world.state.accounting().dropped == {"zero_variance": 2}
    assert world.state.accounting().trained == 4


def test_groups_that_never_have_signal_end_the_run_with_a_reason() -> None:
    world = World(control_settings(dynamic_sampling=True, steps=1))
    world.begin()
    while world.stopped is None:
        if world.draw is not None:
            world.answer_draw()
        world.score(next(iter(world.running)), 0.0, 1)
    assert "zero_variance" in world.stopped and "dynamic_sampling = false" in world.stopped


def test_too_many_failed_rewards_stop_the_run() -> None:
    """Too many failed rewards stop the run with the last message of a reward."""
    world = begun(max_failed_share=0.25, failure_window=4, batch_groups=4)
    for trajectory in sorted(world.running)[:2]:
        world.score(trajectory, 1.0, 1)
    for trajectory in sorted(world.running)[:2]:
        world.fail(trajectory)
    assert world.stopped is not None
    assert "2 of the last 4" in world.stopped and "planted" in world.stopped


def test_a_run_of_failed_rewards_ends_before_its_window_fills() -> None:
    """A run whose rewards all fail does not wait until its window is full."""
    world = begun(max_failed_share=0.25, failure_window=8, batch_groups=8)
    for trajectory in sorted(world.running)[:3]:
        assert world.stopped is None
        world.fail(trajectory)
    assert "3 of the last 3" in str(world.stopped)


def test_a_failed_reward_drops_its_group_or_ends_the_run() -> None:
    """A failed reward drops its group or ends the run, as the recipe says."""
    world = begun(steps=1, group_size=3)
    a, b, *_ = sorted(world.running)
    world.score(a, 1.0, 3)
    world.fail(b, "drop_group")
    assert world.state.accounting().dropped == {"reward_failed": 3}
    world.run_to_end()
    assert world.trained[a] == 0
    assert world.finished == "finished"
    world = begun(steps=1)
    world.fail(min(world.running), "stop")
    assert "planted" in str(world.stopped)


@pytest.mark.parametrize("stops", ["policy", "share"])
def test_a_run_ended_by_a_failed_reward_can_be_resumed(stops: str) -> None:
    """A run that a failed reward ended resumes as if the reward had not failed."""
    limits = {"max_failed_share": 0.0, "failure_window": 1} if stops == "share" else {}
    world = begun(steps=1, batch_groups=1, group_size=2, **limits)
    a, b = sorted(world.running)
    world.score(a, 1.0, 1)
    world.fail(b, "stop" if stops == "policy" else "")
    assert "planted" in str(world.stopped)
    assert world.state.accounting().dropped == {"reward_failed": 2}
    world.core.handle(on.RunContinued())
    assert not world.batches, "one that is left alone has no baseline"


def test_a_failed_reward_shrinks_its_group() -> None:
    """A failed reward shrinks its group and never becomes a number."""
    world = begun(group_size=3, batch_groups=1, steps=1)
    a, b, c = sorted(world.running)
    world.fail(b)
    world.score(a, 1.0, 1)
    world.score(c, 0.0, 1)
    assert world.batches == {0: [(a, c)]}
    world.run_to_end()
    assert world.state.accounting().dropped == {"reward_failed": 1}


def test_slots_of_failed_members_form_no_late_group() -> None:
    """Slots of failed members do not become a group that no batch can take in time."""
    world = begun(rounds=RoundKind.CONTINUOUS, max_staleness=1, group_size=3, steps=6)
    assert len({t.group_id for t in world.running}) == 4
    for group_id in (0, 1, 2):
        world.fail(next(t for t in sorted(world.running) if t.group_id == group_id))
    assert world.draw is None, "three failures of three groups are not room for a fifth one"
    world.run_to_end()
    world.check_end()
    assert world.state.accounting().dropped["reward_failed"] == 3
    assert world.state.slots.in_use == 0


def test_a_lone_survivor_without_baseline_is_refilled() -> None:
    """A group with one survivor has no baseline, and is refilled."""
    world = begun(group_size=2, batch_groups=1, steps=1)
    a, b = sorted(world.running)
    world.fail(a)
    world.score(b, 1.0, 1)
    assert world.draw is not None and world.draw.count == 1
    world.run_to_end()
    assert world.state.accounting().dropped == {"reward_failed": 2}


def test_a_lone_survivor_without_comparison_is_trained() -> None:
    """A lone survivor is trained where the objective compares no siblings."""
    world = begun(batch_groups=1, group_size=3, steps=1, compares_siblings=False)
    for trajectory in list(world.running)[:2]:
        world.fail(trajectory)
    (survivor,) = world.running
    world.score(survivor, 1.0, 5)
    assert world.state.accounting().dropped == {"reward_failed": 2}
    world.step()
    assert world.trained[survivor] == 1


@pytest.mark.parametrize(("algorithm", "compares"), [("grpo", True), ("reinforce_plus_plus", False), ("ppo", False)])
def test_the_objective_says_whether_siblings_are_compared(algorithm: str, compares: bool) -> None:
    recipe = load_recipe(DEMO, [f"objective.algorithm={algorithm!r}"])
    assert settings_of(recipe).compares_siblings is compares


def score_apart(
    world: World,
    trajectory: TrajectoryId,
    rewards: dict[str, float],
    turn_rewards: tuple[float, ...] = (),
    numbers: dict[str, list[float]] | None = None,
) -> None:
    """A sample whose rewards are compared with its siblings' each alone; one of weight 0 is among them."""
    sample = msgspec.structs.replace(finished(rollout_seconds=1.5), id=trajectory)
    separate = {name: (1.0, value) for name, value in rewards.items()} | {"nothing": (0.0, float(trajectory.sample))}
    scored = ScoredTrajectory(
        trajectory=sample,
        reward=sum(rewards.values()),
        separate_rewards=separate,
        turn_rewards=turn_rewards,
        token_values={name: float_array(values) for name, values in (numbers or {}).items()},
    )
    world.running.pop(trajectory)
    world.scored.add(trajectory)
    event = event_of(Scored(outcome=scored, reward_s=0.25))
    assert isinstance(event, on.TrajectoryScored) and event.seconds == 1.75
    world.tell(event)


def test_dynamic_sampling_looks_at_rewards_compared_alone() -> None:
    """Dynamic sampling keeps groups whose rewards differ where each reward is compared alone. Right and long, wrong and
    short: totals are equal, and both rewards say something."""
    world = begun(dynamic_sampling=True, batch_groups=1, steps=1)
    first, second = world.running
    score_apart(world, first, {"right": 1.0, "short": 0.0})
    score_apart(world, second, {"right": 0.0, "short": 1.0})
    assert world.state.accounting().dropped == {}
    assert world.to_step is not None

    world = begun(dynamic_sampling=True, batch_groups=1, steps=1)
    first, second = world.running
    score_apart(world, first, {"right": 1.0})
    score_apart(world, second, {"right": 1.0, "rare": 1.0})  # nobody to compare its second reward with
    assert world.state.accounting().dropped == {"zero_variance": 2}


@pytest.mark.parametrize(
    ("compares", "earned", "signal"),
    [
        (True, [(1.0,), (0.0, 1.0)], True),  # in turn 1 and in turn 2
        (True, [(), (0.0, 1.0)], True),  # nothing is a value
        (True, [(1.0,), (1.0, 0.0)], False),
        (True, [(), (0.0, 0.0)], False),
        (False, [(1.0,), (0.0, 1.0)], False),
    ],
)
def test_dynamic_sampling_compares_turns_with_credit(
    compares: bool, earned: list[tuple[float, ...]], signal: bool
) -> None:
    """Totals are equal: only where turns have advantages of their own has a group of other turns a signal."""
    world = begun(dynamic_sampling=True, batch_groups=1, steps=1, compares_turns=compares)
    for trajectory, turn_rewards in zip(list(world.running), earned, strict=True):
        score_apart(world, trajectory, {"environment": 1.0}, turn_rewards)
    assert world.state.accounting().dropped == ({} if signal else {"zero_variance": 2})


@pytest.mark.parametrize(
    ("numbers", "signal"),
    [
        ([{"steps/judge": [1.0, 1.0]}, {"steps/judge": [2.0]}], True),  # totals are equal, steps are not
        ([{"steps/judge": [2.0]}, {"steps/judge": [math.nan, 2.0]}], False),
        ([{"steps/judge": [0.0, 2.0]}] * 2, True),
        ([{"tokens/judge": [1.0, 1.0]}] * 2, True),
        ([{"tokens/judge": [0.0]}] * 2, False),
        ([{"steps/shadow": [0.0, 1.0]}] * 2, False),
    ],
)
def test_dynamic_sampling_keeps_groups_whose_numbers_differ(numbers: list[Any], signal: bool) -> None:
    """Numbers of steps and tokens are a signal where totals are equal."""
    world = begun(dynamic_sampling=True, batch_groups=1, steps=1)
    for trajectory, of_tokens in zip(list(world.running), numbers, strict=True):
        score_apart(world, trajectory, {"judge": 2.0}, numbers=of_tokens)
    assert world.state.accounting().dropped == ({} if signal else {"zero_variance": 2})


class ClosingWorld(World):
    """Notes what each order to the trainer says of the end of the run."""

    def step(self) -> None:
        assert self.to_step is not None
        closed.append((self.to_step.steps, self.to_step.last))
        super().step()


closed: list[tuple[int, bool]] = []
SIZES = GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 4), shares=(1, 1), keeps=Keeps.TRAJECTORIES)


@pytest.mark.parametrize("prompts", [12, 10], ids=["whole batches", "a smaller last one"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rounds": RoundKind.TAIL_BATCHING, "tail_batching": TailBatching(prompt_oversampling=1.5)},
        {
            "group_sizing": GroupSizing(kind=SizingKind.RANDOM, sizes=(2, 4), shares=(1, 1), keeps=Keeps.TRAJECTORIES),
            "group_size": 4,
        },
        {"rounds": RoundKind.CONTINUOUS},
        {"dynamic_sampling": True},
    ],
    ids=["synchronous", "long rounds", "sizes", "continuous", "dynamic sampling"],
)
def test_a_run_of_passes_counts_prompts(settings: dict[str, object], prompts: int) -> None:
    """Whatever rounds and groups take: each prompt is drawn once, predicted steps are no end, and the trainer gets
    the last step by the same count."""
    closed.clear()
    world = ClosingWorld(control_settings(steps=2, prompts=prompts, **settings))
    world.begin()
    world.run_to_end()
    state = world.state
    assert state.pending.end is not None and (state.prompts.drawn, state.pending.end.reason) == (prompts, "finished")
    assert state.prompts.empty and state.steps == state.trainer_version
    assert closed[-1] == (len(closed), True) and not any(last for _, last in closed[:-1])


def test_another_number_of_steps_takes_the_place_of_prompts() -> None:
    """A run of one pass that has ended goes on where its user asks for more steps."""
    world = World(control_settings(steps=2, prompts=4))
    world.begin()
    world.run_to_end()
    assert world.state.prompts.drawn == 4
    done = world.state.trainer_version
    world.finished = None
    world.tell(on.RunContinued(steps=done + 3))
    world.run_to_end()
    assert (world.state.trainer_version, world.state.prompts.limit) == (done + 3, 0)


def test_an_exhausted_source_trains_a_smaller_last_batch() -> None:
    """An exhausted source trains the smaller last batch, and the run ends."""
    world = World(control_settings(steps=9), prompts=3)
    world.begin()
    world.run_to_end()
    assert world.finished == "prompts exhausted"
    assert world.state.accounting().trained == 6


def test_a_stop_lets_the_closed_batch_go_live_and_drops_the_rest() -> None:
    world = begun(rounds=RoundKind.CONTINUOUS, max_staleness=1, checkpoint_at_end=True)
    for trajectory in sorted(world.running)[:4]:
        world.score(trajectory, 1.0, 1)
    assert world.to_step is not None
    world.tell(on.StopRequested(reason="interrupted"))
    assert not world.running
    world.step()
    world.go_live()
    world.save()
    assert world.finished == "interrupted"
    assert world.state.accounting().dropped == {"drained": 4}


@pytest.mark.parametrize("rounds", [RoundKind.SYNCHRONOUS, RoundKind.CONTINUOUS])
def test_only_the_push_waits_for_an_evaluation(rounds: RoundKind) -> None:
    """The next batch is sampled and trained during an evaluation; only the push waits for it."""
    staleness = 0 if rounds is RoundKind.SYNCHRONOUS else 1
    world = World(
        control_settings(rounds=rounds, max_staleness=staleness, evaluate_every=1, evaluate_at_start=True, steps=2)
    )
    world.begin()
    for version in (0, 1):
        assert world.to_evaluate == (version, 0)
        while world.draw is not None:
            world.answer_draw()
        while world.to_step is None:
            world.score(min(world.running), 1.0, 1)
        world.step()
        assert world.to_evaluate == (version, 0) and world.to_publish is None
        world.evaluate()
        assert world.to_publish == version + 1
        world.go_live()
    world.run_to_end()
    world.check_end()
    assert world.evaluated == [(0, 0), (1, 0), (2, 0)]


def test_a_drain_drops_the_running_evaluation() -> None:
    """A drain drops the evaluation that runs and starts no other."""
    world = World(control_settings(evaluate_at_start=True, evaluate_at_end=True))
    world.begin()
    world.tell(on.StopRequested(reason="drained"))
    world.tell(on.StopRequested(reason="again"))
    assert world.due == set()
    assert world.finished is None, "trajectories of the evaluation may still run"
    world.evaluate()
    assert world.finished == "drained"
    world.check_end()


def test_a_run_goes_on_from_the_version_of_its_checkpoint() -> None:
    world = World(control_settings(steps=6, evaluate_at_start=True), start=4)
    world.begin()
    assert world.to_evaluate == (4, 0)
    world.run_to_end()
    world.check_end()
    assert (world.finished, world.trainer_version, world.state.accounting().trained) == ("finished", 6, 8)
    assert {t.group_id for t in world.trained} == {8, 9, 10, 11}


def test_a_checkpoint_of_the_last_step_leaves_nothing_to_train() -> None:
    world = World(
        control_settings(steps=3, evaluate_at_start=True, evaluate_at_end=True, checkpoint_at_end=True), start=3
    )
    world.begin()
    assert world.finished is not None
    assert "step 3 already" in world.finished and "run.steps" in world.finished
    assert not world.issued and world.to_evaluate is None and world.to_save is None


def test_a_complete_batch_waits_for_the_checkpoint() -> None:
    """A complete batch waits for the checkpoint of the version before it."""
    world = begun(rounds=RoundKind.CONTINUOUS, max_staleness=1, checkpoint_every=1, batch_groups=1, group_size=1)
    first, second = sorted(world.running)
    world.score(first, 1.0, 1)
    world.step()
    world.score(second, 1.0, 1)
    world.go_live()
    assert (world.to_save, world.to_step) == (1, None)
    world.save()
    assert world.to_step is not None
