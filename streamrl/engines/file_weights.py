"""The engine's side of a plain weight push: each announced version is one file with all weights, which
``learning.state.file_publisher`` has written.

A simulated engine holds ``FileWeights``; a ``VllmEngine`` loads versions with ``FilePush``. Both are parts of a
composition in one process (``examples/sort/one_process.py``); vLLM's workers read the file, too."""

from __future__ import annotations

import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
from safetensors import deserialize

from streamrl.base.errors import WeightError
from streamrl.base.messages import OrderDone, WeightAnnouncement


def read_version(announcement: WeightAnnouncement) -> bytes:
    """Return the content of the announced file. Blocking. Raises ``WeightError`` when the file is missing, or its hash
    is not the announced one."""
    [source] = announcement.sources
    path = Path(source.endpoint)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WeightError(f"version {announcement.policy_version} cannot be read: {error}") from error
    file_hash = int.from_bytes(blake2b(content, digest_size=8).digest(), "big")
    if file_hash != announcement.state_hash:
        raise WeightError(f"{path.name} has hash {file_hash:x}; announced was {announcement.state_hash:x}")
    return content


class FileWeights:
    """Weights of a simulated engine: the bytes of every tensor. Implements ``HeldWeights``."""

    def __init__(self) -> None:
        self._tensors: dict[str, bytes] = {}
        self._staged: tuple[int, int, dict[str, bytes]] | None = None

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Read and check the announced file. Raises ``WeightError`` as ``read_version`` does."""
        started = time.perf_counter()
        content = await anyio.to_thread.run_sync(read_version, announcement)
        tensors = {name: bytes(tensor["data"]) for name, tensor in await anyio.to_thread.run_sync(deserialize, content)}
        self._staged = announcement.policy_version, announcement.state_hash, tensors
        return OrderDone(order_id=0, seconds=time.perf_counter() - started, payload_bytes=len(content))

    def commit(self, policy_version: int) -> OrderDone:
        """Hold the staged version. Raises ``WeightError`` when ``policy_version`` is not staged."""
        if self._staged is None or self._staged[0] != policy_version:
            raise WeightError(f"version {policy_version} is not staged")
        _, state_hash, self._tensors = self._staged
        self._staged = None
        return OrderDone(order_id=0, seconds=0.0, state_hash=state_hash)

    def checksums(self) -> dict[str, str]:
        """Return the digest of every tensor, by name."""
        return {name: blake2b(data, digest_size=8).hexdigest() for name, data in self._tensors.items()}

    def close(self) -> None:
        """Forget the tensors."""
        self._tensors = {}


class FilePush:
    """Loads versions into every worker of an ``AsyncLLM``. Implements ``async_llm.engine.WeightsInto``."""

    def __init__(self) -> None:
        self._staged: WeightAnnouncement | None = None

    async def stage(self, llm: Any, announcement: WeightAnnouncement) -> OrderDone:
        """Read and check the announced file. Raises ``WeightError`` as ``read_version`` does."""
        started = time.perf_counter()
        content = await anyio.to_thread.run_sync(read_version, announcement)
        self._staged = announcement
        return OrderDone(order_id=0, seconds=time.perf_counter() - started, payload_bytes=len(content))

    async def commit(self, llm: Any, policy_version: int) -> OrderDone:
        """Load the staged version. Raises ``WeightError`` when ``policy_version`` is not staged; after any other error
        the weights of the engine are undefined."""
        started = time.perf_counter()
        staged = self._staged
        if staged is None or staged.policy_version != policy_version:
            raise WeightError(f"version {policy_version} is not staged")
        await llm.collective_rpc("streamrl_load_file", args=(msgspec.msgpack.encode(staged),))
        await llm.update_weight_version(str(policy_version))
        self._staged = None
        return OrderDone(order_id=0, seconds=time.perf_counter() - started, state_hash=staged.state_hash)
