"""The recipe's ``[[rewards]]`` and ``[reward_limits]``: functions that score completions, their limits, and the policy
for failures. Reward workers run the functions (``rewards``); the controller applies the policies.

A failure is recorded with its reason and never becomes a reward of 0. The only exception is ``late_is_wrong``, for
tasks where an answer that takes too long is wrong."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Struct

from streamrl.base.types import JsonObject, Texts
from streamrl.recipe.field_types import (
    Count,
    Factor,
    Natural,
    NaturalFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
    advanced,
)

COMBINE_WEIGHTS = "weights"
COMBINE_SEPARATE = "separate"
WHOLE_REWARD = "/whole"
"""Name of the sum of all rewards of whole completions, where others have numbers for steps or tokens. No reward has it:
recipes refuse names with "/"."""


class RewardTraits(Struct, frozen=True):
    """Declaration of a built-in reward, for the parts of a run that do not import it. ``file``: option that is a path;
    ``model``: option that is a directory or a name of the Hub, whose model it runs on a GPU unless its option
    ``device`` is ``cpu``. Paths are relative to the recipe."""

    file: str = ""
    model: str = ""


_TRAITS = {"reward_model": RewardTraits(model="path"), "judge": RewardTraits(file="cache")}
NO_TRAITS = RewardTraits()


def reward_traits(function: str) -> RewardTraits:
    """Return the traits of the reward ``function``. A user's function has none: the recipe declares them."""
    return _TRAITS.get(function, NO_TRAITS)


class FailurePolicy(StrEnum):
    """Policy for a sample without a reward. ``drop_sample``: the sample is not trained, its siblings are.
    ``drop_group``: no sample of its group is trained. ``stop``: the run ends."""

    DROP_SAMPLE = "drop_sample"
    DROP_GROUP = "drop_group"
    STOP = "stop"


class RewardCredit(StrEnum):
    """Unit to which a reward gives numbers. ``completion``: a number to a completion. ``steps``: numbers to steps, as
    spans of the text or one a sampled token; each is compared with all numbers of the group, and the advantage of a
    token has those of its own step and of the steps behind it (process supervision, arXiv 2402.03300, section 4.1.3).
    ``tokens``: numbers to spans or tokens, which are added to the advantages of just these tokens."""

    COMPLETION = "completion"
    STEPS = "steps"
    TOKENS = "tokens"


def number_name(credit: RewardCredit, label: str) -> str:
    """Name in ``ScoredTrajectory.token_values`` of the numbers that the reward ``label`` gave to steps or tokens."""
    return f"{credit}/{label}"


def credit_of(name: str) -> tuple[RewardCredit, str]:
    """Return credit and label of a name in ``token_values``: the inverse of ``number_name``. The label is empty for
    values that no reward gave, such as the logprobs of a teacher."""
    credit, slash, label = name.partition("/")
    return (RewardCredit(credit), label) if slash else (RewardCredit.COMPLETION, "")


class AdaptiveTimeout(Section, frozen=True):
    """Time limit for each prompt: a multiple of its slowest correct call so far (RollPacker, arXiv 2509.21009), at most
    the reward's ``timeout_s``, which is also the limit until the prompt was solved once. The reward ``code`` also has a
    limit for each test case, from runs that passed it."""

    factor: Annotated[Factor, "multiple of the slowest correct call"] = 1.5
    min_s: Annotated[PositiveFloat, "smallest limit"] = 2.0
    correct_from: Annotated[float, "smallest value of a correct call"] = 1.0
    key: Annotated[
        str, "column that identifies the program, where several prompts run the same one; every prompt needs it"
    ] = "prompt_id"


class Reward(Section, frozen=True):
    """A reward. A function that is not ``trusted`` runs in a process that is killed at ``timeout_s``. Such rewards
    share their processes: the largest ``memory_mib`` among them counts, and each sees the variables of all."""

    function: Annotated[str, "module:function, path/to/file.py:function, or the name of a built-in reward"]
    name: Annotated[str, "name in metrics (empty: the function's name)"] = ""
    options: Annotated[JsonObject, "keyword arguments of every call; of a built-in reward: its options"] = {}
    weight: Annotated[float, "weight in the sum of the rewards"] = 1.0
    part_weights: Annotated[
        dict[str, float], advanced, "weights of the named parts that it returns (1 for other parts)"
    ] = {}
    credit: Annotated[RewardCredit, advanced] = RewardCredit.COMPLETION
    shadow: Annotated[bool, "it scores, and is not trained"] = False
    trusted: Annotated[bool, "it runs in the worker's event loop, so it must be quick or a coroutine function"] = False
    timeout_s: Annotated[PositiveFloat, "time limit of a call"] = 30.0
    adaptive_timeout: Annotated[AdaptiveTimeout | None, advanced, "learnt time limit for each prompt"] = None
    late_is_wrong: Annotated[
        bool, advanced, "a call past its time limit has the value wrong_value; otherwise it failed"
    ] = False
    wrong_value: Annotated[float, advanced, "value of a late call, with late_is_wrong"] = 0.0
    concurrency: Annotated[Natural, "calls at once (0: reward_limits.concurrency)"] = 0
    rate_per_s: Annotated[NaturalFloat, "calls started a second (0: no bound)"] = 0.0
    retries: Annotated[Natural, "retries of a call that raised"] = 0
    backoff_s: Annotated[
        PositiveFloat, advanced, "pause before the first retry; it doubles with each further retry"
    ] = 0.5
    on_failure: FailurePolicy = FailurePolicy.DROP_SAMPLE
    on_timeout: Annotated[
        FailurePolicy | None, advanced, "policy for a call past its time limit (not set: on_failure)"
    ] = None
    special_tokens: Annotated[
        bool, advanced, "completions have special tokens, such as <think> of some models, but not the end token"
    ] = False
    memory_mib: Annotated[Positive, "limit of the memory of its process"] = 1024
    variables: Annotated[Texts, "environment variables that it sees, such as an API key"] = ()
    gpus: Annotated[
        Natural | None,
        advanced,
        "GPUs that each reward worker sees for it (not set: 1 for reward_model unless on the CPU, else none)",
    ] = None

    def failure_policy(self, *, late: bool) -> FailurePolicy:
        """Return the policy for a sample without this value. ``late``: whether the call reached its time limit."""
        return self.on_timeout if late and self.on_timeout is not None else self.on_failure

    @property
    def model(self) -> str:
        """Directory of the model that the reward runs on a GPU; empty where it has none."""
        if self.options.get("device") == "cpu":
            return ""
        return str(self.options.get(reward_traits(self.function).model, ""))

    @property
    def worker_gpus(self) -> int:
        """Number of GPUs that each reward worker needs for this reward."""
        return int(bool(self.model)) if self.gpus is None else self.gpus

    @property
    def label(self) -> str:
        """Name of the reward in metrics and records."""
        return self.name or self.function.rpartition(":")[2]


def with_current_keys(reward: Any) -> Any:
    """Return the table of a reward with the keys of today: runs before 2026-11-29 recorded ``variables`` as
    ``environment``. Anything else is returned as it is."""
    if not isinstance(reward, dict) or "variables" in reward:
        return reward
    return {"variables" if key == "environment" else key: value for key, value in reward.items()}


class RewardLimits(Section, frozen=True):
    """Limits of all rewards together. The run stops when more than ``max_failed_share`` x ``window`` of the last
    ``window`` trajectories have no reward."""

    combine: Annotated[
        str,
        '"weights": weighted sum; "separate": each reward is compared with its siblings\' alone, and the '
        "advantages are added by weight (GDPO, arXiv 2601.05242); module:function: gets the values by name and "
        "returns the reward",
    ] = COMBINE_WEIGHTS
    max_failed_share: Annotated[Share, "share of failures among the last trajectories above which the run stops"] = 0.2
    window: Annotated[Positive, advanced, "trajectories over which failures are counted"] = 256
    workers: Annotated[Count, "reward workers (processes)"] = 1
    processes: Annotated[Count, advanced, "processes of one worker for functions that are not trusted"] = 16
    concurrency: Annotated[Positive, "calls at once of one worker"] = 64
