"""The checkpoint that trainer and engines start from, as bit patterns that are mapped into memory, without torch.

Trainer ranks encode the first version as a delta on it, and vLLM's workers decode that delta on their own files, so
that weights which both sides have are not sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS
from streamrl.pretrained.weight_files import ModelDirectoryError, StoredTensor, read_safetensors_header, stored_tensors
from streamrl.weights.codec.bits import BitArray, bit_type
from streamrl.weights.manifest import CHECKPOINT_VERSION, ShardSpec
from streamrl.weights.pull.replica import CheckpointReplica, StagedPatch, StagedVersion, TensorSpec, TensorSpecs

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class CheckpointTensor(TensorSpec, frozen=True, eq=False):
    """One tensor of a checkpoint. ``bits``: uint16 or uint32 [elements], flat, read-only; pages are read at first
    use."""

    bits: BitArray


def map_checkpoint(path: Path) -> dict[str, CheckpointTensor]:
    """Map the floating-point tensors of one safetensors file, or of the model in a directory, by name.

    Integer tensors (tables, counters) are left out: they are not published. Raises ``WeightError`` naming the path and
    the remedy: missing path, no safetensors, a broken file, a name in two files, quantised weights."""
    if not path.exists():
        raise WeightError(f"{path} does not exist: give a directory with *.safetensors, or one such file")
    try:
        stored = stored_tensors(path) if path.is_dir() else read_safetensors_header(path)
    except ModelDirectoryError as error:
        raise WeightError(f"{path if path.is_dir() else path.parent} {error}") from error
    plain = {name: tensor for name, tensor in stored.items() if not tensor.dtype.startswith(("I", "U", "BOOL"))}
    if not sum(prod(tensor.shape) for tensor in plain.values()):
        raise WeightError(f"{path} holds no floating-point element: give a directory with a model's weights")
    return {name: _map_tensor(name, tensor) for name, tensor in plain.items()}


def _map_tensor(name: str, stored: StoredTensor) -> CheckpointTensor:
    dtype = _DTYPES.get(stored.dtype)
    if dtype is None:
        raise WeightError(
            f"{stored.file} holds {name!r} as {stored.dtype}; published weights are BF16, F16 or F32: give the "
            "unquantised model"
        )
    bits = _map_bits(stored.file, stored.start, prod(stored.shape), bit_type(dtype, name))
    return CheckpointTensor(name, dtype, stored.shape, bits)


def _map_bits(file: Path, offset: int, count: int, dtype: np.dtype[np.uint16] | np.dtype[np.uint32]) -> BitArray:
    if not count:
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


def constant_tensors(checkpoint: Path | None, published: TensorSpecs) -> dict[str, TensorSpec]:
    """Return the floating-point tensors of the model in ``checkpoint`` that are not ``published``, such as the expert
    bias of DeepSeek-V3: engines keep them as they have loaded them. None: the values of no files were loaded."""
    if checkpoint is None:
        return {}
    return {
        name: TensorSpec(name, _DTYPES[tensor.dtype], tensor.shape)
        for name, tensor in stored_tensors(checkpoint).items()
        if name not in published and tensor.dtype in _DTYPES
    }


class CheckpointBase:
    """The published tensors of a checkpoint on disk. Files are mapped at first use, and read page by page. Every method
    raises ``WeightError`` where the checkpoint does not have the published names, shapes and dtypes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = Lock()
        self._mapped: dict[str, CheckpointTensor] | None = None

    def bits_of(self, shard: ShardSpec) -> BitArray:
        """Return the bits of a shard, flat and read-only."""
        tensor = self._tensors().get(shard.name)
        if tensor is None or (tensor.dtype, tensor.shape) != (shard.dtype, shard.shape):
            content = "nothing" if tensor is None else f"{tensor.dtype} {tensor.shape}"
            published = f"{shard.dtype} {shard.shape}"
            raise WeightError(f"{self._path} holds {content} as {shard.name!r}; published is {published}")
        return shard.of(tensor.bits)

    def part_hash(self, shards: Iterable[ShardSpec]) -> int:
        """Compute the part of the state hash of ``shards`` from the files."""
        return sum(shard.share_of_hash(self.bits_of(shard)) for shard in shards) % HASH_MODULUS

    def of(self, shards: Sequence[ShardSpec]) -> CheckpointReplica:
        """Return the replica of an engine that has loaded the checkpoint, with its state hash: the full, read-only
        tensors that contain ``shards``, which are the shards of all ranks."""
        full_shards = {s.name: ShardSpec(s.name, s.dtype, s.shape, 0, prod(s.shape)) for s in shards}
        specs = {name: TensorSpec(name, shard.dtype, shard.shape) for name, shard in full_shards.items()}
        patches = {name: StagedPatch(None, self.bits_of(shard)) for name, shard in full_shards.items()}
        replica = CheckpointReplica()
        replica.show(StagedVersion(CHECKPOINT_VERSION, None, self.part_hash(full_shards.values()), specs, patches, 0))
        return replica

    def _tensors(self) -> Mapping[str, CheckpointTensor]:
        with self._lock:
            if self._mapped is None:
                self._mapped = map_checkpoint(self._path)
            return self._mapped
