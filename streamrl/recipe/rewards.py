"""The recipe's ``[[rewards]]`` and ``[reward_limits]``: what scores completions, and what may stop it.

A failure is recorded with its reason and never becomes a value: there is no "zero" among the failure policies. The one
exception is what a recipe declares itself: ``late_is_wrong``, for tasks where an answer that takes too long *is* wrong.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from streamrl.recipe.fields import (
    Count,
    Factor,
    Natural,
    NaturalFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
    advanced,
    doc,
)

COMBINE_WEIGHTS = "weights"
COMBINE_SEPARATE = "separate"

PATH_OPTIONS = {"reward_model": ("path",), "judge": ("cache",)}
"""Options of built-in rewards that are paths: relative to the recipe, as all paths in it."""


class FailurePolicy(StrEnum):
    """Policy for a sample without a reward. ``drop_sample``: it is not trained, its siblings are. ``drop_group``: none
    of its group is. ``stop``: the run ends."""

    DROP_SAMPLE = "drop_sample"
    DROP_GROUP = "drop_group"
    STOP = "stop"


class AdaptiveTimeout(Section, frozen=True):
    """A time limit for each prompt: a multiple of its slowest correct call so far (RollPacker, arXiv 2509.21009). Until
    a prompt was solved once, the limit is the reward's ``timeout_s``, which is never exceeded. The reward ``code``
    learns one for each of its test cases, too, from runs that passed it."""

    factor: Annotated[Factor, doc("of the slowest correct call")] = 1.5
    min_s: Annotated[PositiveFloat, doc("the least limit")] = 2.0
    correct_from: Annotated[float, doc("a value from which a call is correct")] = 1.0
    key: Annotated[str, doc("a column that names what is run, where that is not the prompt; every prompt needs it")] = (
        "prompt_id"
    )


class Reward(Section, frozen=True):
    """A reward. A function that is not ``trusted`` runs in processes that are killed at ``timeout_s``; such rewards
    share them: of these the largest ``memory_mib`` counts, and each sees the variables of all."""

    function: Annotated[str, doc("module:function, path/to/file.py:function, or the name of a built-in one")]
    name: Annotated[str, doc("what metrics call it (empty: the function's own name)")] = ""
    options: Annotated[
        dict[str, Any], doc("keyword arguments that every call gets; a built-in one is made with them")
    ] = {}
    weight: Annotated[float, doc("what it counts beside the others")] = 1.0
    part_weights: Annotated[
        dict[str, float], advanced("where it returns named parts, what each counts (1 where not named)")
    ] = {}
    shadow: Annotated[bool, doc("it scores, and nothing is trained on it")] = False
    trusted: Annotated[bool, doc("it runs in the worker's own loop, so it must be quick or a coroutine function")] = (
        False
    )
    timeout_s: Annotated[PositiveFloat, doc("of a call")] = 30.0
    adaptive_timeout: Annotated[AdaptiveTimeout | None, advanced("a time limit for each prompt, learnt")] = None
    late_is_wrong: Annotated[bool, advanced("a call past its limit has the value wrong_value; otherwise it failed")] = (
        False
    )
    wrong_value: Annotated[float, advanced("with late_is_wrong")] = 0.0
    concurrency: Annotated[Natural, doc("calls at once (0: reward_limits.concurrency)")] = 0
    rate_per_s: Annotated[NaturalFloat, doc("calls started a second (0: no bound)")] = 0.0
    retries: Annotated[Natural, doc("of a call that raised")] = 0
    backoff_s: Annotated[PositiveFloat, advanced("the pause before a retry; twice that before the next")] = 0.5
    on_failure: Annotated[FailurePolicy, doc("")] = FailurePolicy.DROP_SAMPLE
    on_timeout: Annotated[FailurePolicy | None, advanced("of a call past its limit (not set: on_failure)")] = None
    special_tokens: Annotated[
        bool,
        advanced("completions show special tokens, such as <think> of some models, all but the one that ends them"),
    ] = False
    memory_mib: Annotated[Positive, doc("what a process of it may allocate")] = 1024
    environment: Annotated[tuple[str, ...], doc("variables that it may see, such as an API key")] = ()

    def failure_policy(self, *, late: bool) -> FailurePolicy:
        """Return the policy for a sample without this value. ``late``: it was not there within the time limit."""
        return self.on_timeout if late and self.on_timeout is not None else self.on_failure

    @property
    def label(self) -> str:
        """Name of the reward in metrics and records."""
        return self.name or self.function.rpartition(":")[2]


class RewardLimits(Section, frozen=True):
    """Rewards together. The run stops when, of the last ``window`` trajectories, more failed than
    ``max_failed_share`` x ``window``."""

    combine: Annotated[
        str,
        doc(
            '"weights" adds them by weight; "separate" compares each with its siblings\' alone and adds the advantages '
            "by weight (GDPO, arXiv 2601.05242); module:function gets the values by name and returns the reward"
        ),
    ] = COMBINE_WEIGHTS
    max_failed_share: Annotated[Share, doc("of the last trajectories; with more the run stops")] = 0.2
    window: Annotated[Positive, advanced("trajectories over which failures are counted")] = 256
    workers: Annotated[Count, doc("processes that score")] = 1
    processes: Annotated[Count, advanced("of one worker, for functions that are not trusted")] = 16
    concurrency: Annotated[Positive, doc("calls at once of one worker")] = 64
