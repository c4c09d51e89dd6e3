"""The load plan: where every element of a published tensor is in the runtime parameters of a loaded model.

``weight_receiver.py`` records it in each vLLM worker's process, when the first version is staged; the dry run records
one to see whether the model can be updated (``engines/vllm/load_plan_probe.py``). The model's own ``load_weights`` runs
once over meta tensors, under a dispatch mode that records the source view and the destination view of each copy and
suppresses the write. Each pair is an affine map from flat checkpoint positions to runtime elements, a *route*: fused
projections, tensor-parallel shards, experts and tied embeddings need no further code.

Where vLLM packed, rearranged or quantised a layer after loading it, the routes lead to the loading-time parameters of
the layer, from which it is rebuilt (``rebuilt_layers.py``). A tensor that vLLM changed or made otherwise is refused by
name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.base.errors import WeightError
from streamrl.base.types import Shape
from streamrl.weights.codec.bits import PositionArray
from streamrl.weights.pull.replica import TensorSpec, TensorSpecs
from streamrl.weights.vllm.latent_attention import derived_parameters
from streamrl.weights.vllm.post_load_changes import Tensors, refuse_unreachable
from streamrl.weights.vllm.rebuilt_layers import ComputedParameters, RebuiltLayer, rebuilt_layers

_TORCH_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_EXACT = {  # (published, runtime) dtypes: the runtime dtype holds every published bit pattern
    ("bfloat16", torch.bfloat16),
    ("float16", torch.float16),
    ("float32", torch.float32),
    ("bfloat16", torch.float32),
}


_MOVES = {  # operations of loaders on a published tensor before the copy: elements change places, not values
    torch.ops.aten.clone.default,
    torch.ops.aten.cat.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.index_select.default,
}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


class Rectangle(Struct, frozen=True):
    """A strided view: element ``(i0, i1, ..)`` is at ``offset + i0*strides[0] + i1*strides[1] + ..``. ``sizes``: number
    of elements along each dimension."""

    offset: int
    sizes: Shape
    strides: Shape

    @property
    def elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.sizes, dtype=np.int64))

    def view_of(self, flat: Tensor) -> Tensor:
        """Return this view of ``flat``."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.offset)

    def positions(self) -> PositionArray:
        """Return the flat positions of the elements, int64 [n], in row-major order."""
        positions = np.full((), self.offset, dtype=np.int64)
        for size, stride in zip(self.sizes, self.strides, strict=True):
            positions = positions[..., None] + np.arange(size, dtype=np.int64) * stride
        return positions.reshape(-1)


class Route(Struct, frozen=True):
    """One recorded copy. ``parameter``: name of the runtime parameter. ``checkpoint``: rectangle of a checkpoint
    tensor. ``runtime``: rectangle of the same size in the storage of the parameter."""

    parameter: str
    checkpoint: Rectangle
    runtime: Rectangle

    def locate(self, positions: PositionArray) -> tuple[NDArray[np.int64], PositionArray]:
        """Find the runtime elements of ``positions`` (flat in the checkpoint tensor). Returns the indices of the
        positions that are in the route's rectangle, and their elements in the runtime storage, both int64 [m]."""
        source = self.checkpoint
        order = sorted(range(len(source.sizes)), key=lambda d: source.strides[d], reverse=True)
        remainder = positions - source.offset
        inside = remainder >= 0
        target = np.full(positions.shape, self.runtime.offset, dtype=np.int64)
        for dimension in order:
            digit = remainder // source.strides[dimension]
            remainder = remainder - digit * source.strides[dimension]
            inside &= digit < source.sizes[dimension]
            target += digit * self.runtime.strides[dimension]
        inside &= remainder == 0
        indices = np.flatnonzero(inside)
        return indices, target[indices]


class LoadPlan(Struct, frozen=True, eq=False):
    """All routes of a model on this worker. ``tensors``: published tensors by name. ``routes``: routes by checkpoint
    tensor."""

    tensors: TensorSpecs
    routes: Mapping[str, Sequence[Route]]
    storages: Tensors
    """The complete storage of each runtime parameter, as a flat tensor of the parameter's dtype."""
    layers: Mapping[str, RebuiltLayer] = {}
    """The rebuilt layer of each loading-time parameter. Such a parameter has no entry in ``storages``."""


def record_load_plan(model: Module, tensors: TensorSpecs, constants: TensorSpecs = MappingProxyType({})) -> LoadPlan:
    """Run ``model.load_weights`` over the published ``tensors`` without writing, and record the target of each copy.
    ``constants``: further tensors of the checkpoint that the engine has loaded, and that nobody publishes: what they
    fill stays as it is.

    Raises ``WeightError`` naming the tensor or parameter: a loader that does more than copy, a runtime dtype that
    cannot hold the published bits, a parameter that no published tensor covers (an emptied one, too) or that two write
    to, a parameter that vLLM rearranged after loading in a layer that cannot be rebuilt."""
    layers = rebuilt_layers(model)
    derived = derived_parameters(model)
    rebuilt = {name for name, layer in layers.items() if not isinstance(layer, ComputedParameters)}
    refuse_unreachable(model, rebuilt, derived)
    sources = without_values({**constants, **tensors})
    with ExitStack() as stack:
        for layer in layers.values():
            stack.enter_context(layer.with_parameters(layer.loading_parameters))
        parameters = _runtime_parameters(model, derived)
        recorder = _CopyRecorder(sources, parameters, frozenset(constants))
        stack.enter_context(torch.no_grad())
        stack.callback(register_module_parameter_registration_hook(recorder.reuse_memory).remove)
        stack.enter_context(recorder)
        run_loader(model, sources)
        _check_same_memory(model, parameters, derived)
    # A checkpoint of bfloat16 with some float32 tensors, which vLLM rounds where its layers are bfloat16.
    rounds = any(tensor.dtype == "bfloat16" for tensor in tensors.values())
    routes: dict[str, list[Route]] = {name: [] for name in tensors}
    for name, route in recorder.routes:
        if name in constants:
            recorder.filled.append((route.parameter, route.runtime))
            continue
        check_exact(tensors[name], route.parameter, parameters[route.parameter], rounds=rounds)
        if route not in routes[name]:  # a loader may write a tied tensor twice
            routes[name].append(route)
    _check_covered(parameters, routes, recorder.filled)
    storages = {name: flat_storage(parameter) for name, parameter in parameters.items() if not parameter.is_meta}
    owners = {name: name.rpartition(".")[0] for name, parameter in parameters.items() if parameter.is_meta}
    layers_by_parameter = {name: layers[owner] for name, owner in owners.items() if owner in layers}
    return LoadPlan(tensors=dict(tensors), routes=routes, storages=storages, layers=layers_by_parameter)


def without_values(tensors: TensorSpecs) -> dict[str, Tensor]:
    """Return tensors like the published ones on the meta device, by name."""
    return {n: torch.empty(t.shape, dtype=_TORCH_TYPES[t.dtype], device="meta") for n, t in tensors.items()}


def run_loader(model: Module, sources: Tensors) -> None:
    """Call ``model.load_weights`` with tensors that have no values. Raises ``WeightError`` where it fails."""
    try:
        model.load_weights(iter(sources.items()))  # type: ignore[operator]
    except WeightError:
        raise
    except Exception as error:
        name = type(model).__qualname__
        reason = f"{type(error).__name__}: {error}"
        raise WeightError(
            f"load_weights of {name} needs more than names and shapes, so it has no plan: {reason}"
        ) from error


def record_copies(sources: Tensors, targets: Tensors, load: Callable[[], object]) -> list[tuple[str, Route]]:
    """Run ``load``, which copies ``sources`` (meta tensors) to ``targets``, without writing. Returns the route of each
    copy, with the name of its source. Raises ``WeightError`` where ``load`` does more than copy."""
    recorder = _CopyRecorder(sources, targets)
    with torch.no_grad(), recorder:
        load()
    return recorder.routes


class _CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies of published tensors to runtime parameters (``routes``) and constant fills of parameters
    (``filled``). Other writes to a parameter raise ``WeightError``."""

    def __init__(self, sources: Tensors, parameters: Tensors, constants: frozenset[str] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constants = constants
        self._casts: list[Tensor] = []  # referenced so that no other tensor gets their memory
        self.routes: list[tuple[str, Route]] = []
        self.filled: list[tuple[str, Rectangle]] = []
        self._sources = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self._parameters = {p.untyped_storage()._cdata: name for name, p in parameters.items()}
        self._moved: dict[int, _MovedTensor] = {}
        self._empty: dict[int, Tensor] = {}

    def reuse_memory(self, module: Module, name: str, parameter: Parameter) -> Any:
        """Return the parameter to register as ``name``. A parameter that the loader makes again, without values yet,
        gets the memory of the one that it replaces: vLLM's transformers backend makes the bias of an output head each
        time that it loads one."""
        old = module._parameters.get(name)
        empty = self._empty.get(parameter.untyped_storage()._cdata) is not None
        if not empty or old is None or (old.shape, old.dtype) != (parameter.shape, parameter.dtype):
            return parameter
        return Parameter(old.detach(), requires_grad=False)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        for written in _written_by(func, args, options):
            parameter = self._parameters.get(written.untyped_storage()._cdata)
            if parameter is None and self._loads_constant_into_buffer(func, written, args):
                return written
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
        if func is torch.ops.aten._to_copy.default and (name := self._origin(args[0])) in self._constants:
            self._casts.append(result)  # a constant of another type is a constant, too
            self._sources[result.untyped_storage()._cdata] = name
        return result

    def _record_copy(self, parameter: str, written: Tensor, value: Tensor) -> None:
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

    def _loads_constant_into_buffer(self, func: Any, written: Tensor, args: tuple[Any, ...]) -> bool:
        """Return whether the loader copies a constant into memory of the model that is no parameter, where the value
        of the checkpoint is already."""
        if func is not torch.ops.aten.copy_.default or written.is_meta or not args[1].is_meta:
            return False
        return self._origin(args[1]) in self._constants

    def _forget(self, written: Tensor) -> None:
        """Forget the source of a tensor that the loader changes: its values are no published ones any more."""
        storage = written.untyped_storage()._cdata
        self._empty.pop(storage, None)
        self._sources.pop(storage, None)
        if storage in self._moved:
            self._moved[storage] = replace(self._moved[storage], tensor=None)

    def _origin(self, value: Tensor) -> str | None:
        """Return the name of the published tensor that all elements of ``value`` are from; None without one."""
        storage = value.untyped_storage()._cdata
        moved = self._moved.get(storage)
        return self._sources.get(storage) if moved is None else moved.tensor

    def _positions(self, value: Tensor) -> PositionArray:
        """Return the positions of the elements of ``value``, in row-major order, in their published tensor: int64
        [n]."""
        positions = _rectangle(value).positions()
        moved = self._moved.get(value.untyped_storage()._cdata)
        return positions if moved is None else moved.positions[positions]

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> None:
        """Move positions as the loader's ``func`` moves elements, so that a copy from ``result`` can be mapped."""
        inputs = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        origins = {self._origin(tensor) for tensor in inputs}
        name = origins.pop()
        if name is None or origins or result.dtype != inputs[0].dtype:
            return
        if any(isinstance(argument, Tensor) and argument.is_meta for argument in args[1:]):
            return  # an index without values
        moved = [torch.from_numpy(self._positions(tensor)).view(tensor.shape) for tensor in inputs]
        if func in (torch.ops.aten.cat.default, torch.ops.aten.index_select.default):
            indices = func(moved if func is torch.ops.aten.cat.default else moved[0], *args[1:], **kwargs)
        else:
            (indices,) = moved
        positions = np.zeros(_stored(result), dtype=np.int64)
        positions[_rectangle(result).positions()] = indices.reshape(-1).numpy()
        self._moved[result.untyped_storage()._cdata] = _MovedTensor(name, positions, result)


def _written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call of ``func`` writes to."""
    if not func._schema.is_mutable:
        return []
    values = (
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return [value for value in values if isinstance(value, Tensor)]


class _MovedTensor(Struct, frozen=True, eq=False):
    """A copy that the loader made of one published tensor, or of parts of it. ``tensor``: name of the published tensor;
    None after the values of the copy were changed. ``positions``: positions in the published tensor of the elements of
    the copy's storage. ``copy``: the copy, referenced so that no other tensor gets its memory."""

    tensor: str | None
    positions: PositionArray
    copy: Tensor


def _fit(tensor: str, parameter: str, source: PositionArray, runtime: PositionArray) -> Route:
    """Return the route that maps ``source`` (flat in the checkpoint tensor) to ``runtime``, both int64 [n]. Raises
    ``WeightError`` where there is none."""
    fitted = fit_rectangles(source, runtime)
    if fitted is not None:
        sizes, source_strides, runtime_strides = fitted
        checkpoint_rectangle = Rectangle(int(source[0]), sizes, source_strides)
        route = Route(parameter, checkpoint_rectangle, Rectangle(int(runtime[0]), sizes, runtime_strides))
        indices, elements = route.locate(source)
        if indices.size == source.size and np.array_equal(elements, runtime):
            return route
    raise WeightError(
        f"{tensor!r} lies in runtime parameter {parameter!r} in a way that is no rectangle: it cannot be mapped"
    )


def fit_rectangles(first: PositionArray, second: PositionArray) -> tuple[Shape, Shape, Shape] | None:
    """Fit rectangles of the same sizes whose elements, in row-major order, are at ``first`` and at ``second`` (int64
    [n]). Returns the sizes, and the strides of both; None when there are no such rectangles with strides of at least
    0."""
    dimensions: list[tuple[int, int, int]] = []
    while first.size > 1:
        first_steps = np.diff(first)
        second_steps = np.diff(second)
        # The innermost dimension ends where a step differs from the first step.
        breaks = np.flatnonzero((first_steps != first_steps[0]) | (second_steps != second_steps[0]))
        run = int(breaks[0]) + 1 if breaks.size else first.size
        if first.size % run or first_steps[0] < 0 or second_steps[0] < 0:
            return None
        for positions, step in ((first, first_steps[0]), (second, second_steps[0])):
            if not np.array_equal(
                positions.reshape(-1, run) - positions[::run, None],
                np.broadcast_to(np.arange(run) * step, (positions.size // run, run)),
            ):
                return None
        dimensions.insert(0, (run, int(first_steps[0]), int(second_steps[0])))
        first = first[::run]
        second = second[::run]
    dimensions = dimensions or [(1, 1, 1)]
    sizes, first_strides, second_strides = zip(*dimensions, strict=True)
    return sizes, first_strides, second_strides


def _rectangle(view: Tensor) -> Rectangle:
    return Rectangle(int(view.storage_offset()), tuple(view.shape), tuple(view.stride()))


def _merge(source: Rectangle, target: Rectangle) -> tuple[Rectangle, Rectangle]:
    """Join neighbouring dimensions that are contiguous in both rectangles, and drop dimensions of size 1."""
    merged: list[tuple[int, int, int]] = []
    for size, first, second in zip(source.sizes, source.strides, target.strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * first and merged[-1][2] == size * second:
            merged[-1] = (merged[-1][0] * size, first, second)
        else:
            merged.append((size, first, second))
    merged = merged or [(source.elements, 1, 1)]
    sizes, source_strides, target_strides = zip(*merged, strict=True)
    return Rectangle(source.offset, sizes, source_strides), Rectangle(target.offset, sizes, target_strides)


def _runtime_parameters(model: Module, derived: Container[str]) -> dict[str, Parameter]:
    """Return the parameters by name, without the ``derived`` ones; of parameters that share a storage, the first
    one."""
    first_names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if name not in derived:
            first_names.setdefault(parameter.untyped_storage()._cdata, name)
    own_storage = set(first_names.values())
    return {name: parameter for name, parameter in model.named_parameters() if name in own_storage}


def _check_same_memory(model: Module, parameters: Mapping[str, Parameter], derived: Container[str]) -> None:
    """Raise ``WeightError`` where the loader has replaced a parameter instead of copying to it."""
    storages = {parameter.untyped_storage()._cdata for parameter in parameters.values()}
    for name, parameter in model.named_parameters():
        if parameter.untyped_storage()._cdata not in storages and name not in derived:
            raise WeightError(
                f"the loader replaces runtime parameter {name!r} instead of copying into it: it cannot be mapped, and "
                "the engine must be started again"
            )


def flat_storage(parameter: Tensor) -> Tensor:
    """Return all elements of the storage of a tensor, as a flat view."""
    flat = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    return flat.set_(parameter.untyped_storage(), 0, (_stored(parameter),), (1,))


def _stored(parameter: Tensor) -> int:
    """Return the number of elements in the storage of a tensor."""
    return parameter.untyped_storage().nbytes() // parameter.element_size()


def check_exact(tensor: TensorSpec, parameter: str, runtime: Tensor, *, rounds: bool = False) -> None:
    """Raise ``WeightError`` where ``runtime`` cannot hold the published bits. ``rounds``: whether a bfloat16 parameter
    may hold rounded float32."""
    dtypes = (tensor.dtype, runtime.dtype)
    if dtypes not in _EXACT and not (rounds and dtypes == ("float32", torch.bfloat16)):
        raise WeightError(
            f"{tensor.name!r} is published as {tensor.dtype}; runtime parameter {parameter!r} is {runtime.dtype} and "
            "cannot hold it bit for bit: start the engine with the published dtype or float32"
        )


def _check_covered(
    parameters: Mapping[str, Parameter], routes: Mapping[str, Sequence[Route]], filled: Sequence[tuple[str, Rectangle]]
) -> None:
    """Raise ``WeightError`` unless every element of every parameter is written by one published tensor, or by a
    constant fill."""
    copies: dict[str, list[Rectangle]] = {name: [] for name in parameters}
    for tensor_routes in routes.values():
        for route in tensor_routes:
            copies[route.parameter].append(route.runtime)
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
        for rectangle in copies[name]:
            rectangle.view_of(written).fill_(True)
        copied_elements = sum(rectangle.elements for rectangle in copies[name])
        if copied_elements != int(written.count_nonzero()):
            raise WeightError(
                f"published tensors write some elements of runtime parameter {name!r} more than once: publish one name "
                "for tied weights"
            )
        for rectangle in fills[name]:
            rectangle.view_of(written).fill_(True)
        shape = tuple(parameter.shape)
        covered = written.as_strided(shape, tuple(parameter.stride()), int(parameter.storage_offset()))
        missing = covered.numel() - int(covered.count_nonzero())
        if missing:
            raise WeightError(
                f"no published tensor covers {missing} of {covered.numel()} elements of runtime parameter {name!r} "
                f"(shape {shape})"
            )
