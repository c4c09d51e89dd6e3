"""SPO (arXiv 2509.13232): a baseline for each prompt that is kept from step to step, so that a prompt needs no group.
Here siblings count in the baseline, too, so that groups of any size have one formula."""

from __future__ import annotations

from typing import Annotated

from streamrl.recipe.field_types import NaturalFloat, PositiveFloat, Share
from streamrl.recipe.objectives.grpo import TokenClip
from streamrl.recipe.objectives.method import Advantages, Method


class TrackedBaseline(Advantages, frozen=True):
    """minus the prompt's mean reward so far, which forgets as the policy changes and has the siblings in it, divided by
    the standard deviation of rewards from their baselines (SPO, arXiv 2509.13232)"""

    name = "tracked"
    tracks_prompts = True

    half_change: Annotated[
        PositiveFloat,
        "mean change of a token's logprob, added up over steps, that halves the weight of a prompt's earlier rewards",
    ] = 0.06
    least_memory: Annotated[Share, "share of their weight that earlier rewards keep at least"] = 0.875
    most_memory: Annotated[Share, "share of their weight that earlier rewards keep at most"] = 0.96
    prior: Annotated[NaturalFloat, "weight of the mean reward of all prompts in the baseline of one, in samples"] = 1.0


SPO = Method("spo", TokenClip(), TrackedBaseline())
