"""The recipe's ``[judge]``: a language model of the run's own that scores completions, beside the actor's engines."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from streamrl.recipe.objective import Natural, NaturalFloat, Positive, PositiveFloat, Section, Share
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
    """What the judge does while it has nothing to judge. ``never``: nothing. ``pause``: its scheduler stands still.
    ``sleep``: its weights go to host memory and its KV cache is freed (vLLM's level 1; on a CPU, where that frees
    nothing, it is paused)."""

    NEVER = "never"
    PAUSE = "pause"
    SLEEP = "sleep"


class Judge(Section, frozen=True):
    """A vLLM engine for the ``judge`` rewards that name no endpoint. ``model``: a Hugging Face directory (empty:
    there is none). ``when_idle``: what it does except for batches, which begin with ``batch`` questions, or when the
    first has waited for ``batch_wait_s``. ``actor_share``: a batch begins only while the actor's engines run at most
    this share of what they can (1: always), or when a question has waited for ``max_wait_s``. ``max_num_seqs``:
    questions that it answers at once; ``max_model_len``: the longest question and answer in tokens (0: what the model
    can, 4096 at most). ``dtype``: as ``engines.dtype``. ``threads``: on a CPU (0: a quarter of the host's), or
    ``cores``: such as ``"6-7"``. ``gpu_memory_utilization``: of its GPU.
    ``restarts``: how often it is started again when it died."""

    model: str = ""
    when_idle: YieldKind = YieldKind.PAUSE
    batch: Positive = 32
    batch_wait_s: NaturalFloat = 0.5
    actor_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    max_wait_s: PositiveFloat = 10.0
    max_num_seqs: Positive = 32
    max_model_len: Natural = 0
    dtype: str = "auto"
    threads: Natural = 0
    cores: str = ""
    gpu_memory_utilization: Share = 0.3
    restarts: Natural = 3


def asks_own_judge(reward: Reward) -> bool:
    """Whether ``reward`` is for the judge of the run."""
    return reward.function == JUDGE_REWARD and not reward.options.get("endpoint")
