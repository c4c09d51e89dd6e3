"""Map of every element of a checkpoint tensor to the runtime parameters of a loaded model.

The model's own ``load_weights`` is run once over meta tensors under a dispatch mode that records the source view and
the destination view of each copy and suppresses the write. Each pair is an affine map from flat checkpoint positions to
runtime elements: fused projections, tensor-parallel shards, experts and tied embeddings need no code of their own.
Where the engine packed, rearranged or quantised a layer after loading it, the map leads to what that was loaded as, and
the layer is rebuilt from there (``load_plan_reload``). Any other tensor is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import PositionArray
from streamrl.weights.pull.replica import TensorSpec
from streamrl.weights.vllm.load_plan_reload import ReloadedLayer, refuse_unreachable, reloaded_layers

_TORCH_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_EXACT = {  # (published, runtime): how the runtime type holds every published bit pattern
    ("bfloat16", torch.bfloat16),
    ("float16", torch.float16),
    ("float32", torch.float32),
    ("bfloat16", torch.float32),
}


_MOVES = {  # what a loader may do to a published tensor before it copies it: elements change places, not values
    torch.ops.aten.clone.default,
    torch.ops.aten.cat.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.index_select.default,
}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


class Rectangle(msgspec.Struct, frozen=True):
    """A strided view: element ``(i0, i1, ..)`` is at ``offset + i0*strides[0] + i1*strides[1] + ..``."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.sizes, dtype=np.int64))

    def positions(self) -> PositionArray:
        """Flat positions of the elements, int64 [n], in the order of the dimensions."""
        found = np.full((), self.offset, dtype=np.int64)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            found = found[..., None] + np.arange(size, dtype=np.int64) * stride
        return found.reshape(-1)


class Route(msgspec.Struct, frozen=True):
    """One recorded copy: a rectangle of a checkpoint tensor and the equal-sized one of a runtime storage. ``parameter``
    names the runtime parameter; ``runtime`` counts elements from the start of its storage."""

    parameter: str
    checkpoint: Rectangle
    runtime: Rectangle

    def locate(self, positions: PositionArray) -> tuple[npt.NDArray[np.int64], PositionArray]:
        """Find which of ``positions`` (flat in the checkpoint tensor) this route holds, and their runtime elements.
        Returns indices into ``positions`` and the runtime elements they map to, both int64 [m]."""
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
    layers: Mapping[str, ReloadedLayer] = {}
    """By parameter that is there only while its layer is loaded: the layer. It has no storage of its own."""


def record_load_plan(model: torch.nn.Module, tensors: Mapping[str, TensorSpec]) -> LoadPlan:
    """Run ``model.load_weights`` over the published ``tensors`` without writing, and keep where each copy went.

    Raises ``WeightError`` naming the tensor or parameter: a loader that does more than copy, a runtime dtype
    that cannot hold the published bits, a parameter that no published tensor covers or two write to (emptied
    parameters among them), one that was rearranged after loading in a way that is not known."""
    layers = reloaded_layers(model)
    refuse_unreachable(model, layers.keys())
    sources = without_values(tensors)
    with ExitStack() as loading:
        for layer in layers.values():
            loading.enter_context(layer.as_loaded(layer.loading))
        parameters = _runtime_parameters(model)
        recorder = _CopyRecorder(sources, parameters)
        loading.enter_context(torch.no_grad())
        loading.callback(register_module_parameter_registration_hook(recorder.keep).remove)
        loading.enter_context(recorder)
        run_loader(model, sources)
        _check_same_memory(model, parameters)
    routes: dict[str, list[Route]] = {name: [] for name in tensors}
    for name, route in recorder.routes:
        check_exact(tensors[name], route.parameter, parameters[route.parameter])
        if route not in routes[name]:  # a loader may write a tied tensor twice
            routes[name].append(route)
    _check_covered(parameters, routes, recorder.filled)
    storages = {name: flat_storage(parameter) for name, parameter in parameters.items() if not parameter.is_meta}
    owners = {name: name.rpartition(".")[0] for name, parameter in parameters.items() if parameter.is_meta}
    rebuilt = {name: layers[owner] for name, owner in owners.items() if owner in layers}
    return LoadPlan(tensors=dict(tensors), routes=routes, storages=storages, layers=rebuilt)


def without_values(tensors: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """The published ``tensors`` on the meta device."""
    return {n: torch.empty(t.shape, dtype=_TORCH_TYPES[t.dtype], device="meta") for n, t in tensors.items()}


def run_loader(model: torch.nn.Module, sources: Mapping[str, torch.Tensor]) -> None:
    """Call ``model.load_weights`` with tensors that have no values. Raises ``WeightError`` where it fails."""
    try:
        model.load_weights(iter(sources.items()))  # type: ignore[operator]
    except WeightError:
        raise
    except Exception as error:
        name = type(model).__qualname__
        what = f"{type(error).__name__}: {error}"
        raise WeightError(
            f"load_weights of {name} needs more than names and shapes, so it has no plan: {what}"
        ) from error


def record_copies(
    sources: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], load: Callable[[], object]
) -> list[tuple[str, Route]]:
    """Run ``load``, which copies tensors without values to ``targets``, without writing: where each copy went, by the
    name of its source. Raises ``WeightError``."""
    recorder = _CopyRecorder(sources, targets)
    with torch.no_grad(), recorder:
        load()
    return recorder.routes


class _CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from published tensors into runtime parameters, and constant fills of parameters."""

    def __init__(self, sources: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.routes: list[tuple[str, Route]] = []
        self.filled: list[tuple[str, Rectangle]] = []
        self._sources = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self._parameters = {p.untyped_storage()._cdata: name for name, p in parameters.items()}
        self._moved: dict[int, _MovedTensor] = {}
        self._empty: dict[int, torch.Tensor] = {}

    def keep(self, module: torch.nn.Module, name: str, made: torch.nn.Parameter) -> Any:
        """A parameter the loader re-creates without writing to it gets the memory of the one that it replaces:
        vLLM's transformers backend makes the bias of an output head each time that it loads one."""
        old = module._parameters.get(name)
        empty = self._empty.get(made.untyped_storage()._cdata) is not None
        if not empty or old is None or (old.shape, old.dtype) != (made.shape, made.dtype):
            return made
        return torch.nn.Parameter(old.detach(), requires_grad=False)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        for written in _written_by(func, args, options):
            parameter = self._parameters.get(written.untyped_storage()._cdata)
            if parameter is None:
                self._forget(written)
            elif func is torch.ops.aten.copy_.default:
                self._record_copy(parameter, written, args[1])
                return written
            elif func in _FILLS:
                self.filled.append((parameter, _rectangle(written)))
                return written
            else:
                raise WeightError(
                    f"the loader of runtime parameter {parameter!r} calls {func} on it; only copies of published "
                    "tensors can be mapped"
                )
        result = func(*args, **options)
        if func is torch.ops.aten.empty.memory_format:
            self._empty[result.untyped_storage()._cdata] = result
        if func in _MOVES:
            self._follow(func, args, options, result)
        return result

    def _record_copy(self, parameter: str, written: torch.Tensor, value: torch.Tensor) -> None:
        name = self._origin(value)
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
        if value.untyped_storage()._cdata not in self._moved:
            source, target = _merge(_rectangle(value), _rectangle(written))
            self.routes.append((name, Route(parameter, source, target)))
        elif value.numel():
            self.routes.append((name, _fit(name, parameter, self._positions(value), _rectangle(written).positions())))

    def _forget(self, written: torch.Tensor) -> None:
        """Forget the source of a tensor that a loader changes: it is no published value any more."""
        storage = written.untyped_storage()._cdata
        self._empty.pop(storage, None)
        self._sources.pop(storage, None)
        if storage in self._moved:
            self._moved[storage] = msgspec.structs.replace(self._moved[storage], tensor=None)

    def _origin(self, value: torch.Tensor) -> str | None:
        """The published tensor that all of ``value`` is from."""
        storage = value.untyped_storage()._cdata
        moved = self._moved.get(storage)
        return self._sources.get(storage) if moved is None else moved.tensor

    def _positions(self, value: torch.Tensor) -> PositionArray:
        """Positions of the elements of ``value``, in the order of its dimensions, in their published tensor: int64
        [n]."""
        places = _rectangle(value).positions()
        moved = self._moved.get(value.untyped_storage()._cdata)
        return places if moved is None else moved.positions[places]

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        """Do with positions what the loader does with elements, so that a copy from ``result`` can be mapped."""
        parts = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        origins = {self._origin(part) for part in parts}
        name = origins.pop()
        if name is None or origins or result.dtype != parts[0].dtype:
            return
        if any(isinstance(other, torch.Tensor) and other.is_meta for other in args[1:]):
            return  # an index that nobody knows
        moved = [torch.from_numpy(self._positions(part)).view(part.shape) for part in parts]
        if func in (torch.ops.aten.cat.default, torch.ops.aten.index_select.default):
            indices = func(moved if func is torch.ops.aten.cat.default else moved[0], *args[1:], **kwargs)
        else:
            (indices,) = moved
        positions = np.zeros(result.untyped_storage().nbytes() // result.element_size(), dtype=np.int64)
        positions[_rectangle(result).positions()] = indices.reshape(-1).numpy()
        self._moved[result.untyped_storage()._cdata] = _MovedTensor(name, positions, result)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call of ``func`` writes to."""
    if not func._schema.is_mutable:
        return []
    given = (
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return [value for value in given if isinstance(value, torch.Tensor)]


class _MovedTensor(msgspec.Struct, frozen=True, eq=False):
    """A copy that the loader made of (parts of) one published tensor: where each element of its storage is from.
    ``tensor``: None once its values were changed. ``kept``: the copy, so that no other takes its place in memory."""

    tensor: str | None
    positions: PositionArray
    kept: torch.Tensor


def _fit(tensor: str, parameter: str, source: PositionArray, runtime: PositionArray) -> Route:
    """The route that takes ``source`` (flat in the checkpoint tensor) to ``runtime``, int64 [n] both."""
    fitted = fit_rectangles(source, runtime)
    if fitted is not None:
        sizes, *strides = fitted
        first, second = (Rectangle(int(walk[0]), sizes, s) for walk, s in zip((source, runtime), strides, strict=True))
        route = Route(parameter, first, second)
        chosen, found = route.locate(source)
        if chosen.size == source.size and np.array_equal(found, runtime):
            return route
    raise WeightError(
        f"{tensor!r} lies in runtime parameter {parameter!r} in a way that is no rectangle: it cannot be mapped"
    )


def fit_rectangles(
    first: PositionArray, second: PositionArray
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Sizes, and strides in ``first`` and in ``second``, of one lattice that both int64 [n] walk in step. Both begin at
    their first element. None when there is no such lattice with strides of at least 0."""
    dimensions: list[tuple[int, int, int]] = []
    while first.size > 1:
        steps = np.diff(first)
        others = np.diff(second)
        broken = np.flatnonzero((steps != steps[0]) | (others != others[0]))
        run = int(broken[0]) + 1 if broken.size else first.size
        if first.size % run or steps[0] < 0 or others[0] < 0:
            return None
        for walk, step in ((first, steps[0]), (second, others[0])):
            if not np.array_equal(
                walk.reshape(-1, run) - walk[::run, None],
                np.broadcast_to(np.arange(run) * step, (walk.size // run, run)),
            ):
                return None
        dimensions.insert(0, (run, int(steps[0]), int(others[0])))
        first = first[::run]
        second = second[::run]
    dimensions = dimensions or [(1, 1, 1)]
    return tuple(d[0] for d in dimensions), tuple(d[1] for d in dimensions), tuple(d[2] for d in dimensions)


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


def _check_same_memory(model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """The loader was to copy into the parameters, and not to put others in their place."""
    storages = {parameter.untyped_storage()._cdata for parameter in parameters.values()}
    for name, parameter in model.named_parameters():
        if parameter.untyped_storage()._cdata not in storages:
            raise WeightError(
                f"the loader replaces runtime parameter {name!r} instead of copying into it: it cannot be mapped, and "
                "the engine must be started again"
            )


def flat_storage(parameter: torch.Tensor) -> torch.Tensor:
    """All that the storage of a tensor holds, as a flat view of it."""
    flat = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return flat.set_(parameter.untyped_storage(), 0, (_stored(parameter),), (1,))


def _stored(parameter: torch.Tensor) -> int:
    """Elements that its storage holds."""
    return parameter.untyped_storage().nbytes() // parameter.element_size()


def check_exact(tensor: TensorSpec, parameter: str, runtime: torch.Tensor) -> None:
    """Raise ``WeightError`` where ``runtime`` cannot hold the published bits."""
    if (tensor.dtype, runtime.dtype) not in _EXACT:
        raise WeightError(
            f"{tensor.name!r} is published as {tensor.dtype}; runtime parameter {parameter!r} is {runtime.dtype} and "
            "cannot hold it bit for bit: start the engine with the published dtype or float32"
        )


def _check_covered(
    parameters: Mapping[str, torch.nn.Parameter],
    routes: Mapping[str, Sequence[Route]],
    filled: Sequence[tuple[str, Rectangle]],
) -> None:
    """Every element of every parameter is written by one published tensor, or by a constant fill."""
    written_by: dict[str, list[Rectangle]] = {name: [] for name in parameters}
    for ways in routes.values():
        for route in ways:
            written_by[route.parameter].append(route.runtime)
    fills: dict[str, list[Rectangle]] = {name: [] for name in parameters}
    for name, rectangle in filled:
        fills[name].append(rectangle)
    for name, parameter in parameters.items():
        if parameter.numel() == 0:
            raise WeightError(
                f"runtime parameter {name!r} is empty: the engine packed its weights after loading. Start it with "
                "streamrl's vLLM plugin (VLLM_PLUGINS=streamrl, STREAMRL_ENGINE=1)"
            )
        written = torch.zeros(_stored(parameter), dtype=torch.bool)
        for part in written_by[name]:
            written.as_strided(part.sizes, part.strides, part.offset).fill_(True)
        routed = sum(part.elements for part in written_by[name])
        if routed != int(written.count_nonzero()):
            raise WeightError(
                f"published tensors write some elements of runtime parameter {name!r} more than once: publish one name "
                "for tied weights"
            )
        for part in fills[name]:
            written.as_strided(part.sizes, part.strides, part.offset).fill_(True)
        own = written.as_strided(tuple(parameter.shape), tuple(parameter.stride()), int(parameter.storage_offset()))
        missing = own.numel() - int(own.count_nonzero())
        if missing:
            raise WeightError(
                f"no published tensor covers {missing} of {own.numel()} elements of runtime parameter {name!r} "
                f"(shape {tuple(parameter.shape)})"
            )
