"""Sources of a publisher's tensors: bits in host memory, or values in memory that only others can read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from streamrl.weights.codec.bits import BitArray, as_bits
from streamrl.weights.codec.codec import EncodedPatch, WeightPatch, encode_patch
from streamrl.weights.manifest import ShardSpec


class HostTensors:
    """Reads what was given for the shards of a rank, here numpy's bits. ``parts``: what was given for each shard of a
    unit, cut to it by slices. Called from several threads, each with another unit."""

    def checked(self, given: Any, shard: ShardSpec) -> Any:
        """Return ``given`` in a form that can be cut into ``parts``. Raises ``WeightError`` where its size or type is
        not the shard's."""
        return as_bits(given, shard.dtype, shard.count, shard.name)

    def complete(self, parts: Sequence[Any], dtype: str) -> BitArray:
        """All elements of a unit, in host memory."""
        return cast("BitArray", parts[0] if len(parts) == 1 else np.concatenate(parts))

    def changes(self, unit: int, parts: Sequence[Any], baseline: BitArray, dtype: str) -> EncodedPatch | None:
        """Encode how unit number ``unit`` differs from its baseline, as ``codec.encode_patch``; None where it does
        not."""
        return encode_patch(self.complete(parts, dtype), baseline, dtype)

    def advance(self, patches: Mapping[int, WeightPatch]) -> None:
        """The baselines of these units have changed: a source with baselines of its own writes them there."""
