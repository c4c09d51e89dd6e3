"""The checkpoint files that trainer and engines begin with, as the base of a delta: what both have is not sent."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.manifest import CHECKPOINT_VERSION, MODULUS, ShardSpec
from streamrl.weights.publish.checkpoint_bits import CheckpointTensor, map_checkpoint


class CheckpointBase:
    """The published tensors of a checkpoint on disk. Files are mapped when first needed, and read page by page.

    Every method raises ``WeightError`` where the checkpoint is not what is published: other names, shapes, dtypes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._mapped: dict[str, CheckpointTensor] | None = None

    def bits_of(self, shard: ShardSpec) -> BitArray:
        """Flat and read only."""
        held = self._tensors().get(shard.name)
        if held is None or (held.dtype, held.shape) != (shard.dtype, shard.shape):
            found = "nothing" if held is None else f"{held.dtype} {held.shape}"
            raise WeightError(f"{self._path} holds {found} as {shard.name!r}; published is {shard.dtype} {shard.shape}")
        return held.bits[shard.offset : shard.offset + shard.count]

    def part_hash(self, shards: Iterable[ShardSpec]) -> int:
        """The state hash that ``shards`` have in the files. Reads them."""
        return sum(hash_range(shard.name, shard.offset, self.bits_of(shard)) for shard in shards) % MODULUS

    def of(self, shards: Sequence[ShardSpec]) -> LoadedCheckpoint:
        """The whole tensors that ``shards`` (of all ranks) are parts of, and their state hash."""
        whole = {s.name: ShardSpec(s.name, s.dtype, s.shape, 0, math.prod(s.shape)) for s in shards}
        bits = {name: self.bits_of(shard) for name, shard in whole.items()}
        return LoadedCheckpoint(whole, bits, self.part_hash(whole.values()))

    def _tensors(self) -> Mapping[str, CheckpointTensor]:
        with self._lock:
            if self._mapped is None:
                self._mapped = map_checkpoint(self._path)
            return self._mapped


class LoadedCheckpoint:
    """What an engine holds that has loaded the checkpoint and no published version yet."""

    policy_version: int | None = CHECKPOINT_VERSION

    def __init__(self, tensors: Mapping[str, ShardSpec], bits: Mapping[str, BitArray], state_hash: int) -> None:
        self.tensors = tensors
        self.state_hash = state_hash
        self._bits = bits

    def bits(self, name: str) -> BitArray:
        """All elements of a tensor, flat. Read only."""
        return self._bits[name]
