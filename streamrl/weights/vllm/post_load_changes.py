"""Records the changes that vLLM makes to a model between loading its weights and serving them.

A load plan is recorded on the layout that the model's loader writes. vLLM's step after loading (packing, transposing,
quantising, tensors derived from weights) is not in the plan: a delta would be written to wrong places, and read back
from there without a fault. So streamrl's plugin (``engines/vllm/plugin.py``, in vLLM's worker processes) runs this step
inside ``record_post_load_changes``, which compares every tensor before and after it. ``load_plan.py`` and
``rebuilt_layers.py`` read the record with ``read_post_load_changes``, when the first version is staged."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import Module, Parameter

from streamrl.base.errors import WeightError

Tensors = Mapping[str, Tensor]
"""Tensors by name."""

REMEDY = "Start its engines without what does that (another quantization, attention or expert backend)"
_ATTRIBUTE = "streamrl_post_load_changes"
_BLOCK = 1 << 20  # 64-bit words digested at once


class PostLoadChanges(Struct, frozen=True):
    """Changes of a model after its weights were loaded. ``rearranged``: names of runtime parameters whose bits changed.
    ``derived``: tensors that are no parameters and were made or changed, as ``module.attribute``; after an update they
    would still be those of the old weights."""

    rearranged: frozenset[str]
    derived: frozenset[str]


def record_post_load_changes(model: Module, process_weights: Callable[[], None]) -> None:
    """Run ``process_weights``, vLLM's step after loading, and record on ``model`` which of its tensors this changed."""
    parameters = dict(digests(model.named_parameters()))
    other_tensors = dict(digests(_other_tensors(model)))
    process_weights()
    after = dict(digests(model.named_parameters()))
    changes = PostLoadChanges(
        rearranged=frozenset(name for name, digest in after.items() if parameters.get(name) != digest),
        derived=frozenset(name for name, digest in digests(_other_tensors(model)) if other_tensors.get(name) != digest),
    )
    setattr(model, _ATTRIBUTE, changes)


def read_post_load_changes(model: Module) -> PostLoadChanges:
    """Return the recorded changes. A model without vLLM's layers needs no record, since vLLM does not change it. Raises
    ``WeightError`` for a model that has such layers and was loaded without streamrl's plugin."""
    changes: PostLoadChanges | None = getattr(model, _ATTRIBUTE, None)
    if changes is not None:
        return changes
    layer = next((name or "<root>" for name, module in model.named_modules() if hasattr(module, "quant_method")), None)
    if layer is not None:
        raise WeightError(
            f"nobody watched how layer {layer!r} was rearranged after loading: start the engine with streamrl's vLLM "
            "plugin (VLLM_PLUGINS=streamrl, STREAMRL_ENGINE=1) and one of vLLM's weight loaders that read a checkpoint"
        )
    return PostLoadChanges(frozenset(), frozenset())


def refuse_unreachable(model: Module, rebuilt: Container[str], derived_again: frozenset[str]) -> None:
    """Raise ``WeightError`` naming a tensor that vLLM changed or made after loading, and that neither a copy nor a
    rebuild of a layer updates. ``rebuilt``: names of the modules that are rebuilt. ``derived_again``: names of the
    parameters that are derived again after a copy."""
    changes = read_post_load_changes(model)
    derived = [n for n in changes.derived - derived_again if n.rpartition(".")[0] not in rebuilt]
    if derived:
        raise WeightError(
            f"{min(derived)!r} (one of {len(derived)}) was computed from weights after they were loaded, "
            f"and would keep the old ones: updates of this model cannot be applied in place. {REMEDY}"
        )
    rearranged = [n for n in changes.rearranged - derived_again if n.rpartition(".")[0] not in rebuilt]
    if rearranged:
        name = min(rearranged)
        method = getattr(model.get_submodule(name.rpartition(".")[0]), "quant_method", None)
        raise WeightError(
            f"runtime parameter {name!r} is rearranged after loading by {type(method).__name__}, and vLLM noted "
            f"nothing to load that layer by again: updates of this model cannot be applied in place. {REMEDY}"
        )


def _other_tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the modules' tensors that are no parameters and have more than one element, as ``module.attribute``."""
    for name, module in model.named_modules():
        for attribute, value in [*vars(module).items(), *module._buffers.items()]:
            if isinstance(value, Tensor) and not isinstance(value, Parameter) and value.numel() > 1:
                yield f"{name}.{attribute}", value


def digests(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the digest of each named tensor: shape, strides, dtype and ``place_sum``, computed on the tensor's
    device."""
    for name, tensor in tensors:
        total = 0 if tensor.is_meta else place_sum(bytes_of(tensor))
        yield name, (*tensor.shape, *tensor.stride(), hash(str(tensor.dtype)), total)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, flat."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def place_sum(content: Tensor) -> int:
    """Return a 64-bit sum over positions and values of ``content`` (uint8, flat), read as 64-bit words, then bytes."""
    word_bytes = content.numel() // 8 * 8 if content.data_ptr() % 8 == 0 else 0
    total = 0
    for words in (content[:word_bytes].view(torch.int64), content[word_bytes:]):
        if not words.numel():
            continue
        places = torch.arange(min(words.numel(), _BLOCK), dtype=torch.int64, device=content.device)
        factors = (2 * places + 1) * 0x9E3779B97F4A7C1
        for start in range(0, words.numel(), _BLOCK):
            block = words[start : start + _BLOCK]
            mixed = block.to(torch.int64) * factors[: block.numel()]
            total = (total * 1000003 + int((mixed ^ (mixed >> 29)).sum())) % 2**64
    return total
