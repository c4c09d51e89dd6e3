"""What follows from a recipe: the class of custom rounds, the cores of the trainer."""

from __future__ import annotations

from builders.files import EXAMPLES
from builders.recipe import small_recipe as recipe

from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import control_settings
from streamrl.learning.threads import trainer_threads
from streamrl.recipe.rules.rules import broken_rules
from streamrl.recipe.scheduling import Rollout, RoundKind
from streamrl.recipe.sections import Cluster, ClusterKind, Engines

EXAMPLE = str(EXAMPLES / "custom_rounds.py")


def test_a_policy_of_the_users_is_a_file() -> None:
    made = recipe(rollout=Rollout(rounds=RoundKind.CUSTOM, policy=f"{EXAMPLE}:EarlyRace"))
    assert broken_rules(made) == []
    assert type(make_control(control_settings(made)).rules.policy).__name__ == "EarlyRace"


def test_the_cores_of_a_freed_engine_are_for_training() -> None:
    made = recipe(engines=Engines(count=4))
    threads = [trainer_threads(made, 16, engines_on_cpu=True, freed=freed) for freed in range(5)]
    assert threads == [8, 10, 12, 14, 16]
    elsewhere = recipe(engines=Engines(count=4), cluster=Cluster(kind=ClusterKind.RAY))
    assert trainer_threads(elsewhere, 16, engines_on_cpu=True, freed=1) == 16
