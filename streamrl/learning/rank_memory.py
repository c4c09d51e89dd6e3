"""Predict the memory of one trainer rank at its peak, from sizes alone, and choose how parameters are gathered.

``prepare`` calls it in the command's process, before a run; ``model.loading`` calls it in each trainer rank. What a
step holds beside the weights is counted with FakeTensorMode on real models of several families
(``tests/learning/test_memory_of_a_step.py``), which the arithmetic here reproduces. There are two ways to gather
parameters over several ranks. ``batch``: every rank has full parameters and gradients while a batch is open, and
gradients are reduced once, at its close. ``layer``: each layer is gathered for its own forward and backward, and its
gradient is reduced in every row, the usual way of FSDP2."""

from __future__ import annotations

from msgspec import Struct

from streamrl.base.types import UNCHANGED, TokenDistribution
from streamrl.pretrained.model_facts import ModelFacts, facts_of
from streamrl.recipe.objective import ObjectiveSettings
from streamrl.recipe.sections import ComputeDtype, Gathered, Lora, OptimizerKind, Training

FORWARD_BYTES = 4  # a float32 value of the published bfloat16 bits
REMAINDER_BYTES = 2  # the lower bits of the float32 master
# A master of adapters, and a weight below adapters, as published.
MASTER_BYTES = 4
BASE_BYTES = 2
GRADIENT_BYTES = 4
SHADOW_BYTES = 2  # a copy of the published bits, which a GPU holds besides the weights
MOMENT_BYTES = {"adamw": 8, "adamw_offloaded": 8, "adamw_8bit": 2}
PEFT_TARGETS = ("q_proj", "v_proj")  # peft's choice where ``lora.targets`` is empty
# Projections that take the result of a norm, and the one that takes the products of the MLP.
INPUT_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
MLP_OUTPUT = "down_proj"
LINEAR_PROJECTIONS = 7  # of a layer: four of the attention, three of the gated network
# Bytes of a logit while the loss of a chunk is computed: the model's logit in bfloat16 where it computes so, the logit,
# its exponential and their product in float32.
LOGIT_BYTES = 12
SIXTEEN_BIT_LOGIT_BYTES = 2
# Where the sampler's nucleus is computed: the sorted logits, their order, their probabilities and the sums of these.
NUCLEUS_BYTES = 13
MIN_P_BYTES = 4
# A gradient of a weight on the way to its float32 sum, in float32, and before that as the product computes it.
WEIGHT_GRADIENT_BYTES = 4
# The last layer's output, its norm, the trained positions of it and their gradients, for each element.
OUTPUT_BYTES = 16
UNSEEN_SHARE = 10
"""A tenth of a step's activations, logits and copies is added on a GPU, for cracks between blocks and for kernels."""
LOGITS_IN_A_CHUNK = 1 << 24
"""Largest number of logits that exist at once (64 MiB of float32): the head runs over chunks of trained positions."""
CARD_SHARE = 64
"""Share of a GPU's memory, 1/64, that logits may take where it is more. Larger chunks are faster: each chunk reads the
head again, and adds to its gradient."""
STEP_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements of the masters that a step reads, moves and writes at once, with temporaries of 4 to 12 bytes an element.
A multiple of the block of 8-bit optimizers (256), and below 2**31: their CUDA kernel counts in 32 bits."""
SCRATCH_BYTES = 8  # for each element of a step, kept between steps
GIB = 1 << 30


class Card(Struct, frozen=True):
    """The GPU of a rank. ``memory``: bytes (0: unknown); ``has_bfloat16``: whether it multiplies in bfloat16."""

    memory: int
    has_bfloat16: bool = True


class TrainingSizes(Struct, frozen=True, kw_only=True):
    """Quantities that the memory of a rank depends on.

    ``parameters``: number of parameters of the model.
    ``outside``: number of parameters outside of the repeated layers (embeddings, head).
    ``layer``: mean number of parameters of a layer.
    ``looked_up``: number of parameters of an embedding that is no head: no matrix product reads them.
    ``ranks``: number of ranks that hold one replica together.
    ``replicas``: number of replicas.
    ``trained``: number of parameters of the adapters; 0: all parameters are trained.
    ``adapted``: number of elements of the weights below the adapters.
    ``publishes_adapters``: whether the adapters alone are published.
    ``moment_bytes``: bytes of the optimizer's moments, for each trained parameter.
    ``masters_on_cpu``: whether masters and moments lie in CPU memory.
    ``sixteen_bit``: whether the forward computes in bfloat16.
    ``casts_stay``: whether all parameters that are cast to bfloat16 stay until the backward.
    ``on_device``: whether weights lie on a GPU.
    ``reference``: number of parameters of the reference model; 0: none.
    ``critic``: number of parameters of a separate value model, of which each rank has a full copy; 0: none.
    ``activations``: bytes of activations and logits of the longest row."""

    parameters: int
    outside: int
    layer: int
    looked_up: int = 0
    ranks: int = 1
    replicas: int = 1
    trained: int = 0
    adapted: int = 0
    publishes_adapters: bool = False
    moment_bytes: int = 8
    masters_on_cpu: bool = False
    sixteen_bit: bool = False
    casts_stay: bool = True
    on_device: bool = False
    reference: int = 0
    critic: int = 0
    activations: int = 0

    @property
    def single_rank(self) -> bool:
        """Whether there is one trainer rank, which gathers no parameters and reduces no gradients."""
        return self.ranks * self.replicas == 1

    @property
    def scratch(self) -> int:
        """Bytes into which split masters are read."""
        masters = -(-self.parameters // self.ranks)
        at_once = min(masters, STEP_ELEMENTS["cuda" if self.on_device else "cpu"])
        return 0 if self.trained or self.masters_on_cpu else SCRATCH_BYTES * at_once

    @property
    def cast(self) -> int:
        """Number of parameters that are bfloat16 copies at one time, on a single rank."""
        if not self.single_rank or not self.sixteen_bit:
            return 0
        if self.casts_stay:
            return self.parameters - self.looked_up
        return max(self.outside - self.looked_up, self.layer)


def training_sizes(
    training: Training,
    lora: Lora,
    objective: ObjectiveSettings,
    facts: ModelFacts,
    *,
    context: int = 0,
    distribution: TokenDistribution = UNCHANGED,
    card: Card | None = None,
) -> TrainingSizes:
    """Return the sizes that the memory of a trainer rank depends on, estimated from the files of the model.

    ``context``: tokens of the longest sequence, which has its own row where it is longer than a row.
    ``distribution``: settings by which the engines sample.
    ``card``: the GPU of the rank; None: a CPU."""
    outside, in_layers = _parameters_of_rank(facts, training.tensor_parallel_size)
    reference = 0
    if objective.has_reference:
        # One that cannot be read, which the dry run refuses, counts as the policy.
        reference_facts = facts_of(objective.reference) or facts
        reference = sum(_parameters_of_rank(reference_facts, training.tensor_parallel_size))
    if "all-linear" in lora.targets:
        projections = LINEAR_PROJECTIONS
        adapted = in_layers
    else:
        projections = len(lora.targets or PEFT_TARGETS)
        adapted = min(in_layers, projections * facts.hidden**2 * facts.layers)
    sixteen_bit = training.compute_dtype is ComputeDtype.BFLOAT16
    if training.compute_dtype is ComputeDtype.AUTO:
        sixteen_bit = card is not None and card.has_bfloat16
    row_tokens = training.row_tokens("cuda", facts.parameters)  # rows on a CPU are never longer
    longest = min(context, facts.positions) if facts.positions else context
    tokens = max(row_tokens, -(-longest // training.context_parallel_size))
    layer = kept_in_layer(facts, training, lora, tokens, sixteen_bit=sixteen_bit, on_device=card is not None)
    logits = min(tokens * facts.vocabulary, logits_at_once(card.memory if card else 0))
    head = head_bytes(facts, lora, logits, distribution, sixteen_bit=sixteen_bit)
    activations = facts.layers * layer + head
    if training.activation_checkpointing:  # of each layer its input, and one layer when the head is done
        activations = facts.layers * 4 * tokens * facts.hidden + max(layer, head)
    return TrainingSizes(
        parameters=outside + in_layers,
        outside=outside,
        layer=in_layers // max(1, facts.layers),
        looked_up=_looked_up(facts),
        ranks=max(1, training.ranks // (training.tensor_parallel_size * training.replicas)),
        replicas=training.replicas,
        trained=2 * lora.rank * facts.hidden * projections * facts.layers,
        adapted=adapted if lora.rank and not lora.syncs_adapter else 0,
        publishes_adapters=lora.syncs_adapter,
        moment_bytes=MOMENT_BYTES[training.optimizer],
        masters_on_cpu=card is not None and training.optimizer is OptimizerKind.ADAMW_OFFLOADED,
        sixteen_bit=sixteen_bit,
        casts_stay=not training.activation_checkpointing,
        on_device=card is not None,
        reference=reference,
        critic=facts.parameters if objective.has_value_model else 0,
        activations=activations + OUTPUT_BYTES * tokens * facts.hidden,
    )


def _parameters_of_rank(facts: ModelFacts, tensor: int) -> tuple[int, int]:
    """Numbers of parameters outside of layers and in layers that one of ``tensor`` tensor parallel ranks has."""
    # Most tensor parallel plans split the layers and an untied head over the ranks, and not the embedding.
    head = _looked_up(facts)
    outside = facts.outside - head + head // tensor
    return outside, (facts.parameters - facts.outside) // tensor


def _looked_up(facts: ModelFacts) -> int:
    """Return the number of parameters of an embedding that is not the head, too; 0: the head is tied."""
    table = facts.vocabulary * facts.hidden
    return table if facts.outside >= 2 * table else 0


class RankBytes(Struct, frozen=True, kw_only=True):
    """Bytes of one rank at its peak, by purpose.

    ``parameters``: the rank's shard of the weights that the forward runs on, and of the masters.
    ``shadow``: a copy of the published bits.
    ``casts``: parameters cast to bfloat16 for the forward.
    ``gathered``: full parameters, and the buffers that gather and reduce them, for a time.
    ``backward``: activations and logits, or FSDP2's sums of gradients over replicas where these are larger.
    ``unseen``: a share of ``casts`` and ``backward`` (``UNSEEN_SHARE``)."""

    parameters: int
    gradients: int
    optimizer: int
    shadow: int
    casts: int
    gathered: int
    backward: int
    reference: int
    critic: int
    unseen: int

    @property
    def total(self) -> int:
        """Sum of all fields."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


def bytes_per_rank(sizes: TrainingSizes, gathered: Gathered) -> RankBytes:
    """Predict the peak of one rank. ``gathered`` (not ``auto``) matters with several ranks only."""
    ranks = sizes.ranks
    compute = 2 if sizes.sixteen_bit else 4
    shard = -(-sizes.parameters // ranks)
    masters = -(-sizes.trained // ranks) if sizes.trained else shard
    adapted = -(-sizes.adapted // ranks)
    published = masters if sizes.publishes_adapters else shard
    stored = shard * FORWARD_BYTES
    if sizes.trained:
        stored += masters * MASTER_BYTES + adapted * BASE_BYTES
    elif not sizes.masters_on_cpu:
        stored += shard * REMAINDER_BYTES
    by_batch = not sizes.single_rank and gathered is Gathered.BATCH
    # FSDP2 keeps each layer's sum of gradients over replicas until the backward ends.
    summed = masters * GRADIENT_BYTES if sizes.replicas > 1 and not by_batch else 0
    casts = 2 * sizes.cast
    full = 0 if sizes.single_rank else _gathered_bytes(sizes, compute, by_batch=by_batch)
    backward = max(sizes.activations, summed)
    return RankBytes(
        parameters=stored,
        gradients=(masters + (0 if sizes.single_rank else adapted)) * GRADIENT_BYTES,
        optimizer=0 if sizes.masters_on_cpu else masters * sizes.moment_bytes + sizes.scratch,
        shadow=published * SHADOW_BYTES if sizes.on_device else 0,
        casts=casts,
        gathered=full,
        backward=backward,
        reference=_reference_bytes(sizes, by_batch=by_batch),
        critic=sizes.critic * (MASTER_BYTES + GRADIENT_BYTES + MOMENT_BYTES["adamw"]),
        unseen=(casts + backward) // UNSEEN_SHARE if sizes.on_device else 0,
    )


def logits_at_once(card_bytes: int) -> int:
    """Return the number of float32 logits that the head makes at a time on a GPU with ``card_bytes`` of memory (0: on a
    CPU)."""
    return max(LOGITS_IN_A_CHUNK, card_bytes // CARD_SHARE // 4)


def kept_in_layer(
    facts: ModelFacts, training: Training, lora: Lora, tokens: int, *, sixteen_bit: bool, on_device: bool
) -> int:
    """Return the bytes that autograd keeps of one layer for ``tokens`` of a row on one rank. Frozen weights need less
    of the forward than trained ones."""
    keys = facts.key_value_bytes // 8 // max(1, facts.layers)
    queries = facts.queries
    ranks_of_row = training.context_parallel_size
    frozen = lora.rank > 0
    of_mlp = 3 * facts.inner if frozen and not _adapts(lora, MLP_OUTPUT) else 4 * facts.inner
    normed = (queries + keys) * facts.norms_heads
    if sixteen_bit:
        # Rotated queries and keys, values and the attention's output; of each norm its input and result in float32; and
        # the inputs of the projections, each cast on its own.
        of_heads = 2 * queries + 2 * keys * ranks_of_row + normed * (2 if frozen else 3)
        of_norms = facts.norms * (2 if frozen else 4)
        inputs = sum(_adapts(lora, name) for name in INPUT_PROJECTIONS) if frozen else len(INPUT_PROJECTIONS)
        in_layer = (of_mlp + of_heads) // training.tensor_parallel_size + (of_norms + inputs) * facts.hidden
    else:
        # No fused kernel of a GPU shares keys among queries in float32: they are repeated. A rank keeps its own keys
        # twice where other ranks have keys of the row, too.
        in_kernel = 2 * (max(queries, keys) if on_device else keys) * ranks_of_row
        own_keys = 2 * keys if ranks_of_row > 1 else 0
        of_heads = 3 * queries + in_kernel + own_keys + normed * (1 if frozen else 2)
        of_norms = 2 + facts.norms * (1 if frozen else 2)
        in_layer = (of_mlp + of_heads) // training.tensor_parallel_size + of_norms * facts.hidden
    return tokens * (2 if sixteen_bit else 4) * in_layer


def _adapts(lora: Lora, projection: str) -> bool:
    """Return whether ``projection`` has an adapter. Targets that are no names of projections count as all of them."""
    names = [target.rpartition(".")[2] for target in lora.targets or PEFT_TARGETS]
    return projection in names or not all(name.endswith("_proj") for name in names)


def head_bytes(
    facts: ModelFacts, lora: Lora, logits: int, distribution: TokenDistribution, *, sixteen_bit: bool
) -> int:
    """Return the bytes of ``logits`` float32 logits with their copies, or of the gradient of the head, which is made
    when they are gone, where that is larger."""
    of_logit = LOGIT_BYTES
    of_gradient = WEIGHT_GRADIENT_BYTES
    if sixteen_bit:
        of_logit += SIXTEEN_BIT_LOGIT_BYTES
        of_gradient += 2
    if distribution.removes_tokens:
        of_logit += NUCLEUS_BYTES
    if distribution.min_p:
        of_logit += MIN_P_BYTES
    gradient = 0 if lora.rank else of_gradient * facts.vocabulary * facts.hidden
    return max(of_logit * logits, gradient)


def _gathered_bytes(sizes: TrainingSizes, compute: int, *, by_batch: bool) -> int:
    """Bytes of full parameters, of their gradients, and of the buffer from which a layer's gradients are reduced."""
    outside = sizes.outside * (compute + GRADIENT_BYTES)
    if by_batch:
        full_model = sizes.parameters * (compute + GRADIENT_BYTES)
        return full_model + max(sizes.outside, sizes.layer) * GRADIENT_BYTES
    # While a layer is reduced, the layer before it is gathered. Parameters outside of layers are reduced after them.
    return outside + max(sizes.layer * 2 * (compute + GRADIENT_BYTES), sizes.outside * GRADIENT_BYTES)


def _reference_bytes(sizes: TrainingSizes, *, by_batch: bool) -> int:
    if sizes.ranks == 1 or by_batch:
        return FORWARD_BYTES * sizes.reference
    return FORWARD_BYTES * -(-sizes.reference // sizes.ranks)


def choose_gathered(setting: Gathered, sizes: TrainingSizes, free_bytes: int) -> tuple[Gathered, str]:
    """Choose how parameters are gathered where a rank has ``free_bytes``, with a sentence that gives the reason.

    ``setting``: value of ``training.advanced.gathered``, which decides unless it is ``auto``."""
    by_batch = bytes_per_rank(sizes, Gathered.BATCH).total
    by_layer = bytes_per_rank(sizes, Gathered.LAYER).total
    if sizes.single_rank:
        return Gathered.BATCH, f"parameters are not gathered: {by_batch / GIB:.2f} GiB"
    if setting is not Gathered.AUTO:
        choice = setting
        reason = "as training.advanced.gathered says"
    elif by_batch <= free_bytes:
        choice = Gathered.BATCH
        reason = f"which fits {free_bytes / GIB:.2f} GiB"
    else:
        choice = Gathered.LAYER
        reason = f"as {by_batch / GIB:.2f} GiB for whole batches do not fit {free_bytes / GIB:.2f} GiB"
    times = {Gathered.BATCH: "once a batch", Gathered.LAYER: "layer by layer"}[choice]
    needed = by_batch if choice is Gathered.BATCH else by_layer
    return choice, f"parameters are gathered {times}: {needed / GIB:.2f} GiB a rank, {reason}"
