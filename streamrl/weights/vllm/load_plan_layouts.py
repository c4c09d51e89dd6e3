"""Which runtime parameters an engine rearranged after loading them, and how.

A load plan is recorded on the layout that the model's loader writes. What vLLM does to a parameter after that
(packing, transposing, quantising, tensors derived from it) is invisible there: a delta would be written to wrong
places, and read back without a fault. So the plugin compares every parameter before and after that step, and the
plan accepts a rearranged one only where the permutation is known: it is found by packing indices instead of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import PositionArray

REMEDY = "Start its engines without what does that (another quantization, attention or expert backend)"
_ATTRIBUTE = "streamrl_after_loading"
_BLOCK = 1 << 20  # 64-bit words digested at once
_PLANE_BITS = {2: 16, 4: 32}


class AfterLoading(msgspec.Struct, frozen=True):
    """What the engine did to a model between loading its weights and serving them.

    ``rearranged``: runtime parameters whose bits changed. ``derived``: tensors that were made or changed and are no
    parameters (they would keep the old weights), as ``module.attribute``.
    """

    rearranged: frozenset[str]
    derived: frozenset[str]


class BlockPermutation(msgspec.Struct, frozen=True, eq=False):
    """How a parameter is rearranged: each block of ``places.size`` elements by itself, all alike.

    ``places``: int64, where element ``i`` of a block, as it was loaded, lies in the block.
    """

    places: PositionArray

    def runtime_elements(self, loaded: PositionArray) -> PositionArray:
        """Where the elements at ``loaded`` (flat, before rearranging) are, int64 [n]."""
        inside = loaded % self.places.size
        found: PositionArray = loaded - inside + self.places[inside]
        return found


def observe_after_loading(model: torch.nn.Module, finish_loading: Callable[[], None]) -> None:
    """Run ``finish_loading`` and note on the model what it did to its parameters (for ``after_loading``)."""
    parameters, others = dict(digests(model.named_parameters())), dict(digests(_other_tensors(model)))
    finish_loading()
    after = dict(digests(model.named_parameters()))
    noted = AfterLoading(
        rearranged=frozenset(name for name, digest in after.items() if parameters.get(name) != digest),
        derived=frozenset(name for name, digest in digests(_other_tensors(model)) if others.get(name) != digest),
    )
    setattr(model, _ATTRIBUTE, noted)


def after_loading(model: torch.nn.Module) -> AfterLoading:
    """What was noted when the model was loaded.

    A model without vLLM's layers needs no note: nothing rearranges it. Raises ``WeightError`` for one that has them
    and was loaded without streamrl's plugin.
    """
    noted: AfterLoading | None = getattr(model, _ATTRIBUTE, None)
    if noted is not None:
        return noted
    layer = next((name or "<root>" for name, module in model.named_modules() if hasattr(module, "quant_method")), None)
    if layer is not None:
        raise WeightError(
            f"nobody watched how layer {layer!r} was rearranged after loading: start the engine with streamrl's vLLM "
            "plugin (VLLM_PLUGINS=streamrl, STREAMRL_ENGINE=1) and one of vLLM's weight loaders that read a checkpoint"
        )
    return AfterLoading(frozenset(), frozenset())


def permutations_of(model: torch.nn.Module, reloaded: Container[str]) -> Mapping[str, BlockPermutation]:
    """By runtime parameter, how it was rearranged after loading. ``reloaded``: modules that are rebuilt in any case.

    Raises ``WeightError`` naming the parameter or tensor when that is not known to be a permutation.
    """
    noted = after_loading(model)
    derived = [name for name in noted.derived if name.rpartition(".")[0] not in reloaded]
    if derived:
        raise WeightError(
            f"{min(derived)!r} (one of {len(derived)}) was computed from weights after they were loaded, "
            f"and would keep the old ones: updates of this model cannot be applied in place. {REMEDY}"
        )
    found: dict[tuple[object, ...], BlockPermutation] = {}
    permutations = {}
    for name, parameter in model.named_parameters():
        if name in noted.rearranged and name.rpartition(".")[0] not in reloaded:
            isa = _expert_layout(model, name)
            key = (isa, parameter.dtype, *parameter.shape[1:])
            if key not in found:
                found[key] = _permutation_of_experts(name, parameter, isa)
            permutations[name] = found[key]
    return permutations


def fit_rectangles(
    first: PositionArray, second: PositionArray
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Sizes, and strides in ``first`` and in ``second``, of one lattice that both int64 [n] walk in step.

    Both begin at their first element. None when there is no such lattice with strides of at least 0.
    """
    dimensions: list[tuple[int, int, int]] = []
    while first.size > 1:
        steps, others = np.diff(first), np.diff(second)
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
        first, second = first[::run], second[::run]
    dimensions = dimensions or [(1, 1, 1)]
    return tuple(d[0] for d in dimensions), tuple(d[1] for d in dimensions), tuple(d[2] for d in dimensions)


def has_known_layout(model: torch.nn.Module, name: str) -> bool:
    """Whether rearranged parameter ``name`` is one of vLLM's own expert kernels on CPU."""
    owner, _, attribute = name.rpartition(".")
    return attribute in ("w13_weight", "w2_weight") and _is_plain_cpu_kernel(_experts(model, owner))


def _experts(model: torch.nn.Module, owner: str) -> Any:
    method = getattr(model.get_submodule(owner), "quant_method", None)
    return getattr(getattr(method, "moe_kernel", None), "fused_experts", None)


def _expert_layout(model: torch.nn.Module, name: str) -> str:
    """The layout of vLLM's own expert kernels on CPU. Raises ``WeightError`` for every other rearranged parameter."""
    owner = name.rpartition(".")[0]
    if has_known_layout(model, name):
        return str(_experts(model, owner).isa)
    method = getattr(model.get_submodule(owner), "quant_method", None)
    raise WeightError(
        f"runtime parameter {name!r} is rearranged after loading by {type(method).__name__} in a way that streamrl "
        "does not know, and vLLM noted nothing to load that layer by again: updates of this model cannot be applied in "
        f"place. {REMEDY}"
    )


def _is_plain_cpu_kernel(experts: Any) -> bool:
    from vllm.platforms import current_platform

    if experts is None or not current_platform.is_cpu():
        return False
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    return isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch


def _permutation_of_experts(name: str, parameter: torch.nn.Parameter, isa: str) -> BlockPermutation:
    """Pack one expert that holds its own indices, as bit patterns of the parameter's type, part by part."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    shape = (1, *parameter.shape[1:])
    count = int(np.prod(shape))
    width = parameter.element_size()
    plane, bits = np.dtype(f"<u{width}"), _PLANE_BITS[width]
    indices = np.arange(count, dtype=np.int64)
    packed: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
    for shift in range(0, max(int(count - 1).bit_length(), 1), bits):
        part = ((indices >> shift) & ((1 << bits) - 1)).astype(plane)
        weight = torch.from_numpy(part.view(f"<i{width}")).view(parameter.dtype).view(shape)
        moved = cpu_prepack_moe_weight(weight, isa).view(-1).view(torch.int16 if width == 2 else torch.int32)
        packed |= moved.numpy().view(plane).astype(np.int64) << shift
    places = np.full(count, -1, dtype=np.int64)
    if packed.min() < 0 or packed.max() >= count:
        raise WeightError(f"packing the experts of {name!r} for {isa!r} does more than move elements")
    places[packed] = indices
    if places.min() < 0:
        raise WeightError(f"packing the experts of {name!r} for {isa!r} does more than move elements")
    return BlockPermutation(places)


def _other_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of more than one element that the modules keep besides their parameters."""
    for name, module in model.named_modules():
        for attribute, value in [*vars(module).items(), *module._buffers.items()]:
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.numel() > 1:
                yield f"{name}.{attribute}", value


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """By name: shape, strides, type and a 64-bit sum over places and values, on the tensor's device."""
    for name, tensor in tensors:
        total = 0 if tensor.is_meta else place_sum(tensor.detach().contiguous().view(-1).view(torch.uint8))
        yield name, (*tensor.shape, *tensor.stride(), hash(str(tensor.dtype)), total)


def place_sum(content: torch.Tensor) -> int:
    """A 64-bit sum over places and values of ``content``: uint8, flat; taken as words of 64 bits, the rest as bytes."""
    whole = content.numel() // 8 * 8 if content.data_ptr() % 8 == 0 else 0
    total = 0
    for words in (content[:whole].view(torch.int64), content[whole:]):
        if not words.numel():
            continue
        places = torch.arange(min(words.numel(), _BLOCK), dtype=torch.int64, device=content.device)
        factors = (2 * places + 1) * 0x9E3779B97F4A7C1
        for start in range(0, words.numel(), _BLOCK):
            block = words[start : start + _BLOCK]
            mixed = block.to(torch.int64) * factors[: block.numel()]
            total = (total * 1000003 + int((mixed ^ (mixed >> 29)).sum())) % 2**64
    return total
