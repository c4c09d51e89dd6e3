"""REINFORCE++ (arXiv 2501.03262), without and with the group's mean as baseline, and SortedRL's whitening over a
cohort."""

from __future__ import annotations

from streamrl.recipe.objectives.grpo import TokenClip
from streamrl.recipe.objectives.method import Advantages, KlPlace, Method


class OverBatch(Advantages, frozen=True):
    """minus the mean of the whole batch, divided by its deviation (REINFORCE++, arXiv 2501.03262)"""

    name = "batch"
    whole_batch = True


class GroupThenBatch(Advantages, frozen=True):
    """minus the siblings' mean, divided by the batch's deviation (REINFORCE++-baseline)"""

    name = "group_then_batch"
    compares_siblings = True
    whole_batch = True


class OverCohort(Advantages, frozen=True):
    """mean and deviation of the last ``cohort_batches`` batches (SortedRL trains a cohort in several, by length)"""

    name = "cohort"
    whole_batch = True
    of_cohort = True


REINFORCE_PLUS_PLUS = Method("reinforce_plus_plus", TokenClip(), OverBatch(), kl_in=KlPlace.REWARD)
REINFORCE_PLUS_PLUS_BASELINE = Method("reinforce_plus_plus_baseline", TokenClip(), GroupThenBatch())
