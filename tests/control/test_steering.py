"""Steering of a running run on the pure core: pauses, orders and changed settings, whatever else happens; and the table
of what may change."""

from __future__ import annotations

from random import Random
from typing import Any

import anyio
import msgspec
import pytest
from builders.files import SORT_RECIPE as EXAMPLE
from oracle.control_walks import COMBINATIONS, ON_POLICY, QUICK_COMBINATIONS, random_run
from oracle.control_world import begun
from oracle.steered_world import SteeredWorld
from tiers import quick_only

from streamrl.base.errors import RecipeError
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.control import events as on
from streamrl.control.settings import control_settings as settings_of
from streamrl.control.steering.live_keys import LIVE, with_values
from streamrl.launch.control_protocol import ChangeSettings, SteeringTaken, SteerRun
from streamrl.launch.steering.changed_recipe import settings_change, written_key
from streamrl.launch.steering.steering import SteeringService
from streamrl.recipe.rules.load_recipe import load_recipe, overridden_recipe
from streamrl.run.journal.run_journal import RunJournal


@pytest.mark.parametrize(("composition", "sizing"), quick_only(COMBINATIONS, QUICK_COMBINATIONS))
def test_steered_runs_end_with_everything_accounted_for(composition: str, sizing: str) -> None:
    before = SteeredWorld.changes
    for seed in range(4):
        random_run(Random(seed), composition, sizing, world_of=SteeredWorld)
    assert SteeredWorld.changes > before, "nothing was changed"


@pytest.mark.parametrize(("composition", "sizing"), ON_POLICY)
def test_steered_deterministic_runs_go_on_after_crashes(composition: str, sizing: str) -> None:
    random_run(Random(5), composition, sizing, world_of=SteeredWorld, deterministic=True)


CHANGES: dict[str, tuple[str, ...]] = {
    "run": ("run.steps=90",),
    "training": ("training.learning_rate=1e-5", "rollout.advanced.presubmit=true"),
    "sampling": ("sampling.temperature=0.7", "sampling.max_tokens=99"),
    "race": (
        "rollout.rounds=tail_batching",
        "tail_batching.prompt_oversampling=1.5",
        "tail_batching.response_oversampling=1.25",
        "tail_batching.long_round_batches=2",
    ),
    "sorted": (
        "rollout.rounds=length_sorted",
        "rollout.max_staleness=1",
        "length_sorted.cohort_batches=2",
        "length_sorted.partial=true",
        "length_sorted.oversubscription=1.5",
    ),
    "cut": ("rollout.rounds=length_sorted", "length_sorted.cohort_batches=2", "length_sorted.cut_tokens=900"),
    "random": ("kind=random", "sizes=[4, 8]", "shares=[1, 2]", "keeps=prompts", "dwell=3"),
    "sagc": ("kind=sagc", "sizes=[4, 8]", "straggler_ratio=3", "straggler=seconds", "tradeoff=2", "optimism=2"),
    "budget": ("kind=sagc", "sizes=[4, 8]", "budget=0.3", "tightening=0.1", "discount=0.9"),
    "calibration": ("kind=sagc", "sizes=[4, 8]", "calibration_steps=4"),
    "limits": ("reward_limits.max_failed_share=0.3", "reward_limits.window=9", "rollout.dynamic_sampling=true"),
    "ends": ("evaluation.every=3", "evaluation.at_end=false", "checkpoint.every=0", "checkpoint.at_end=false"),
}


def test_every_key_of_the_table_decides_as_a_recipe_that_has_it() -> None:
    recipe = load_recipe(EXAMPLE, ["objective.advantages=leave_one_out"])
    seen: set[str] = set()
    for name, given in CHANGES.items():
        changes = [one if "." in one.partition("=")[0] else f"group_sizing.{one}" for one in given]
        change = settings_change(recipe, begun().state, changes, 0)
        seen |= change.values.keys()
        carried = with_values(settings_of(recipe), msgspec.msgpack.decode(msgspec.msgpack.encode(change.values)))
        written = [f"{written_key(key)}={value}" for key, _, value in (one.partition("=") for one in changes)]
        fresh = settings_of(overridden_recipe(recipe, written))
        own = {"steps": 0, "learning_rate": None, "sampling": {}}
        assert msgspec.structs.replace(carried, **own) == msgspec.structs.replace(fresh, **own), name
    assert seen == LIVE.keys()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("lora.rank=4", "read when the processes of the run start"),
        ("rewards.0.weight=2", "streamrl reward attach"),
        ("rollout.group_size=4", "group_sizing may change"),
        ("sampling.top_p=0.9", "carries only its temperature"),
        ("rollout.rounds=auto", "set up at the start"),
        ("sampling.max_tokens=500", "at most 448"),
        ("length_sorted.cohort_batches=200 rollout.rounds=length_sorted", "trajectories would be in flight"),
        ("rollout.max_staleness=-1", "rollout.max_staleness"),
        ("group_sizing.kind=random group_sizing.shares=[1,1,1]", "objective would be another"),
        ("rolout.rounds=auto", "unknown section"),
        ("training.learning_rate", "write"),
    ],
)
def test_what_cannot_change_is_refused_with_the_reason(change: str, why: str) -> None:
    with pytest.raises(RecipeError, match="(?s).*" + why):
        settings_change(load_recipe(EXAMPLE), begun().state, change.split(), 0)


def test_a_limit_that_lengths_are_punished_by_stays() -> None:
    recipe = load_recipe(EXAMPLE, ["objective.overlong_buffer=9"])
    with pytest.raises(RecipeError, match=r"ranks punish lengths below 448 \(objective.overlong_buffer\)"):
        settings_change(recipe, begun().state, ["sampling.max_tokens=99"], 0)


def test_pending_changes_are_checked_together() -> None:
    """Changes that wait are checked together with the changes before and after them."""
    recipe, world = load_recipe(EXAMPLE), begun(steps=9)
    world.tell(settings_change(recipe, world.state, ["rollout.rounds=continuous", "rollout.max_staleness=1"], 7))
    for step, change in ((6, "rollout.advanced.presubmit=true"), (8, "rollout.max_staleness=0")):
        with pytest.raises(RecipeError, match="continuous"):
            settings_change(recipe, world.state, [change], step)
    assert settings_change(recipe, world.state, ["training.learning_rate=0.5"], 6).values


def test_a_recipe_with_other_steps_wins_after_a_change() -> None:
    """A resumed recipe that sets other steps wins over steps that were changed before. And one that is resumed as it is
    does not."""
    world = begun(steps=3)
    world.tell(on.SettingsChanged(values={"run.steps": 5}, recipe_steps=3))
    while not world.state.steering.changed:
        trajectory = world.sampled[0] if world.sampled else None
        world.score(trajectory, 1.0, 3) if trajectory else world.goes_on()
    assert world.state.steps == 5 and world.state.steering.recipe_steps == 3
    world.tell(on.RunContinued(steps=5))
    assert world.state.steering.changed == {"run.steps": 5}
    world.tell(on.RunContinued(steps=8))
    assert (world.state.steps, world.state.steering.changed, world.state.steering.recipe_steps) == (8, {}, 0)


def test_other_steps_win_over_pending_changes_and_pauses() -> None:
    """A resumed recipe with other steps wins over a change that waits, and ends no pause."""
    world = begun(steps=3)
    world.tell(on.SettingsChanged(values={"run.steps": 5}, step=2, recipe_steps=3))
    world.tell(on.SettingsChanged(values={"run.steps": 6, "sampling.temperature": 0.7}, step=3, recipe_steps=3))
    world.tell(on.Steered(order="pause"))
    world.tell(on.RunContinued(steps=3))
    changes = world.state.steering.waiting_changes
    assert [one.values["run.steps"] for one in changes] == [5, 6], "the recipe is as it was"
    world.tell(on.RunContinued(steps=8))
    assert [one.values for one in world.state.steering.waiting_changes] == [{"sampling.temperature": 0.7}]
    assert world.state.steering.paused, "it was killed, not drained"
    world.tell(on.StopRequested(reason="drained"))
    assert not world.state.steering.paused


def test_a_requested_evaluation_replaces_a_smaller_one() -> None:
    """A requested evaluation takes the place of a smaller one that each step would have. Each lasts longer than a step:
    a push waits for it, and between two of them there is no time for another one."""
    world = begun(steps=3, evaluate_every=1, evaluate_limit=1)
    for version in (1, 2):
        while world.trainer_version < version:
            world.score(
                world.sampled[0], 1.0, 3
            ) if world.sampled else world.step() if world.to_step else world.goes_on()
        if version == 2:
            world.tell(on.Steered(order="evaluate"))
            world.evaluate()
        world.go_live()
    assert world.to_evaluate == (2, 0) and not world.state.steering.waiting_orders


async def test_every_request_is_answered() -> None:
    """Every request is answered, whatever is wrong with it, also where there is nothing to do."""
    recipe, world = load_recipe(EXAMPLE), begun()
    unused: Any = None
    service = SteeringService(recipe, RunJournal(None, TrajectoryStore()), unused, unused, unused)

    def notify(event: on.ControlEvent) -> None:
        world.tell(event)
        service._event_handled.set()

    async def answer(request: SteerRun | ChangeSettings) -> SteeringTaken:
        with anyio.fail_after(60):
            reply = await service._answer(request, world.state, notify)
        assert isinstance(reply, SteeringTaken)
        return reply

    problems = {"engine-0": "the last that must serve", "engine-7": 'no engine "engine-7"', "": 'no engine ""'}
    for engine, problem in problems.items():
        assert problem in (await answer(SteerRun(order="pause_engine", engine=engine))).problems[0]
    assert not world.state.steering.engines_away
    assert "engine-0 serves again" in (await answer(SteerRun(order="return_engine", engine="engine-0"))).text
    refused = await answer(ChangeSettings(changes=(f"reward_limits.window={10**20}",)))
    assert refused.problems and not world.state.steering.waiting_changes and not world.state.steering.changed
    for request in (SteerRun(order="evaluate"), SteerRun(order="checkpoint")):
        assert "ordered already" not in (await answer(request)).text
        assert f"the {request.order} of version 0 was ordered already" in (await answer(request)).text
