"""Bytes that one trainer rank holds at its peak, predicted from sizes alone, and how its parameters are gathered.

Activations and logits depend on the rows: they are given. Two ways to gather parameters over several ranks:
``batch``: whole parameters and gradients on every rank while a batch is open, one reduction at its close. ``layer``:
each layer is gathered for its own forward and backward, and its gradient reduced in every row (FSDP2 as it is meant).
"""

from __future__ import annotations

import msgspec

from streamrl.pretrained.model_facts import ModelFacts
from streamrl.recipe.objective import ObjectiveSettings
from streamrl.recipe.sections import ComputeDtype, Gathered, Lora, OptimizerKind, Training

FORWARD_BYTES = 4  # a float32 value of the published bfloat16 bits
REMAINDER_BYTES = 2  # the rest of the float32 master
# of adapters, and of the weights below them as they are published
MASTER_BYTES = 4
BASE_BYTES = 2
GRADIENT_BYTES = 4
SHADOW_BYTES = 2  # published bits beside the weights, on a device
MOMENT_BYTES = {"adamw": 8, "adamw_offloaded": 8, "adamw_8bit": 2}
ADAPTED_PROJECTIONS = 2  # peft adapts the query and the value projection where ``lora.targets`` is empty
LINEAR_PROJECTIONS = 7  # of a layer: four of the attention, three of the gated network
LOGIT_COPIES = 3  # logits, log-softmax and their gradient
STEP_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements of the masters that a step reads, moves and writes at once: temporaries of 4 to 12 bytes an element exist
for so many. A multiple of the block of 8-bit optimizers (256), and below 2**31, in which their CUDA kernel counts."""
SCRATCH_BYTES = 8  # of each of them, kept between steps
GIB = 1 << 30


class TrainingSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Quantities that the memory of a rank depends on.

    ``parameters``: of the model; ``outside``: those of them outside of the repeated layers (embeddings, head);
    ``layer``: of a layer, in the mean. ``ranks`` hold one of the ``replicas``. ``trained`` 0: all of them;
    else those of adapters, below which lie weights of ``adapted`` elements. ``moment_bytes``: of the optimizer, for a
    trained parameter. ``masters_on_host``: masters and moments lie in host memory. ``sixteen_bit``: the forward
    computes in bfloat16. ``on_device``: weights lie on a GPU. ``reference``: there is a reference model; ``critic``:
    parameters of a value model of its own, which each rank has whole."""

    parameters: int
    outside: int
    layer: int
    ranks: int = 1
    replicas: int = 1
    trained: int = 0
    adapted: int = 0
    moment_bytes: int = 8
    masters_on_host: bool = False
    sixteen_bit: bool = False
    on_device: bool = False
    reference: bool = False
    critic: int = 0

    @property
    def alone(self) -> bool:
        """Whether there is one trainer rank, which gathers no parameters and reduces no gradients."""
        return self.ranks * self.replicas == 1

    @property
    def scratch(self) -> int:
        """Bytes into which split masters are read."""
        masters = -(-self.parameters // self.ranks)
        at_once = min(masters, STEP_ELEMENTS["cuda" if self.on_device else "cpu"])
        return 0 if self.trained or self.masters_on_host else SCRATCH_BYTES * at_once


def training_sizes(
    training: Training, lora: Lora, objective: ObjectiveSettings, facts: ModelFacts, *, on_device: bool = False
) -> TrainingSizes:
    """Sizes that the memory of a trainer rank depends on, as far as the files of the model say."""
    # Most plans split layers and a head of its own over tensor parallel ranks, and not the embedding.
    table = facts.vocabulary * facts.hidden
    tensor = training.tensor_parallel_size
    in_layers = (facts.parameters - facts.outside) // tensor
    outside = facts.outside - (table - table // tensor if facts.outside >= 2 * table else 0)
    whole = "all-linear" in lora.targets
    projections = LINEAR_PROJECTIONS if whole else len(lora.targets) or ADAPTED_PROJECTIONS
    adapted = in_layers if whole else min(in_layers, projections * facts.hidden**2 * facts.layers)
    return TrainingSizes(
        parameters=outside + in_layers,
        outside=outside,
        layer=in_layers // max(1, facts.layers),
        ranks=max(1, training.ranks // (tensor * training.replicas)),
        replicas=training.replicas,
        trained=2 * lora.rank * facts.hidden * projections * facts.layers,
        adapted=adapted if lora.rank and not lora.served else 0,
        moment_bytes=MOMENT_BYTES[training.optimizer],
        masters_on_host=on_device and training.optimizer is OptimizerKind.ADAMW_OFFLOADED,
        sixteen_bit=training.compute_dtype is ComputeDtype.BFLOAT16
        or (on_device and training.compute_dtype is ComputeDtype.AUTO),
        on_device=on_device,
        reference=objective.has_reference,
        critic=objective.has_value_model * facts.parameters,
    )


class RankBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank at its peak. ``gathered``: whole parameters, and what gathers and reduces them, for a time;
    ``backward``: activations, or the gradients that FSDP2 has added up over replicas where these are more."""

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
        """Sum of all of them."""
        return sum(getattr(self, name) for name in self.__struct_fields__)


def bytes_per_rank(sizes: TrainingSizes, gathered: Gathered, beside: int = 0) -> RankBytes:
    """The peak of one rank. ``beside``: bytes of activations and logits. ``gathered`` (not ``auto``) matters with
    several ranks only."""
    ranks = sizes.ranks
    compute = 2 if sizes.sixteen_bit else 4
    shard = -(-sizes.parameters // ranks)
    masters = -(-sizes.trained // ranks) if sizes.trained else shard
    adapted = -(-sizes.adapted // ranks)
    stored = shard * FORWARD_BYTES
    if sizes.trained:
        stored += masters * MASTER_BYTES + adapted * BASE_BYTES
    elif not sizes.masters_on_host:
        stored += shard * REMAINDER_BYTES
    alone = sizes.alone
    by_batch = not sizes.alone and gathered is Gathered.BATCH
    # FSDP2 keeps what replicas have added up of each layer until the backward ends.
    summed = masters * GRADIENT_BYTES if sizes.replicas > 1 and not by_batch else 0
    return RankBytes(
        parameters=stored,
        gradients=(masters + (0 if alone else adapted)) * GRADIENT_BYTES,
        optimizer=0 if sizes.masters_on_host else masters * sizes.moment_bytes + sizes.scratch,
        shadow=shard * SHADOW_BYTES if sizes.on_device else 0,
        casts=sizes.parameters * 2 if alone and sizes.sixteen_bit else 0,
        gathered=0 if alone else _gathered_bytes(sizes, compute, by_batch=by_batch),
        backward=max(beside, summed),
        reference=_reference_bytes(sizes, by_batch=by_batch),
        critic=sizes.critic * (MASTER_BYTES + GRADIENT_BYTES + MOMENT_BYTES["adamw"]),
    )


def activation_bytes(facts: ModelFacts, training: Training, tokens: int, logits: int, *, sixteen_bit: bool) -> int:
    """Bytes that ``tokens`` of a row keep on their rank for the backward, and the ``logits`` that exist at once."""
    whole_layers = 1 if training.activation_checkpointing else facts.layers
    # Keys and values are kept twice, and once those of each other piece of the row.
    keys = facts.key_value_bytes // 8 // max(1, facts.layers) * 2 * (training.context_parallel_size + 1)
    split = (4 * facts.inner + 5 * facts.hidden + keys) // training.tensor_parallel_size
    kept = tokens * ((split + 6 * facts.hidden) * whole_layers + facts.hidden * (facts.layers - whole_layers))
    return (2 if sixteen_bit else 4) * kept + 4 * LOGIT_COPIES * logits


def _gathered_bytes(sizes: TrainingSizes, compute: int, *, by_batch: bool) -> int:
    """Whole parameters, their gradients, and the buffer from which a group of them is reduced."""
    outside = sizes.outside * (compute + GRADIENT_BYTES)
    if by_batch:
        whole = sizes.parameters * (compute + GRADIENT_BYTES)
        return whole + max(sizes.outside, sizes.layer) * GRADIENT_BYTES
    # While a layer is reduced the one before it is gathered; what lies outside of layers is reduced after them.
    return outside + max(sizes.layer * 2 * (compute + GRADIENT_BYTES), sizes.outside * GRADIENT_BYTES)


def _reference_bytes(sizes: TrainingSizes, *, by_batch: bool) -> int:
    if not sizes.reference:
        return 0
    whole = sizes.ranks == 1 or by_batch
    return FORWARD_BYTES * (sizes.parameters if whole else -(-sizes.parameters // sizes.ranks))


def choose_gathered(wanted: Gathered, sizes: TrainingSizes, room: int, beside: int = 0) -> tuple[Gathered, str]:
    """Choose how parameters are gathered where ``room`` bytes of a rank are free, with a sentence that says why.
    ``beside``: bytes that activations and logits take."""
    whole, by_layer = (bytes_per_rank(sizes, g, beside).total for g in (Gathered.BATCH, Gathered.LAYER))
    if sizes.alone:
        return Gathered.BATCH, f"parameters are not gathered: {whole / GIB:.2f} GiB"
    if wanted is not Gathered.AUTO:
        chosen = wanted
        why = "as training.advanced.gathered says"
    elif whole <= room:
        chosen = Gathered.BATCH
        why = f"which fits {room / GIB:.2f} GiB"
    else:
        chosen = Gathered.LAYER
        why = f"as {whole / GIB:.2f} GiB for whole batches do not fit {room / GIB:.2f} GiB"
    times = {Gathered.BATCH: "once a batch", Gathered.LAYER: "layer by layer"}[chosen]
    needed = whole if chosen is Gathered.BATCH else by_layer
    return chosen, f"parameters are gathered {times}: {needed / GIB:.2f} GiB a rank, {why}"
