"""The recipe's ``[judge]``: a language model of the run's own that scores completions, beside the actor's engines."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from streamrl.recipe.fields import (
    EngineDtype,
    Natural,
    NaturalFloat,
    Positive,
    PositiveFloat,
    Section,
    Share,
    advanced,
    doc,
)
from streamrl.recipe.rewards import Reward

JUDGE_REWARD = "judge"
"""The built-in reward that asks it."""
JUDGE_SOCKET = "STREAMRL_JUDGE_SOCKET"
"""Environment of reward processes: where the run's own judge answers; empty: there is none."""
JUDGE_MODEL = "STREAMRL_JUDGE_MODEL"
"""Environment of reward processes: the model that it serves, under this name."""
JUDGE_CONTEXT = 4096
"""Tokens of a question and its answer, at most, where the recipe leaves ``judge.max_model_len`` to us."""
CALLS_AT_ONCE = 64
"""What one judge reward asks at once, of each worker, where its options do not say it."""


class YieldKind(StrEnum):
    """State of the judge while it has nothing to judge. ``never``: it stays ready. ``pause``: its scheduler is paused.
    ``sleep``: its weights go to host memory and its KV cache is freed (vLLM's level 1; on a CPU, where that frees
    nothing, it is paused)."""

    NEVER = "never"
    PAUSE = "pause"
    SLEEP = "sleep"


class Judge(Section, frozen=True):
    """A vLLM engine for the ``judge`` rewards that name no endpoint."""

    model: Annotated[str, doc("a Hugging Face directory, or a model of the Hub (empty: there is none)")] = ""
    when_idle: Annotated[YieldKind, doc("")] = YieldKind.PAUSE
    batch: Annotated[Positive, advanced("questions with which it begins, unless it is never idle")] = 32
    batch_wait_s: Annotated[NaturalFloat, advanced("or with fewer, when the first has waited for this time")] = 0.5
    actor_share: Annotated[
        float,
        Meta(ge=0, le=1),
        advanced("it begins while the actor's engines run at most this share of what they can (1: always)"),
    ] = 1.0
    max_wait_s: Annotated[PositiveFloat, advanced("or when a question has waited for this time")] = 10.0
    max_num_seqs: Annotated[Positive, doc("questions that it answers at once")] = 32
    max_model_len: Annotated[
        Natural, advanced("tokens of the longest question and answer (0: what the model can, 4096 at most)")
    ] = 0
    dtype: Annotated[EngineDtype, advanced("as engines.dtype")] = "auto"
    threads: Annotated[Natural, advanced("on a CPU (0: a quarter of the host's)")] = 0
    cores: Annotated[str, advanced('on a CPU, such as "6-7", in place of threads')] = ""
    gpu_memory_utilization: Annotated[Share, doc("of its GPU")] = 0.3
    restarts: Annotated[Natural, advanced("how often it is started again when it died")] = 3


def asks_own_judge(reward: Reward) -> bool:
    """Return whether ``reward`` is for the judge of the run."""
    return reward.function == JUDGE_REWARD and not reward.options.get("endpoint")
