"""The part of each tensor that lies on one rank, read from its placements: a part of each side of a parameter, and of a
checkpoint's tensor a range of elements or of columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.architecture import CheckpointPiece


class LocalShard(NamedTuple):
    """Part of one tensor that this rank has: ``[start, stop)`` of the flat vectors, ``offset`` in the full tensor.

    ``run`` 0: its elements lie in a row there. Else they are columns of a matrix: ``run`` elements in a row, the next
    ones ``stride`` further on. ``owned``: of the ranks with the same part this one counts and publishes it. ``held``:
    of a parameter, the indices on each of its sides, int64."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    offset: int
    start: int
    stop: int
    run: int = 0
    stride: int = 0
    owned: bool = True
    held: tuple[np.ndarray, ...] = ()

    @property
    def place(self) -> slice:
        """Slice of the shard in the flat vectors."""
        return slice(self.start, self.stop)


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds; the tensor itself unless it is distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shards(tensors: Mapping[str, Tensor]) -> list[LocalShard]:
    """Lay this rank's part of each tensor in a flat vector, one after the other. Raises ``StreamRLError`` for a
    placement that is not understood."""
    shards = []
    start = 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        held = tuple(_held(name, tensor, side) for side in range(len(shape)))
        local_shape = tuple(len(indices) for indices in held)
        if tuple(local_part(tensor).shape) != local_shape:
            found = tuple(local_part(tensor).shape)
            raise StreamRLError(f"{name}: {_placed(tensor)} is {found} on this rank; understood was {local_shape}")
        count = math.prod(local_shape)
        firsts = [int(indices[0]) for indices in held] if count else []
        offset = sum(first * math.prod(shape[side + 1 :]) for side, first in enumerate(firsts))
        shards.append(
            LocalShard(name, shape, local_shape, offset, start, start + count, owned=_is_owned(tensor), held=held)
        )
        start += count
    return shards


def published_shards(shards: Sequence[LocalShard], pieces: Sequence[CheckpointPiece]) -> list[LocalShard]:
    """Return this rank's part of each tensor of the checkpoint, given its part of each parameter: a range of elements,
    or columns. Raises ``StreamRLError`` for a part that is neither."""
    by_name = {shard.name: shard for shard in shards}
    rows = {shard.name: _rows(shard) for shard in shards}
    return [_published(piece, by_name[piece.parameter], rows[piece.parameter]) for piece in pieces]


def _published(piece: CheckpointPiece, shard: LocalShard, rows: np.ndarray) -> LocalShard:
    """Part of a piece. ``rows``: those of the parameter's matrix that this rank has, in order."""
    width, columns = (shard.shape[-1], shard.held[-1]) if len(shard.shape) > 1 else (1, np.zeros(1, dtype=np.int64))
    count = math.prod(piece.shape)
    wide = len(columns)
    whole = wide == width
    if not wide or not count:
        return LocalShard(piece.name, piece.shape, (0,), 0, shard.start, shard.start, owned=shard.owned)
    first, last = (int(np.searchsorted(rows, line)) for line in (piece.start // width, (piece.start + count) // width))
    mine = rows[first:last]
    aligned = not (piece.start % width or count % width) and (len(piece.shape) < 2 or whole or piece.shape[-1] == width)
    if not aligned or any((np.diff(part) != 1).any() for part in (mine, columns)):
        raise StreamRLError(
            f"{piece.name}: this rank has neither consecutive rows nor consecutive columns of it: such a split of "
            f"{shard.name} cannot be published; set training.advanced.tensor_parallel_size = 1, or "
            "expert_parallel_size to it"
        )
    start = shard.start + first * wide
    offset = int(mine[0]) * width - piece.start + int(columns[0]) if len(mine) else 0
    run, stride = (0, 0) if whole else (wide, width)
    stop = start + len(mine) * wide
    return LocalShard(piece.name, piece.shape, (stop - start,), offset, start, stop, run, stride, shard.owned)


def _rows(shard: LocalShard) -> np.ndarray:
    """The rows that a rank has of a parameter, seen as a matrix of its last side, or as one column."""
    sides = shard.held[:-1] if len(shard.held) > 1 else shard.held
    rows = np.zeros(1, dtype=np.int64)
    for indices, size in zip(sides, shard.shape, strict=False):
        rows = (rows[:, None] * size + indices[None, :]).reshape(-1)
    return rows


def _held(name: str, tensor: Tensor, side: int) -> np.ndarray:
    """Indices on one side that this rank has. Placements are taken as torch applies them: from the first dimension of
    the mesh to the last, each to what the ones before left."""
    indices = torch.arange(tensor.shape[side])
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for dimension, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate):
                continue
            if not isinstance(placement, Shard | _StridedShard):
                raise StreamRLError(f"{name}: {_placed(tensor)} is a placement that cannot be published")
            if placement.dim % tensor.ndim == side:
                factor = getattr(placement, "split_factor", None)
                along = Shard(0) if factor is None else _StridedShard(0, split_factor=factor)
                parts, _ = along._split_tensor(indices, mesh.size(dimension), with_padding=False, contiguous=False)
                indices = parts[coordinate[dimension]]
    return indices.numpy()


def _is_owned(tensor: Tensor) -> bool:
    """Return whether this is the first of the ranks with the same part of a tensor. The dimensions that its own mesh
    lacks of the whole mesh hold copies of it, the first of them where rank 0 is."""
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    copies = [
        at for at, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate)
    ]
    return not any(copies) and int(tensor.device_mesh.mesh.min()) == 0


def _placed(tensor: Tensor) -> str:
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return f"{tuple(tensor.shape)} placed as {', '.join(map(repr, placements)) or 'a whole'}"
