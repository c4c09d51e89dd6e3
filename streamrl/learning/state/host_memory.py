"""Host memory for what a rank has on its GPU, while engines have the memory of the GPU.

``trainer.TorchTrainer`` makes one ``HostMemory`` in a rank that takes turns with engines (``engines.gpu_sharing``). It
moves every tensor of the process, by every holder: a tensor that was left out would keep its memory, and a view that
was left out would not follow its base. Tensors stay the same objects, with other storage, so everything that only
reads them, such as a checkpoint, works on the CPU meanwhile."""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Iterator
from time import perf_counter

import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.tensor import DTensor


class _Moved(Struct, frozen=True):
    """A storage of the GPU. ``host``: copy of its bytes; ``block``: pinned memory that begins with the copy;
    ``tensors``: tensors that share the storage."""

    host: Tensor
    block: Tensor
    tensors: list[Tensor]


class HostMemory:
    """Pinned host memory for the tensors of this process on ``device``. On a CPU nothing is moved.

    ``holds_state``: whether it has the tensors now;
    ``moved_bytes``: bytes that the last ``offload`` moved"""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: list[_Moved] = []
        self._free: list[Tensor] = []  # by size; pinning takes longer than a copy: blocks are used again
        self.holds_state = False
        self.moved_bytes = 0

    @torch.no_grad()
    def offload(self) -> float:
        """Move the tensors to host memory and free theirs. Returns the seconds. Between batches: a graph of autograd
        would not be moved."""
        began = perf_counter()
        assert not self.holds_state
        self.holds_state = True
        if self._device.type == "cpu":
            return 0.0
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in self._tensors():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        # The largest first, and each takes the smallest block that holds it.
        for tensors in sorted(by_storage.values(), key=lambda tensors: -tensors[0].untyped_storage().nbytes()):
            self._moved.append(self._to_host(tensors))
        self._free.clear()
        torch.cuda.synchronize()  # copies to pinned memory do not wait
        for moved in self._moved:
            _point(moved.tensors, moved.host)
        by_storage.clear()
        torch.cuda.empty_cache()
        self.moved_bytes = sum(moved.host.numel() for moved in self._moved)
        return perf_counter() - began

    @torch.no_grad()
    def reload(self) -> float:
        """Move the tensors back to the device. Returns the seconds."""
        began = perf_counter()
        assert self.holds_state
        self.holds_state = False
        for moved in self._moved:
            _point(moved.tensors, moved.host.to(self._device, non_blocking=True))
        if self._moved:
            torch.cuda.synchronize()
        self._free = sorted((moved.block for moved in self._moved), key=Tensor.numel)
        self._moved.clear()
        return perf_counter() - began

    def _tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of this process that have memory on the device, each once, with their gradients."""
        ids: set[int] = set()
        waiting = [item for item in gc.get_objects() if _is_plain_tensor(item)]
        for tensor in waiting:
            if id(tensor) in ids or tensor.layout is not torch.strided or tensor.device.type != self._device.type:
                continue
            ids.add(id(tensor))
            if tensor.is_leaf and tensor.grad is not None and id(tensor.grad) not in ids:
                waiting.append(tensor.grad)
            if tensor.untyped_storage().nbytes():
                yield tensor

    def _to_host(self, tensors: list[Tensor]) -> _Moved:
        """Start to copy the storage of ``tensors`` to pinned memory."""
        storage = tensors[0].untyped_storage()
        size = storage.nbytes()
        index = bisect_left(self._free, size, key=Tensor.numel)
        if index < len(self._free):
            block = self._free.pop(index)
        else:
            block = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        content = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage, 0, (size,), (1,))
        return _Moved(block[:size].copy_(content, non_blocking=True), block, tensors)


def _is_plain_tensor(item: object) -> bool:
    kind = type(item)  # ``isinstance`` would ask the object, which may be a proxy that imports something
    return issubclass(kind, Tensor) and not issubclass(kind, DTensor)


def _point(tensors: list[Tensor], content: Tensor) -> None:
    """Give ``tensors``, which share a storage, the storage of ``content`` in its place."""
    storage = content.untyped_storage()
    for tensor in tensors:
        elements = torch.empty(0, dtype=tensor.dtype, device=content.device)
        tensor.data = elements.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
