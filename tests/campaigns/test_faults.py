"""Whole runs on simulated time, network, disk and processes, with faults: a few seconds of what
``python -m campaigns faults run`` does for hours. A seed that fails here is replayed and shrunk by that command."""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Iterator
from random import Random

import msgspec
import pytest

from campaigns.faults.campaign import catch, plan_of, run_seed, shrink
from campaigns.faults.fault_plan import Fault, Phase, cells
from campaigns.faults.planted import PLANTED
from campaigns.faults.virtual_time import NothingCanHappen, SimulatedProcess, VirtualLoop
from campaigns.faults.world import World
from campaigns.faults.world_shape import Shape, draw_shape
from streamrl.recipe.scheduling import GroupSizing, RoundKind, SizingKind
from streamrl.recipe.sections import EngineShape, ReleaseKind

FIRST_SEED = 1_000
SECONDS = 25.0
FEWEST_WORLDS = 10
QUICK_BUGS = (
    "a reward is rounded",
    "completions are mixed up",
    "a group is handed out twice",
    "faults that do nothing",
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    logging.disable(logging.NOTSET)


@pytest.mark.long
def test_runs_with_faults_keep_invariants_and_reach_their_end() -> None:
    """Runs with injected faults keep every invariant and reach their last step."""
    ends, fired, lives = time.monotonic() + SECONDS, set[str](), 0
    for count, seed in enumerate(range(FIRST_SEED, FIRST_SEED + 10_000)):
        if count >= FEWEST_WORLDS and time.monotonic() > ends:
            break
        outcome = run_seed(seed)
        fired.update(outcome.fired)
        lives += outcome.lives
        assert outcome.ok, f"python -m campaigns faults shrink {seed}: {outcome.kind} {outcome.violations}"
        assert outcome.kind == "finished"
    assert len(fired) > len(cells()) / 4 and lives > count, "next to nothing happened"


def all_of_rollpacker(seed: int) -> Shape:
    """The run of ``seed`` with every part of it at once: races and long rounds, sets of engines, freed engines, rounds
    submitted in advance, restarts of engines, groups of several sizes, dynamic sampling."""
    shape = draw_shape(seed, steps=8)
    recipe, changed = shape.recipe, msgspec.structs.replace
    engines = changed(recipe.engines, count=2, sets=(EngineShape(count=3),), release=ReleaseKind.DRAIN, restarts=1000)
    rollout = changed(
        recipe.rollout,
        rounds=RoundKind.TAIL_BATCHING,
        max_staleness=0,
        presubmit=True,
        dynamic_sampling=True,
        prompts_per_batch=4,
        group_size=4,
    )
    sizing = GroupSizing(kind=SizingKind.SAGC, sizes=(4, 8), dwell=1, calibration_steps=2)
    run = changed(recipe.run, restarts=1000)
    return changed(shape, recipe=changed(recipe, engines=engines, rollout=rollout, group_sizing=sizing, run=run))


@pytest.mark.long
def test_rollpacker_loses_nothing_and_trains_nothing_twice() -> None:
    """A run with all parts of RollPacker loses no sample and trains none twice."""
    random, lives, fired = Random(7), 0, Counter[str]()
    for seed in range(6):
        shape = all_of_rollpacker(seed)
        kills = [
            Fault(
                component=component,
                kind="crash",
                phase=phase,
                nth=random.randint(1, most),
                delay_s=random.uniform(0, 2 * shape.pace),
                seed=random.randrange(100),
            )
            for component, phase, most in (
                ("engine", Phase.ROLLOUT, 60),
                ("engine", Phase.STAGE, 12),
                ("controller", Phase.TRAIN, 8),
            )
            for _ in range(3)
        ]
        outcome = World(shape, kills).run()
        assert outcome.ok and outcome.kind == "finished", (seed, outcome.kind, outcome.message, outcome.violations)
        lives += outcome.lives
        fired.update(fault.partition("/")[0] for fault in outcome.fired)
    assert fired["engine"] > 12 and fired["controller"] > 6


@pytest.mark.long
def test_a_seed_is_the_same_run_every_time() -> None:
    for seed in (3, 4):
        first, second = (run_seed(seed, keep_history=True) for _ in range(2))
        assert first.history == second.history
        assert first.trace == second.trace and first.fired == second.fired
    assert run_seed(5).trace != first.trace


def test_a_run_whose_faults_do_not_fire_has_shown_nothing() -> None:
    never = Fault(component="engine", kind="hang", phase=Phase.ROLLOUT, nth=10**6, delay_s=0.0, seconds=1.0)
    outcome = run_seed(1, faults=[never], steps=2)
    assert outcome.kind == "vacuous" and not outcome.ok


@pytest.mark.parametrize("name", QUICK_BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    [bug] = [bug for bug in PLANTED if bug.name == name]
    assert catch(bug, 30)[0], f"{name}: 30 worlds did not notice"


@pytest.mark.long
def test_a_failing_seed_shrinks_to_what_matters() -> None:
    [bug] = [bug for bug in PLANTED if bug.name == "a decoder raises what nobody expects"]
    seed = catch(bug, 30)[0] - 1
    with bug.planted():
        faults, _, outcome = shrink(seed)
    assert outcome.violations and outcome.history
    assert 1 <= len(faults) < len(plan_of(seed, draw_shape(seed))) / 4
    assert any(fault.kind == "corrupt" for fault in faults)


def test_planted_bugs_are_distinct_and_cells_cover_components() -> None:
    """Every planted bug has its own name, and the cells of a campaign cover all components."""
    assert len({bug.name for bug in PLANTED}) == len(PLANTED)
    assert {component for component, _, _ in cells()} == {
        *("controller", "engine", "trainer", "reward", "network", "disk", "tree")
    }


def test_killed_processes_stop_and_hung_ones_go_on_later() -> None:
    """A killed process runs no further line; a hung one goes on later."""
    loop = VirtualLoop()
    told: list[tuple[str, float]] = []

    async def life(name: str) -> None:
        import asyncio

        try:
            for _ in range(5):
                await asyncio.sleep(1)
                told.append((name, loop.time()))
        finally:
            told.append((f"{name} ends", loop.time()))

    processes = {name: SimulatedProcess(name, 0) for name in ("killed", "hung", "free")}
    for name, process in processes.items():
        process.context.run(lambda name=name, process=process: process.roots.append(loop.create_task(life(name))))
    loop.call_at(2.5, loop.kill, processes["killed"])
    loop.call_at(1.5, loop.hang, processes["hung"], 10.0)
    loop.call_at(30.0, loop.stop)
    loop.run_forever()
    of = {name: [at for who, at in told if who == name] for name in (*processes, "killed ends", "hung ends")}
    assert of["killed"] == [1.0, 2.0] and of["killed ends"] == []
    assert of["hung"] == [1.0, 11.5, 12.5, 13.5, 14.5] and of["hung ends"] == [14.5]
    assert of["free"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    loop.burn()
    loop.close()


def test_a_world_in_which_nothing_can_happen_says_so() -> None:
    loop = VirtualLoop()
    with pytest.raises(NothingCanHappen):
        loop.run_until_complete(loop.create_future())
    loop.close()
