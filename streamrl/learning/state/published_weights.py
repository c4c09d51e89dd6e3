"""Masters and what is published: the forward runs on the bits that the engines hold.

The optimizer steps float32 masters; every parameter of the model is the float32 value of its published bfloat16 bits,
bit for bit what engines sample with. Gradients and masters of a rank are each one flat vector ``_L`` (L local elements,
tensor after tensor). AdamW is elementwise, so that is exact for any sharding.

Bytes an element, without optimizer and activations: forward 4, the rest of the masters 2 (``masters.SplitMasters``),
gradient 4. Published bits are the upper halves of the forward's float32 values: no copy on a CPU. The model of the
caller is taken over tensor by tensor, so loading never holds more than that."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streamrl.learning.model.architecture import CheckpointPiece
from streamrl.learning.model.local_shards import LocalShard, local_part, local_shards, published_shards
from streamrl.learning.state.masters import Masters, SplitMasters, WholeMasters

PUBLISHED_DTYPE = torch.bfloat16
UPPER_HALF = 1 if sys.byteorder == "little" else 0
NORM_ELEMENTS = 1 << 20
"""Elements that a norm takes at once: in float64, all of them would take twice the memory of the gradient."""


class PublishedWeights(ABC):
    """Masters, gradients and published bits of one rank. Parameters must be sharded (if they are) and loaded.

    ``shards``: the published tensors, with the names and shapes of the checkpoint (``pieces``; None: those of the
    parameters). ``master_shards``: the tensors that the masters, ``gradient_L`` and optimizer moments consist of;
    ``_master_tensors`` have their shapes and sharding."""

    master_shards: list[LocalShard]
    _master_tensors: Mapping[str, Tensor]
    masters: Masters
    gradient_L: Tensor
    adapter_elements = 0
    """Elements of all adapters over all ranks, where nothing else is trained."""

    def __init__(self, parameters: dict[str, nn.Parameter], pieces: Sequence[CheckpointPiece] | None = None) -> None:
        self._parameters = parameters
        self._parameter_shards = local_shards(parameters)
        self._pieces = pieces or [CheckpointPiece(s.name, s.name, s.shape, 0) for s in self._parameter_shards]
        # Of the ranks with the same part of a tensor one publishes it, the others nothing of it.
        every = published_shards(self._parameter_shards, self._pieces)
        self.shards = [s if s.owned else s._replace(offset=0, stop=s.start, run=0, stride=0) for s in every]
        self._sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())

    @property
    def total_elements(self) -> int:
        """Elements of all published tensors over all ranks."""
        return sum(int(np.prod(shard.shape, dtype=np.int64)) for shard in self.shards)

    @property
    def counted(self) -> list[slice]:
        """The places in the masters that count in a sum over all ranks: what other ranks have too counts once."""
        return [shard.place for shard in self.master_shards if shard.owned]

    @property
    def decayed(self) -> list[slice]:
        """The places of matrices in the masters: weight decay is for them, not for norms and biases."""
        return _joined([shard.place for shard in self.master_shards if len(shard.shape) > 1])

    @abstractmethod
    def refresh_forward(self) -> None:
        """Set every parameter to the float32 value of its published bits after masters changed. Collective."""

    @abstractmethod
    def collect_gradient(self) -> Tensor:
        """Return this rank's part of the gradient of the masters: ``gradient_L``. Collective; once, before ``step``."""

    @abstractmethod
    def clear_gradient(self) -> None:
        """Set gradients to 0 for the next batch."""

    def bits(self) -> dict[str, np.ndarray]:
        """Published bits of this rank as flat uint16 arrays, by name. Views where they can be: valid until a step."""
        return {name: bit_array(values) for name, values in self.values().items()}

    def values(self) -> dict[str, Tensor]:
        """Values that ``bits`` is made of, where they lie: flat float32 views, by name. Valid until a step."""
        flat = {name: local_part(parameter.detach()).reshape(-1) for name, parameter in self._parameters.items()}
        starts = {shard.name: shard.start for shard in self._parameter_shards}
        return {
            shard.name: flat[piece.parameter][shard.start - starts[piece.parameter] :][: shard.stop - shard.start]
            for piece, shard in zip(self._pieces, self.shards, strict=True)
        }

    def save_adapter(self, directory: Path) -> None:  # noqa: B027 - where everything is trained there is none
        """Write the adapter, if there is one, in peft's format, which engines load too. Collective; rank 0 writes."""

    def as_tensors(self, flat_L: Tensor) -> dict[str, Tensor]:
        """Views of a float32 vector (masters or an optimizer moment) as full or distributed tensors, for checkpoints.
        They stay where the vector is, also when that is host memory and the mesh is CUDA's."""
        tensors: dict[str, Tensor] = {}
        for shard, like in zip(self.master_shards, self._master_tensors.values(), strict=True):
            local = flat_L.detach()[shard.place].view(shard.local_shape)
            if isinstance(like, DTensor):
                # ``DTensor.from_local`` would copy host memory to the device of the mesh, and what is loaded be lost.
                local = cast("Any", DTensor)(local, like._spec, requires_grad=False)
            tensors[shard.name] = local
        return tensors

    def _saved(self, parameter: str) -> Tensor:
        return self._parameters[parameter].detach()

    @torch.no_grad()
    def full_published(self) -> dict[str, Tensor]:
        """All tensors of the model complete, bfloat16 on the CPU, adapters merged. Collective; the first rank gets
        them, others nothing."""
        mine = not dist.is_initialized() or dist.get_rank() == 0
        complete: dict[str, Tensor] = {}
        for name in self._parameters:
            published = self._saved(name).to(PUBLISHED_DTYPE)
            whole = published.full_tensor() if isinstance(published, DTensor) else published
            # Copied: what is gathered from uneven shards is a view of a padded buffer, which safetensors refuses.
            if mine:
                complete[name] = whole.to("cpu", copy=True)
        full: dict[str, Tensor] = {}
        for name, parameter_name, shape, first in self._pieces if mine else ():
            piece = complete[parameter_name].flatten()[first:][: torch.Size(shape).numel()].view(shape)
            # A tensor of its own: safetensors refuses views of one storage.
            full[name] = piece.clone() if piece.numel() < complete[parameter_name].numel() else piece
        return full


class FullWeights(PublishedWeights):
    """Every parameter is trained: published bits are ``bfloat16(master)``.

    ``masters_on_host``: masters lie whole in host memory, for an optimizer that steps there; the gradient stays on the
    device and bfloat16 bits come back, through pinned memory on CUDA. On a CPU that is the same memory, and no other.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        pieces: Sequence[CheckpointPiece] | None = None,
        *,
        masters_on_host: bool = False,
    ) -> None:
        super().__init__(parameters, pieces)
        self._group: Any = None
        self._partial: list[slice] = []
        self.master_shards = self._parameter_shards
        self._master_tensors = parameters
        device = local_part(next(iter(parameters.values()))).device
        size = self.master_shards[-1].stop
        forward_L = None if self._sharded else self._take_over(torch.empty(size, dtype=torch.float32, device=device))
        self._crossing_L: Tensor | None = None
        if masters_on_host and device.type != "cpu":
            whole_L = torch.empty(size, dtype=torch.float32)
            for shard, parameter in self._pairs():
                whole_L[shard.place] = local_part(parameter.detach()).flatten()
            self.masters: Masters = WholeMasters(whole_L)
            self._crossing_L = torch.empty(size, dtype=PUBLISHED_DTYPE, pin_memory=True)
        elif forward_L is not None:
            self.masters = SplitMasters([lambda: forward_L], [size], device)
        else:
            parts = [self._flat_part(parameter) for parameter in parameters.values()]
            self.masters = SplitMasters(parts, [shard.stop - shard.start for shard in self.master_shards], device)
        self.gradient_L = torch.zeros(size, dtype=torch.float32, device=device)
        for parameter, gradient in zip(parameters.values(), self.as_tensors(self.gradient_L).values(), strict=True):
            # A gradient that exists is added to in place: backward fills the flat vector itself.
            parameter.grad = gradient
        self.refresh_forward()

    @torch.no_grad()
    def _take_over(self, forward_L: Tensor) -> Tensor:
        """Parameters become views of one vector, which gets their values; their memory is freed one by one."""
        for shard, parameter in self._pairs():
            forward_L[shard.place] = parameter.flatten()
            parameter.data = forward_L[shard.place].view(shard.shape)
        return forward_L

    @staticmethod
    def _flat_part(parameter: nn.Parameter) -> Callable[[], Tensor]:
        return lambda: local_part(parameter.detach()).view(-1)

    def _pairs(self) -> list[tuple[LocalShard, nn.Parameter]]:
        return list(zip(self.master_shards, self._parameters.values(), strict=True))

    @torch.no_grad()
    def refresh_forward(self) -> None:
        if self._crossing_L is None:
            return  # split masters are written with the forward
        rounded_L = self._crossing_L.copy_(self.masters.whole()).to(self.gradient_L.device)
        for shard, parameter in self._pairs():
            local_part(parameter).copy_(rounded_L[shard.place].view(shard.local_shape))

    def reduce_over(self, group: Any, partial: Set[str]) -> None:
        """Add up the gradients of the parameters ``partial`` over the ranks of ``group``, at each close."""
        self._group = group
        self._partial = [shard.place for shard in self.master_shards if shard.name in partial]

    def collect_gradient(self) -> Tensor:
        if self._partial:
            together = torch.cat([self.gradient_L[place] for place in self._partial])
            dist.all_reduce(together, group=self._group)
            for place, part in zip(
                self._partial, torch.split(together, [p.stop - p.start for p in self._partial]), strict=True
            ):
                self.gradient_L[place] = part
        return self.gradient_L

    def clear_gradient(self) -> None:
        self.gradient_L.zero_()


def _joined(places: Sequence[slice]) -> list[slice]:
    """Places that follow each other as one; empty ones left out."""
    joined: list[slice] = []
    for place in places:
        if joined and joined[-1].stop == place.start:
            joined[-1] = slice(joined[-1].start, place.stop)
        elif place.start < place.stop:
            joined.append(place)
    return joined


def bit_array(values: Tensor) -> np.ndarray:
    """The bits of flat float32 values that bfloat16 has, as uint16: their upper halves, a view of values on a CPU."""
    halves = upper_halves(values)
    # Gathered before they cross: a copy of every second half would take all.
    there = halves if halves.device.type == "cpu" else halves.contiguous().cpu()
    return there.numpy().view(np.uint16)


def upper_halves(values: Tensor) -> Tensor:
    """The bits of flat float32 values that bfloat16 has, as int16: a view, which lies apart."""
    return values.view(torch.int16)[UPPER_HALF::2]


def global_norm(gradient_L: Tensor, counted: Sequence[slice] | None = None) -> float:
    """Euclidean norm over the shards of all ranks. ``counted``: the places that other ranks do not count too (None:
    all)."""
    places = [slice(None)] if counted is None else _joined(counted)
    parts = [part for place in places for part in torch.split(gradient_L[place], NORM_ELEMENTS)] or [gradient_L[:0]]
    square = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]).sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(square)
    return float(square.sqrt())
