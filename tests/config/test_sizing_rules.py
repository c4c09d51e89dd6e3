"""What ``[group_sizing]`` refuses, and with which words; what it allows."""

from __future__ import annotations

import msgspec
import pytest

from streamrl.recipe.objective import AdvantageKind, Algorithm, Objective
from streamrl.recipe.scheduling import GroupSizing, LengthSorted, Rollout, RoundKind, SizingKind, StalePolicy
from streamrl.recipe.sections import Model, Prompts, Recipe, Reward, Run, Training
from streamrl.rules.rules import broken_rules

SAGC = GroupSizing(kind=SizingKind.SAGC)
RANDOM = GroupSizing(kind=SizingKind.RANDOM, shares=(0.5, 0.3, 0.2))
CONTINUOUS = Rollout(rounds=RoundKind.CONTINUOUS, max_staleness=1)


def recipe_of(**sections: object) -> Recipe:
    minimal = {"model": Model(path="m"), "prompts": Prompts(train="t.jsonl"), "rewards": (Reward(function="r:f"),)}
    return Recipe(**{**minimal, **sections})  # type: ignore[arg-type]


def broken(recipe: Recipe) -> list[tuple[str, str]]:
    about = ("group_sizing", "rollout.group_size", "rollout.when_stale", "training.updates_per_batch")
    return [found for found in broken_rules(recipe) if found[0].startswith(about)]


def changed(sizing: GroupSizing, **changes: object) -> GroupSizing:
    return msgspec.structs.replace(sizing, **changes)


@pytest.mark.parametrize(
    ("sections", "path", "words"),
    [
        (
            {"group_sizing": GroupSizing(sizes=(4, 8))},
            "group_sizing.sizes",
            '[4, 8] has no effect with group_sizing.kind = "fixed": remove it, or set group_sizing.kind = "sagc"',
        ),
        ({"group_sizing": GroupSizing(budget=0.2)}, "group_sizing.budget", "0.2 has no effect"),
        (
            {"group_sizing": changed(SAGC, shares=(1.0, 1.0, 1.0))},
            "group_sizing.advanced.shares",
            'set kind = "random"',
        ),
        ({"group_sizing": changed(SAGC, sizes=(8,))}, "group_sizing.sizes", "[8] leaves nothing to choose"),
        ({"group_sizing": changed(SAGC, sizes=(8, 4))}, "group_sizing.sizes", "[8, 4] is not ascending"),
        ({"group_sizing": changed(RANDOM, sizes=(4, 8, 8))}, "group_sizing.sizes", "write each size once"),
        (
            {"group_sizing": changed(SAGC, sizes=(4, 8, 12))},
            "group_sizing.sizes.2",
            "12 does not divide a batch of rollout.prompts_per_batch x group_size = 256 trajectories",
        ),
        ({"group_sizing": changed(RANDOM, sizes=(4, 8, 12))}, "group_sizing.sizes.2", "12 does not divide"),
        ({"group_sizing": changed(SAGC, sizes=(2, 8))}, "group_sizing.sizes.0", "set it to 4 or more"),
        (
            {"group_sizing": SAGC, "rollout": Rollout(group_size=2, prompts_per_batch=128)},
            "rollout.group_size",
            "2, which the run starts with, is none of group_sizing.sizes = [4, 8, 16]",
        ),
        ({"group_sizing": changed(SAGC, straggler_ratio=1.0)}, "group_sizing.straggler_ratio", "set it above 1"),
        (
            {"group_sizing": changed(SAGC, tightening=0.3)},
            "group_sizing.advanced.tightening",
            "leaves nothing of budget = 0.3",
        ),
        (
            {"group_sizing": changed(SAGC, calibration_steps=10), "run": Run(steps=10)},
            "group_sizing.advanced.calibration_steps",
            "10 leaves none of run.steps = 10 to control",
        ),
        ({"group_sizing": changed(RANDOM, shares=(1.0,))}, "group_sizing.advanced.shares", "has 1 entries for 3 sizes"),
        (
            {"group_sizing": changed(RANDOM, shares=(1.0, -1.0, 1.0))},
            "group_sizing.advanced.shares.1",
            "-1.0 is negative",
        ),
        ({"group_sizing": changed(RANDOM, shares=(0.0,) * 3)}, "group_sizing.advanced.shares", "every share is 0"),
        (
            {"group_sizing": changed(RANDOM, sizes=(1, 4, 8))},
            "group_sizing.sizes.0",
            "1 makes every advantage 0, because siblings are compared",
        ),
        (
            {"group_sizing": SAGC, "objective": Objective(algorithm=Algorithm.REINFORCE_PLUS_PLUS)},
            "group_sizing.kind",
            '"sagc" has no use with objective.advantages = "batch"',
        ),
        (
            {"group_sizing": RANDOM, "objective": Objective(advantages=AdvantageKind.COHORT)},
            "group_sizing.kind",
            '"random" has no use with objective.advantages = "cohort"',
        ),
        (
            {
                "group_sizing": SAGC,
                "rollout": Rollout(rounds=RoundKind.LENGTH_SORTED),
                "length_sorted": LengthSorted(single=True),
            },
            "group_sizing.kind",
            "has no use with length_sorted.advanced.single = true",
        ),
        ({"group_sizing": SAGC, "rollout": CONTINUOUS}, "rollout.when_stale", '"wait" needs groups of one size'),
        (
            {"group_sizing": SAGC, "training": Training(updates_per_batch=17)},
            "training.updates_per_batch",
            "17 steps do not fit a batch of 16 groups of size 16",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sections: dict[str, object], path: str, words: str) -> None:
    found = broken(recipe_of(**sections))
    assert [where for where, _ in found] == [path], found
    assert words in found[0][1]


def test_as_many_effectless_fields_as_there_are() -> None:
    found = broken(recipe_of(group_sizing=GroupSizing(dwell=3, shares=(1.0,))))
    assert [path for path, _ in found] == ["group_sizing.advanced.dwell", "group_sizing.advanced.shares"]


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"group_sizing": GroupSizing(straggler_ratio=3.0)},
        {"group_sizing": SAGC},
        {"group_sizing": RANDOM},
        {"group_sizing": SAGC, "rollout": Rollout(rounds=RoundKind.TAIL_BATCHING)},
        {"group_sizing": SAGC, "rollout": Rollout(rounds=RoundKind.LENGTH_SORTED)},
        {"group_sizing": SAGC, "rollout": msgspec.structs.replace(CONTINUOUS, when_stale=StalePolicy.DROP)},
        {"group_sizing": SAGC, "objective": Objective(algorithm=Algorithm.PPO)},
        {"group_sizing": SAGC, "objective": Objective(algorithm=Algorithm.DAPO)},
        {"group_sizing": SAGC, "length_sorted": LengthSorted(single=True)},  # not read by synchronous rounds
        {"group_sizing": SAGC, "training": Training(updates_per_batch=16)},
        {
            "group_sizing": changed(RANDOM, sizes=(1, 4, 8)),
            "objective": Objective(algorithm=Algorithm.PPO),
        },
    ],
)
def test_what_fits_is_allowed(sections: dict[str, object]) -> None:
    assert broken(recipe_of(**sections)) == []
