"""The part of each tensor that lies on one rank: rows of a parameter, a range of elements of a checkpoint's tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from streamrl.learning.model.architecture import CheckpointPiece


class LocalShard(NamedTuple):
    """Rows of one tensor that this rank holds: ``[start, stop)`` of the flat vectors, ``offset`` in the full tensor."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: int
    start: int
    stop: int

    @property
    def place(self) -> slice:
        """Slice of the shard in the flat vectors."""
        return slice(self.start, self.stop)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds; the tensor itself unless it is distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shards(tensors: Mapping[str, Tensor]) -> list[LocalShard]:
    """Lay this rank's part of each tensor in a flat vector, one after the other."""
    shards, start = [], 0
    for name, tensor in tensors.items():
        shape, offset = tuple(tensor.shape), 0
        local_shape = shape
        if isinstance(tensor, DTensor):
            # Private in torch, and the only place that knows it is this line: a shard is a range of rows.
            local, first = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
            local_shape = tuple(local)
            offset = first[0] * (tensor.numel() // max(1, shape[0])) if shape else 0
        count = int(np.prod(local_shape, dtype=np.int64))
        shards.append(LocalShard(name, shape, local_shape, offset, start, start + count))
        start += count
    return shards


def published_shards(shards: Sequence[LocalShard], pieces: Sequence[CheckpointPiece]) -> list[LocalShard]:
    """Return this rank's part of each tensor of the checkpoint, given its part of each parameter: a range of
    elements."""
    by_name = {shard.name: shard for shard in shards}
    published = []
    for name, parameter, shape, first in pieces:
        shard = by_name[parameter]
        here = range(shard.offset, shard.offset + shard.stop - shard.start)
        start = min(max(first, here.start), here.stop)
        stop = min(max(first + int(np.prod(shape, dtype=np.int64)), start), here.stop)
        moved = shard.start - shard.offset
        offset = start - first if stop > start else 0
        published.append(LocalShard(name, shape, (stop - start,), offset, start + moved, stop + moved))
    return published
