"""Sources of the tensors that a ``WeightPublisher`` encodes, called by the publisher in the trainer rank's process. The
source here reads numpy arrays; ``torch_tensors`` has sources for torch's tensors in CPU memory and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from streamrl.weights.codec.bits import BitArray, as_bits
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch, encode_patch, unencoded_patch
from streamrl.weights.manifest import ShardSpec, WorkUnit


class CpuTensors:
    """Reads the bit patterns of a rank's shards from numpy arrays. Several threads call it, each with another unit.

    ``slices``: consecutive elements of checked tensors, one slice for each shard of the work unit."""

    def checked(self, tensor: Any, shard: ShardSpec) -> Any:
        """Return the elements of ``tensor`` in a flat form that can be sliced. Raises ``WeightError`` where its size or
        type is not that of ``shard``."""
        return as_bits(tensor, shard.dtype, shard.count, shard.name)

    def complete(self, slices: Sequence[Any], dtype: str) -> BitArray:
        """Return all elements of a unit, in CPU memory."""
        return cast("BitArray", slices[0] if len(slices) == 1 else np.concatenate(slices))

    def changes(self, unit: int, slices: Sequence[Any], baseline: BitArray, dtype: str) -> EncodedPatch | None:
        """Encode the differences of unit number ``unit`` from its baseline, as ``codec.encode_patch`` does. Returns
        None where nothing differs."""
        return encode_patch(self.complete(slices, dtype), baseline, dtype)

    def share(self, units: Sequence[WorkUnit]) -> tuple[str, bytes]:
        """Keep the bits of the last version where an engine on the same GPU can map them. Returns the UUID of the GPU
        and the encoded handle of the memory; both are empty for arrays."""
        return "", b""

    def hold(self, units: Sequence[BitArray]) -> None:
        """Take the bits of the first version, or of the checkpoint on which it is made."""

    def patch(self, unit: int, slices: Sequence[Any], baseline: BitArray, dtype: str) -> EncodedPatch | None:
        """Return the differences as ``changes`` does, without encoding them."""
        return unencoded_patch(self.complete(slices, dtype), baseline)

    def advance(self, patches: Mapping[int, WeightPatch]) -> None:
        """Apply ``patches`` to the source's own copies of the baselines, by number of the unit. This source has
        none."""
