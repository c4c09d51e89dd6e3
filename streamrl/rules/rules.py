"""What ``recipe.load`` calls: every rule of this folder, and what keys of other systems are called here."""

from streamrl.rules import (  # noqa: F401 - each registers its rules
    engine_rules,
    objective_rules,
    reward_rules,
    run_rules,
    scheduling_rules,
    transport_rules,
)
from streamrl.rules.foreign_keys import foreign_answer
from streamrl.rules.rule import broken_rules

__all__ = ["broken_rules", "foreign_answer"]
