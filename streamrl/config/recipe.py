"""The recipe: everything a user sets, as frozen structs. Derived values are properties, never fields.

Unknown keys are refused. Relative paths are relative to the recipe file (resolved by ``load_recipe``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(gt=0)]
Natural = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NaturalFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every recipe section."""


class Run(Section, frozen=True):
    """Identity and length of the run."""

    name: str = "run"
    directory: str = "runs"
    seed: Natural = 0
    steps: Positive = 100


class Model(Section, frozen=True):
    """A directory in Hugging Face format, with a tokenizer."""

    path: str


class Prompts(Section, frozen=True):
    """Where prompts come from: a ``.jsonl`` path, or ``module:name`` / ``file.py:name`` of an (async) iterator
    or a function that returns one. Each row has ``prompt`` (text) or ``prompt_token_ids``, an optional
    ``prompt_id``, and the columns that the rewards name."""

    train: str
    shuffle: bool = True


class RoundKind(StrEnum):
    """How rounds are formed."""

    SYNCHRONOUS = "synchronous"
    CONTINUOUS = "continuous"


class InFlight(StrEnum):
    """What a weight update does to requests in flight: keep their KV, recompute it, or cut and resume by tokens."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    RESUME = "resume"


class StalePolicy(StrEnum):
    """What happens to a trajectory that would become older than ``max_staleness``."""

    WAIT = "wait"
    DROP = "drop"
    REGENERATE = "regenerate"


class Rollout(Section, frozen=True):
    """One optimizer step consumes ``prompts_per_batch`` groups of ``group_size`` trajectories."""

    prompts_per_batch: Positive = 32
    group_size: Positive = 8
    rounds: RoundKind = RoundKind.SYNCHRONOUS
    max_staleness: Natural = 0
    in_flight: InFlight = InFlight.KEEP
    when_stale: StalePolicy = StalePolicy.WAIT
    dynamic_sampling: bool = False

    @property
    def batch_trajectories(self) -> int:
        """Trajectories in one batch."""
        return self.prompts_per_batch * self.group_size


class Sampling(Section, frozen=True):
    """How completions are sampled. Training uses the same temperature."""

    temperature: PositiveFloat = 1.0
    top_p: Share = 1.0
    max_tokens: Positive = 512


class Reward(Section, frozen=True):
    """A reward function: ``module:function`` or ``path/to/file.py:function``."""

    function: str
    weight: float = 1.0
    time_limit_s: PositiveFloat = 30.0

    @property
    def name(self) -> str:
        """The function's own name, as metrics show it."""
        return self.function.rpartition(":")[2]


class RewardLimits(Section, frozen=True):
    """When failing rewards stop the run: more than ``max_failed_share`` of the last ``window`` trajectories."""

    max_failed_share: Share = 0.2
    window: Positive = 256
    workers: Positive = 1
    concurrency: Positive = 64


class Objective(StrEnum):
    """The objective that is differentiated."""

    GRPO = "grpo"


class LossNormalization(StrEnum):
    """What a step's loss is divided by.

    ``token_mean``: all trained tokens of the batch (DAPO, arXiv 2503.14476); ``sequence_mean``: each
    sample's tokens, then samples (GRPO, arXiv 2402.03300); ``constant``: ``samples * max_tokens`` (Dr. GRPO, arXiv
    2503.20783).
    """

    TOKEN_MEAN = "token_mean"
    SEQUENCE_MEAN = "sequence_mean"
    CONSTANT = "constant"


class AdvantageNormalization(StrEnum):
    """Divide a group's centred rewards by their standard deviation, or not (Dr. GRPO)."""

    STD = "std"
    NONE = "none"


class Training(Section, frozen=True):
    """The trainer."""

    ranks: Positive = 1
    device: str = "auto"
    threads: Natural = 0
    objective: Objective = Objective.GRPO
    loss_normalization: LossNormalization = LossNormalization.TOKEN_MEAN
    advantage_normalization: AdvantageNormalization = AdvantageNormalization.STD
    learning_rate: NaturalFloat = 1e-6
    warmup_steps: Natural = 0
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    weight_decay: NaturalFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    importance_cap: PositiveFloat = 2.0
    micro_batch_tokens: Positive = 4096
    streaming: bool = True


class Engines(Section, frozen=True):
    """The vLLM engines. ``max_context`` 0: prompt and completion limits of this recipe decide."""

    count: Positive = 1
    max_running: Positive = 256
    max_context: Natural = 0
    dtype: str = "auto"
    cores: tuple[str, ...] = ()
    gpu_memory_share: Share = 0.85
    start_timeout_s: PositiveFloat = 300.0


class Weights(Section, frozen=True):
    """The weight path. ``audit_interval``: every so many versions the engines' own checksums of all live parameters are
    written to ``audits.jsonl`` (0: never; slow)."""

    audit_interval: Natural = 0
    push_timeout_s: PositiveFloat = 120.0


class Evaluation(Section, frozen=True):
    """Held-out prompts: after every ``every`` steps on the first ``limit`` (0: all); at start and end on all.

    ``temperature`` None: the sampling temperature.
    """

    prompts: str = ""
    every: Natural = 0
    limit: Natural = 0
    at_start: bool = True
    at_end: bool = True
    temperature: PositiveFloat | None = None


class Checkpoint(Section, frozen=True):
    """Trainer state and a Hugging Face directory every ``every`` steps (0: only at the end), the last ``keep`` kept."""

    every: Natural = 0
    keep: Positive = 2
    at_end: bool = True


class TransportKind(StrEnum):
    """What streams between processes run on."""

    IPC = "ipc"
    TCP = "tcp"


class Launch(StrEnum):
    """Who starts a process: this run, or a person (``streamrl serve``)."""

    LOCAL = "local"
    EXTERNAL = "external"


class Transport(Section, frozen=True):
    """Streams between processes. With tcp: ``port``, ``port + 1``, ... of ``host``; the dry run lists them."""

    kind: TransportKind = TransportKind.IPC
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1024, le=65000)] = 5700
    engines: Launch = Launch.LOCAL
    training: Launch = Launch.LOCAL


class Metrics(Section, frozen=True):
    """``endpoint``: where the metrics socket binds; empty: an ipc endpoint that the run prints."""

    endpoint: str = ""


class Recipe(Section, frozen=True):
    """One run."""

    model: Model
    prompts: Prompts
    rewards: tuple[Reward, ...]
    run: Run = Run()
    rollout: Rollout = Rollout()
    sampling: Sampling = Sampling()
    reward_limits: RewardLimits = RewardLimits()
    training: Training = Training()
    engines: Engines = Engines()
    weights: Weights = Weights()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    transport: Transport = Transport()
    metrics: Metrics = Metrics()

    @property
    def max_in_flight(self) -> int:
        """Slots: trajectories that may be in flight at once."""
        return (self.rollout.max_staleness + 1) * self.rollout.batch_trajectories
