"""The recipe: everything a user sets, as frozen structs. Derived values are properties, never fields.

Unknown keys are refused. Relative paths are relative to the recipe file, those of run directories
(``run.directory``, ``checkpoint.resume_from``) to the current directory (resolved by ``load_recipe``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from streamrl.plan.training_memory import Gathered
from streamrl.recipe.algorithms import METHODS
from streamrl.recipe.judge import Judge
from streamrl.recipe.objective import (
    Count,
    Natural,
    NaturalFloat,
    Objective,
    OffPolicy,
    Positive,
    PositiveFloat,
    Section,
    Share,
)
from streamrl.recipe.rewards import AdaptiveTimeout, FailurePolicy, Reward, RewardLimits
from streamrl.recipe.scheduling import GroupSizing, LengthSorted, Rollout, TailBatching, slots, trains_on_policy

__all__ = ["AdaptiveTimeout", "FailurePolicy", "Reward", "RewardLimits"]  # also found here, beside the other sections


ENGINE_RESTARTS = 3
RECOVERY_INTERVAL = 100
"""Steps between checkpoints where ``checkpoint.every`` is 0."""


class JournalKind(StrEnum):
    """What of the run survives. ``fsync``: what is trained is on the disk before, so a power cut loses nothing that
    counts. ``process``: as much after any kill of its processes. ``none``: nothing but checkpoints."""

    FSYNC = "fsync"
    PROCESS = "process"
    NONE = "none"


class Run(Section, frozen=True):
    """Identity and length of the run. ``name``: of its directory (with the time), below ``directory``. ``steps``:
    versions of the weights, counted from 0. ``seed``: of the order of prompts and of what is sampled. ``journal``: what
    it goes on from after a death. ``restarts``: how often the controller, the trainer with it, or each reward worker
    may die and be started again (0: the first death ends the run). ``deterministic``: batches and
    weights are the same however often the run is killed and resumed; slower, for verification. ``stall_timeout_s``:
    where nothing moved for so long, and for longer than any other time limit explains, the run says who waits for whom
    and ends (0: never)."""

    name: str = "run"
    directory: str = "runs"
    seed: Natural = 0
    steps: Positive = 100
    restarts: Natural = 3
    journal: JournalKind = JournalKind.FSYNC
    deterministic: bool = False
    stall_timeout_s: NaturalFloat = 600.0


class Model(Section, frozen=True):
    """``path``: a directory in Hugging Face format, with a tokenizer."""

    path: str


class Prompts(Section, frozen=True):
    """``train``: where prompts come from: a ``.jsonl``, ``.parquet`` or ``.arrow`` file, the directory of a Hugging
    Face dataset (``data/gsm8k?split=train``), a task of reasoning-gym
    (``reasoning_gym:chain_sum?size=1000&seed=0``), or ``module:name`` / ``file.py:name`` of an (async) iterator or a
    function that returns one. Each row has ``prompt`` (text), ``messages`` (a chat, written with the model's own
    template) or ``prompt_token_ids``, an optional ``prompt_id``, and the columns that the rewards name;
    ``?prompt=COLUMN`` takes the text from another column, and ``?chat=true`` makes a chat of it. ``shuffle``: stored
    rows come in another order in each epoch."""

    train: str
    shuffle: bool = True


class Sampling(Section, frozen=True):
    """How completions are sampled: with ``temperature`` (training uses the same), from the likeliest tokens that have
    ``top_p`` of the probability together, until they end or have ``max_tokens``."""

    temperature: PositiveFloat = 1.0
    top_p: Share = 1.0
    max_tokens: Positive = 512


class OptimizerKind(StrEnum):
    """AdamW on float32 masters. ``adamw_8bit``: moments in 8 bits (bitsandbytes). ``adamw_offloaded``: masters and
    moments in host memory, for a GPU that cannot hold them."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    ADAMW_OFFLOADED = "adamw_offloaded"


class ComputeDtype(StrEnum):
    """What matrix products run in; masters, gradients and the loss are float32. ``auto``: bfloat16 on CUDA."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Training(Section, frozen=True):
    """The trainer: ``ranks`` processes (FSDP2) on ``device`` (``auto``: CUDA where there is one), each with ``threads``
    on a CPU (0: what the engines leave). AdamW with ``learning_rate``, which rises linearly over ``warmup_steps``,
    ``beta1``, ``beta2`` and ``weight_decay``; gradients are clipped to a norm of ``max_grad_norm``. A round that trains
    several batches at once takes as many steps along their mean gradient. ``streaming``: groups are trained while
    others are still sampled, with the gradient of the whole batch. ``updates_per_batch`` > 1: so many optimizer steps
    on each batch; all but the first are off-policy, and nothing streams. ``micro_batch_tokens``: tokens that go through
    the model at once. ``activation_checkpointing``: activations are computed again in the backward, for memory.
    ``compile``: layers by torch.compile; the start takes longer. ``gathered``: with several ranks, whether each holds
    the whole model while a batch is open ("batch"), or one layer at a time ("layer", for models that do not fit;
    groups are then trained when every rank has some); "auto" takes "batch" where that fits."""

    ranks: Count = 1
    device: str = "auto"
    threads: Natural = 0
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    learning_rate: NaturalFloat = 1e-6
    warmup_steps: Natural = 0
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    weight_decay: NaturalFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    updates_per_batch: Positive = 1
    micro_batch_tokens: Positive = 2048
    streaming: bool = True
    compute_dtype: ComputeDtype = ComputeDtype.AUTO
    gathered: Gathered = Gathered.AUTO
    activation_checkpointing: bool = False
    compile: bool = False


class Lora(Section, frozen=True):
    """Low-rank adapters (peft) instead of all weights. ``rank`` 0: none. They are scaled by ``alpha`` / rank.
    ``targets`` empty: peft's choice."""

    rank: Natural = 0
    alpha: PositiveFloat = 16.0
    targets: tuple[str, ...] = ()


class ReleaseKind(StrEnum):
    """What late in a round becomes of engines whose requests fit on the others. ``drain``: they stand idle until the
    next round, and their cores are for training. ``stop``: their processes end as well, which frees their memory;
    to start them again takes as long as at the start of the run."""

    NEVER = "never"
    DRAIN = "drain"
    STOP = "stop"


class EngineKind(StrEnum):
    """What generates. ``simulated``: no model and no vLLM, to try a pipeline with: random text in about the time that a
    small model takes, whatever the weights, which are fetched and verified as ever. The rest of the run is real."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class EngineShape(Section, frozen=True):
    """Another set of engines on the same devices: ``count`` engines of ``tensor_parallel_size`` workers.
    ``max_num_seqs`` 0: of one engine, so that the set runs as many as the first. ``rounds``: kinds of rounds that it
    always serves, such as ``["long"]``; empty: which set serves a round is decided from what is measured."""

    count: Count
    tensor_parallel_size: Count = 1
    max_num_seqs: Natural = 0
    kv_tokens: Natural = 0
    cores: tuple[str, ...] = ()
    rounds: tuple[str, ...] = ()


class Engines(Section, frozen=True):
    """``count`` vLLM engines, each of ``tensor_parallel_size`` workers, which run ``max_num_seqs`` requests at once.
    ``dtype`` ``auto``: float32 on a CPU, bfloat16 on CUDA. ``cores``: of each engine on a CPU, such as ``["0-3",
    "4-7"]``; ``gpu_memory_utilization``: of a GPU, for all engines on it. ``max_model_len`` 0: prompt and completion
    limits of this recipe decide. ``max_num_batched_tokens``: of one step of an engine (0: 16,384 on a GPU of 70 GiB or
    more). ``kv_tokens``: room of the KV cache of one engine (0: what fits). ``release``: what
    becomes of engines that can be spared late in a round (rounds that train on-policy). ``sets``: other sets, prepared
    beside this one; one set is awake (rounds that train on-policy). ``sleep_level``: of the others on CUDA, where 1
    keeps their weights in host memory, 2 drops them, 0 ends their processes, as is done on a CPU. ``start_timeout_s``:
    for an engine that was stopped to be ready again. ``rounds``: kinds of rounds that the first set always serves.

    An engine that dies is started again, at most ``restarts`` times until one of its starts has served ten minutes
    (None: 3, where engines are neither stopped nor changed; 0: a death ends the run), and the others serve on, as
    long as ``min_serving`` can be had. One from which nothing was heard for ``silence_timeout_s``, or whose requests
    did not get on for ``progress_timeout_s``, is ended first; a slow one is not. A trajectory that was being sampled at
    ``fatal_deaths`` deaths is dropped (0: never)."""

    kind: EngineKind = EngineKind.VLLM
    count: Count = 1
    tensor_parallel_size: Count = 1
    max_num_seqs: Positive = 256
    max_model_len: Natural = 0
    max_num_batched_tokens: Natural = 0
    kv_tokens: Natural = 0
    rounds: tuple[str, ...] = ()
    dtype: str = "auto"
    cores: tuple[str, ...] = ()
    gpu_memory_utilization: Share = 0.85
    start_timeout_s: PositiveFloat = 300.0
    release: ReleaseKind = ReleaseKind.NEVER
    sets: tuple[EngineShape, ...] = ()
    sleep_level: Annotated[int, Meta(ge=0, le=2)] = 1
    restarts: Natural | None = None
    min_serving: Positive = 1
    silence_timeout_s: PositiveFloat = 30.0
    progress_timeout_s: PositiveFloat = 120.0
    fatal_deaths: Natural = 3


class Weights(Section, frozen=True):
    """The weight path. ``push_timeout_s``: for a version to be live on every engine. ``audit_interval``: every so
    many versions the engines' own checksums of all live parameters are written to ``audits.jsonl`` (0: never; slow).
    ``engine_timeout_s``: how long after the first engine another one may go on fetching before it leaves service and
    catches up beside the run (0: all are waited for). ``canary``: after each push every engine scores a few fixed
    tokens, which the trainer scored, too; they must agree. Nobody waits for the answers; simulated engines are not
    asked."""

    audit_interval: Natural = 0
    push_timeout_s: PositiveFloat = 120.0
    engine_timeout_s: NaturalFloat = 0.0
    canary: bool = True


class Evaluation(Section, frozen=True):
    """Held-out ``prompts`` (as ``prompts.train``; empty: none): after every ``every`` steps on the first ``limit`` (0:
    all); before the first step (``at_start``) and after the last one (``at_end``) on all.

    ``temperature`` None: the sampling temperature. ``samples``: completions of each prompt, for avg@k and pass@k.
    ``reward``: the name of the reward that is the score there (empty: the first one that is no shadow), of which
    ``success_reward`` or more is a success. ``store_samples``: write every completion to ``evaluations/`` of the run.
    """

    prompts: str = ""
    samples: Count = 1
    store_samples: bool = True
    every: Natural = 0
    limit: Natural = 0
    at_start: bool = True
    at_end: bool = True
    temperature: PositiveFloat | None = None
    success_reward: float = 1.0
    reward: str = ""


class ResumedRewards(StrEnum):
    """What a resumed run is scored with. ``kept``: what scored when the checkpoint was written, changed live or not.
    ``recipe``: what ``[[rewards]]`` says."""

    KEPT = "kept"
    RECIPE = "recipe"


class Checkpoint(Section, frozen=True):
    """Trainer state and a Hugging Face directory every ``every`` steps (0: every 100 where there is a journal, else
    none), and ``at_end``.

    Kept: the last ``keep``, the ``keep_best`` of highest held-out score, and every ``keep_every``-th step (0: none).
    ``min_free_gib``: refuse to write, and stop the run, where less than this would be left on the disk.
    ``resume_from``: a checkpoint directory to start from: weights, optimizer and version, on any number of ranks.
    ``rewards``: those that were attached to the running run when it was written, or the recipe's.
    """

    every: Natural = 0
    keep: Positive = 2
    keep_best: Natural = 0
    keep_every: Natural = 0
    at_end: bool = True
    min_free_gib: NaturalFloat = 1.0
    resume_from: str = ""
    rewards: ResumedRewards = ResumedRewards.KEPT


class TransportKind(StrEnum):
    """What streams between processes run on."""

    IPC = "ipc"
    TCP = "tcp"


class Launch(StrEnum):
    """Who starts a process: this run, or a person (``streamrl serve``)."""

    LOCAL = "local"
    EXTERNAL = "external"


class TransportSecurity(StrEnum):
    """``curve``: what other hosts reach is encrypted and lets in known keys only. ``none``: it is open to everybody."""

    CURVE = "curve"
    NONE = "none"


class Transport(Section, frozen=True):
    """Streams between processes. With tcp: ``port``, ``port + 1``, ... of ``host``; the dry run lists them. ``keys``:
    a directory of ``streamrl keys``; without it nothing may listen on other addresses than this host's own, unless
    ``security`` is "none". With it, every tcp socket asks for keys."""

    kind: TransportKind = TransportKind.IPC
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1024, le=65000)] = 5700
    engines: Launch = Launch.LOCAL
    training: Launch = Launch.LOCAL
    security: TransportSecurity = TransportSecurity.CURVE
    keys: str = ""


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
    tail_batching: TailBatching = TailBatching()
    length_sorted: LengthSorted = LengthSorted()
    group_sizing: GroupSizing = GroupSizing()
    sampling: Sampling = Sampling()
    reward_limits: RewardLimits = RewardLimits()
    judge: Judge = Judge()
    objective: Objective = Objective()
    off_policy: OffPolicy = OffPolicy()
    training: Training = Training()
    lora: Lora = Lora()
    engines: Engines = Engines()
    weights: Weights = Weights()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    transport: Transport = Transport()
    metrics: Metrics = Metrics()

    @property
    def max_in_flight(self) -> int:
        """Slots: trajectories that may be in flight at once."""
        return slots(self.rollout, self.tail_batching, self.length_sorted, self.group_sizing)

    @property
    def on_policy(self) -> bool:
        """Whether every token is trained by the version that sampled it."""
        return trains_on_policy(self.rollout, self.tail_batching, self.length_sorted)

    @property
    def score(self) -> str:
        """The name of the reward whose value is the score of an evaluation."""
        first = next((reward for reward in self.rewards if not reward.shadow), self.rewards[0])
        return self.evaluation.reward or first.label

    @property
    def core_restarts(self) -> int:
        """How often the controller may die: without a journal it could not go on."""
        return 0 if self.run.journal is JournalKind.NONE else self.run.restarts

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints (0: none). What a journal holds, and what is trained again after a death, is
        bounded by one: there is one now and then, also where the recipe asks for none before the end."""
        return self.checkpoint.every or (0 if self.run.journal is JournalKind.NONE else RECOVERY_INTERVAL)

    @property
    def engine_restarts(self) -> int:
        """How often an engine that died is started again."""
        engines = self.engines
        if engines.restarts is not None:
            return engines.restarts
        return 0 if engines.release is ReleaseKind.STOP or engines.sets else ENGINE_RESTARTS

    @property
    def compares_logprobs(self) -> bool:
        """Whether engines compute what the trainer does, so that they can be compared: simulated ones do not."""
        return self.engines.kind is EngineKind.VLLM

    @property
    def canary(self) -> bool:
        """Whether engines score fixed tokens after each push."""
        return self.weights.canary and self.compares_logprobs

    @property
    def dynamic_sampling(self) -> bool:
        """Whether groups without a signal are dropped and refilled."""
        chosen = self.rollout.dynamic_sampling
        return METHODS[self.objective.algorithm].dynamic_sampling if chosen is None else chosen
