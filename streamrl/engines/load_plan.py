"""Where every element of a checkpoint tensor lives in the runtime parameters of a loaded model.

The model's own ``load_weights`` is run once over meta tensors under a dispatch mode that records the
source view and the destination view of each copy and suppresses the write. Each pair is an affine map from
flat checkpoint positions to runtime elements: fused projections, tensor-parallel shards and tied embeddings
need no code of their own. What is not such a copy is refused by name; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.comm.weights.bit_patterns import PositionArray
from streamrl.comm.weights.mirror import TensorSpec
from streamrl.errors import WeightError

_TORCH_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_EXACT = {  # (published, runtime): how the runtime type holds every published bit pattern
    ("bfloat16", torch.bfloat16),
    ("float16", torch.float16),
    ("float32", torch.float32),
    ("bfloat16", torch.float32),
}


class Rectangle(msgspec.Struct, frozen=True):
    """A strided view: element ``(i0, i1, ..)`` is at ``offset + i0*strides[0] + i1*strides[1] + ..``."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.sizes, dtype=np.int64))


class Route(msgspec.Struct, frozen=True):
    """One recorded copy: a rectangle of a checkpoint tensor and the equal-sized one of a runtime storage.

    ``parameter`` names the runtime parameter; ``runtime`` counts elements from the start of its storage.
    """

    parameter: str
    checkpoint: Rectangle
    runtime: Rectangle

    def locate(self, positions: PositionArray) -> tuple[npt.NDArray[np.int64], PositionArray]:
        """Which of ``positions`` (flat in the checkpoint tensor) this route holds, and where.

        Returns indices into ``positions`` and the runtime elements they map to, both int64 [m].
        """
        source = self.checkpoint
        order = sorted(range(len(source.sizes)), key=lambda d: source.strides[d], reverse=True)
        rest = positions - source.offset
        inside = rest >= 0
        target = np.full(positions.shape, self.runtime.offset, dtype=np.int64)
        for dimension in order:
            digit = rest // source.strides[dimension]
            rest = rest - digit * source.strides[dimension]
            inside &= digit < source.sizes[dimension]
            target += digit * self.runtime.strides[dimension]
        inside &= rest == 0
        chosen = np.flatnonzero(inside)
        return chosen, target[chosen]


class LoadPlan(msgspec.Struct, frozen=True, eq=False):
    """All routes of a model on this worker, by checkpoint tensor, and the runtime parameters they fill."""

    tensors: Mapping[str, TensorSpec]
    routes: Mapping[str, Sequence[Route]]
    storages: Mapping[str, torch.Tensor]
    """By runtime parameter: its whole storage as a flat tensor of its dtype."""


def record_load_plan(model: torch.nn.Module, tensors: Mapping[str, TensorSpec]) -> LoadPlan:
    """Run ``model.load_weights`` over the published ``tensors`` without writing, and keep where each copy went.

    Raises ``WeightError`` naming the tensor or parameter: a loader that does more than copy, a runtime dtype
    that cannot hold the published bits, a parameter that no published tensor covers (packed or emptied
    parameters among them).
    """
    parameters = _runtime_parameters(model)
    sources = {n: torch.empty(t.shape, dtype=_TORCH_TYPES[t.dtype], device="meta") for n, t in tensors.items()}
    recorder = _CopyRecorder(sources, parameters)
    with torch.no_grad(), recorder:
        model.load_weights(iter(sources.items()))  # type: ignore[operator]
    routes: dict[str, list[Route]] = {name: [] for name in tensors}
    for name, route in recorder.routes:
        _check_exact(tensors[name], route.parameter, parameters[route.parameter])
        routes[name].append(route)
    _check_covered(parameters, recorder)
    storages = {name: _flat_storage(parameter) for name, parameter in parameters.items()}
    return LoadPlan(tensors=dict(tensors), routes=routes, storages=storages)


class _CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from published tensors into runtime parameters, and constant fills of parameters."""

    def __init__(self, sources: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.routes: list[tuple[str, Route]] = []
        self.filled: list[tuple[str, Rectangle]] = []
        self._sources = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self._parameters = {p.untyped_storage()._cdata: name for name, p in parameters.items()}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        written = args[0] if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) else None
        parameter = None if written is None else self._parameters.get(written.untyped_storage()._cdata)
        if written is None or parameter is None:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self._record_copy(parameter, written, args[1])
        elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default):
            self.filled.append((parameter, _rectangle(written)))
        else:
            raise WeightError(
                f"the loader of runtime parameter {parameter!r} calls {func} on it; only copies of published "
                "tensors can be mapped"
            )
        return written

    def _record_copy(self, parameter: str, written: torch.Tensor, value: torch.Tensor) -> None:
        name = self._sources.get(value.untyped_storage()._cdata)
        if name is None:
            raise WeightError(
                f"runtime parameter {parameter!r} is loaded with a value computed from published tensors "
                f"(shape {tuple(value.shape)}), not with a part of one: it cannot be mapped"
            )
        if value.shape != written.shape or (value.numel() > 1 and 0 in value.stride()):
            raise WeightError(
                f"{name!r} is broadcast from {tuple(value.shape)} to {tuple(written.shape)} when it is loaded into "
                f"runtime parameter {parameter!r}: it cannot be mapped"
            )
        source, target = _merge(_rectangle(value), _rectangle(written))
        self.routes.append((name, Route(parameter, source, target)))


def _rectangle(view: torch.Tensor) -> Rectangle:
    return Rectangle(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


def _merge(source: Rectangle, target: Rectangle) -> tuple[Rectangle, Rectangle]:
    """Join neighbouring dimensions that are contiguous in both, and drop those of size 1."""
    merged: list[tuple[int, int, int]] = []
    for size, first, second in zip(source.sizes, source.strides, target.strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * first and merged[-1][2] == size * second:
            merged[-1] = (merged[-1][0] * size, first, second)
        else:
            merged.append((size, first, second))
    merged = merged or [(source.elements, 1, 1)]
    sizes = tuple(m[0] for m in merged)
    return (
        Rectangle(source.offset, sizes, tuple(m[1] for m in merged)),
        Rectangle(target.offset, sizes, tuple(m[2] for m in merged)),
    )


def _runtime_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters by name, a shared storage once."""
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        first_names.setdefault(parameter.untyped_storage()._cdata, name)
    return {name: p for name, p in model.named_parameters() if first_names[p.untyped_storage()._cdata] == name}


def _flat_storage(parameter: torch.nn.Parameter) -> torch.Tensor:
    storage = parameter.untyped_storage()
    count = storage.nbytes() // parameter.element_size()
    flat = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return flat.set_(storage, 0, (count,), (1,))


def _check_exact(tensor: TensorSpec, parameter: str, runtime: torch.nn.Parameter) -> None:
    if (tensor.dtype, runtime.dtype) not in _EXACT:
        raise WeightError(
            f"{tensor.name!r} is published as {tensor.dtype}; runtime parameter {parameter!r} is {runtime.dtype} and "
            "cannot hold it bit for bit: start the engine with the published dtype or float32"
        )


def _check_covered(parameters: Mapping[str, torch.nn.Parameter], recorder: _CopyRecorder) -> None:
    """Every element of every parameter is written by exactly the published tensors or a constant fill."""
    rectangles: dict[str, list[Rectangle]] = {name: [] for name in parameters}
    for _, route in recorder.routes:
        rectangles[route.parameter].append(route.runtime)
    for name, filled in recorder.filled:
        rectangles[name].append(filled)
    for name, parameter in parameters.items():
        if parameter.numel() == 0:
            raise WeightError(
                f"runtime parameter {name!r} is empty: the engine packed its weights after loading. Start it with "
                "streamrl's vLLM plugin (VLLM_PLUGINS=streamrl, STREAMRL_ENGINE=1)"
            )
        written = torch.zeros(_flat_storage(parameter).numel(), dtype=torch.bool)
        for part in rectangles[name]:
            written.as_strided(part.sizes, part.strides, part.offset).fill_(True)
        own = written.as_strided(tuple(parameter.shape), tuple(parameter.stride()), int(parameter.storage_offset()))
        missing = own.numel() - int(own.count_nonzero())
        if missing:
            raise WeightError(
                f"no published tensor covers {missing} of {own.numel()} elements of runtime parameter {name!r} "
                f"(shape {tuple(parameter.shape)})"
            )
