"""The recipe: everything a user sets, as frozen structs. Derived values are properties, never fields.

Unknown keys are refused. Relative paths are relative to the recipe file, those of run directories
(``run.directory``, ``checkpoint.resume_from``) to the current directory (resolved by ``load_recipe``)."""

from __future__ import annotations

import math
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import replace

from streamrl.recipe.environment import Environment
from streamrl.recipe.fields import (
    Count,
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
from streamrl.recipe.judge import Judge
from streamrl.recipe.objective import Objective, ObjectiveSettings, OffPolicy, objective_settings
from streamrl.recipe.objectives.catalog import METHODS
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.scheduling import (
    GroupSizing,
    LengthSorted,
    Rollout,
    TailBatching,
    largest_batch,
    slots,
    trains_on_policy,
)

HELD_OUT = "held_out"
ENGINE_RESTARTS = 3
STAGES = "pipeline_parallel_size"  # of vLLM: workers are these times the tensor parallel size
ROUNDING = ("quantization", "quantization_config", "kv_cache_dtype")
"""Arguments of vLLM with which an engine computes in fewer bits than the trainer."""
RECOVERY_INTERVAL = 100
"""Steps between checkpoints where ``checkpoint.every`` is 0."""


class JournalKind(StrEnum):
    """Durability of a run. ``fsync``: what is trained is on the disk before, so a power cut loses nothing that counts.
    ``process``: as much after any kill of its processes. ``none``: nothing but checkpoints."""

    FSYNC = "fsync"
    PROCESS = "process"
    NONE = "none"


class Run(Section, frozen=True):
    """Identity and length of the run."""

    name: Annotated[str, doc("of its directory, with the time behind it")] = "run"
    project: Annotated[str, doc("of several runs, for trackers and `streamrl runs`")] = ""
    tags: Annotated[tuple[str, ...], doc("of the run, for trackers and `streamrl runs`")] = ()
    directory: Annotated[str, doc("where the directories of runs are, relative to the current directory")] = "runs"
    seed: Annotated[Natural, doc("of the order of prompts and of what is sampled")] = 0
    steps: Annotated[Positive, doc("versions of the weights, counted from 0")] = 100
    restarts: Annotated[
        Natural,
        advanced(
            "how often the controller, the trainer with it, or each reward worker may die and be started again "
            "(0: the first death ends the run)"
        ),
    ] = 3
    journal: Annotated[JournalKind, doc("what the run resumes from after a death")] = JournalKind.FSYNC
    deterministic: Annotated[
        bool,
        doc("batches and weights are the same however often the run is killed and resumed; slower, for verification"),
    ] = False
    observers: Annotated[
        tuple[str, ...],
        advanced(
            "classes (module:Class or file.py:Class) that inherit streamrl.contracts.Observer, and are called with "
            "what happens in the run"
        ),
    ] = ()
    stall_timeout_s: Annotated[
        NaturalFloat,
        advanced(
            "where nothing moved for this time, and for longer than any other time limit explains, the run says who "
            "waits for whom and ends (0: never)"
        ),
    ] = 600.0


class Model(Section, frozen=True):
    """The policy."""

    path: Annotated[
        str, doc("a directory in Hugging Face format, with a tokenizer, or a model of the Hub (owner/name@revision)")
    ]


class Prompts(Section, frozen=True):
    """The source of prompts. Each row has ``prompt`` (text, or a list of messages), ``messages`` (a chat, written with
    the model's own template) or ``prompt_token_ids``, perhaps a ``prompt_id``, and the columns of the rewards."""

    train: Annotated[
        str,
        doc(
            "a .jsonl, .parquet or .arrow file, the directory of a Hugging Face dataset (data/gsm8k?split=train), a "
            "data set of the Hub (hf:openai/gsm8k@revision?config=main&split=train), a "
            "task of reasoning-gym (reasoning_gym:chain_sum?size=1000&seed=0), or module:name / file.py:name of an "
            "(async) iterator or a function that returns one; ?prompt=COLUMN takes it from another column, ?limit=N "
            "the first N rows, and ?chat=true makes a chat of a text"
        ),
    ]
    template: Annotated[str, doc('jinja, for the text of a prompt: "{{question}}\\nAnswer after ####."')] = ""
    answer: Annotated[str, doc('for the column "answer": another column, or an expression or a template of jinja')] = ""
    shuffle: Annotated[bool, doc("stored rows come in another order in each epoch")] = True


class Sampling(Section, frozen=True):
    """Sampling parameters of completions. Training computes logprobs of the distribution that all of them make."""

    temperature: Annotated[PositiveFloat, doc("training uses the same")] = 1.0
    top_p: Annotated[Share, doc("from the likeliest tokens that have this probability together")] = 1.0
    top_k: Annotated[Natural, doc("from so many of the likeliest tokens (0: all)")] = 0
    min_p: Annotated[
        float, Meta(ge=0, lt=1), doc("from tokens with this share of the likeliest one's probability or more")
    ] = 0.0
    max_tokens: Annotated[Positive, doc("of one completion")] = 512
    min_tokens: Annotated[Natural, doc("none of the first so many is an end token")] = 0
    stop: Annotated[
        tuple[str, ...], doc("texts that end a completion; the tokens that make one are its last, and are trained")
    ] = ()


class OptimizerKind(StrEnum):
    """AdamW on float32 masters. ``adamw_8bit``: moments in 8 bits (bitsandbytes). ``adamw_offloaded``: masters and
    moments in host memory, for a GPU that cannot hold them."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    ADAMW_OFFLOADED = "adamw_offloaded"


class ComputeDtype(StrEnum):
    """Dtype of matrix products; masters, gradients and the loss are float32. ``auto``: bfloat16 on CUDA."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Gathered(StrEnum):
    """Time during which every rank holds whole parameters. ``batch``: while a batch is open. ``layer``: one layer at a
    time, for models that do not fit; groups are then trained when every rank has some. ``auto``: ``batch`` where that
    fits."""

    AUTO = "auto"
    BATCH = "batch"
    LAYER = "layer"


class Training(Section, frozen=True):
    """The trainer: AdamW over FSDP2 ranks. A round that trains several batches at once takes as many steps along their
    mean gradient."""

    ranks: Annotated[Count, doc("processes of the trainer (FSDP2)")] = 1
    device: Annotated[str, doc('"auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N"')] = "auto"
    threads: Annotated[Natural, advanced("of each rank on a CPU (0: what the engines leave)")] = 0
    optimizer: Annotated[OptimizerKind, doc("")] = OptimizerKind.ADAMW
    learning_rate: Annotated[NaturalFloat, doc("of AdamW")] = 1e-6
    warmup_steps: Annotated[Natural, doc("over which the learning rate rises linearly")] = 0
    schedule: Annotated[str, doc("behind the warm-up, by transformers' names, such as cosine or linear")] = "constant"
    schedule_options: Annotated[dict[str, float | str], advanced("as lr_scheduler_kwargs: {min_lr_rate = 0.1}")] = {}
    schedule_steps: Annotated[Natural, advanced("with which the schedule ends (0: run.steps)")] = 0
    epochs: Annotated[NaturalFloat, doc("passes over prompts.train, in place of run.steps (0: run.steps)")] = 0.0
    beta1: Annotated[float, Meta(ge=0, lt=1), advanced("of AdamW")] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1), advanced("of AdamW")] = 0.95
    weight_decay: Annotated[NaturalFloat, doc("of AdamW")] = 0.0
    max_grad_norm: Annotated[PositiveFloat, doc("gradients are clipped to this norm")] = 1.0
    updates_per_batch: Annotated[
        Positive, doc("optimizer steps on each batch; all but the first are off-policy, and above 1 nothing streams")
    ] = 1
    epochs_per_batch: Annotated[
        Positive,
        advanced("passes over each batch, of updates_per_batch steps each, all against the logprobs before the first"),
    ] = 1
    micro_batch_tokens: Annotated[
        Natural, doc("tokens that go through the model at once (0: 2,048; on a CPU from 512, by model and prompts)")
    ] = 0
    streaming: Annotated[
        bool, advanced("groups are trained while others are still sampled, with the gradient of the whole batch")
    ] = True
    compute_dtype: Annotated[ComputeDtype, doc("")] = ComputeDtype.AUTO
    gathered: Annotated[Gathered, advanced("with several ranks")] = Gathered.AUTO
    tensor_parallel_size: Annotated[
        Count, advanced("ranks over which each layer is split; they train the same rows; the others share rows (FSDP2)")
    ] = 1
    expert_parallel_size: Annotated[
        Count, advanced("ranks over which experts are split whole: 1, or tensor_parallel_size")
    ] = 1
    context_parallel_size: Annotated[
        Count, advanced("ranks over which each row is cut, so that a long sequence takes less memory on each")
    ] = 1
    replicas: Annotated[Count, advanced("groups of ranks of which each has the whole model (HSDP)")] = 1
    routing_replay: Annotated[
        bool | Literal["auto"],
        advanced("mixtures of experts: the trainer's routers take the experts that the engines chose"),
    ] = "auto"
    activation_checkpointing: Annotated[
        bool, doc("activations are computed again in the backward, which saves memory")
    ] = False
    compile: Annotated[bool, doc("layers by torch.compile; the start takes longer")] = False

    @property
    def ranks_per_group(self) -> int:
        """Number of consecutive ranks that train the same groups: they split layers or rows."""
        return self.tensor_parallel_size * self.context_parallel_size

    def row_tokens(self, device: str, parameters: int, prompt: int = 0) -> int:
        """Tokens of a row on ``"cpu"`` or ``"cuda"``: ``micro_batch_tokens``, or what costs least where it is 0. A CPU
        keeps 512 in its caches. More, to 2,048, for a model beyond them, which every row reads and whose gradient it
        adds to; and so that few rows repeat the longest ``prompt``, which siblings share."""
        chosen = min(max(512, parameters >> 14, 16 * prompt), 2048) if "cpu" in (device, self.device) else 2048
        return self.micro_batch_tokens or chosen


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has room for (``max_lora_rank``)."""


class LoraSync(StrEnum):
    """Weights that engines are sent. ``merged``: those of the base with the adapter added, rounded. ``adapter``: the
    adapter alone, which trainer and engines compute beside the base; slower sampling."""

    MERGED = "merged"
    ADAPTER = "adapter"


class Lora(Section, frozen=True):
    """Low-rank adapters (peft) instead of all weights."""

    rank: Annotated[Natural, doc("0: none, all weights are trained")] = 0
    alpha: Annotated[PositiveFloat, doc("adapters are scaled by alpha / rank")] = 16.0
    targets: Annotated[
        tuple[str, ...], doc("modules that are adapted, or one regular expression; empty: peft's choice")
    ] = ()
    sync: Annotated[LoraSync, doc("")] = LoraSync.MERGED
    rslora: Annotated[bool, advanced("adapters are scaled by alpha / sqrt(rank)")] = False
    dora: Annotated[bool, advanced("lengths of rows are trained apart from their directions (DoRA); merged only")] = (
        False
    )

    @property
    def named_targets(self) -> tuple[str, ...]:
        """``targets`` without ``all-linear``, peft's name for every linear module except the output head."""
        return () if self.targets == ("all-linear",) else self.targets

    @property
    def pattern(self) -> str:
        """The regular expression of the full names of modules, where ``targets`` is one; empty: names."""
        return "".join(self.targets) if len(self.targets) == 1 and not re.fullmatch(r"[\w.-]*", self.targets[0]) else ""

    @property
    def served(self) -> bool:
        """Return whether engines compute the adapter beside the base."""
        return self.rank > 0 and self.sync is LoraSync.ADAPTER


class ReleaseKind(StrEnum):
    """Release of engines whose requests fit on the others late in a round. ``drain``: they are idle until the next
    round, and their cores are for training."""

    NEVER = "never"
    DRAIN = "drain"


class EngineKind(StrEnum):
    """Kind of inference engine. ``simulated``: no model and no vLLM, to try a pipeline with: random text in about the
    time that a small model takes, whatever the weights, which are fetched and verified as ever. The rest of the run is
    real."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class EngineShape(Section, frozen=True):
    """Another set of engines on the same devices."""

    count: Annotated[Count, doc("engines")]
    tensor_parallel_size: Annotated[Count, doc("workers of each")] = 1
    max_num_seqs: Annotated[
        Natural, doc("requests that one engine runs at once (0: so that the set runs as many as the first)")
    ] = 0
    kv_tokens: Annotated[Natural, doc("room of the KV cache of one engine (0: what fits)")] = 0
    cores: Annotated[tuple[str, ...], doc("of each engine on a CPU")] = ()
    rounds: Annotated[
        tuple[str, ...],
        doc('kinds of rounds that it always serves, such as ["long"]; empty: decided from what is measured'),
    ] = ()
    args: Annotated[dict[str, Any], doc("as engines.args, and beside them")] = {}


class Engines(Section, frozen=True):
    """The engines that sample. One that dies is started again while the others serve on."""

    kind: Annotated[EngineKind, doc("")] = EngineKind.VLLM
    count: Annotated[Count, doc("engines")] = 1
    tensor_parallel_size: Annotated[Count, doc("workers of each engine")] = 1
    max_num_seqs: Annotated[Positive, doc("requests that one engine runs at once")] = 256
    max_model_len: Annotated[Natural, doc("tokens of prompt and completion (0: the limits of this recipe)")] = 0
    max_num_batched_tokens: Annotated[
        Natural, doc("tokens of one step of an engine (0: vLLM's choice; 16,384 on a GPU of 70 GiB or more)")
    ] = 0
    kv_tokens: Annotated[Natural, advanced("room of the KV cache of one engine (0: what fits)")] = 0
    rounds: Annotated[tuple[str, ...], advanced("kinds of rounds that the first set always serves (with sets)")] = ()
    dtype: Annotated[EngineDtype, doc('"auto": float32 on a CPU, bfloat16 on CUDA')] = "auto"
    cores: Annotated[tuple[str, ...], doc('of each engine on a CPU, such as ["0-3", "4-7"]')] = ()
    gpu_memory_utilization: Annotated[Share, doc("of a GPU, for all engines on it")] = 0.85
    args: Annotated[
        dict[str, Any],
        doc("arguments of vLLM's engine (AsyncEngineArgs) that no other key sets, such as speculative_config"),
    ] = {}
    start_timeout_s: Annotated[PositiveFloat, advanced("for an engine that was stopped to be ready again")] = 300.0
    release: Annotated[ReleaseKind, doc("for rounds that end: not continuous ones")] = ReleaseKind.NEVER
    sets: Annotated[tuple[EngineShape, ...], advanced("other sets, prepared beside this one; one is in use")] = ()
    sleep_level: Annotated[
        int,
        Meta(ge=0, le=1),
        advanced(
            "of sets that are not in use, on CUDA: 1 keeps their weights in host memory, 0 ends their processes, as is "
            "done on a CPU"
        ),
    ] = 1
    restarts: Annotated[
        Natural, advanced("of one engine, until one of its starts has served ten minutes (0: a death ends the run)")
    ] = ENGINE_RESTARTS
    min_serving: Annotated[Positive, advanced("with fewer engines that can be had the run ends")] = 1
    silence_timeout_s: Annotated[PositiveFloat, advanced("an engine that says nothing for this time is killed")] = 30.0
    progress_timeout_s: Annotated[
        PositiveFloat, advanced("an engine none of whose requests advances for this time is killed")
    ] = 120.0
    fatal_deaths: Annotated[
        Natural, advanced("a trajectory that was being sampled at this many deaths is dropped (0: never)")
    ] = 3


class Weights(Section, frozen=True):
    """The way of the weights from the trainer to the engines."""

    audit_interval: Annotated[
        Natural,
        advanced(
            "versions between audits: the engines' own checksums of all live parameters go to audits.jsonl "
            "(0: never; slow)"
        ),
    ] = 0
    push_timeout_s: Annotated[PositiveFloat, advanced("for a version to be live on every engine")] = 120.0
    transport: Annotated[
        str,
        advanced(
            "a place in an object store, as s3://BUCKET/PREFIX (also gs://, az://, file:///), through which engines of "
            "another site get the weights (empty: from the trainer)"
        ),
    ] = ""
    canary: Annotated[
        bool,
        advanced(
            "after each push every engine scores a few fixed tokens, which the trainer scored, too; they must agree. "
            "Nobody waits for the answers; simulated engines are not asked"
        ),
    ] = True


class EvaluationSet(Section, frozen=True):
    """Held-out prompts of several. What is not set is as in ``[evaluation]``."""

    prompts: str
    every: Natural | None = None
    limit: Natural | None = None


class Evaluation(Section, frozen=True):
    """Held-out prompts."""

    prompts: Annotated[
        str | dict[str, str | EvaluationSet],
        doc('as prompts.train; empty: none; or several: {a = "a.jsonl", b = {prompts = "b.jsonl", every = 50}}'),
    ] = ""
    samples: Annotated[Count, doc("completions of each prompt, for avg@k and pass@k")] = 1
    store_samples: Annotated[bool, advanced("every completion is written to evaluations/ of the run")] = True
    every: Annotated[Natural, doc("steps between evaluations on the first prompts (0: none)")] = 0
    limit: Annotated[Natural, doc("prompts of those evaluations (0: all)")] = 0
    at_start: Annotated[bool, doc("on all prompts, before the first step")] = True
    at_end: Annotated[bool, doc("on all prompts, after the last step")] = True
    temperature: Annotated[NaturalFloat | None, doc("0: greedy; not set: the sampling temperature")] = None
    success_reward: Annotated[float, advanced("a score from which a completion is a success")] = 1.0
    reward: Annotated[str, advanced("the name of the reward that is the score (empty: the first that counts)")] = ""

    @property
    def sets(self) -> dict[str, EvaluationSet]:
        """The sets by name, with nothing left out; one that has no name is ``held_out``."""
        given = self.prompts if isinstance(self.prompts, dict) else {HELD_OUT: self.prompts} if self.prompts else {}
        own = {name: EvaluationSet(prompts=one) if isinstance(one, str) else one for name, one in given.items()}
        unset = {"every": self.every, "limit": self.limit}
        return {
            name: replace(one, **{k: v for k, v in unset.items() if getattr(one, k) is None})
            for name, one in own.items()
        }

    @property
    def regular(self) -> tuple[int, int]:
        """Steps between evaluations of any set (0: none), and the ``limit`` that control has for them: above 0 where
        they are not on all prompts of all sets."""
        every = {one.every or 0 for one in self.sets.values()}
        limits = [one.limit or 0 for one in self.sets.values()]
        return math.gcd(*every), max(limits, default=0) or int(len(every) > 1)


class ResumedRewards(StrEnum):
    """Rewards of a resumed run. ``kept``: those in use when the checkpoint was written, changed live or not.
    ``recipe``: those of ``[[rewards]]``."""

    KEPT = "kept"
    RECIPE = "recipe"


class Checkpoint(Section, frozen=True):
    """Trainer state and a Hugging Face directory. Those that are kept: the last ones, the best ones, and
    every N-th."""

    every: Annotated[Natural, doc("steps between checkpoints (0: 100 where there is a journal, else none)")] = 0
    keep: Annotated[Positive, doc("the last ones")] = 2
    keep_best: Annotated[Natural, doc("those of the highest held-out score")] = 0
    keep_every: Annotated[Natural, advanced("also those of every such step (0: none)")] = 0
    at_end: Annotated[bool, doc("one when the run ends")] = True
    min_free_gib: Annotated[
        NaturalFloat, advanced("refuse to write, and stop the run, where less would be left on the disk")
    ] = 1.0
    resume_from: Annotated[
        str,
        doc(
            "a checkpoint directory, or a copy in an object store, to start from: weights, optimizer and version, on "
            "any number of ranks"
        ),
    ] = ""
    copy_to: Annotated[
        str,
        advanced(
            "a place in an object store, as s3://BUCKET/PREFIX: every checkpoint that is kept is copied there, below "
            "the name of the run's directory, while the run goes on"
        ),
    ] = ""
    rewards: Annotated[ResumedRewards, advanced("of a run that starts from a checkpoint")] = ResumedRewards.KEPT


class TransportKind(StrEnum):
    """Transport of the streams between processes."""

    IPC = "ipc"
    TCP = "tcp"


class LaunchedBy(StrEnum):
    """Launcher of a process: this run, or a person (``streamrl serve``)."""

    LOCAL = "local"
    EXTERNAL = "external"


class TransportSecurity(StrEnum):
    """``curve``: what other hosts reach is encrypted and lets in known keys only. ``none``: it is open to everybody."""

    CURVE = "curve"
    NONE = "none"


class Transport(Section, frozen=True):
    """Streams between processes."""

    kind: Annotated[TransportKind, doc("")] = TransportKind.IPC
    host: Annotated[str, doc("with tcp: the address of one interface of this host")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1024, le=65000), doc("with tcp: the first of the ports; the dry run lists them")] = (
        5700
    )
    engines: Annotated[LaunchedBy, doc("")] = LaunchedBy.LOCAL
    training: Annotated[LaunchedBy, doc("")] = LaunchedBy.LOCAL
    training_hosts: Annotated[
        tuple[str, ...],
        advanced(
            "addresses of the hosts of external trainer ranks, in the order of the ranks, equally many on each; ranks "
            "meet on the first; empty: all are on `host`"
        ),
    ] = ()
    security: Annotated[TransportSecurity, advanced("of what other hosts reach")] = TransportSecurity.CURVE
    keys: Annotated[
        str,
        doc(
            "a directory of `streamrl keys`, for which every tcp socket asks then; without it nothing listens on other "
            "addresses than this host's own"
        ),
    ] = ""


class ClusterKind(StrEnum):
    """``local``: all that the run starts is on this host. ``ray``: engines and trainer ranks are on hosts of a Ray
    cluster."""

    LOCAL = "local"
    RAY = "ray"


class Cluster(Section, frozen=True):
    """Hosts of the engines and trainer ranks that the run starts. The controller, rewards and environments are on the
    host of `streamrl train`, which is one of the cluster; all see the run's directory."""

    kind: Annotated[ClusterKind, doc("")] = ClusterKind.LOCAL
    address: Annotated[str, doc("HOST:PORT of Ray's head; `streamrl train --cluster` sets it and `kind`")] = "auto"
    hosts: Annotated[Natural, doc("least number of hosts, with fewer the run does not start (0: those it needs)")] = 0
    trainer_hosts: Annotated[Natural, advanced("hosts that share the trainer ranks (0: the fewest that hold them)")] = 0
    engine_hosts: Annotated[
        Natural, advanced("hosts that share the engines (0: all without a rank; all, where each has one)")
    ] = 0
    ports: Annotated[str, advanced("FIRST-LAST, of this run's streams on each host")] = "5700-5899"
    interface: Annotated[
        str, advanced("network of the streams, as 10.1.0.0/16 or eth1 (empty: the one by which Ray knows the hosts)")
    ] = ""
    lease_s: Annotated[
        float,
        Meta(ge=1, le=300),
        advanced("seconds after which a host ends its processes where the run does not reach it any more"),
    ] = 10.0


class Metrics(Section, frozen=True):
    """Who gets the figures of a run, and how large its files may become."""

    report_to: Annotated[
        tuple[str, ...],
        doc(
            "trackers, each a process that follows the run's files: tensorboard, wandb, trackio, prometheus (at port "
            '9464, or `"prometheus?port=N"`), or a plug-in'
        ),
    ] = ()
    most_mib: Annotated[
        float,
        Meta(ge=8),
        advanced("MiB of the files that grow with the run: trace, metrics, samples, evaluations, logs; the oldest go"),
    ] = 4096.0
    endpoint: Annotated[str, doc("where it binds; empty: an ipc endpoint that the run prints")] = ""


class Recipe(Section, frozen=True):
    """One run."""

    model: Model
    prompts: Prompts
    rewards: tuple[Reward, ...]
    environment: Environment = Environment()
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
    cluster: Cluster = Cluster()
    metrics: Metrics = Metrics()

    @property
    def starts_engines_here(self) -> bool:
        """Return whether the run starts its engines on the controller's host."""
        return self.transport.engines is LaunchedBy.LOCAL and self.cluster.kind is ClusterKind.LOCAL

    @property
    def starts_ranks_here(self) -> bool:
        """Return whether the run starts its trainer ranks on the controller's host."""
        return self.transport.training is LaunchedBy.LOCAL and self.cluster.kind is ClusterKind.LOCAL

    @property
    def batch_trajectories(self) -> int:
        """Trajectories of a batch, of the largest groups where their size changes it."""
        return largest_batch(self.group_sizing.batches(self.rollout.prompts_per_batch, self.rollout.group_size))

    @property
    def max_in_flight(self) -> int:
        """Slots: trajectories that may be in flight at once."""
        return slots(self.rollout, self.tail_batching, self.length_sorted, self.group_sizing)

    @property
    def most_tokens(self) -> int:
        """Tokens that are sampled for a trajectory, at most."""
        return self.environment.max_tokens if self.environment.given else self.sampling.max_tokens

    @property
    def on_policy(self) -> bool:
        """Return whether each gradient is taken at the version that sampled its tokens. A long round of several batches
        takes several optimizer steps along one gradient."""
        return trains_on_policy(self.rollout, self.tail_batching, self.length_sorted)

    @property
    def score(self) -> str:
        """The name of the reward whose value is the score of an evaluation."""
        first = next((reward for reward in self.rewards if not reward.shadow), self.rewards[0])
        return self.evaluation.reward or first.label

    @property
    def core_restarts(self) -> int:
        """Restarts that the controller may have: none without a journal, since it could not resume."""
        return 0 if self.run.journal is JournalKind.NONE else self.run.restarts

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints (0: none). What a journal holds, and what is trained again after a death, is
        bounded by one: there is one now and then, also where the recipe asks for none before the end."""
        return self.checkpoint.every or (0 if self.run.journal is JournalKind.NONE else RECOVERY_INTERVAL)

    @property
    def compares_logprobs(self) -> bool:
        """Return whether engines compute what the trainer does, so that they can be compared: simulated ones do not."""
        return self.engines.kind is EngineKind.VLLM

    @property
    def canary(self) -> bool:
        """Return whether engines score fixed tokens after each push."""
        return self.weights.canary and self.compares_logprobs

    @property
    def objective_settings(self) -> ObjectiveSettings:
        """``[objective]`` with nothing left out."""
        return objective_settings(self.objective, sizes_vary=self.group_sizing.varies)

    @property
    def dynamic_sampling(self) -> bool:
        """Return whether groups without a signal are dropped and refilled."""
        chosen = self.rollout.dynamic_sampling
        return METHODS[self.objective.algorithm].dynamic_sampling if chosen is None else chosen
