"""The part of each tensor that one rank holds, computed from the tensor's placements.

A rank holds a part of each side of a parameter, and a range of elements or of columns of a checkpoint's tensor.
``loading`` and ``state`` call it in each trainer rank, to load, to save and to publish weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from streamrl.base.errors import StreamRLError
from streamrl.base.types import Shape
from streamrl.learning.model.architecture import CheckpointEntry


class LocalShard(NamedTuple):
    """Part of one tensor that this rank holds.

    ``shape``: shape of the full tensor.
    ``local_shape``: shape of the part.
    ``offset``: index of the part's first element in the full tensor.
    ``start``, ``stop``: range of the part in the rank's flat vectors.
    ``run``: number of elements of the part that follow each other in the full tensor, where the part is columns of a
    matrix; 0: all of them.
    ``stride``: distance of the runs in the full tensor.
    ``owned``: whether this rank counts and publishes the part, of the ranks that hold the same part.
    ``indices``: int64 indices on each side of a parameter that the rank holds.
    ``dtype``: published dtype."""

    name: str
    shape: Shape
    local_shape: Shape
    offset: int
    start: int
    stop: int
    run: int = 0
    stride: int = 0
    owned: bool = True
    indices: tuple[np.ndarray, ...] = ()
    dtype: str = "bfloat16"

    @property
    def place(self) -> slice:
        """Slice of the shard in the flat vectors."""
        return slice(self.start, self.stop)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds; the tensor itself unless it is distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shards(tensors: Mapping[str, Tensor]) -> list[LocalShard]:
    """Lay this rank's parts of all tensors in a flat vector, one after the other. Raises ``StreamRLError`` for an
    unknown placement."""
    shards = []
    start = 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        indices = tuple(_indices_on_side(name, tensor, side) for side in range(len(shape)))
        local_shape = tuple(len(side_indices) for side_indices in indices)
        actual_shape = tuple(local_part(tensor).shape)
        if actual_shape != local_shape:
            raise StreamRLError(
                f"{name}: {_describe(tensor)} is {actual_shape} on this rank; understood was {local_shape}"
            )
        count = prod(local_shape)
        offset = 0
        if count:
            offset = sum(int(rows[0]) * prod(shape[side + 1 :]) for side, rows in enumerate(indices))
        stop = start + count
        owned = _is_owned(tensor)
        shards.append(LocalShard(name, shape, local_shape, offset, start, stop, owned=owned, indices=indices))
        start = stop
    return shards


def published_shards(shards: Sequence[LocalShard], entries: Sequence[CheckpointEntry]) -> list[LocalShard]:
    """Return this rank's part of each tensor of the checkpoint: a range of elements, or columns. ``shards``: parts
    of the parameters. Raises ``StreamRLError`` for a part that is neither a range nor columns."""
    by_name = {shard.name: shard for shard in shards}
    rows = {shard.name: _rows(shard) for shard in shards}
    return [_published(entry, by_name[entry.parameter], rows[entry.parameter]) for entry in entries]


def _published(entry: CheckpointEntry, shard: LocalShard, rows: np.ndarray) -> LocalShard:
    """Part of an entry. ``rows``: rows of the parameter's matrix that this rank holds, in order."""
    width = 1
    columns = np.zeros(1, dtype=np.int64)
    if len(shard.shape) > 1:
        width = shard.shape[-1]
        columns = shard.indices[-1]
    count = prod(entry.shape)
    local_width = len(columns)
    has_all_columns = local_width == width
    if not local_width or not count:
        return LocalShard(entry.name, entry.shape, (0,), 0, shard.start, shard.start, owned=shard.owned)
    first = int(np.searchsorted(rows, entry.start // width))
    last = int(np.searchsorted(rows, (entry.start + count) // width))
    local_rows = rows[first:last]
    is_whole_rows = entry.start % width == 0 and count % width == 0
    aligned = is_whole_rows and (len(entry.shape) < 2 or has_all_columns or entry.shape[-1] == width)
    if not aligned or any((np.diff(indices) != 1).any() for indices in (local_rows, columns)):
        raise StreamRLError(
            f"{entry.name}: this rank has neither consecutive rows nor consecutive columns of it: such a split of "
            f"{shard.name} cannot be published; set training.advanced.tensor_parallel_size = 1, or "
            "expert_parallel_size to it"
        )
    start = shard.start + first * local_width
    stop = start + len(local_rows) * local_width
    offset = 0
    if len(local_rows):
        offset = int(local_rows[0]) * width - entry.start + int(columns[0])
    run = 0 if has_all_columns else local_width
    stride = 0 if has_all_columns else width
    return LocalShard(entry.name, entry.shape, (stop - start,), offset, start, stop, run, stride, shard.owned)


def _rows(shard: LocalShard) -> np.ndarray:
    """Rows that a rank holds of a parameter, which is read as a matrix whose rows are its last side, or as one
    column."""
    sides = shard.indices[:-1] if len(shard.indices) > 1 else shard.indices
    rows = np.zeros(1, dtype=np.int64)
    for indices, size in zip(sides, shard.shape, strict=False):
        rows = (rows[:, None] * size + indices[None, :]).reshape(-1)
    return rows


def _indices_on_side(name: str, tensor: Tensor, side: int) -> np.ndarray:
    """Indices on one side that this rank holds. Placements are applied as torch does: from the first dimension of the
    mesh to the last, each to the result of the one before."""
    indices = torch.arange(tensor.shape[side])
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for dimension, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate):
                continue
            if not isinstance(placement, Shard | _StridedShard):
                raise StreamRLError(f"{name}: {_describe(tensor)} is a placement that cannot be published")
            if placement.dim % tensor.ndim == side:
                factor = getattr(placement, "split_factor", None)
                along = Shard(0) if factor is None else _StridedShard(0, split_factor=factor)
                parts, _ = along._split_tensor(indices, mesh.size(dimension), with_padding=False, contiguous=False)
                indices = parts[coordinate[dimension]]
    return indices.numpy()


def _is_owned(tensor: Tensor) -> bool:
    """Return whether this is the first of the ranks that hold the same part of a tensor. Where the mesh of the tensor
    has fewer dimensions than the mesh of the run, the other dimensions hold copies, and the first copy is on the ranks
    with rank 0."""
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    copies = [
        number
        for number, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    ]
    return not any(copies) and int(tensor.device_mesh.mesh.min()) == 0


def _describe(tensor: Tensor) -> str:
    placements = "a whole"
    if isinstance(tensor, DTensor):
        placements = ", ".join(map(repr, tensor.placements))
    return f"{tuple(tensor.shape)} placed as {placements}"
