"""What a recipe may say about rounds: each rule, and that recipe and core agree on the slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.control.settings import control_settings
from streamrl.learning.threads import trainer_threads
from streamrl.policies.round_policies import make_control
from streamrl.recipe.objective import Algorithm
from streamrl.recipe.scheduling import (
    DeferredPrompts,
    GroupSizing,
    LengthSorted,
    Rollout,
    RoundKind,
    SizingKind,
    StalePolicy,
    TailBatching,
)
from streamrl.recipe.sections import (
    Engines,
    EngineShape,
    Launch,
    Model,
    Objective,
    Prompts,
    Recipe,
    ReleaseKind,
    Reward,
    Run,
    Transport,
)
from streamrl.recipe.sections import TransportKind as Kind
from streamrl.rules.rules import broken_rules

TAIL = Rollout(rounds=RoundKind.TAIL_BATCHING)
SORTED = Rollout(rounds=RoundKind.LENGTH_SORTED)
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "custom_rounds.py")


def recipe(**changes: object) -> Recipe:
    rewards = (Reward(function="reward.py:f"),)
    return Recipe(model=Model(path="m"), prompts=Prompts(train="p.jsonl"), rewards=rewards, **changes)  # type: ignore[arg-type]


FITTING: dict[str, dict[str, object]] = {
    "synchronous": {},
    "presubmitted": {"rollout": Rollout(presubmit=True)},
    "continuous": {"rollout": Rollout(rounds=RoundKind.CONTINUOUS, max_staleness=2)},
    "tail batching": {"rollout": TAIL},
    "both axes, presubmitted": {
        "rollout": Rollout(rounds=RoundKind.TAIL_BATCHING, presubmit=True),
        "tail_batching": TailBatching(response_oversampling=1.25),
    },
    "resumed losers": {
        "rollout": Rollout(rounds=RoundKind.TAIL_BATCHING, max_staleness=6),
        "tail_batching": TailBatching(deferred_prompts=DeferredPrompts.RESUME),
    },
    "elastic": {"rollout": TAIL, "tail_batching": TailBatching(long_round_batches=3)},
    "domains": {"rollout": TAIL, "tail_batching": TailBatching(domain_column="kind", domains={"math": 1, "code": 2})},
    "sorted": {"rollout": SORTED},
    "partial": {
        "rollout": Rollout(rounds=RoundKind.LENGTH_SORTED, max_staleness=3, when_stale=StalePolicy.DROP),
        "length_sorted": LengthSorted(partial=True),
    },
    "single": {
        "rollout": SORTED,
        "length_sorted": LengthSorted(single=True),
        "objective": Objective(algorithm=Algorithm.REINFORCE_PLUS_PLUS),
    },
    "deterministic": {"rollout": TAIL, "run": Run(deterministic=True)},
    "sized": {"rollout": TAIL, "group_sizing": GroupSizing(kind=SizingKind.SAGC)},
    "auto": {"rollout": Rollout(rounds=RoundKind.AUTO)},
    "engines freed": {"rollout": TAIL, "engines": Engines(count=2, release=ReleaseKind.DRAIN)},
    "sets of engines": {
        "rollout": TAIL,
        "engines": Engines(
            count=2, rounds=("short",), sets=(EngineShape(count=1, tensor_parallel_size=2, rounds=("long",)),)
        ),
    },
}


@pytest.mark.parametrize("name", list(FITTING))
def test_what_fits_is_accepted_and_the_core_has_the_slots_that_the_recipe_counts(name: str) -> None:
    made = recipe(**FITTING[name])
    assert broken_rules(made) == []
    rules = make_control(control_settings(made)).rules
    assert rules.slots == made.max_in_flight
    assert rules.policy.on_policy == made.on_policy


ONE = (EngineShape(count=1),)


@pytest.mark.parametrize(
    ("release", "sets", "restarts"),
    [(ReleaseKind.NEVER, (), 3), (ReleaseKind.DRAIN, (), 3), (ReleaseKind.NEVER, ONE, 0)],
)
def test_a_dead_engine_is_started_again_unless_sets_of_engines_change(
    release: ReleaseKind, sets: tuple[EngineShape, ...], restarts: int
) -> None:
    made = recipe(engines=Engines(count=2, release=release, sets=sets))
    assert broken_rules(made) == []
    assert made.engine_restarts == restarts


def test_a_policy_of_the_users_is_a_file() -> None:
    made = recipe(rollout=Rollout(rounds=RoundKind.CUSTOM, policy=f"{EXAMPLE}:EarlyRace"))
    assert broken_rules(made) == []
    assert type(make_control(control_settings(made)).rules.policy).__name__ == "EarlyRace"


def test_the_cores_of_a_freed_engine_are_for_training() -> None:
    made = recipe(engines=Engines(count=4))
    threads = [trainer_threads(made, 16, engines_on_cpu=True, freed=freed) for freed in range(5)]
    assert threads == [8, 10, 12, 14, 16]
    elsewhere = recipe(engines=Engines(count=4), transport=Transport(kind=Kind.TCP, engines=Launch.EXTERNAL))
    assert trainer_threads(elsewhere, 16, engines_on_cpu=True, freed=1) == 16
