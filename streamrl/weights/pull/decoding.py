"""Patches become bits: in threads, each as soon as it is there, and those of several versions as one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from streamrl.base.errors import WeightError
from streamrl.base.run_process import usable_cores
from streamrl.weights.codec.bits import BitArray, PositionArray
from streamrl.weights.codec.codec import WeightPatch, decode_patch
from streamrl.weights.manifest import ShardSpec, WorkUnit
from streamrl.weights.pull.received_part import ReceivedChain
from streamrl.weights.pull.replica import CheckpointReplica, ShardPatch

_EncodedPatch = tuple[WorkUnit, memoryview]


class Decoding:
    """Decodes patches in threads (numpy, numba and pcodec let go of the interpreter), while others still arrive."""

    def __init__(self, base: CheckpointReplica | None) -> None:
        # Counted here: vLLM may have bound the thread that imported this module to one core.
        self.pool = ThreadPoolExecutor(max(1, min(8, usable_cores() // 2)), thread_name_prefix="weight decoding")
        self._base = base
        self._begun: dict[str, list[Future[list[ShardPatch]]]] = {}

    def offer(self, chain: ReceivedChain) -> None:
        """Begin to decode what is there now. Raises what a patch that is done raised."""
        if len(chain.parts) > 1:
            return  # several patches of a unit: when all are there
        part = chain.oldest
        begun = self._begun.setdefault(chain.source.manifest_digest, [])
        whole = part.whole_patches()
        if whole > len(begun):
            for index, patch in enumerate(part.patch_bytes()):
                if len(begun) <= index < whole:
                    begun.append(self.pool.submit(self.decode, [patch]))
        for future in begun:
            if future.done():
                future.result()

    def finish(self, chains: Sequence[ReceivedChain]) -> list[ShardPatch]:
        """All patches, in the order of the manifests; what several versions make of a unit is one."""
        futures = []
        for chain in chains:
            if len(chain.parts) == 1:
                futures += self._begun[chain.source.manifest_digest]
                continue
            units: dict[tuple[ShardSpec, ...], list[_EncodedPatch]] = {}
            for part in reversed(chain.parts):
                for patch in part.patch_bytes():
                    units.setdefault(patch[0].shards, []).append(patch)
            futures += [self.pool.submit(self.decode, patches) for patches in units.values()]
        return [patch for future in futures for patch in future.result()]

    def cancel(self) -> None:
        """Cancel all work that has not begun."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def decode(self, encoded: Sequence[_EncodedPatch]) -> list[ShardPatch]:
        """Decode patches of one unit, each of a later version than the one before, into one patch for each of its
        shards; for a delta, for those that change."""
        unit = encoded[0][0]
        bits = None if self._base is None else unit.join(self._base_of)
        patch = _decoded(*encoded[0], bits) if len(encoded) == 1 else _decoded_in_turn(encoded, bits)
        patches = [ShardPatch(shard, part) for shard, part in zip(unit.shards, unit.cut(patch), strict=True)]
        return [decoded for decoded in patches if self._base is None or decoded.patch.values.size]

    def _base_of(self, shard: ShardSpec) -> BitArray:
        """The bits of the shard that a delta is made on."""
        assert self._base is not None
        known = self._base.tensors.get(shard.name)
        if known is None or (known.dtype, known.shape) != (shard.dtype, shard.shape):
            raise WeightError(f"{shard.name!r} is published as {shard.dtype} {shard.shape}; this engine holds {known}")
        return shard.of(self._base.bits(shard.name))


def _decoded_in_turn(encoded: Sequence[_EncodedPatch], base: BitArray | None) -> WeightPatch:
    """Decode each patch against what the ones before made; the last value of an element wins."""
    bits = None if base is None else base.copy()
    positions: list[PositionArray | None] = []
    for one in encoded:
        patch = _decoded(*one, bits)
        bits = patch.values.copy() if bits is None else bits
        bits[slice(None) if patch.positions is None else patch.positions] = patch.values
        positions.append(patch.positions)
    assert bits is not None
    listed = [changed for changed in positions if changed is not None]
    if base is None or len(listed) < len(positions):
        return WeightPatch(None, bits)
    changed = np.unique(np.concatenate(listed))
    return WeightPatch(changed, bits[changed])


def _decoded(unit: WorkUnit, encoded: memoryview, base: BitArray | None) -> WeightPatch:
    """One patch, whose positions lie in its unit."""
    patch = decode_patch(encoded, unit.dtype, unit.count, unit.name, base)
    if patch.positions is not None and not _rise_within(patch.positions, unit.count):
        raise WeightError(f"the patch of {unit.name!r} has positions that do not rise within {unit.count} elements")
    return patch


def _rise_within(positions: PositionArray, count: int) -> bool:
    """Return whether positions rise and lie below ``count``. A wrong codec must not write elsewhere, or twice."""
    return not positions.size or bool(
        positions[0] >= 0 and positions[-1] < count and (positions[1:] > positions[:-1]).all()
    )
