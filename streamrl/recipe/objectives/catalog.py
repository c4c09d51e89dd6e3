"""All objectives and their parts by the names of the recipe, and the types of the recipe's keys for these names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from streamrl.recipe.objectives.cispo import CISPO
from streamrl.recipe.objectives.custom import CUSTOM, CustomAdvantages, CustomLoss
from streamrl.recipe.objectives.distillation import DISTILLATION
from streamrl.recipe.objectives.dppo import DPPO
from streamrl.recipe.objectives.grpo import DAPO, DR_GRPO, GRPO
from streamrl.recipe.objectives.gspo import GSPO
from streamrl.recipe.objectives.maxrl import MAXRL
from streamrl.recipe.objectives.method import Advantages, Surrogate
from streamrl.recipe.objectives.ppo import PPO
from streamrl.recipe.objectives.reinforce_plus_plus import REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE, OverCohort
from streamrl.recipe.objectives.rloo import RLOO
from streamrl.recipe.objectives.sapo import SAPO
from streamrl.recipe.objectives.spo import SPO

METHODS = {
    method.name: method
    for method in (
        GRPO,
        DR_GRPO,
        DAPO,
        RLOO,
        REINFORCE_PLUS_PLUS,
        REINFORCE_PLUS_PLUS_BASELINE,
        GSPO,
        CISPO,
        PPO,
        DISTILLATION,
        DPPO,
        MAXRL,
        SAPO,
        SPO,
    )
}
SURROGATES: dict[str, Surrogate] = {method.surrogate.name: method.surrogate for method in METHODS.values()}
ADVANTAGES: dict[str, Advantages] = {
    part.name: part for part in (*(method.advantages for method in METHODS.values()), OverCohort())
}
ALL_SURROGATES: dict[str, Surrogate] = SURROGATES | {CUSTOM: CustomLoss()}
ALL_ADVANTAGES: dict[str, Advantages] = ADVANTAGES | {CUSTOM: CustomAdvantages()}
"""Formulas, and the declaration of one of the user's own."""


def _texts(parts: Mapping[str, Surrogate] | Mapping[str, Advantages]) -> str:
    """The first paragraph of each part's docstring, for ``streamrl explain``."""
    paragraphs = {name: (inspect.getdoc(type(part)) or "").partition("\n\n")[0] for name, part in parts.items()}
    return ";\n".join(f"``{name}``: {text}".replace("\n", " ") for name, text in paragraphs.items())


# Types of keys are made from the tables, so that a new objective is listed in no other place. Mypy sees strings.
if TYPE_CHECKING:
    AlgorithmName = str
    SurrogateName = str
    AdvantagesName = str
else:
    AlgorithmName = StrEnum("AlgorithmName", {name.upper(): name for name in METHODS})
    AlgorithmName.__doc__ = """Published method, which sets the fields of ``[objective]`` that the recipe does not set.

Two differences from the papers: GRPO divides by tokens, as most trainers do now (its paper: ``sequence_mean``); a KL in
the loss is ``k2``, whose gradient is that of KL(pi, reference) (GRPO's paper: ``k3``)."""
    SurrogateName = StrEnum("SurrogateName", {name.upper(): name for name in ALL_SURROGATES})
    SurrogateName.__doc__ = f"Loss of a token, by its advantage A and r = pi / pi_proximal.\n\n{_texts(ALL_SURROGATES)}"
    AdvantagesName = StrEnum("AdvantagesName", {name.upper(): name for name in ALL_ADVANTAGES})
    AdvantagesName.__doc__ = f"Baseline and scale of an advantage.\n\n{_texts(ALL_ADVANTAGES)}"
