"""The reward ``length``: a penalty for the length of a completion, 0 inside of the bounds. Listed in ``catalog``."""

from __future__ import annotations

from enum import StrEnum

from streamrl.recipe.field_types import Natural, Positive
from streamrl.rewards.declared import BadOption, BuiltinReward, Options, RewardCallable, declare


class LengthUnit(StrEnum):
    """Unit of a length."""

    TOKENS = "tokens"
    WORDS = "words"
    CHARACTERS = "characters"


class LengthOptions(Options, frozen=True):
    """0 for a completion of ``shortest`` to ``longest`` units; outside the value falls to -1 over ``margin`` units.

    ``longest`` 0: no upper bound. With ``longest`` = maximum - ``margin`` it is DAPO's soft overlong punishment (arXiv
    2503.14476, equation 13). ``unit``: tokens (as sampled, the end token among them), words or characters."""

    shortest: Natural = 0
    longest: Natural = 0
    margin: Positive = 64
    unit: LengthUnit = LengthUnit.TOKENS


def _length(options: LengthOptions) -> RewardCallable:
    if not options.shortest and not options.longest:
        raise BadOption('"longest" is 0 and so is "shortest": set one')
    if options.longest and options.longest < options.shortest:
        raise BadOption(f'"longest" = {options.longest} is below "shortest" = {options.shortest}: correct one')

    def penalty(size: int) -> float:
        below = max(0, options.shortest - size)
        above = max(0, size - options.longest) if options.longest else 0
        return -min(1.0, (below + above) / options.margin) or 0.0  # 0.0 in place of -0.0

    if options.unit is LengthUnit.TOKENS:

        def length_in_tokens(_completion: str, *, token_ids: list[int]) -> float:
            return penalty(len(token_ids))

        return declare(length_in_tokens, provided=["token_ids"])

    def length_of_text(completion: str) -> float:
        return penalty(len(completion.split() if options.unit is LengthUnit.WORDS else completion))

    return declare(length_of_text)


LENGTH = BuiltinReward("length", LengthOptions, _length)
