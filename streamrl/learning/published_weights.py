"""Masters and what is published: the forward runs on the bits that the engines hold.

The optimizer steps float32 masters; every parameter of the model is ``float(bfloat16(master))``, bit for bit what
engines sample with. Masters, gradients and published bits of a rank are each one flat vector ``_L`` (L local elements,
tensor after tensor), so a step, a norm or a cast is one call. AdamW is elementwise, so that is exact for any sharding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from streamrl.comm.weights.manifest import ShardSpec

PUBLISHED_DTYPE = torch.bfloat16


class LocalShard(NamedTuple):
    """This rank's rows of one tensor: ``[start, stop)`` of the flat vectors, ``offset`` in the full tensor."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: int
    start: int
    stop: int

    @property
    def place(self) -> slice:
        """Its place in the flat vectors."""
        return slice(self.start, self.stop)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_shards(parameters: dict[str, nn.Parameter]) -> list[LocalShard]:
    shards, start = [], 0
    for name, parameter in parameters.items():
        shape, offset = tuple(parameter.shape), 0
        local_shape = shape
        if isinstance(parameter, DTensor):
            # Private in torch, and the only place that knows it is this line: a shard is a range of rows.
            local, first = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
            local_shape = tuple(local)
            offset = first[0] * (parameter.numel() // max(1, shape[0])) if shape else 0
        count = int(np.prod(local_shape, dtype=np.int64))
        shards.append(LocalShard(name, shape, local_shape, offset, start, start + count))
        start += count
    return shards


class PublishedWeights:
    """Masters, gradients and published bits of one rank. Parameters must be sharded (if they are) and loaded."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.shards = _local_shards(parameters)
        device = _local(next(iter(parameters.values()))).device
        size = self.shards[-1].stop
        self.masters_L = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device))
        self.gradient_L = torch.zeros(size, dtype=torch.float32, device=device)
        self._sharded = any(isinstance(parameter, DTensor) for parameter in parameters.values())
        self._forward_L = None if self._sharded else torch.empty(size, dtype=torch.float32, device=device)
        with torch.no_grad():
            for shard, parameter in self._pairs():
                self.masters_L[shard.place] = _local(parameter).flatten()
                if self._forward_L is not None:
                    parameter.data = self._forward_L[shard.place].view(shard.shape)
                    # A gradient that exists is added to in place: backward fills the flat vector itself.
                    parameter.grad = self.gradient_L[shard.place].view(shard.shape)
        self.refresh_forward()

    def _pairs(self) -> list[tuple[LocalShard, nn.Parameter]]:
        return list(zip(self.shards, self._parameters.values(), strict=True))

    @property
    def shard_specs(self) -> list[ShardSpec]:
        """What this rank serves to engines."""
        dtype = str(PUBLISHED_DTYPE).removeprefix("torch.")
        return [
            ShardSpec(name=s.name, dtype=dtype, shape=s.shape, offset=s.offset, count=s.stop - s.start)
            for s in self.shards
        ]

    @property
    def total_elements(self) -> int:
        """Elements of all tensors over all ranks."""
        return sum(int(np.prod(shard.shape, dtype=np.int64)) for shard in self.shards)

    @torch.no_grad()
    def refresh_forward(self) -> None:
        """Every parameter becomes the float32 value of its published bits."""
        rounded_L = self.masters_L.to(PUBLISHED_DTYPE)
        if self._forward_L is not None:
            self._forward_L.copy_(rounded_L)
            return
        for shard, parameter in self._pairs():
            _local(parameter).copy_(rounded_L[shard.place].view(shard.local_shape))

    @torch.no_grad()
    def collect_gradient(self) -> Tensor:
        """This rank's part of the gradient, one flat vector. With FSDP2, after the synced backward."""
        if self._sharded:
            for shard, parameter in self._pairs():
                if parameter.grad is None:
                    self.gradient_L[shard.place] = 0.0
                else:
                    self.gradient_L[shard.place] = _local(parameter.grad).flatten()
        return self.gradient_L

    def clear_gradient(self) -> None:
        """Before the next batch."""
        self.gradient_L.zero_()
        if self._sharded:
            for parameter in self._parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def bits(self) -> dict[str, np.ndarray]:
        """Published bits as flat uint16 views, by name. A new array on each call: nobody writes to it later."""
        bits_L = self.masters_L.to(PUBLISHED_DTYPE).view(torch.int16).cpu().numpy().view(np.uint16)
        return {shard.name: bits_L[shard.place] for shard in self.shards}

    def as_tensors(self, flat_L: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector (masters or an optimizer moment) as full or distributed tensors, for checkpoints."""
        tensors: dict[str, Tensor] = {}
        for shard, parameter in self._pairs():
            local = flat_L.detach()[shard.place].view(shard.local_shape)
            if isinstance(parameter, DTensor):
                strides = parameter.stride()
                tensors[shard.name] = DTensor.from_local(
                    local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=strides
                )
            else:
                tensors[shard.name] = local
        return tensors

    def full_published(self) -> dict[str, Tensor]:
        """All published tensors complete, bfloat16 on the CPU. Collective; every rank gets them."""
        tensors = self.as_tensors(self.masters_L.detach().to(PUBLISHED_DTYPE))
        full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
        # Cloned: safetensors refuses views of one storage.
        return {name: tensor.to("cpu", copy=True) for name, tensor in full.items()}


def global_norm(gradient_L: Tensor) -> float:
    """Euclidean norm over the shards of all ranks."""
    square = torch.linalg.vector_norm(gradient_L, dtype=torch.float64).square()
    if dist.get_world_size() > 1:
        dist.all_reduce(square)
    return float(square.sqrt())
