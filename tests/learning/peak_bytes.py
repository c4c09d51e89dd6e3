"""How many bytes of tensors there are at once, counted up and down."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Storages of the results of operations on a CPU, also of those that FSDP2 frees and takes again."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, tuple[int, weakref.ref[Any]]] = {}
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return result

        self._resizes = mock.patch.object(torch.UntypedStorage, "resize_", resized)

    def __enter__(self) -> PeakBytes:
        self._resizes.start()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizes.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                self._count(local.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        before, ref = self._sizes.get(key, (0, None))
        if before != size or ref is None:
            self.now += size - before
            self._sizes[key] = size, ref or weakref.ref(storage, lambda _: self._forget(key))

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)[0]
