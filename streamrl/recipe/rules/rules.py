"""Imports all rules, and offers ``load_recipe`` the checks: rules, keys of other systems, ``rollout.system``."""

from streamrl.recipe.dialects.foreign_keys import foreign_answer
from streamrl.recipe.rules import (  # noqa: F401 - each registers its rules
    engine_arguments,
    engine_rules,
    environment_rules,
    objective_rules,
    reward_rules,
    run_rules,
    scheduling_rules,
    teacher_rules,
    transport_rules,
    turn_rules,
)
from streamrl.recipe.rules.rule import broken_rules
from streamrl.recipe.rules.systems import apply_system

__all__ = ["apply_system", "broken_rules", "foreign_answer"]
