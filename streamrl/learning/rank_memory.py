"""Predict the memory of one trainer rank at its peak, from sizes alone, and choose how parameters are gathered.

``prepare`` calls it in the command's process, before a run; ``model.loading`` calls it in each trainer rank. There are
two ways to gather parameters over several ranks. ``batch``: every rank has full parameters and gradients while a batch
is open, and gradients are reduced once, at its close. ``layer``: each layer is gathered for its own forward and
backward, and its gradient is reduced in every row, the usual way of FSDP2."""

from __future__ import annotations

from msgspec import Struct

from streamrl.pretrained.model_facts import ModelFacts
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
ADAPTED_PROJECTIONS = 2  # peft adapts the query and the value projection where ``lora.targets`` is empty
LINEAR_PROJECTIONS = 7  # of a layer: four of the attention, three of the gated network
LOGIT_COPIES = 3  # logits, log-softmax and their gradient
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


class TrainingSizes(Struct, frozen=True, kw_only=True):
    """Quantities that the memory of a rank depends on.

    ``parameters``: number of parameters of the model.
    ``outside``: number of parameters outside of the repeated layers (embeddings, head).
    ``layer``: mean number of parameters of a layer.
    ``ranks``: number of ranks that hold one replica together.
    ``replicas``: number of replicas.
    ``trained``: number of parameters of the adapters; 0: all parameters are trained.
    ``adapted``: number of elements of the weights below the adapters.
    ``moment_bytes``: bytes of the optimizer's moments, for each trained parameter.
    ``masters_on_cpu``: whether masters and moments lie in CPU memory.
    ``sixteen_bit``: whether the forward computes in bfloat16.
    ``on_device``: whether weights lie on a GPU.
    ``reference``: whether there is a reference model.
    ``critic``: number of parameters of a separate value model, of which each rank has a full copy; 0: none."""

    parameters: int
    outside: int
    layer: int
    ranks: int = 1
    replicas: int = 1
    trained: int = 0
    adapted: int = 0
    moment_bytes: int = 8
    masters_on_cpu: bool = False
    sixteen_bit: bool = False
    on_device: bool = False
    reference: bool = False
    critic: int = 0

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


def training_sizes(
    training: Training, lora: Lora, objective: ObjectiveSettings, facts: ModelFacts, *, on_device: bool = False
) -> TrainingSizes:
    """Return the sizes that the memory of a trainer rank depends on, estimated from the files of the model."""
    # Most tensor parallel plans split the layers and an untied head over the ranks, and not the embedding.
    table = facts.vocabulary * facts.hidden
    tensor = training.tensor_parallel_size
    in_layers = (facts.parameters - facts.outside) // tensor
    outside = facts.outside
    if facts.outside >= 2 * table:
        outside -= table - table // tensor
    if "all-linear" in lora.targets:
        projections = LINEAR_PROJECTIONS
        adapted = in_layers
    else:
        projections = len(lora.targets) or ADAPTED_PROJECTIONS
        adapted = min(in_layers, projections * facts.hidden**2 * facts.layers)
    return TrainingSizes(
        parameters=outside + in_layers,
        outside=outside,
        layer=in_layers // max(1, facts.layers),
        ranks=max(1, training.ranks // (tensor * training.replicas)),
        replicas=training.replicas,
        trained=2 * lora.rank * facts.hidden * projections * facts.layers,
        adapted=adapted if lora.rank and not lora.syncs_adapter else 0,
        moment_bytes=MOMENT_BYTES[training.optimizer],
        masters_on_cpu=on_device and training.optimizer is OptimizerKind.ADAMW_OFFLOADED,
        sixteen_bit=training.compute_dtype is ComputeDtype.BFLOAT16
        or (on_device and training.compute_dtype is ComputeDtype.AUTO),
        on_device=on_device,
        reference=objective.has_reference,
        critic=facts.parameters if objective.has_value_model else 0,
    )


class RankBytes(Struct, frozen=True, kw_only=True):
    """Bytes of one rank at its peak, by purpose.

    ``parameters``: the rank's shard of the weights that the forward runs on, and of the masters.
    ``shadow``: a copy of the published bits.
    ``casts``: parameters cast to bfloat16 for the forward.
    ``gathered``: full parameters, and the buffers that gather and reduce them, for a time.
    ``backward``: activations and logits, or FSDP2's sums of gradients over replicas where these are larger."""

    parameters: int
    gradients: int
    optimizer: int
    shadow: int
    casts: int
    gathered: int
    backward: int
    reference: int
    critic: int

    @property
    def total(self) -> int:
        """Sum of all fields."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


def bytes_per_rank(sizes: TrainingSizes, gathered: Gathered, activations: int = 0) -> RankBytes:
    """Predict the peak of one rank. ``gathered`` (not ``auto``) matters with several ranks only. ``activations``: bytes
    of activations and logits."""
    ranks = sizes.ranks
    compute = 2 if sizes.sixteen_bit else 4
    shard = -(-sizes.parameters // ranks)
    masters = -(-sizes.trained // ranks) if sizes.trained else shard
    adapted = -(-sizes.adapted // ranks)
    stored = shard * FORWARD_BYTES
    if sizes.trained:
        stored += masters * MASTER_BYTES + adapted * BASE_BYTES
    elif not sizes.masters_on_cpu:
        stored += shard * REMAINDER_BYTES
    by_batch = not sizes.single_rank and gathered is Gathered.BATCH
    # FSDP2 keeps each layer's sum of gradients over replicas until the backward ends.
    summed = masters * GRADIENT_BYTES if sizes.replicas > 1 and not by_batch else 0
    return RankBytes(
        parameters=stored,
        gradients=(masters + (0 if sizes.single_rank else adapted)) * GRADIENT_BYTES,
        optimizer=0 if sizes.masters_on_cpu else masters * sizes.moment_bytes + sizes.scratch,
        shadow=shard * SHADOW_BYTES if sizes.on_device else 0,
        casts=sizes.parameters * 2 if sizes.single_rank and sizes.sixteen_bit else 0,
        gathered=0 if sizes.single_rank else _gathered_bytes(sizes, compute, by_batch=by_batch),
        backward=max(activations, summed),
        reference=_reference_bytes(sizes, by_batch=by_batch),
        critic=sizes.critic * (MASTER_BYTES + GRADIENT_BYTES + MOMENT_BYTES["adamw"]),
    )


def logits_at_once(card_bytes: int) -> int:
    """Return the number of float32 logits that the head makes at a time on a GPU with ``card_bytes`` of memory (0: on a
    CPU)."""
    return max(LOGITS_IN_A_CHUNK, card_bytes // CARD_SHARE // 4)


def activation_bytes(facts: ModelFacts, training: Training, tokens: int, logits: int, *, sixteen_bit: bool) -> int:
    """Return the bytes of activations that autograd keeps for ``tokens`` of a row on one rank, and those of ``logits``
    float32 logits that exist at one time, with their copies."""
    whole_layers = 1 if training.activation_checkpointing else facts.layers
    keys = facts.key_value_bytes // 8 // max(1, facts.layers)
    tensor = training.tensor_parallel_size
    if sixteen_bit:
        # What autograd keeps of a layer: the MLP's 4 values, rotated queries and keys, values, the attention's output,
        # for each norm its input and result in float32, and inputs of projections
        # (tests/learning/test_kept_activations.py).
        heads = 2 * facts.queries + 2 * keys * training.context_parallel_size
        if facts.norms_heads:
            heads += 3 * (facts.queries + keys)
        in_layer = (4 * facts.inner + heads) // tensor + (5 + 4 * facts.norms) * facts.hidden
    else:
        # A rank keeps its own keys and values twice, and those of each other rank of its context group once.
        heads = 5 * facts.queries + 2 * keys * (training.context_parallel_size + 1)
        in_layer = (4 * facts.inner + heads) // tensor + 6 * facts.hidden
    elements = tokens * (in_layer * whole_layers + facts.hidden * (facts.layers - whole_layers))
    return (2 if sixteen_bit else 4) * elements + 4 * LOGIT_COPIES * logits


def _gathered_bytes(sizes: TrainingSizes, compute: int, *, by_batch: bool) -> int:
    """Bytes of full parameters, of their gradients, and of the buffer from which a layer's gradients are reduced."""
    outside = sizes.outside * (compute + GRADIENT_BYTES)
    if by_batch:
        full_model = sizes.parameters * (compute + GRADIENT_BYTES)
        return full_model + max(sizes.outside, sizes.layer) * GRADIENT_BYTES
    # While a layer is reduced, the layer before it is gathered. Parameters outside of layers are reduced after them.
    return outside + max(sizes.layer * 2 * (compute + GRADIENT_BYTES), sizes.outside * GRADIENT_BYTES)


def _reference_bytes(sizes: TrainingSizes, *, by_batch: bool) -> int:
    if not sizes.reference:
        return 0
    if sizes.ranks == 1 or by_batch:
        return FORWARD_BYTES * sizes.parameters
    return FORWARD_BYTES * -(-sizes.parameters // sizes.ranks)


def choose_gathered(
    setting: Gathered, sizes: TrainingSizes, free_bytes: int, activations: int = 0
) -> tuple[Gathered, str]:
    """Choose how parameters are gathered where a rank has ``free_bytes``, with a sentence that gives the reason.

    ``setting``: value of ``training.advanced.gathered``, which decides unless it is ``auto``.
    ``activations``: bytes of activations and logits."""
    by_batch = bytes_per_rank(sizes, Gathered.BATCH, activations).total
    by_layer = bytes_per_rank(sizes, Gathered.LAYER, activations).total
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
