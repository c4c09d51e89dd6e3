"""GSPO (arXiv 2507.18071): one ratio for all tokens of a sequence."""

from __future__ import annotations

from streamrl.recipe.objectives.grpo import GroupStd, TokenClip
from streamrl.recipe.objectives.method import LossNormalization, Method


class SequenceClip(TokenClip, frozen=True):
    """token_clip with the geometric mean of the sequence's ratios (GSPO, arXiv 2507.18071)"""

    # Equations 5 and 7, not the token variant: the gradient of the ratio reaches all tokens of the sequence.
    name = "sequence_clip"
    whole_sequences = True


GSPO = Method("gspo", SequenceClip(), GroupStd(), LossNormalization.SEQUENCE_MEAN, clip_low=3e-4, clip_high=4e-4)
