"""Language models that a run serves in processes of their own, beside the actor's engines, and the recipe's
``[judge]``, one of them. ``rewards.served`` is the process and its clients; ``[teacher]``, the other one, is in
``recipe.objectives.teacher``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from streamrl.recipe.field_types import (
    EngineDtype,
    Natural,
    NaturalFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
    advanced,
)
from streamrl.recipe.rewards import Reward

JUDGE_REWARD = "judge"
"""Name of the built-in reward that sends questions to the judge."""
JUDGE_SOCKET = "STREAMRL_JUDGE_SOCKET"
"""Variable of reward processes with the path of the judge's socket; empty: the run has no judge."""
JUDGE_MODEL = "STREAMRL_JUDGE_MODEL"
"""Variable of reward processes with the name of the judge's model."""
JUDGE_CONTEXT = 4096
"""Limit of the tokens of a question and its answer where ``judge.max_model_len`` is 0."""
CALLS_AT_ONCE = 64
"""Open questions of one judge reward in each reward worker where its options have no ``concurrency``."""


class YieldKind(StrEnum):
    """State of the judge without questions. ``never``: ready. ``pause``: paused scheduler. ``sleep``: weights in
    CPU memory and no KV cache (vLLM's level 1; paused on a CPU, where a sleep frees no memory)."""

    NEVER = "never"
    PAUSE = "pause"
    SLEEP = "sleep"


class ServedModel(Section, frozen=True):
    """A vLLM engine that answers questions about what the policy sampled, and gets no pushed weights."""

    model: Annotated[str, "a Hugging Face directory, or a model of the Hub (empty: none)"] = ""
    when_idle: YieldKind = YieldKind.PAUSE
    batch: Annotated[Positive, advanced, 'number of questions at which it begins, unless when_idle = "never"'] = 32
    batch_wait_s: Annotated[
        NaturalFloat, advanced, "it begins with fewer questions when the first has waited for this time"
    ] = 0.5
    actor_share: Annotated[
        float,
        Meta(ge=0, le=1),
        advanced,
        "it begins while the actor's engines run at most this share of their capacity (1: always)",
    ] = 1.0
    max_wait_s: Annotated[
        PositiveFloat,
        advanced,
        "it begins, even while the actor's engines are busy, when a question has waited for this time",
    ] = 10.0
    max_num_seqs: Annotated[Positive, "questions that it answers at once"] = 32
    max_model_len: Annotated[Natural, advanced, "tokens of the longest question and answer"] = 0
    dtype: Annotated[EngineDtype, advanced, "dtype of the model, as engines.dtype"] = "auto"
    threads: Annotated[Natural, advanced, "number of threads on a CPU (0: a quarter of the host's)"] = 0
    cores: Annotated[str, advanced, 'cores on a CPU, such as "6-7", in place of threads'] = ""
    gpu_memory_utilization: Annotated[Share, "share of the memory of its GPU"] = 0.3
    restarts: Annotated[Natural, advanced, "number of restarts after it died"] = 3

    @property
    def is_own(self) -> bool:
        """Whether the run starts the model itself."""
        return bool(self.model)


class Judge(ServedModel, frozen=True):
    """A vLLM engine for the ``judge`` rewards that name no endpoint."""

    model: Annotated[str, "a Hugging Face directory, or a model of the Hub (empty: no judge)"] = ""
    max_model_len: Annotated[
        Natural, advanced, "tokens of the longest question and answer (0: the limit of the model, 4096 at most)"
    ] = 0


def compares_siblings(reward: Reward) -> bool:
    """Return whether ``reward`` is a judge that compares the completions of a group, and scores none alone."""
    return reward.function == JUDGE_REWARD and reward.options.get("compare", "none") != "none"


def address_problem(endpoint: str) -> str:
    """Return the problem of the address of an OpenAI-compatible server, with its remedy; empty: it can be asked."""
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, or too large
        is_address = False
    host = endpoint.rpartition("@")[2]
    if not is_address:
        return f'"{host}" is no address: write it as http://host:8000/v1'
    if host != endpoint:
        return f'"...@{host}" has a name or password, which logs would show: set api_key_variable in its place'
    return ""


def asks_own_judge(reward: Reward) -> bool:
    """Return whether ``reward`` sends questions to the judge of the run, not to another endpoint."""
    return reward.function == JUDGE_REWARD and not reward.options.get("endpoint")
