"""Decodes patches to bits in threads, each patch as soon as it has arrived. The patches of several versions of one work
unit are decoded to a single patch. ``fetch.py`` makes one ``Decoding`` for each fetch, in a vLLM worker's process."""

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


def decoding_threads() -> int:
    """Return the number of threads for one fetch."""
    return max(1, min(8, usable_cores() // 2))


class Decoding:
    """Decodes patches in threads while others still arrive (numpy, numba and pcodec release the GIL). ``base``: replica
    on which the version is a delta; None for an anchor."""

    def __init__(self, base: CheckpointReplica | None) -> None:
        # Cores are counted here, not at import: vLLM may have bound the importing thread to one core.
        self.pool = ThreadPoolExecutor(decoding_threads(), thread_name_prefix="weight decoding")
        self._base = base
        self._futures: dict[str, list[Future[list[ShardPatch]]]] = {}

    def offer(self, chain: ReceivedChain) -> None:
        """Start to decode the patches that have arrived. Raises the error of a patch that has failed."""
        if len(chain.parts) > 1:
            return  # a unit may have several patches: ``finish`` decodes them when all have arrived
        part = chain.oldest
        futures = self._futures.setdefault(chain.source.manifest_digest, [])
        arrived = part.arrived_patches()
        if arrived > len(futures):
            for index, patch in enumerate(part.patch_bytes()):
                if len(futures) <= index < arrived:
                    futures.append(self.pool.submit(self.decode, [patch]))
        for future in futures:
            if future.done():
                future.result()

    def finish(self, chains: Sequence[ReceivedChain]) -> list[ShardPatch]:
        """Return all patches, in the order of the manifests. The patches of several versions of a unit are one."""
        futures = []
        for chain in chains:
            if len(chain.parts) == 1:
                futures += self._futures[chain.source.manifest_digest]
                continue
            units: dict[tuple[ShardSpec, ...], list[_EncodedPatch]] = {}
            for part in reversed(chain.parts):
                for patch in part.patch_bytes():
                    units.setdefault(patch[0].shards, []).append(patch)
            futures += [self.pool.submit(self.decode, patches) for patches in units.values()]
        return [patch for future in futures for patch in future.result()]

    def cancel(self) -> None:
        """Cancel all work that has not started."""
        self.pool.shutdown(wait=False, cancel_futures=True)

    def decode(self, encoded: Sequence[_EncodedPatch]) -> list[ShardPatch]:
        """Decode the patches of one unit, in the order of their versions, to one patch for each shard of the unit. For
        a delta, shards without changes are left out."""
        unit = encoded[0][0]
        bits = None if self._base is None else unit.join(self._base.bits_of)
        patch = _decoded(*encoded[0], bits) if len(encoded) == 1 else _decoded_in_order(encoded, bits)
        shard_patches = zip(unit.shards, unit.split(patch), strict=True)
        patches = [ShardPatch(shard, shard_patch) for shard, shard_patch in shard_patches]
        return [decoded for decoded in patches if self._base is None or decoded.patch.values.size]


def _decoded_in_order(encoded: Sequence[_EncodedPatch], base: BitArray | None) -> WeightPatch:
    """Decode each patch on the result of the patches before it, and return one patch with the last values."""
    bits = None if base is None else base.copy()
    positions: list[PositionArray | None] = []
    for unit, encoded_patch in encoded:
        patch = _decoded(unit, encoded_patch, bits)
        if bits is None:
            bits = patch.values.copy()
        bits[slice(None) if patch.positions is None else patch.positions] = patch.values
        positions.append(patch.positions)
    assert bits is not None
    listed = [changed for changed in positions if changed is not None]
    if base is None or len(listed) < len(positions):
        return WeightPatch(None, bits)
    changed = np.unique(np.concatenate(listed))
    return WeightPatch(changed, bits[changed])


def _decoded(unit: WorkUnit, encoded: memoryview, base: BitArray | None) -> WeightPatch:
    """Decode one patch, and check that its positions are in its unit. Raises ``WeightError``."""
    patch = decode_patch(encoded, unit.dtype, unit.count, unit.name, base)
    if patch.positions is not None and not _rise_within(patch.positions, unit.count):
        raise WeightError(f"the patch of {unit.name!r} has positions that do not rise within {unit.count} elements")
    return patch


def _rise_within(positions: PositionArray, count: int) -> bool:
    """Return whether positions rise and are below ``count``: a faulty codec must not write beside the unit, or
    twice."""
    return not positions.size or bool(
        positions[0] >= 0 and positions[-1] < count and (positions[1:] > positions[:-1]).all()
    )
