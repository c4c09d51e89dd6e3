"""The model as the trainer uses it: it takes packed tokens and returns hidden states of the predicting positions.

``loading`` makes it in each trainer rank; ``updates``, ``gradients`` and ``scoring`` run it."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module, Parameter

from streamrl.base.errors import StreamRLError
from streamrl.learning.layers.llama4 import PlaceScaling
from streamrl.learning.model.architecture import (
    checkpoint_entries,
    decoder_layers,
    logit_scaling,
    longest_exact_sequence,
    saved_constants,
)
from streamrl.learning.model.attention import PackedLayout, PackedSequence, has_bfloat16, packed_layout
from streamrl.learning.model.context_parallel import ContextGroup
from streamrl.learning.model.recurrent import RecurrentLayers
from streamrl.learning.model.routers import RoutedRow, routers_of
from streamrl.learning.model.text_part import text_decoder
from streamrl.learning.objective.objectives import TokenInputs
from streamrl.learning.options import TrainerOptions
from streamrl.learning.rank_memory import Card, logits_at_once
from streamrl.recipe.sections import ComputeDtype, Gathered


class FullRow(NamedTuple):
    """The full row of which a rank has a slice, with context parallel.

    ``inputs``: inputs of the loss for all trained tokens of the row.
    ``indices_N``: int64, indices among them of the trained tokens that the slice predicts."""

    context: ContextGroup
    inputs: TokenInputs
    indices_N: Tensor


class ImitatedTokens(NamedTuple):
    """Tokens of a row whose cross-entropy is a part of the loss: tokens that no policy sampled. Indices are int64.

    ``predictors_M``: index in the row of the token whose output predicts the target.
    ``weights_M``: float32, weight of the cross-entropy of each in the un-normalised sum."""

    predictors_M: Tensor
    targets_M: Tensor
    weights_M: Tensor


class MicroBatch(NamedTuple):
    """One row of ``T`` tokens with ``N`` trained tokens, or a rank's slice of it. Indices are int64.

    ``predictors_N``: index in the row of the token whose output predicts the target: the token before it. Siblings that
    share a prompt share the token that predicts their first target.
    ``targets_N``: trained tokens.
    ``sample_ids``: names of the row's sequences, in order.
    ``counts``: number of targets of each sequence, in the full row.
    ``places_N``: number of each target within its turn.
    ``temperature_N``: float32 temperature of each target, NaN: the one of the options; None: all targets have that one.
    ``routed``: experts that engines chose for the tokens; None: for no token.
    ``full_row``: row that this is a slice of; None: the rank has the full row.
    ``imitated``: tokens to imitate; None: the row has none.
    ``kept_NK``: kept set of each target, as engines returned it, with -1 behind its last token; a target whose set is
    not known has -1 alone. None: no set is known."""

    tokens_T: Tensor
    positions_T: Tensor
    layout: PackedLayout
    predictors_N: Tensor
    targets_N: Tensor
    inputs: TokenInputs
    sample_ids: tuple[str, ...]
    counts: tuple[int, ...]
    places_N: Tensor
    temperature_N: Tensor | None = None
    routed: RoutedRow | None = None
    full_row: FullRow | None = None
    imitated: ImitatedTokens | None = None
    kept_NK: Tensor | None = None

    @property
    def all_predictors(self) -> Tensor:
        """Index of the token that predicts each trained token, and then each imitated one."""
        if self.imitated is None:
            return self.predictors_N
        return torch.cat([self.predictors_N, self.imitated.predictors_M])

    def gather(self, values_N: Tensor) -> Tensor:
        """Gather the values of all trained tokens of the full row; ``values_N`` are the ones of this rank. Where the
        rank has a slice, it is collective over the context group, and the result has no gradient."""
        if self.full_row is None:
            return values_N
        trained_tokens = self.full_row.inputs.behavior_N.numel()
        return self.full_row.context.gather(values_N, self.full_row.indices_N, trained_tokens)

    def slice_of_rank(self, context: ContextGroup) -> MicroBatch:
        """Return this rank's slice of a row whose layout is the layout of the slice already. A token is trained on the
        rank that predicts it, which may be the rank before the one that has the token."""
        place = context.slice_of_rank(self.tokens_T.numel())
        indices_N = ((self.predictors_N >= place.start) & (self.predictors_N < place.stop)).nonzero()[:, 0]
        imitated = self.imitated
        if imitated is not None:
            all_M, targets_M, weights_M = imitated
            in_slice_M = (all_M >= place.start) & (all_M < place.stop)
            imitated = ImitatedTokens(all_M[in_slice_M] - place.start, targets_M[in_slice_M], weights_M[in_slice_M])
        return self._replace(
            imitated=imitated,
            tokens_T=self.tokens_T[place],
            positions_T=self.positions_T[place],
            predictors_N=self.predictors_N[indices_N] - place.start,
            targets_N=self.targets_N[indices_N],
            inputs=self.inputs.part(indices_N),
            places_N=self.places_N[indices_N],
            temperature_N=None if self.temperature_N is None else self.temperature_N[indices_N],
            kept_NK=None if self.kept_NK is None else self.kept_NK[indices_N],
            full_row=FullRow(context, self.inputs, indices_N),
        )


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """Make a row of two tokens, none trained: a rank that has nothing to train takes part in collectives with it."""
    no_values = torch.zeros(0, device=device)
    no_indices = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens_T=torch.zeros(2, dtype=torch.int64, device=device),
        positions_T=torch.arange(2, device=device),
        layout=packed_layout([PackedSequence(0, 2)], device),
        predictors_N=no_indices,
        targets_N=no_indices,
        inputs=TokenInputs(no_values, no_values, no_values, no_indices, no_indices, 0),
        sample_ids=(),
        counts=(),
        places_N=no_indices,
    )


class PackedPolicy(Module):
    """A Hugging Face causal language model on packed rows. It is the root unit of FSDP2.

    Its forward does not apply the output head: the caller does, in chunks, so that the logits of a whole row never
    exist.

    ``hugging_face``: transformers model.
    ``entries``: tensors of the checkpoint, each with its place in the parameters; weights are published under their
    names.
    ``constants``: saved tensors that are not trained: names in the checkpoint by names of the model's buffers. Trainer
    and engines keep the values of the files.
    ``float32``: names of the tensors in the checkpoint that are published in float32, as they are stored.
    ``partial_gradients``: names of parameters whose gradient on each rank of ``tensor_group`` is only the part of that
    rank's heads (``parallel.split_tensors``).
    ``context``: ranks that split each row; None: every rank has full rows.
    ``experts``: routers of the model; None: it has no experts.
    ``logits``: number of tokens, from the first one, that the head gives logits of; None: all."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hugging_face = model
        kind = f"model type {self.hugging_face.config.model_type!r}"
        self._decoder = (text_decoder(model),)  # in a tuple: it is a part of ``hugging_face``, and no second module
        # Not by ``_supports_attention_backend``, which classes of hybrid models leave unset: ``packing_check`` sees.
        if not self.hugging_face._can_set_attn_implementation():
            raise StreamRLError(
                f"{kind} does not use transformers' attention interface: it cannot be trained on packed rows"
            )
        self.entries = checkpoint_entries(self.hugging_face)
        self.constants = saved_constants(self.hugging_face)
        self.float32: frozenset[str] = frozenset()
        self.partial_gradients: frozenset[str] = frozenset()
        self.tensor_group: Any = None
        self.context: ContextGroup | None = None
        self._scaling = logit_scaling(self.hugging_face.config)
        self._longest = longest_exact_sequence(self.hugging_face.config)
        self.experts = routers_of(self.hugging_face)
        self.recurrent = RecurrentLayers()
        self._place_scaling = PlaceScaling(self.hugging_face)
        self.logits: int | None = None

    def set_attention(self, name: str) -> None:
        """Let the layers call the attention that transformers knows by ``name``."""
        self._decoder[0].set_attn_implementation(name)

    def forget_row(self) -> None:
        """Let ``hugging_face`` compute what is no packed row."""
        self.recurrent.begin(None)
        self._place_scaling.positions_T = None

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits ``[N, V]``: outputs of the head, scaled and capped as the model does."""
        return self._scaling(self.hugging_face.get_output_embeddings()(hidden_ND)[:, : self.logits])

    def forward(self, row: MicroBatch) -> Tensor:
        """Hidden states that predict the trained tokens of the row, and then the imitated ones: float [N + M, D].
        Raises ``StreamRLError`` for a sequence so long that its rotary angles would depend on the row."""
        if self._longest is not None and row.layout.longest > self._longest:
            raise StreamRLError(
                f"a sequence has {row.layout.longest} tokens; with the rope type of this model at most {self._longest} "
                "can be trained: lower sampling.max_tokens or engines.max_model_len"
            )
        if self.experts is not None:
            self.experts.begin(row.routed, row.all_predictors if torch.is_grad_enabled() else None)
        self.recurrent.begin(row.layout)
        self._place_scaling.positions_T = row.positions_T
        output = self._decoder[0](
            input_ids=row.tokens_T[None],
            position_ids=row.positions_T[None],
            attention_mask=None,
            use_cache=False,
            packed=row.layout,
        )
        if self.experts is not None:
            self.experts.end()
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD.index_select(0, row.all_predictors)

    def float32_parameters(self) -> frozenset[str]:
        """Names of the parameters whose tensors are all published in float32."""
        rounded = {entry.parameter for entry in self.entries if entry.name not in self.float32}
        return frozenset(entry.parameter for entry in self.entries) - rounded

    def trained_parameters(self) -> dict[str, Parameter]:
        """Parameters by their names in the model; tied ones once."""
        return dict(self.hugging_face.named_parameters())


def shard(policy: PackedPolicy, mesh: DeviceMesh, gathered: Gathered, *, sixteen_bit: bool) -> None:
    """Shard a policy with FSDP2: each decoder layer is a unit. All other parameters are in the root unit, which stays
    gathered from its forward to the end of the backward, as the head runs in between.

    ``gathered``: ``layer``: a unit is gathered for its forward and for its backward, and each backward reduces the
    gradient. ``batch``: units are gathered until ``set_sharded``, and each rank adds up gradients until
    ``set_gradient_sync``.
    ``sixteen_bit``: whether parameters are gathered in bfloat16; the stored float32 values are exact in bfloat16."""
    by_layer = gathered is Gathered.LAYER
    mixed = MixedPrecisionPolicy(cast_forward_inputs=False)
    if sixteen_bit:
        mixed = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(policy.hugging_face):
        fully_shard(layer, mesh=mesh, mp_policy=mixed, reshard_after_forward=by_layer)
    fully_shard(policy, mesh=mesh, mp_policy=mixed, reshard_after_forward=False)
    cast("FSDPModule", policy).set_reshard_after_backward(by_layer)


def gather_once(policy: PackedPolicy) -> None:
    """Gather a loaded policy once, unit by unit. Collective.

    It makes tied parameters one parameter again, and lets gradients of gathered bfloat16 parameters add up in float32,
    as the gradients of float32 parameters do under autocast."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for parameter in module.parameters():
                parameter.grad_dtype = torch.float32
            module.reshard()


def set_sharded(policy: PackedPolicy | None, sharded: bool) -> None:
    """Shard or gather every unit. Collective. Does nothing without a policy or without FSDP2."""
    if policy is None:
        return
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            if sharded:
                module.reshard()
            else:
                module.unshard()


def set_gradient_sync(policy: PackedPolicy, synced: bool) -> None:
    """Let each backward reduce gradients over the ranks (``synced``), or add them up locally."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(synced)


def drop_unreduced_gradients(policy: PackedPolicy) -> None:
    """Drop the gradients of a batch that was not closed, which this rank never reduced. Parameters must be gathered."""
    if isinstance(policy, FSDPModule):
        policy.zero_grad()


def computes_in_sixteen_bits(options: TrainerOptions, device: torch.device) -> bool:
    """Return whether forwards run in bfloat16: by ``options.compute_dtype``, where ``auto`` means on a GPU that has
    it."""
    dtype = options.compute_dtype
    return dtype is ComputeDtype.BFLOAT16 or (dtype is ComputeDtype.AUTO and has_bfloat16(device))


def compute_context(options: TrainerOptions, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Context manager of a forward pass: bfloat16 autocast, or nothing."""
    if computes_in_sixteen_bits(options, device):
        # Copies of the weights that autocast keeps until its end are of no use where the backward casts them again.
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=not options.activation_checkpointing)
    return contextlib.nullcontext()


def chunks(policy: PackedPolicy, tokens: int) -> list[slice]:
    """Ranges of trained tokens whose logits may exist at once; one range at least."""
    vocabulary = policy.hugging_face.config.get_text_config().vocab_size
    card = card_of(policy.hugging_face.device)
    size = max(1, logits_at_once(card.memory if card else 0) // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, max(1, tokens), size)]


def card_of(device: torch.device) -> Card | None:
    """Return the GPU of a rank; None on a CPU."""
    if device.type != "cuda":
        return None
    return Card(torch.cuda.get_device_properties(device).total_memory, has_bfloat16(device))
