"""The recipe: all settings of a user, as frozen structs. Every command and every process of a run reads it. Derived
values are properties, never fields.

Unknown keys are refused. Relative paths are relative to the recipe file, those of run directories (``run.directory``,
``checkpoint.resume_from``) to the current directory; ``rules.load_recipe`` makes them absolute."""

from __future__ import annotations

import math
import re
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from streamrl.base.types import JsonObject, SamplingSettings, Texts
from streamrl.recipe.environment import RUN_ENVIRONMENT, Environment
from streamrl.recipe.field_types import (
    Count,
    EngineDtype,
    Natural,
    NaturalFloat,
    Positive,
    PositiveFloat,
    Section,
    ShareOrAuto,
    advanced,
)
from streamrl.recipe.objective import Objective, ObjectiveSettings, OffPolicy, objective_settings
from streamrl.recipe.objectives.catalog import METHODS
from streamrl.recipe.objectives.distillation import NO_REWARD
from streamrl.recipe.objectives.teacher import Teacher
from streamrl.recipe.rewards import Reward, RewardLimits
from streamrl.recipe.scheduling import (
    AdmissionKind,
    AdmissionOptions,
    GroupSizing,
    KvAdmission,
    LengthSorted,
    Rollout,
    TailBatching,
    largest_batch,
    slots,
    trains_on_policy,
)
from streamrl.recipe.served_models import Judge

HELD_OUT = "held_out"
ENGINE_RESTARTS = 3
PROMPT_ALLOWANCE = 1024
"""Longest prompt in tokens, when the recipe does not set ``engines.max_model_len``."""
PIPELINE_PARALLEL = "pipeline_parallel_size"
"""Argument of vLLM by which the tensor parallel size is multiplied to get the number of workers."""
ROUNDING = ("quantization", "quantization_config", "kv_cache_dtype")
"""Arguments of vLLM that make an engine compute in fewer bits than the trainer."""
RECOVERY_INTERVAL = 100
"""Steps between checkpoints where ``checkpoint.every`` is 0."""


class JournalKind(StrEnum):
    """Durability of a run. ``fsync``: trajectories are flushed to the disk before they are trained, so that a run goes
    on after a power cut. ``process``: written but not flushed, so that a run goes on after any kill of its processes.
    ``none``: only checkpoints are written."""

    FSYNC = "fsync"
    PROCESS = "process"
    NONE = "none"


class Run(Section, frozen=True):
    """Identity and length of the run."""

    name: Annotated[str, "name of the run's directory, to which the time is added"] = "run"
    project: Annotated[str, "name that several runs share, for trackers and `streamrl runs`"] = ""
    tags: Annotated[Texts, "tags of the run, for trackers and `streamrl runs`"] = ()
    directory: Annotated[str, "directory of the runs' directories, relative to the current directory"] = "runs"
    seed: Annotated[Natural, "seed of the order of prompts and of sampling"] = 0
    steps: Annotated[Positive, "optimizer steps; the last version of the weights has this number"] = 100
    prompts: Annotated[
        Natural, advanced, "prompts that the run draws, in place of steps, which are predicted then (0: steps)"
    ] = 0
    restarts: Annotated[
        Natural,
        advanced,
        "number of restarts of the controller (with the trainer), and of each reward worker, after a death (0: the "
        "first death ends the run)",
    ] = 3
    journal: JournalKind = JournalKind.FSYNC
    deterministic: Annotated[
        bool, "batches and weights do not depend on kills and resumes of the run; slower, for verification"
    ] = False
    observers: Annotated[
        Texts,
        advanced,
        "classes (module:Class or file.py:Class) that inherit streamrl.contracts.Observer, which get the events of "
        "the run",
    ] = ()
    stall_timeout_s: Annotated[
        NaturalFloat,
        advanced,
        "time without any progress after which the run reports all waits and ends, unless another time limit is "
        "longer (0: never)",
    ] = 600.0


class Model(Section, frozen=True):
    """The policy model."""

    path: Annotated[
        str, "a directory in Hugging Face format, with a tokenizer, or a model of the Hub (owner/name@revision)"
    ]


SOLVED = "solved"
"""Name of the pool of ``prompts.skip_solved``."""
ONE_SET = ""
"""Name of the set of a run that trains on a single source."""


class TrainingSet(Section, frozen=True):
    """One of several sets of prompts that a run trains on, and how its prompts are made, sampled and scored."""

    prompts: Annotated[str, "source of its prompts"]
    share: Annotated[PositiveFloat, "share of the prompts that the run draws, relative to those of the other sets"] = (
        1.0
    )
    rewards: Annotated[Texts, "names of the rewards that score it (empty: all)"] = ()
    max_tokens: Annotated[
        Natural, "limit of the tokens of a completion, below sampling.max_tokens (0: sampling.max_tokens)"
    ] = 0
    environment: Annotated[
        bool | str,
        "its trajectories are episodes of [environment], where there is one, and rows to imitate are written as its "
        'prompts are; "NAME": those of [[environment.advanced.further]] with this name; false: single completions',
    ] = True
    template: Annotated[str, "template of the prompt, in place of prompts.template"] = ""
    answer: Annotated[str, 'content of the column "answer", in place of prompts.answer'] = ""
    template_arguments: Annotated[
        JsonObject, "variables of the chat template, which go before those of prompts.template_arguments"
    ] = {}
    imitate: Annotated[
        NaturalFloat,
        "weight of the cross-entropy of the column completion of its rows, which are not sampled then (0: sampled)",
    ] = 0.0
    imitate_steps: Annotated[Natural, "number of the first steps that imitate it (0: all)"] = 0

    @property
    def environment_name(self) -> str | None:
        """Name in ``Environment.by_name`` of the environment of the set; None: its trajectories are completions."""
        if isinstance(self.environment, str):
            return self.environment
        return RUN_ENVIRONMENT if self.environment else None

    def serves(self, reward: Reward) -> bool:
        """Return whether ``reward`` scores prompts of the set."""
        return not self.rewards or reward.label in self.rewards


class Pool(Section, frozen=True):
    """Prompts of one difficulty: those whose last group had a mean reward in a range. A prompt that was not launched
    yet is in none."""

    minimum: Annotated[float | None, "least mean reward (not set: any)"] = None
    below: Annotated[float | None, "mean reward below which a prompt is in the pool (not set: any)"] = None
    keep: Annotated[
        ShareOrAuto, "share of its prompts that are launched when they are drawn again; the others are skipped"
    ] = 0.0

    def holds(self, mean_reward: float) -> bool:
        """Return whether a prompt with this mean reward is in the pool."""
        return (self.minimum is None or mean_reward >= self.minimum) and (
            self.below is None or mean_reward < self.below
        )


class Prompts(Section, frozen=True):
    """The source of prompts. Each row has ``prompt`` (a text, or a list of messages), ``messages`` (a chat, in the
    model's chat template) or ``prompt_token_ids``, optionally a ``prompt_id``, and the columns for the rewards."""

    train: Annotated[
        str | dict[str, str | TrainingSet],
        "a .jsonl, .json, .csv, .parquet or .arrow file, the directory of a Hugging Face dataset "
        "(data/gsm8k?split=train), a data set of the Hub (hf:openai/gsm8k@revision?config=main&split=train), a "
        "task of reasoning-gym (reasoning_gym:chain_sum?size=1000&seed=0), or module:name / file.py:name of an "
        "(async) iterator or a function that returns one; ?prompt=COLUMN takes the prompt from another column, "
        "?limit=N takes the first N rows, ?where=EXPRESSION those for which a jinja expression is true, and ?chat=true "
        "makes a chat of a text; or several sets, with the shares in which they are drawn: "
        '{math = {prompts = "m.jsonl", share = 3}, code = "c.jsonl"}',
    ]
    template: Annotated[str, 'jinja template of the prompt: "{{question}}\\nAnswer after ####."'] = ""
    answer: Annotated[str, 'content of the column "answer": another column, or a jinja expression or template'] = ""
    template_arguments: Annotated[
        JsonObject,
        "variables of the chat template for every row, held-out rows too, such as {enable_thinking = false}; those "
        "of a row's column chat_template_kwargs go before them",
    ] = {}
    shuffle: Annotated[bool, "stored rows are in another order in each epoch"] = True
    skip_solved: Annotated[
        float | None,
        "mean reward of a prompt's last group from which on it is solved and not launched again (not set: solved "
        "prompts are launched, too)",
    ] = None
    pools: Annotated[
        dict[str, Pool],
        "pools by difficulty, the mean reward of a prompt's last group, and the share of the prompts of each that are "
        "launched when they are drawn again: {easy = {minimum = 0.8, keep = 0.25}, hard = {below = 0.1, keep = 0.5}}; "
        "the first that holds a prompt counts",
    ] = {}

    @property
    def sets(self) -> dict[str, TrainingSet]:
        """Sets that are sampled, by name; the set of a single source is ``ONE_SET``."""
        return {name: training_set for name, training_set in self.all_sets.items() if not training_set.imitate}

    @property
    def imitated(self) -> dict[str, TrainingSet]:
        """Sets whose completions are imitated, by name."""
        return {name: training_set for name, training_set in self.all_sets.items() if training_set.imitate}

    @property
    def all_sets(self) -> dict[str, TrainingSet]:
        """Sets that are sampled and sets that are imitated, by name."""
        by_name = self.train if isinstance(self.train, dict) else {ONE_SET: self.train}
        return {
            name: TrainingSet(prompts=written) if isinstance(written, str) else written
            for name, written in by_name.items()
        }

    @property
    def gates(self) -> dict[str, Pool]:
        """Pools by name, with that of ``skip_solved`` first."""
        if self.skip_solved is None:
            return self.pools
        return {SOLVED: Pool(minimum=self.skip_solved), **self.pools}

    @property
    def shares(self) -> dict[str, float]:
        """Share of each set, which together are 1; empty for a single source."""
        if isinstance(self.train, str):
            return {}
        total = sum(training_set.share for training_set in self.sets.values())
        return {name: training_set.share / total for name, training_set in self.sets.items()}


class Sampling(Section, SamplingSettings, frozen=True):
    """Sampling parameters of completions. Training computes logprobs of the distribution that they define."""


class OptimizerKind(StrEnum):
    """Optimizer: AdamW on float32 master weights. ``adamw_8bit``: moments in 8 bits (bitsandbytes).
    ``adamw_offloaded``: master weights and moments in CPU memory, for a GPU without room for them."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw_8bit"
    ADAMW_OFFLOADED = "adamw_offloaded"


BFLOAT16_CAPABILITY = (8, 0)
"""Least compute capability of a GPU that multiplies matrices in bfloat16, and that torch's flash attention runs on."""


class ComputeDtype(StrEnum):
    """Dtype of matrix products; master weights, gradients and the loss are float32. ``auto``: bfloat16 on GPUs of
    compute capability 8.0 or more (not on a T4)."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Gathered(StrEnum):
    """Time during which every rank holds gathered parameters. ``batch``: while a batch is open. ``layer``: while a
    layer is computed, for models that do not fit; groups are then trained when every rank has some. ``auto``: ``batch``
    where it fits."""

    AUTO = "auto"
    BATCH = "batch"
    LAYER = "layer"


class Training(Section, frozen=True):
    """The trainer: AdamW over FSDP2 ranks. A round that trains several batches at once makes as many steps along their
    mean gradient."""

    ranks: Annotated[Count, "processes of the trainer (FSDP2)"] = 1
    device: Annotated[str, '"auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N"'] = "auto"
    threads: Annotated[Natural, advanced, "threads of each rank on a CPU (0: the cores without engines)"] = 0
    optimizer: OptimizerKind = OptimizerKind.ADAMW
    learning_rate: Annotated[NaturalFloat, "learning rate of AdamW"] = 1e-6
    warmup_steps: Annotated[Natural, "steps over which the learning rate rises linearly"] = 0
    schedule: Annotated[str, "schedule after the warm-up, by transformers' names, such as cosine or linear"] = (
        "constant"
    )
    schedule_options: Annotated[
        dict[str, float | str], advanced, "options of the schedule, as lr_scheduler_kwargs: {min_lr_rate = 0.1}"
    ] = {}
    schedule_steps: Annotated[Natural, advanced, "step at which the schedule ends (0: run.steps)"] = 0
    epochs: Annotated[
        NaturalFloat, "passes over prompts.train, counted in prompts, in place of run.steps (0: run.steps)"
    ] = 0.0
    beta1: Annotated[float, Meta(ge=0, lt=1), advanced, "beta1 of AdamW"] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1), advanced, "beta2 of AdamW"] = 0.95
    weight_decay: Annotated[NaturalFloat, "weight decay of AdamW"] = 0.0
    max_grad_norm: Annotated[PositiveFloat, "gradients are clipped to this norm"] = 1.0
    updates_per_batch: Annotated[
        Positive, "optimizer steps on each batch; all but the first are off-policy, and above 1 streaming is off"
    ] = 1
    epochs_per_batch: Annotated[
        Positive,
        advanced,
        "passes over each batch, of updates_per_batch steps each, all against the logprobs before the first",
    ] = 1
    micro_batch_tokens: Annotated[
        Natural,
        "tokens of a row, which go through the model at once (0: 2,048; on a CPU from 512, by model and prompts)",
    ] = 0
    streaming: Annotated[
        bool, advanced, "groups are trained while others are still sampled; the gradient is that of the complete batch"
    ] = True
    compute_dtype: ComputeDtype = ComputeDtype.AUTO
    gathered: Annotated[Gathered, advanced] = Gathered.AUTO
    tensor_parallel_size: Annotated[
        Count, advanced, "ranks that share each layer and train the same rows (other ranks divide the rows: FSDP2)"
    ] = 1
    expert_parallel_size: Annotated[
        Count, advanced, "ranks over which whole experts are divided: 1, or tensor_parallel_size"
    ] = 1
    context_parallel_size: Annotated[
        Count, advanced, "ranks over which each row is divided, so that a long sequence takes less memory on each"
    ] = 1
    replicas: Annotated[Count, advanced, "groups of ranks that each hold a complete copy of the model (HSDP)"] = 1
    routing_replay: Annotated[
        bool | Literal["auto"],
        advanced,
        "mixtures of experts: the trainer's routers use the experts that the engines chose",
    ] = "auto"
    kept_set_replay: Annotated[
        bool,
        advanced,
        "where top_k, top_p or min_p remove tokens: the trainer's distribution of a token has the tokens that the "
        "engine kept; false: those that it would keep by the trainer's logits",
    ] = True
    activation_checkpointing: Annotated[
        bool, "activations are computed again in the backward pass, which saves memory"
    ] = False
    compile: Annotated[bool, "compile layers with torch.compile; the start takes longer"] = False

    @property
    def ranks_per_group(self) -> int:
        """Number of consecutive ranks that train the same groups, because they divide layers or rows."""
        return self.tensor_parallel_size * self.context_parallel_size

    def row_tokens(self, device: str, parameters: int, prompt: int = 0) -> int:
        """Return the tokens of a row: ``micro_batch_tokens``, or the cheapest number where it is 0.

        ``device``: ``"cpu"`` or ``"cuda"``; ``parameters``: size of the model; ``prompt``: tokens of the longest
        prompt.

        The caches of a CPU hold 512 tokens. More, up to 2,048, are cheaper for a model that is larger than the caches,
        whose weights and gradients each row reads, and for long prompts, which siblings of a row share."""
        if self.micro_batch_tokens:
            return self.micro_batch_tokens
        if "cpu" in (device, self.device):
            return min(max(512, parameters >> 14, 16 * prompt), 2048)
        return 2048


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can allocate (``max_lora_rank``)."""


class LoraSync(StrEnum):
    """Weights that engines get. ``merged``: weights of the base with the adapter added, rounded, so that small changes
    arrive late. ``adapter``: the adapter alone, which trainer and engines compute beside the base; slower sampling.
    ``auto``: the adapter, where vLLM can serve it; a run that merges says why."""

    AUTO = "auto"
    MERGED = "merged"
    ADAPTER = "adapter"


class Lora(Section, frozen=True):
    """Low-rank adapters (peft) instead of all weights."""

    rank: Annotated[Natural, "rank of the adapters (0: no adapters, all weights are trained)"] = 0
    alpha: Annotated[PositiveFloat, "adapters are scaled by alpha / rank"] = 16.0
    targets: Annotated[Texts, "modules with an adapter, or one regular expression (empty: peft's choice)"] = ()
    sync: LoraSync = LoraSync.AUTO
    rslora: Annotated[bool, advanced, "adapters are scaled by alpha / sqrt(rank)"] = False
    dora: Annotated[bool, advanced, "train lengths and directions of rows separately (DoRA); merged only"] = False

    @property
    def named_targets(self) -> Texts:
        """``targets`` without ``all-linear``, peft's name for every linear module except the output head."""
        if self.targets == ("all-linear",):
            return ()
        return self.targets

    @property
    def pattern(self) -> str:
        """Regular expression of the full names of modules, where ``targets`` is one; empty: ``targets`` has names."""
        if len(self.targets) != 1 or re.fullmatch(r"[\w.-]*", self.targets[0]):
            return ""
        return self.targets[0]

    @property
    def syncs_adapter(self) -> bool:
        """Whether engines get the adapter alone, and compute it beside the base."""
        return self.rank > 0 and self.sync is LoraSync.ADAPTER


class ReleaseKind(StrEnum):
    """Release of engines late in a round, when their requests fit on the others. ``drain``: released engines are idle
    until the next round, and training uses their cores."""

    NEVER = "never"
    DRAIN = "drain"


class EngineKind(StrEnum):
    """Kind of inference engine. ``simulated``: an engine without a model and without vLLM, to try a pipeline: random
    text in about the time of a small model. It fetches and verifies weights, which have no effect on the text. All
    other parts of the run are real."""

    VLLM = "vllm"
    SIMULATED = "simulated"


class GpuSharing(StrEnum):
    """Sharing of GPUs by engines and trainer ranks. ``side_by_side``: both keep their memory, and the engines get what
    the ranks leave. ``in_turns``: each has the memory in its turn, and a round is sampled, then trained. ``auto``:
    ``in_turns`` where both do not fit side by side and each fits alone."""

    AUTO = "auto"
    SIDE_BY_SIDE = "side_by_side"
    IN_TURNS = "in_turns"


class EngineShape(Section, frozen=True):
    """A further set of engines on the same devices."""

    count: Annotated[Count, "number of engines"]
    tensor_parallel_size: Annotated[Count, "workers of each engine"] = 1
    max_num_seqs: Annotated[
        Natural, "requests that one engine runs at once (0: the set runs as many as the first set)"
    ] = 0
    kv_tokens: Annotated[Natural, "tokens in the KV cache of one engine (0: as many as fit)"] = 0
    cores: Annotated[Texts, "cores of each engine on a CPU"] = ()
    rounds: Annotated[
        Texts, 'kinds of rounds that it always serves, such as ["long"]; empty: chosen by measurements'
    ] = ()
    args: Annotated[JsonObject, "arguments of vLLM in addition to engines.args"] = {}


class Engines(Section, frozen=True):
    """The engines that sample. An engine that dies is restarted while the others serve."""

    kind: EngineKind = EngineKind.VLLM
    count: Annotated[Count, "number of engines"] = 1
    tensor_parallel_size: Annotated[Count, "workers of each engine"] = 1
    max_num_seqs: Annotated[Positive, "requests that one engine runs at once"] = 256
    max_model_len: Annotated[
        Natural, "limit of the tokens of prompt and completion (0: by the limits of this recipe)"
    ] = 0
    max_num_batched_tokens: Annotated[
        Natural, "tokens of one step of an engine (0: vLLM's choice; 16,384 on a GPU of 70 GiB or more)"
    ] = 0
    kv_tokens: Annotated[Natural, advanced, "tokens in the KV cache of one engine (0: as many as fit)"] = 0
    rounds: Annotated[Texts, advanced, "kinds of rounds that the first set always serves (with sets)"] = ()
    dtype: Annotated[
        EngineDtype,
        'dtype of weights and computation; "auto": bfloat16 on GPUs of compute capability 8.0 or more and for Gated '
        "DeltaNet on a CPU, else float32",
    ] = "auto"
    cores: Annotated[Texts, 'cores of each engine on a CPU, such as ["0-3", "4-7"]'] = ()
    gpu_memory_utilization: Annotated[
        ShareOrAuto,
        "share of a GPU's memory for all engines on it (0: 0.85 of a GPU of their own; beside other processes what "
        "these leave)",
    ] = 0.0
    args: Annotated[
        JsonObject, "arguments of vLLM's engine (AsyncEngineArgs) that no other key sets, such as speculative_config"
    ] = {}
    start_timeout_s: Annotated[PositiveFloat, advanced, "time limit for the start of an engine that was stopped"] = (
        300.0
    )
    release: Annotated[ReleaseKind, "for rounds that end, not for continuous ones"] = ReleaseKind.NEVER
    gpu_sharing: Annotated[GpuSharing, advanced] = GpuSharing.AUTO
    sets: Annotated[tuple[EngineShape, ...], advanced, "further sets of engines, of which one is in use"] = ()
    sleep_level: Annotated[
        int,
        Meta(ge=0, le=1),
        advanced,
        "state of sets that are not in use, on CUDA: 1 keeps their weights in CPU memory, 0 ends their processes, "
        "as on a CPU",
    ] = 1
    restarts: Annotated[
        Natural,
        advanced,
        "restarts of one engine, counted from 0 again after it has served ten minutes (0: a death ends the run)",
    ] = ENGINE_RESTARTS
    min_serving: Annotated[Positive, advanced, "least number of engines; with fewer the run ends"] = 1
    silence_timeout_s: Annotated[PositiveFloat, advanced, "time without a message after which an engine is killed"] = (
        30.0
    )
    progress_timeout_s: Annotated[
        PositiveFloat, advanced, "time without progress of any of its requests after which an engine is killed"
    ] = 120.0
    fatal_deaths: Annotated[
        Natural, advanced, "deaths of engines that sampled a trajectory after which it is dropped (0: never)"
    ] = 3


class Weights(Section, frozen=True):
    """Transfer of the weights from the trainer to the engines."""

    audit_interval: Annotated[
        Natural,
        advanced,
        "versions between audits, which write the engines' checksums of all live parameters to audits.jsonl "
        "(0: never; slow)",
    ] = 0
    push_timeout_s: Annotated[PositiveFloat, advanced, "time limit for a version to be live on every engine"] = 120.0
    transport: Annotated[
        str,
        advanced,
        "a place in an object store, as s3://BUCKET/PREFIX (also gs://, az://, file:///), through which engines of "
        "another site get the weights (empty: from the trainer)",
    ] = ""
    shared_memory: Annotated[
        bool | None,
        advanced,
        "engines on the host of a trainer rank read weights from its memory, and none are encoded for them (not set: "
        "where ranks have GPUs and there is no transport)",
    ] = None
    canary: Annotated[
        bool,
        advanced,
        "after each push every engine scores a few fixed tokens, and its logprobs must agree with the trainer's. "
        "The run does not wait for them; simulated engines do not score",
    ] = True


class EvaluationSet(Section, frozen=True):
    """One of several sets of held-out prompts. Keys that are not set have the values of ``[evaluation]``."""

    prompts: Annotated[str, "source of its prompts"]
    every: Annotated[Natural | None, "steps between its evaluations"] = None
    limit: Annotated[Natural | None, "number of its first prompts"] = None
    like: Annotated[str, "training set as which it is made, sampled and scored (empty: the one of its name)"] = ""


class Evaluation(Section, frozen=True):
    """Evaluations on held-out prompts."""

    prompts: Annotated[
        str | dict[str, str | EvaluationSet],
        'source as prompts.train (empty: none), or several: {a = "a.jsonl", b = {prompts = "b.jsonl", every = 50}}; a '
        "set that has the name of a training set, or names it (like), is made, sampled and scored as that",
    ] = ""
    samples: Annotated[Count, "completions of each prompt, for avg@k and pass@k"] = 1
    store_samples: Annotated[bool, advanced, "write every completion to evaluations/ of the run"] = True
    every: Annotated[Natural, "steps between evaluations on the first prompts (0: none)"] = 0
    limit: Annotated[Natural, "number of the first prompts (0: all)"] = 0
    at_start: Annotated[bool, "evaluation on all prompts before the first step"] = True
    at_end: Annotated[bool, "evaluation on all prompts after the last step"] = True
    temperature: Annotated[NaturalFloat | None, "sampling temperature (0: greedy; not set: that of sampling)"] = None
    success_reward: Annotated[float, advanced, "smallest score of a successful completion"] = 1.0
    reward: Annotated[str, advanced, "name of the reward that is the score (empty: the first that is no shadow)"] = ""

    @property
    def sets(self) -> dict[str, EvaluationSet]:
        """Sets by name, with a value for every key; a set without a name is ``held_out``."""
        by_name = {}
        if isinstance(self.prompts, dict):
            by_name = self.prompts
        elif self.prompts:
            by_name = {HELD_OUT: self.prompts}
        sets = {}
        for name, prompts in by_name.items():
            written = EvaluationSet(prompts=prompts) if isinstance(prompts, str) else prompts
            sets[name] = EvaluationSet(
                prompts=written.prompts,
                every=self.every if written.every is None else written.every,
                limit=self.limit if written.limit is None else written.limit,
                like=written.like,
            )
        return sets

    @property
    def regular(self) -> tuple[int, int]:
        """(steps between evaluations of any set, or 0; the ``limit`` for control, above 0 where these evaluations are
        not on all prompts of all sets)."""
        every = {held_out.every or 0 for held_out in self.sets.values()}
        limits = [held_out.limit or 0 for held_out in self.sets.values()]
        return math.gcd(*every), max(limits, default=0) or int(len(every) > 1)


class ResumedRewards(StrEnum):
    """Rewards of a run that starts from a checkpoint. ``kept``: rewards at the time of the checkpoint, with live
    changes.
    ``recipe``: rewards of ``[[rewards]]``."""

    KEPT = "kept"
    RECIPE = "recipe"


class Checkpoint(Section, frozen=True):
    """Checkpoints of the trainer's state and a Hugging Face directory. The last ones, the best ones and every N-th are
    kept."""

    every: Annotated[Natural, "steps between checkpoints (0: 100 with a journal, else none)"] = 0
    keep: Annotated[Positive, "number of the last checkpoints to keep"] = 2
    keep_best: Annotated[Natural, "number of the checkpoints with the highest held-out score to keep"] = 0
    keep_every: Annotated[Natural, advanced, "steps between checkpoints that are kept, too (0: none)"] = 0
    at_end: Annotated[bool, "write a checkpoint when the run ends"] = True
    min_free_gib: Annotated[
        NaturalFloat, advanced, "free space on the disk below which no checkpoint is written, and the run stops"
    ] = 1.0
    resume_from: Annotated[
        str,
        "checkpoint directory, or copy in an object store, to start from: weights, optimizer and version, on any "
        "number of ranks",
    ] = ""
    copy_to: Annotated[
        str,
        advanced,
        "place in an object store, as s3://BUCKET/PREFIX, to which every kept checkpoint is copied, below the name "
        "of the run's directory, while the run goes on",
    ] = ""
    rewards: Annotated[ResumedRewards, advanced] = ResumedRewards.KEPT


class TransportKind(StrEnum):
    """Transport of the streams between processes (ZeroMQ)."""

    IPC = "ipc"
    TCP = "tcp"


class TransportSecurity(StrEnum):
    """Security of sockets that other hosts reach. ``curve``: encrypted, for known keys only. ``none``: open to
    everybody."""

    CURVE = "curve"
    NONE = "none"


class Transport(Section, frozen=True):
    """Streams between processes."""

    kind: TransportKind = TransportKind.IPC
    host: Annotated[str, "with tcp: address of one interface of this host"] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1024, le=65000), "with tcp: first of the ports, which the dry run lists"] = 5700
    security: Annotated[TransportSecurity, advanced] = TransportSecurity.CURVE
    keys: Annotated[
        str,
        "directory of `streamrl keys`, whose keys every tcp socket then requires; without it no socket listens on "
        "another than a loopback address",
    ] = ""


class ClusterKind(StrEnum):
    """Place of the processes that the run starts. ``local``: host of `streamrl train`. ``ray``: hosts of a Ray cluster
    for engines and trainer ranks."""

    LOCAL = "local"
    RAY = "ray"


class Cluster(Section, frozen=True):
    """Hosts of the engines and trainer ranks that the run starts. The controller, rewards and environments run on the
    host of `streamrl train`, which is a host of the cluster; all hosts see the run's directory."""

    kind: ClusterKind = ClusterKind.LOCAL
    address: Annotated[str, "HOST:PORT of Ray's head; `streamrl train --cluster` sets it and `kind`"] = "auto"
    hosts: Annotated[Natural, "least number of hosts; with fewer the run does not start (0: as many as it needs)"] = 0
    trainer_hosts: Annotated[Natural, advanced, "number of hosts with trainer ranks (0: as few as possible)"] = 0
    engine_hosts: Annotated[
        Natural, advanced, "number of hosts with engines (0: all without a rank; where each has a rank, all)"
    ] = 0
    ports: Annotated[str, advanced, "FIRST-LAST, the ports of this run's streams on each host"] = "5700-5899"
    interface: Annotated[
        str, advanced, "network of the streams, as 10.1.0.0/16 or eth1 (empty: the network of Ray's addresses)"
    ] = ""
    lease_s: Annotated[
        float, Meta(ge=1, le=300), advanced, "seconds without contact to the run after which a host ends its processes"
    ] = 10.0


class Metrics(Section, frozen=True):
    """Receivers of the metrics of a run, and the size of its files."""

    report_to: Annotated[
        Texts,
        "trackers, each a process that follows the run's files: tensorboard, wandb, trackio, prometheus (at port "
        '9464, or `"prometheus?port=N"`), or a plug-in',
    ] = ()
    most_mib: Annotated[
        float,
        Meta(ge=8),
        advanced,
        "limit in MiB of the files that grow with the run (trace, metrics, samples, evaluations, logs); the oldest "
        "are removed",
    ] = 4096.0
    endpoint: Annotated[str, "endpoint of the published metrics (empty: an ipc endpoint that the run prints)"] = ""


class Recipe(Section, frozen=True):
    """All settings of one run."""

    model: Model
    prompts: Prompts
    rewards: tuple[Reward, ...]
    environment: Environment = Environment()
    run: Run = Run()
    rollout: Rollout = Rollout()
    tail_batching: TailBatching = TailBatching()
    length_sorted: LengthSorted = LengthSorted()
    kv_admission: KvAdmission = KvAdmission()
    group_sizing: GroupSizing = GroupSizing()
    sampling: Sampling = Sampling()
    reward_limits: RewardLimits = RewardLimits()
    judge: Judge = Judge()
    teacher: Teacher = Teacher()
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
    def on_one_host(self) -> bool:
        """Whether the engines and trainer ranks are on the controller's host, not on hosts of a cluster."""
        return self.cluster.kind is ClusterKind.LOCAL

    @property
    def in_turns(self) -> bool:
        """Whether engines and trainer ranks have the memory of their GPUs in turns. Not known before
        ``prepare.gpu_placement.GpuPlacement.decided`` has replaced ``auto``, which is False here."""
        return self.engines.gpu_sharing is GpuSharing.IN_TURNS

    @property
    def batch_shapes(self) -> tuple[tuple[int, int], ...]:
        """(Number of groups, group size) of a batch, for each size that groups may have."""
        return self.group_sizing.batches(self.rollout.prompts_per_batch, self.rollout.group_size)

    @property
    def batch_trajectories(self) -> int:
        """Largest number of trajectories of a batch, over all group sizes."""
        return largest_batch(self.batch_shapes)

    @property
    def largest_group(self) -> int:
        """Largest number of trajectories of a group."""
        return max(size for _, size in self.batch_shapes)

    @property
    def max_in_flight(self) -> int:
        """Number of slots: trajectories that may be in flight at once."""
        return slots(self.rollout, self.tail_batching, self.length_sorted, self.group_sizing)

    @property
    def max_tokens(self) -> int:
        """Limit of the sampled tokens of a trajectory."""
        return self.environment.max_tokens if self.environment.configured else self.sampling.max_tokens

    @property
    def admission(self) -> AdmissionOptions:
        """Options of the admission of trajectories."""
        if self.rollout.admission is AdmissionKind.KV:
            return self.kv_admission
        return None

    def token_limit(self, training_set: TrainingSet) -> int:
        """Return the limit of the sampled tokens of a trajectory of a training set."""
        if self.environment.configured and training_set.environment_name is not None:
            return self.environment.max_tokens
        return training_set.max_tokens or self.sampling.max_tokens

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, prompt and completions, of a model with as many positions."""
        if self.engines.max_model_len:
            return self.engines.max_model_len
        if self.environment.configured:
            return self.environment.max_tokens
        return self.sampling.max_tokens + PROMPT_ALLOWANCE

    @property
    def on_policy(self) -> bool:
        """Whether each gradient is computed at the version that sampled its tokens. A long round of several batches
        makes several optimizer steps along one gradient."""
        return trains_on_policy(self.rollout, self.tail_batching, self.length_sorted)

    def with_rewards(self, rewards: tuple[Reward, ...]) -> Recipe:
        """Return the recipe with other ``rewards``. Those whose names this recipe does not have score every set, also
        a set that names its rewards."""
        labels = {reward.label for reward in self.rewards}
        added = tuple(reward.label for reward in rewards if reward.label not in labels)
        prompts = self.prompts
        if isinstance(prompts.train, dict):
            sets = {
                name: replace(training_set, rewards=training_set.rewards + added)
                for name, training_set in prompts.sets.items()
                if training_set.rewards
            }
            prompts = replace(prompts, train=prompts.train | sets)
        return replace(self, rewards=rewards, prompts=prompts)

    def settings_of_held_out(self, name: str) -> TrainingSet:
        """Return the settings by which prompts of a held-out set are made, sampled and scored: those of the training
        set that it names or that has its name, else those of the run."""
        sets = self.prompts.all_sets
        like = self.evaluation.sets[name].like or name
        if isinstance(self.prompts.train, dict) and like in sets:
            return sets[like]
        return TrainingSet(prompts="")

    def score_of(self, held_out: str) -> Reward | None:
        """Return the reward whose value is the score of a held-out set; None: its only reward is that of a run without
        rewards."""
        settings = self.settings_of_held_out(held_out)
        rewards = [reward for reward in self.rewards if settings.serves(reward) and reward.function != NO_REWARD]
        named = [reward for reward in rewards if reward.label == self.evaluation.reward]
        return min(named or rewards, key=lambda reward: reward.shadow, default=None)

    @property
    def core_restarts(self) -> int:
        """Number of restarts of the controller: none without a journal, from which it would resume."""
        return 0 if self.run.journal is JournalKind.NONE else self.run.restarts

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints (0: none). With a journal there are checkpoints even where the recipe sets none:
        they bound the size of the journal and the steps that are trained again after a death."""
        if self.checkpoint.every or self.run.journal is JournalKind.NONE:
            return self.checkpoint.every
        return RECOVERY_INTERVAL

    @property
    def compares_logprobs(self) -> bool:
        """Whether logprobs of engines and trainer can be compared; simulated engines compute none."""
        return self.engines.kind is EngineKind.VLLM

    @property
    def canary(self) -> bool:
        """Whether engines score fixed tokens after each push."""
        return self.weights.canary and self.compares_logprobs

    @property
    def objective_settings(self) -> ObjectiveSettings:
        """``[objective]`` with a value for every key."""
        return objective_settings(self.objective, sizes_vary=self.group_sizing.varies)

    @property
    def dynamic_sampling(self) -> bool:
        """Whether groups of equal rewards are dropped and replaced."""
        if self.rollout.dynamic_sampling is not None:
            return self.rollout.dynamic_sampling
        return METHODS[self.objective.algorithm].dynamic_sampling
