"""Declarations of a loss and of advantages of the user's own (``objective.function``). Trainer ranks load the code
(``learning.objective.custom``); every command reads the names."""

from __future__ import annotations

from streamrl.recipe.objectives.method import Advantages, Surrogate

CUSTOM = "custom"


class CustomLoss(Surrogate, frozen=True):
    """the loss of objective.function"""

    name = CUSTOM


class CustomAdvantages(Advantages, frozen=True):
    """the advantages of objective.function, of the rewards of siblings"""

    name = CUSTOM
    compares_siblings = True
