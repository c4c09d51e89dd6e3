"""The model as the trainer sees it: packed tokens in, hidden states of the predicting positions out."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.architecture import (
    checkpoint_pieces,
    decoder_layers,
    logit_scaling,
    longest_exact_sequence,
)
from streamrl.learning.model.attention import PackedLayout, PackedSequence, packed_layout
from streamrl.learning.model.context import Context
from streamrl.learning.model.routers import RoutedRow, routers_of
from streamrl.learning.objective.objectives import TokenInputs
from streamrl.learning.options import TrainerOptions
from streamrl.recipe.sections import ComputeDtype, Gathered

LOGITS_IN_A_CHUNK = 1 << 24
"""Logits that exist at once (64 MiB of float32): the head runs over so many trained positions at a time. On CUDA as
many as a 64th of the card holds: each chunk reads the head again, and adds to its gradient."""
CARD_SHARE = 64


class CutRow(NamedTuple):
    """The row that a rank has a piece of. ``inputs``: of all its trained tokens; ``own_N``: int64, which of them are
    predicted in the piece."""

    context: Context
    inputs: TokenInputs
    own_N: Tensor


class MicroBatch(NamedTuple):
    """One row of ``T`` tokens with ``N`` trained ones among them, or a rank's piece of one (``cut``).

    ``tokens_T``, ``positions_T``: int64. ``predictors_N``: index in the row of the token whose output predicts
    the target ``targets_N`` (the one before it; siblings that share a prompt share it). ``places_N``: int64, number of
    the target in its turn. ``sample_ids`` and ``counts``: names of the row's sequences, in their order, and how many of
    the targets of the whole row are theirs. ``temperature_N``: float32, 0 for that of the options (None: all have
    it). ``routed``: the experts that engines chose for its tokens (None: for none of them)."""

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
    cut: CutRow | None = None

    def whole(self, values_N: Tensor) -> Tensor:
        """Values of all trained tokens of the row, given those of this rank. No gradient where the row is cut, and
        collective over its group then."""
        if self.cut is None:
            return values_N
        return self.cut.context.joined(values_N, self.cut.own_N, self.cut.inputs.behavior_N.numel())

    def piece(self, context: Context) -> MicroBatch:
        """This rank's piece of a row whose layout is that of the piece already. A token is trained where it is
        predicted, which may be one piece before the one that it lies in."""
        place = context.piece(self.tokens_T.numel())
        own_N = ((self.predictors_N >= place.start) & (self.predictors_N < place.stop)).nonzero()[:, 0]
        return self._replace(
            tokens_T=self.tokens_T[place],
            positions_T=self.positions_T[place],
            predictors_N=self.predictors_N[own_N] - place.start,
            targets_N=self.targets_N[own_N],
            inputs=self.inputs.part(own_N),
            places_N=self.places_N[own_N],
            temperature_N=None if self.temperature_N is None else self.temperature_N[own_N],
            cut=CutRow(context, self.inputs, own_N),
        )


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """Two tokens, none trained: keeps a rank in step with collectives when it has nothing to train."""
    nothing = torch.zeros(0, device=device)
    index = torch.zeros(0, dtype=torch.int64, device=device)
    return MicroBatch(
        tokens_T=torch.zeros(2, dtype=torch.int64, device=device),
        positions_T=torch.arange(2, device=device),
        layout=packed_layout([PackedSequence(0, 2)], device),
        predictors_N=index,
        targets_N=index,
        inputs=TokenInputs(nothing, nothing, nothing, index, index, 0),
        sample_ids=(),
        counts=(),
        places_N=index,
    )


class PackedPolicy(nn.Module):
    """A Hugging Face causal language model on packed rows. Its forward is the unit that FSDP2 sees as its root.

    ``pieces``: where each tensor of the checkpoint lies in the parameters; they are published under its names.
    ``hugging_face``: the transformers model itself. ``partial_gradients``: parameters of which each rank of
    ``tensor_group`` has the gradient of its own heads only (``parallel.split_tensors``). ``experts``: its routers
    (None: it has none). ``context``: ranks over which rows are cut.
    The output head is not applied here but in chunks by the caller, so that the logits of a whole row never exist."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hugging_face = model
        kind = f"model type {self.hugging_face.config.model_type!r}"
        if self.hugging_face.base_model is model:
            raise StreamRLError(f"{kind} has no inner model that gives hidden states")
        if not self.hugging_face._can_set_attn_implementation() or not self.hugging_face._supports_attention_backend:
            raise StreamRLError(
                f"{kind} does not use transformers' attention interface: it cannot be trained on packed rows"
            )
        self.pieces = checkpoint_pieces(self.hugging_face)
        self.partial_gradients: frozenset[str] = frozenset()
        self.tensor_group: Any = None
        self.context: Context | None = None
        self._scaling = logit_scaling(self.hugging_face.config)
        self._longest = longest_exact_sequence(self.hugging_face.config)
        self.experts = routers_of(self.hugging_face)

    def head(self, hidden_ND: Tensor) -> Tensor:
        """Logits ``[N, V]``: the output head, and what the model does to what comes out of it."""
        return self._scaling(self.hugging_face.get_output_embeddings()(hidden_ND))

    def forward(self, row: MicroBatch) -> Tensor:
        """Hidden states that predict the trained tokens of the row: float [N, D]. Raises ``StreamRLError`` for a
        sequence so long that its rotary angles would depend on the row."""
        if self._longest is not None and row.layout.longest > self._longest:
            raise StreamRLError(
                f"a sequence has {row.layout.longest} tokens; with the rope type of this model at most {self._longest} "
                "can be trained: lower sampling.max_tokens or engines.max_model_len"
            )
        if self.experts is not None:
            self.experts.begin(row.routed, counted=bool(row.sample_ids) and torch.is_grad_enabled())
        output = self.hugging_face.base_model(
            input_ids=row.tokens_T[None],
            position_ids=row.positions_T[None],
            attention_mask=None,
            use_cache=False,
            packed=row.layout,
        )
        if self.experts is not None:
            self.experts.counted = False  # the backward may compute layers again
        hidden_TD: Tensor = output.last_hidden_state[0]
        return hidden_TD.index_select(0, row.predictors_N)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the model; tied ones once."""
        return dict(self.hugging_face.named_parameters())


def shard(policy: PackedPolicy, over: DeviceMesh, gathered: Gathered, *, sixteen_bit: bool) -> None:
    """FSDP2: each decoder layer is a unit, the rest is the root's, which stays gathered from its forward to the end of
    the backward, as the head runs in between. ``sixteen_bit``: all-gather in bfloat16; stored float32 values
    are exact bfloat16.

    ``gathered``: for the forward and the backward of a unit, with the gradient reduced in each backward; or until
    ``set_sharded``, with gradients added up on each rank until ``set_gradient_sync``."""
    by_layer = gathered is Gathered.LAYER
    mixed = MixedPrecisionPolicy(cast_forward_inputs=False)
    if sixteen_bit:
        mixed = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(policy.hugging_face):
        fully_shard(layer, mesh=over, mp_policy=mixed, reshard_after_forward=by_layer)
    fully_shard(policy, mesh=over, mp_policy=mixed, reshard_after_forward=False)
    cast("FSDPModule", policy).set_reshard_after_backward(by_layer)


def gather_once(policy: PackedPolicy) -> None:
    """Gather a loaded policy unit by unit, so that tied parameters are one again and gradients of gathered bfloat16
    parameters add up in float32, as those of float32 parameters do under autocast. Collective."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            for parameter in module.parameters():
                parameter.grad_dtype = torch.float32
            module.reshard()


def set_sharded(policy: PackedPolicy | None, sharded: bool) -> None:
    """Shard or gather every unit. Collective. Nothing to do without FSDP2."""
    for module in policy.modules() if policy is not None else ():
        if isinstance(module, FSDPModule):
            module.reshard() if sharded else module.unshard()


def set_gradient_sync(policy: PackedPolicy, synced: bool) -> None:
    """Let each backward reduce gradients over the ranks (``synced``), or add them up locally."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(synced)


def drop_unreduced_gradients(policy: PackedPolicy) -> None:
    """Drop the gradients of a batch that was not closed, which this rank never reduced. Parameters are gathered."""
    if isinstance(policy, FSDPModule):
        policy.zero_grad()


def computes_in_sixteen_bits(options: TrainerOptions, device: torch.device) -> bool:
    """Return whether forwards run in bfloat16, as ``options.compute_dtype`` says (``auto``: on CUDA)."""
    wanted = options.compute_dtype
    return wanted is ComputeDtype.BFLOAT16 or (wanted is ComputeDtype.AUTO and device.type == "cuda")


def compute_context(options: TrainerOptions, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Context of a forward pass: bfloat16 autocast, or nothing."""
    if computes_in_sixteen_bits(options, device):
        return torch.autocast(device.type, torch.bfloat16)
    return contextlib.nullcontext()


def chunks(policy: PackedPolicy, tokens: int) -> list[slice]:
    """Ranges of predicting positions whose logits may exist at once; one at least."""
    vocabulary = policy.hugging_face.config.get_text_config().vocab_size
    size = max(1, logits_at_once(policy.hugging_face.device) // vocabulary)
    return [slice(start, start + size) for start in range(0, max(1, tokens), size)]


def logits_at_once(device: torch.device) -> int:
    """Float32 logits that the head makes at a time on this device."""
    if device.type != "cuda":
        return LOGITS_IN_A_CHUNK
    return max(LOGITS_IN_A_CHUNK, torch.cuda.get_device_properties(device).total_memory // CARD_SHARE // 4)
