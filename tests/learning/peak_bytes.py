"""How many bytes of tensors there are at once, by asking after every operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Storages of the results of operations on a CPU, also of those that FSDP2 frees and takes again."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result, known = func(*args, **kwargs or {}), len(self._alive)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                self._follow(local.untyped_storage())
        if len(self._alive) > known:
            alive = [storage for ref in list(self._alive.values()) if (storage := ref()) is not None]
            self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return result

    def _follow(self, storage: Any) -> None:
        alive, key = self._alive, storage._cdata
        if key not in alive:
            alive[key] = weakref.ref(storage, lambda _: alive.pop(key, None))
