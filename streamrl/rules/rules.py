"""What ``recipe.load`` calls: every rule of this folder, what keys of other systems are called here, and what
``rollout.system`` sets."""

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
from streamrl.rules.systems import apply_system

__all__ = ["apply_system", "broken_rules", "foreign_answer"]
