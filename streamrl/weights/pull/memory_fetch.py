"""Takes an announced version from the memory of the trainer ranks, where these are processes of the same host.

``vllm/weight_transaction.py`` calls ``fetch_nearest`` in a thread of vLLM's worker process. What it returns is what
``fetch.fetch_version`` would have decoded from the same version: the bits that differ from those of the receiver. So
the transaction, its state hash and its roll-back are the same. No chain of versions is needed, whatever the receiver
holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from logging import getLogger
from typing import Any

import numpy as np

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.codec.codec import WeightPatch
from streamrl.weights.distance import Location, Mover, mover_of
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.pull.decoding import decoding_threads
from streamrl.weights.pull.loaded_checkpoint import CheckpointBase
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion, ShardPatch, StagedVersion, TensorSpec
from streamrl.weights.pull.trainer_memory import TrainerMemory

ShardBits = tuple[ShardSpec, BitArray]


def fetch_nearest(
    announcement: WeightAnnouncement,
    location: Location,
    replica: CheckpointReplica,
    checkpoint: CheckpointBase | None,
    fetch_encoded: Callable[[], FetchedVersion],
) -> tuple[FetchedVersion, Mover]:
    """Take a version from memory where that is possible at ``location``, otherwise call ``fetch_encoded``. Memory that
    cannot be read is named in the log. Raises ``WeightError``, also where only this memory has the version.

    ``replica``, ``checkpoint``: see ``read_memory``. The mover of the result is the one that was used."""
    if mover_of(announcement, location) is not Mover.ENCODED:
        try:
            return read_memory(announcement, replica, checkpoint), Mover.HOST
        except (WeightError, OSError) as error:  # OSError: the system does not map it
            _logger.warning("version %s is fetched as encoded bytes: %s", announcement.policy_version, error)
    return fetch_encoded(), Mover.ENCODED


def read_memory(
    announcement: WeightAnnouncement, replica: CheckpointReplica, checkpoint: CheckpointBase | None
) -> FetchedVersion:
    """Compare the bits of all ranks with those of the receiver. Raises ``WeightError`` where the memory cannot be read,
    or has another version than the announced one.

    ``replica``: bits that the receiver holds. ``checkpoint``: files that it loaded, where the replica is empty. With
    neither, and for an anchor, the result has all bits."""
    with ExitStack() as stack:
        memories = []
        for source in announcement.sources:
            assert source.memory is not None
            memories.append(TrainerMemory.attach(source.memory))
            stack.callback(memories[-1].close)
        _check(memories, announcement)
        shards = [shard for memory in memories for shard in _shards_of(memory)]
        base: CheckpointReplica | None = None
        if announcement.base_version is not None and replica.policy_version is not None and replica.at_hand:
            base = replica
        elif announcement.base_version is not None and checkpoint is not None:
            base = checkpoint.of([spec for spec, _ in shards])
        with ThreadPoolExecutor(decoding_threads(), thread_name_prefix="weight reading") as pool:
            patches = list(pool.map(partial(_patch_of, base), shards))
        _check(memories, announcement)
    return FetchedVersion(
        announcement=announcement,
        base_version=None if base is None else base.policy_version,
        base_hash=0 if base is None else base.state_hash,
        patches=[patch for patch in patches if base is None or patch.patch.values.size],
        payload_bytes=0,
        run_id=memories[0].table.run_id,
        checkpoint=None if base is None or base is replica else base.complete_version(),
    )


def device_version(
    announcement: WeightAnnouncement, open_device: Callable[[bytes], Any], base_version: int | None
) -> tuple[StagedVersion, TrainerMemory]:
    """Map a version that the only rank has on the GPU of this worker. Raises ``WeightError``, as ``read_memory`` does.
    Returns the memory, too, which has the number of its version.

    ``open_device``: opens a handle of ``MemoryTable.device`` as a flat tensor of int16. ``base_version``: version whose
    changes are to be written (None: all elements)."""
    (source,) = announcement.sources
    assert source.memory is not None
    memory = TrainerMemory.attach(source.memory)
    memory.close()  # the file: its number of the version stays mapped
    memory.check(announcement.policy_version)
    flat = open_device(memory.table.device)
    specs: dict[str, TensorSpec] = {}
    device: dict[str, Any] = {}
    start = 0
    for shard in (shard for unit in memory.table.units for shard in unit.shards):
        spec = specs[shard.name] = TensorSpec(shard.name, shard.dtype, shard.shape)
        device[shard.name] = flat[start - shard.offset :][: spec.elements]
        start += shard.count
    identity = (announcement.policy_version, base_version, announcement.state_hash)
    return StagedVersion(*identity, specs, {}, 0, memory.table.run_id, device), memory


def _check(memories: Sequence[TrainerMemory], announcement: WeightAnnouncement) -> None:
    for memory in memories:
        memory.check(announcement.policy_version)


def _shards_of(memory: TrainerMemory) -> Iterator[ShardBits]:
    for unit, bits in zip(memory.table.units, memory.bits, strict=True):
        for shard, part in zip(unit.shards, unit.split(WeightPatch(None, bits)), strict=True):
            yield shard, part.values


def _patch_of(base: CheckpointReplica | None, part: ShardBits) -> ShardPatch:
    """Return the elements of a shard that differ from ``base``, or all of them, in the memory of the trainer: the state
    hash is computed from the copy that ``CheckpointReplica.stage`` makes."""
    shard, bits = part
    if base is None:
        return ShardPatch(shard, WeightPatch(None, bits))
    positions = np.flatnonzero(base.bits_of(shard) != bits)
    return ShardPatch(shard, WeightPatch(positions, bits[positions]))


_logger = getLogger(__name__)
