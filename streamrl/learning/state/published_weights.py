"""Masters, gradients and published bits of one rank: the forward runs on the bits that the engines hold.

``updates.make_weights`` makes them in each trainer rank. The optimizer steps float32 masters. Every parameter of the
model is the float32 value of its published bfloat16 bits, bit for bit the value that engines sample with. Gradients and
masters of a rank are each one flat vector ``_L`` (L local elements, tensor after tensor). AdamW is elementwise, so the
flat vector is exact for any sharding.

Bytes an element, without optimizer and activations: forward 4, remainders of the masters 2 (``masters.SplitMasters``),
gradient 4. Published bits are the upper halves of the forward's float32 values, without a copy on a CPU. The caller's
model is taken over tensor by tensor, so loading needs no second copy of the model."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import all_reduce, get_rank, get_world_size
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from streamrl.learning.model.architecture import CheckpointEntry
from streamrl.learning.model.local_shards import LocalShard, local_part, local_shards, published_shards
from streamrl.learning.state.masters import Masters, SplitMasters, Tensors, WholeMasters

PUBLISHED_DTYPE = torch.bfloat16
PEFT_PREFIX = "base_model.model."
ADAPTER_TENSORS = "adapter_model.safetensors"
UPPER_HALF = 1 if sys.byteorder == "little" else 0
NORM_ELEMENTS = 1 << 20
"""Elements that a norm converts at once: in float64 a full gradient would take twice the memory of the gradient."""


class PublishedWeights(ABC):
    """Masters, gradients and published bits of one rank. The parameters must be loaded, and sharded where they will be.

    ``shards``: published tensors, with the names and shapes of the checkpoint (``entries``; None: of the parameters).
    ``in_float32``: names of parameters that are published in float32; all others in bfloat16.
    ``master_shards``: tensors that make up the masters, ``gradient_L`` and the optimizer's moments.
    ``_master_tensors``: tensors with the shapes and the sharding of ``master_shards``.
    ``adapter_elements``: number of elements of all adapters over all ranks; 0 where all parameters are trained.
    ``base_part``: part of this rank of a sum over the bits of the adapters' base; None without adapters."""

    master_shards: list[LocalShard]
    _master_tensors: Mapping[str, Tensor]
    masters: Masters
    gradient_L: Tensor
    adapter_elements = 0
    base_part: int | None = None

    def __init__(
        self,
        parameters: dict[str, Parameter],
        entries: Sequence[CheckpointEntry] | None = None,
        in_float32: Set[str] = frozenset(),
    ) -> None:
        self._parameters = parameters
        self._in_float32 = in_float32
        self._parameter_shards = local_shards(parameters)
        self._entries = entries or [
            CheckpointEntry(shard.name, shard.name, shard.shape, 0) for shard in self._parameter_shards
        ]
        # Of the ranks that hold the same part of a tensor, one publishes it; the part is empty on the others.
        shards = [
            shard._replace(dtype="float32") if entry.parameter in in_float32 else shard
            for entry, shard in zip(self._entries, published_shards(self._parameter_shards, self._entries), strict=True)
        ]
        self.shards = [
            shard if shard.owned else shard._replace(offset=0, stop=shard.start, run=0, stride=0) for shard in shards
        ]
        self._sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())

    @property
    def total_elements(self) -> int:
        """Number of elements of all published tensors over all ranks."""
        return sum(int(np.prod(shard.shape, dtype=np.int64)) for shard in self.shards)

    @property
    def counted_places(self) -> list[slice]:
        """Places in the masters that count in a sum over all ranks. A place that several ranks hold counts on one."""
        return [shard.place for shard in self.master_shards if shard.owned]

    @property
    def decayed_places(self) -> list[slice]:
        """Places of matrices in the masters: weight decay applies to them, and not to norms and biases."""
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
        """Published bits of this rank as flat uint16 arrays, of float32 tensors uint32, by name. They may be views,
        valid until a step."""
        dtypes = {shard.name: shard.dtype for shard in self.shards}
        return {name: bit_array(values, dtypes[name]) for name, values in self.values().items()}

    def values(self) -> Tensors:
        """Float32 values of ``bits`` on their device: flat views, by name, which are valid until a step."""
        flat = {name: local_part(parameter.detach()).reshape(-1) for name, parameter in self._parameters.items()}
        starts = {shard.name: shard.start for shard in self._parameter_shards}
        return {
            shard.name: flat[entry.parameter][shard.start - starts[entry.parameter] :][: shard.stop - shard.start]
            for entry, shard in zip(self._entries, self.shards, strict=True)
        }

    def save_adapter(self, directory: Path) -> None:  # noqa: B027 - without adapters there is no file
        """Write the adapters, if there are any, in peft's format, which engines load. Collective; rank 0 writes."""

    def as_tensors(self, flat_L: Tensor) -> Tensors:
        """Views of a float32 vector (masters or an optimizer moment) as full or distributed tensors, for checkpoints.
        They have the memory of the vector, also where it is in CPU memory and the mesh is of CUDA devices."""
        tensors: Tensors = {}
        for shard, like in zip(self.master_shards, self._master_tensors.values(), strict=True):
            local = flat_L.detach()[shard.place].view(shard.local_shape)
            if isinstance(like, DTensor):
                # ``DTensor.from_local`` would copy CPU memory to the device of the mesh: loading would fill the copy.
                local = cast("Any", DTensor)(local, like._spec, requires_grad=False)
            tensors[shard.name] = local
        return tensors

    def _dtype_of(self, parameter: str) -> torch.dtype:
        """Published dtype of a parameter."""
        return torch.float32 if parameter in self._in_float32 else PUBLISHED_DTYPE

    def _saved(self, parameter: str) -> Tensor:
        return self._parameters[parameter].detach()

    @torch.no_grad()
    def full_published(self) -> Tensors:
        """All tensors of the model, complete, in their published dtypes on the CPU, adapters merged. Collective. The
        first rank gets them, the other ranks get an empty dictionary."""
        is_first_rank = not dist.is_initialized() or get_rank() == 0
        complete: Tensors = {}
        for name in self._parameters:
            published = self._saved(name).to(self._dtype_of(name))
            full_tensor = published.full_tensor() if isinstance(published, DTensor) else published
            # Copied: a tensor gathered from uneven shards is a view of a padded buffer, which safetensors refuses.
            if is_first_rank:
                complete[name] = full_tensor.to("cpu", copy=True)
        if not is_first_rank:
            return {}
        tensors: Tensors = {}
        for name, parameter_name, shape, first in self._entries:
            tensor = complete[parameter_name].flatten()[first:][: torch.Size(shape).numel()].view(shape)
            # Cloned where several tensors share a parameter: safetensors refuses views of one storage.
            tensors[name] = tensor.clone() if tensor.numel() < complete[parameter_name].numel() else tensor
        return tensors


class FullWeights(PublishedWeights):
    """Weights of which every parameter is trained: published bits are ``bfloat16(master)``.

    ``masters_on_cpu``: whether full masters are in CPU memory, for an optimizer that steps on the CPU. The gradient
    stays on the device, and bfloat16 bits go back to the device, through pinned memory on CUDA. It changes nothing on
    a CPU."""

    def __init__(
        self,
        parameters: dict[str, Parameter],
        entries: Sequence[CheckpointEntry] | None = None,
        in_float32: Set[str] = frozenset(),
        *,
        masters_on_cpu: bool = False,
    ) -> None:
        super().__init__(parameters, entries, in_float32)
        self._group: Any = None
        self._partial: list[slice] = []
        self.master_shards = self._parameter_shards
        self._master_tensors = parameters
        device = local_part(next(iter(parameters.values()))).device
        size = self.master_shards[-1].stop
        forward_L = None if self._sharded else self._take_over(torch.empty(size, dtype=torch.float32, device=device))
        self._cpu_bits_L: Tensor | None = None
        if masters_on_cpu and device.type != "cpu":
            masters_L = torch.empty(size, dtype=torch.float32)
            for shard, parameter in self._pairs():
                masters_L[shard.place] = local_part(parameter.detach()).flatten()
            self.masters: Masters = WholeMasters(masters_L)
            self._cpu_bits_L = torch.empty(size, dtype=PUBLISHED_DTYPE, pin_memory=True)
        elif forward_L is not None:
            self.masters = SplitMasters([lambda: forward_L], [size], device, self._float32_places)
        else:
            parts = [self._flat_part(parameter) for parameter in parameters.values()]
            sizes = [shard.stop - shard.start for shard in self.master_shards]
            self.masters = SplitMasters(parts, sizes, device, self._float32_places)
        self.gradient_L = torch.zeros(size, dtype=torch.float32, device=device)
        for parameter, gradient in zip(parameters.values(), self.as_tensors(self.gradient_L).values(), strict=True):
            # The backward adds to an existing gradient in place, so it fills the flat vector.
            parameter.grad = gradient
        self.refresh_forward()

    @torch.no_grad()
    def _take_over(self, forward_L: Tensor) -> Tensor:
        """Copy the parameters to one vector, and make them views of it. Their own memory is freed one by one."""
        for shard, parameter in self._pairs():
            forward_L[shard.place] = parameter.flatten()
            parameter.data = forward_L[shard.place].view(shard.shape)
        return forward_L

    @staticmethod
    def _flat_part(parameter: Parameter) -> Callable[[], Tensor]:
        return lambda: local_part(parameter.detach()).view(-1)

    @property
    def _float32_places(self) -> list[slice]:
        return [shard.place for shard in self.master_shards if shard.name in self._in_float32]

    def _pairs(self) -> list[tuple[LocalShard, Parameter]]:
        return list(zip(self.master_shards, self._parameters.values(), strict=True))

    @torch.no_grad()
    def refresh_forward(self) -> None:
        if self._cpu_bits_L is None:
            return  # split masters write the forward's values in each step
        masters_L = self.masters.full()
        rounded_L = self._cpu_bits_L.copy_(masters_L).to(self.gradient_L.device)
        for shard, parameter in self._pairs():
            source_L = masters_L if shard.name in self._in_float32 else rounded_L
            local_part(parameter).copy_(source_L[shard.place].view(shard.local_shape))

    def reduce_over(self, group: Any, partial: Set[str]) -> None:
        """Sum the gradients of the parameters ``partial`` over the ranks of ``group``, at each close."""
        self._group = group
        self._partial = [shard.place for shard in self.master_shards if shard.name in partial]

    def collect_gradient(self) -> Tensor:
        if self._partial:
            joined = torch.cat([self.gradient_L[place] for place in self._partial])
            all_reduce(joined, group=self._group)
            parts = torch.split(joined, [place.stop - place.start for place in self._partial])
            for place, part in zip(self._partial, parts, strict=True):
                self.gradient_L[place] = part
        return self.gradient_L

    def clear_gradient(self) -> None:
        self.gradient_L.zero_()


def _joined(places: Sequence[slice]) -> list[slice]:
    """Join places that follow each other, and leave out empty places."""
    joined: list[slice] = []
    for place in places:
        if joined and joined[-1].stop == place.start:
            joined[-1] = slice(joined[-1].start, place.stop)
        elif place.start < place.stop:
            joined.append(place)
    return joined


def bit_array(values: Tensor, dtype: str) -> np.ndarray:
    """Return the published bits of flat float32 values: of bfloat16 their upper halves, as uint16, of float32 all, as
    uint32. They are views of values on a CPU."""
    if dtype == "float32":
        return values.cpu().numpy().view(np.uint32)
    halves = upper_halves(values)
    if halves.device.type != "cpu":
        # Made contiguous on the device: a copy of the strided view would transfer both halves.
        halves = halves.contiguous().cpu()
    return halves.numpy().view(np.uint16)


def upper_halves(values: Tensor) -> Tensor:
    """Return the bfloat16 bits of flat float32 values, as int16: a view with stride 2."""
    return values.view(torch.int16)[UPPER_HALF::2]


def global_norm(gradient_L: Tensor, counted: Sequence[slice] | None = None) -> float:
    """Euclidean norm over the shards of all ranks. Collective. ``counted``: places that no other rank counts; None: all
    places."""
    places = [slice(None)] if counted is None else _joined(counted)
    parts = [part for place in places for part in torch.split(gradient_L[place], NORM_ELEMENTS)] or [gradient_L[:0]]
    square = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]).sum()
    if get_world_size() > 1:
        all_reduce(square)
    return float(square.sqrt())
