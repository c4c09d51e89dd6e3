"""A simple publisher for one trainer rank: each version is one complete safetensors file in a directory.

Engines read the same directory (``engines.file_weights``). Programs that use the trainer without a run pass it to
``TorchTrainer``; a run uses ``streamrl.weights``, which publishes deltas to any host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from streamrl.base.atomic_files import write_durable
from streamrl.base.errors import WeightError
from streamrl.base.messages import Published, WeightSource
from streamrl.learning.model.local_shards import LocalShard
from streamrl.learning.options import TrainerOptions


class FilePublisher:
    """Writes the versions of a trainer with one rank to ``directory``, in bfloat16; the newest two stay. The endpoint
    of a ``WeightSource`` is the path of the file. See ``contracts.Publisher``."""

    def __init__(self, directory: Path, shards: Sequence[LocalShard]) -> None:
        self._directory = directory
        self._shards = {shard.name: shard for shard in shards}
        self._newest: tuple[int, Published] | None = None

    @classmethod
    def into(cls, directory: Path) -> Callable[[TrainerOptions, Sequence[LocalShard], torch.device], FilePublisher]:
        """Return the function that ``TorchTrainer`` takes as ``start_publisher``."""

        def start(options: TrainerOptions, shards: Sequence[LocalShard], device: torch.device) -> FilePublisher:
            if options.ranks != 1:
                raise WeightError(
                    f"{options.ranks} trainer ranks: whole files are published by one; use streamrl.weights"
                )
            return cls(directory, shards)

        return start

    def publish(self, policy_version: int, values: Mapping[str, Tensor], /) -> Published:
        """Write a version. Raises ``OSError`` where the file cannot be written."""
        tensors = {
            name: values[name].to("cpu", torch.bfloat16).reshape(shard.shape) for name, shard in self._shards.items()
        }
        content = save(tensors)
        path = self._directory / f"version-{policy_version}.safetensors"
        write_durable(path, content)
        digest = blake2b(content, digest_size=8).digest()
        elements = sum(tensor.numel() for tensor in tensors.values())
        source = WeightSource(0, str(path), digest.hex(), len(content), elements, elements)
        published = Published(source, None, int.from_bytes(digest, "big"))
        self._newest = policy_version, published
        return published

    def publish_anchor(self, policy_version: int) -> Published:
        """Return the newest version again. Raises ``WeightError`` for another version."""
        if self._newest is None or self._newest[0] != policy_version:
            raise WeightError(f"version {policy_version} is not the newest that was published")
        return self._newest[1]

    def acknowledge(self, policy_version: int) -> None:
        """Remove the files of versions below ``policy_version - 1``."""
        for path in self._directory.glob("version-*.safetensors"):
            if int(path.stem.partition("-")[2]) < policy_version - 1:
                path.unlink()

    def close(self) -> None:
        """Do nothing: files stay."""
