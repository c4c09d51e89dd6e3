"""The recipe's ``[[rewards]]`` and ``[reward_limits]``: what scores completions, and what may stop it.

A failure is recorded with its reason and never becomes a value: there is no "zero" among the failure policies. The one
exception is what a recipe declares itself: ``late_is_wrong``, for tasks where an answer that takes too long *is* wrong.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from streamrl.recipe.objective import Count, Natural, NaturalFloat, Positive, PositiveFloat, Section, Share

COMBINE_WEIGHTS = "weights"
COMBINE_SEPARATE = "separate"

PATH_OPTIONS = {"reward_model": ("path",), "judge": ("cache",)}
"""Options of built-in rewards that are paths: relative to the recipe, as all paths in it."""


class FailurePolicy(StrEnum):
    """What becomes of a sample without a reward. ``drop_sample``: it is not trained, its siblings are. ``drop_group``:
    none of its group is. ``stop``: the run ends."""

    DROP_SAMPLE = "drop_sample"
    DROP_GROUP = "drop_group"
    STOP = "stop"


class AdaptiveTimeout(Section, frozen=True):
    """A time limit for each prompt: ``factor`` times its slowest correct call so far, at least ``min_s`` and at most
    the reward's ``timeout_s`` (RollPacker, arXiv 2509.21009). Until a prompt was solved once, the limit is
    ``timeout_s``. A call is correct when its value is at least ``correct_from``. ``key``: a column that names what
    is run, where that is not the prompt; every prompt needs it."""

    factor: Annotated[float, Meta(ge=1)] = 1.5
    min_s: PositiveFloat = 2.0
    correct_from: float = 1.0
    key: str = "prompt_id"


class Reward(Section, frozen=True):
    """A reward: ``function`` is ``module:function``, ``path/to/file.py:function``, or the name of a built-in one.

    ``weight``: what it counts beside the others. ``adaptive_timeout``: a time limit for each prompt, learnt. ``name``:
    what metrics call it (the function's own name). ``options``: keyword arguments that every call gets; a built-in one
    is made with them. ``part_weights``: where it returns named parts, what each counts (1). ``shadow``: it scores, and
    nothing is trained on it. ``trusted``: it runs in the worker's own loop, so it must be quick or a coroutine
    function; all others run in processes that are killed at ``timeout_s``. ``late_is_wrong``: a call past its limit
    has the value ``wrong_value``; otherwise it failed, and ``on_timeout`` is its policy where that is not
    ``on_failure``. ``concurrency``: calls at once (0: ``reward_limits.concurrency``). ``rate_per_s``: calls started a
    second (0: no bound). ``retries``: of a call that raised, with pauses of ``backoff_s``, twice that, and so on.
    ``memory_mib``: what a process of it may allocate. ``environment``: variables that it may see, such as an API key.
    Rewards that are not trusted share processes: of these the largest ``memory_mib`` counts, and each sees the
    variables of all.
    """

    function: str
    name: str = ""
    options: dict[str, Any] = {}
    weight: float = 1.0
    part_weights: dict[str, float] = {}
    shadow: bool = False
    trusted: bool = False
    timeout_s: PositiveFloat = 30.0
    adaptive_timeout: AdaptiveTimeout | None = None
    late_is_wrong: bool = False
    wrong_value: float = 0.0
    concurrency: Natural = 0
    rate_per_s: NaturalFloat = 0.0
    retries: Natural = 0
    backoff_s: PositiveFloat = 0.5
    on_failure: FailurePolicy = FailurePolicy.DROP_SAMPLE
    on_timeout: FailurePolicy | None = None
    memory_mib: Positive = 1024
    environment: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """What metrics and records call it."""
        return self.name or self.function.rpartition(":")[2]


class RewardLimits(Section, frozen=True):
    """Rewards together. ``combine``: ``weights`` adds them by weight; ``separate`` compares each with its siblings'
    alone and adds the advantages by weight (GDPO, arXiv 2601.05242); ``module:function`` gets the values by name and
    returns the reward. The run stops when, of the last ``window`` trajectories, more failed than
    ``max_failed_share`` x ``window``. ``workers``: processes that score. Each has ``concurrency`` calls at once, and
    at most ``processes`` of its own for functions that are not trusted."""

    combine: str = COMBINE_WEIGHTS
    max_failed_share: Share = 0.2
    window: Positive = 256
    workers: Count = 1
    processes: Count = 16
    concurrency: Positive = 64
