"""Changes that vLLM makes to a model after loading it, and the layers that are rebuilt for that reason.

A load plan is recorded on the layout that the model's loader writes. What vLLM does to a parameter after that (packing,
transposing, quantising, tensors derived from it) is invisible there: a delta would be written to wrong places, and read
back without a fault. So the plugin compares every parameter before and after that step.

The load plan of a layer that vLLM packs or quantises leads to its parameters *as its loader sees them* (bfloat16
weights, say), which the engine keeps no longer. They are made again from checkpoint bits, the layer's own
``process_weights_after_loading`` is run on them, and what comes of it is copied into the tensors that the layer serves
with, so that nothing that points to those (a captured graph) is lost. It is what vLLM's layerwise reload does to all
layers at once, for those that changed.

vLLM notes, when it makes a model, what each parameter was like before loading. That note is all that is used of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from streamrl.base.errors import WeightError

REMEDY = "Start its engines without what does that (another quantization, attention or expert backend)"
_ATTRIBUTE = "streamrl_after_loading"
_BLOCK = 1 << 20  # 64-bit words digested at once
_NOTES = "vllm.model_executor.model_loader.reload.layerwise"
_ONLINE_LOADER = "online_process_loader"
_ROW_WORDS = 1024
_FINISHED = "_already_called_process_weights_after_loading"
_KEPT = frozenset({"bias"})
"""Parameters that are never replaced after loading: plain copies reach them."""


class AfterLoading(msgspec.Struct, frozen=True):
    """Changes that the engine made to a model between loading its weights and serving them. ``rearranged``: runtime
    parameters whose bits changed. ``derived``: tensors that were made or changed and are no parameters (they would keep
    the old weights), as ``module.attribute``."""

    rearranged: frozenset[str]
    derived: frozenset[str]


class ReloadedLayer:
    """One module, and what its parameters were before they were loaded: ``loading``, meta tensors by attribute."""

    def __init__(self, name: str, module: torch.nn.Module, loading: Mapping[str, torch.Tensor]) -> None:
        self.name = name
        self.loading = dict(loading)
        self._module = module
        self._seen: dict[str, tuple[int, ...]] | None = None

    @contextmanager
    def as_loaded(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The module with ``parameters`` and those that are never replaced; afterwards with its own again."""
        module = self._module
        own = dict(module._parameters)
        buffers = dict(module._buffers)
        try:
            for attribute, parameter in own.items():
                if parameter is not None and attribute not in _KEPT:
                    del module._parameters[attribute]
            for attribute, tensor in parameters.items():
                module.register_parameter(attribute, tensor)  # type: ignore[arg-type]
            yield
        finally:
            for mine, saved in ((module._parameters, own), (module._buffers, buffers)):
                mine.clear()
                mine.update(saved)  # type: ignore[arg-type]

    def rebuild(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Serve with what comes of ``loaded`` (by attribute of ``loading``). Raises ``WeightError`` naming the tensor
        that has another form than before; nothing was copied then."""
        built = self._built(loaded)
        served = dict(self._tensors())
        self._check_forms(built, served)
        for attribute, tensor in built.items():
            if tensor.data_ptr() != served[attribute].data_ptr():
                served[attribute].data.copy_(tensor.data)
        self._seen = self._digests()

    def compare(self, loaded: Mapping[str, torch.Tensor]) -> None:
        """Raises ``WeightError`` where the layer does not serve with what comes of ``loaded``, bit for bit."""
        served = {attribute: tensor.clone() for attribute, tensor in self._tensors()}
        built = self._built(loaded)
        self._check_forms(built, served)
        for attribute, tensor in built.items():
            different = _bytes(tensor) != _bytes(served[attribute])
            if different.any():
                raise WeightError(
                    f"layer {self.name!r}: {int(different.count_nonzero())} bytes of {attribute!r} are not what comes "
                    "of its published weights"
                )
        self._seen = self._digests()

    @property
    def known(self) -> bool:
        """Return whether it was rebuilt, or compared with what a rebuild gives."""
        return self._seen is not None

    def check_untouched(self, moment: str) -> None:
        """Raises ``WeightError`` when a tensor was written to since it was rebuilt or compared. Reads only."""
        if self._seen is None:
            return
        now = self._digests()
        for attribute, digest in self._seen.items():
            if now.get(attribute) != digest:
                raise WeightError(
                    f"layer {self.name!r}: {attribute!r} has other bits {moment} than after its last rebuild: "
                    "something else than a commit wrote to it"
                )

    def _built(self, loaded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return, by attribute, what the layer's quantisation method makes of ``loaded``. Anything else that it sets (a
        packed kernel without tensors, say) is in service from now on."""
        derived = dict(_plain_tensors(self._module))
        with torch.no_grad(), self.as_loaded({n: _as_parameter(self.loading[n], t) for n, t in loaded.items()}):
            self._module.__dict__.pop(_FINISHED, None)
            _process_weights(self._module)
            if hasattr(self._module, "update_param_tp_status"):
                self._module.update_param_tp_status()  # type: ignore[operator]
            built = dict(self._tensors())
        for attribute, tensor in derived.items():
            self._module.__dict__[attribute] = tensor
        return built

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that the module serves with, by attribute, without the parameters that plain copies reach."""
        module = self._module
        registered = [*module._parameters.items(), *module._buffers.items()]
        yield from ((name, t) for name, t in registered if t is not None and name not in _KEPT)
        yield from _plain_tensors(module)

    def _digests(self) -> dict[str, tuple[int, ...]]:
        return {attribute: _quick_digest(tensor) for attribute, tensor in self._tensors()}

    def _check_forms(self, built: Mapping[str, torch.Tensor], served: Mapping[str, torch.Tensor]) -> None:
        forms = _forms(built)
        wanted = _forms(served)
        for attribute in sorted(forms.keys() | wanted.keys()):
            if forms.get(attribute) != wanted.get(attribute):
                now = forms.get(attribute, "not there")
                before = wanted.get(attribute, "not there")
                raise WeightError(
                    f"layer {self.name!r}: {attribute!r} is {now} after a reload, and was {before} after loading: "
                    f"updates of this model cannot be applied in place. {REMEDY}"
                )


def observe_after_loading(model: torch.nn.Module, finish_loading: Callable[[], None]) -> None:
    """Run ``finish_loading`` and note on the model what it did to its parameters (for ``after_loading``)."""
    parameters = dict(digests(model.named_parameters()))
    others = dict(digests(_other_tensors(model)))
    finish_loading()
    after = dict(digests(model.named_parameters()))
    noted = AfterLoading(
        rearranged=frozenset(name for name, digest in after.items() if parameters.get(name) != digest),
        derived=frozenset(name for name, digest in digests(_other_tensors(model)) if others.get(name) != digest),
    )
    setattr(model, _ATTRIBUTE, noted)


def after_loading(model: torch.nn.Module) -> AfterLoading:
    """Return what was noted when the model was loaded. A model without vLLM's layers needs no note: nothing rearranges
    it. Raises ``WeightError`` for one that has them and was loaded without streamrl's plugin."""
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


def refuse_unreachable(model: torch.nn.Module, reloaded: Container[str]) -> None:
    """Raise ``WeightError`` naming a tensor that the engine changed or made after loading, and that neither a copy nor
    a rebuild of a layer reaches. ``reloaded``: modules that are rebuilt."""
    noted = after_loading(model)
    derived = [name for name in noted.derived if name.rpartition(".")[0] not in reloaded]
    if derived:
        raise WeightError(
            f"{min(derived)!r} (one of {len(derived)}) was computed from weights after they were loaded, "
            f"and would keep the old ones: updates of this model cannot be applied in place. {REMEDY}"
        )
    rearranged = [name for name in noted.rearranged if name.rpartition(".")[0] not in reloaded]
    if rearranged:
        name = min(rearranged)
        method = getattr(model.get_submodule(name.rpartition(".")[0]), "quant_method", None)
        raise WeightError(
            f"runtime parameter {name!r} is rearranged after loading by {type(method).__name__}, and vLLM noted "
            f"nothing to load that layer by again: updates of this model cannot be applied in place. {REMEDY}"
        )


def reloaded_layers(model: torch.nn.Module) -> dict[str, ReloadedLayer]:
    """Return, by module, the layers that plain copies do not reach and that vLLM noted."""
    noted = after_loading(model)
    found = {}
    for name, module in model.named_modules():
        loading = loading_parameters(module)
        finishes = hasattr(getattr(module, "quant_method", None), "process_weights_after_loading")
        if loading and finishes and not _reached_by_copies(name, module, loading, noted):
            found[name] = ReloadedLayer(name, module, loading)
    return found


def loading_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return vLLM's note of the parameters of ``module`` before they were loaded, as meta tensors with their loaders.
    Empty where there is none: another kind of module, or an older vLLM."""
    layerwise = sys.modules.get(_NOTES)  # who made the model has imported it
    notes = getattr(layerwise, "LAYERWISE_INFO", None)
    note = notes.get(module) if notes is not None else None
    if note is None:
        return {}
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    parameters, _ = note.restore_metadata
    loading = {}
    for attribute, noted in parameters.items():
        if attribute not in _KEPT:
            loading[attribute] = restore_layer_refs(to_meta_tensor(noted), module)
            _unwrap_loader(loading[attribute])
    return loading


def _unwrap_loader(parameter: Any) -> None:
    """Online quantisation gathers what is loaded in a loader around the real one."""
    loader = getattr(parameter, "weight_loader", None)
    while getattr(loader, "__name__", "") == _ONLINE_LOADER:
        loader = loader.__wrapped__  # type: ignore[union-attr]
        parameter.weight_loader = loader


def _reached_by_copies(
    name: str, module: torch.nn.Module, loading: Mapping[str, torch.Tensor], noted: AfterLoading
) -> bool:
    prefix = f"{name}." if name else ""
    if any(derived.rpartition(".")[0] == name for derived in noted.derived):
        return False
    mine = {attribute: p for attribute, p in module._parameters.items() if p is not None and attribute not in _KEPT}
    if any(f"{prefix}{attribute}" in noted.rearranged for attribute in mine):
        return False
    if getattr(module.quant_method, "uses_meta_device", False):
        return False
    return _forms(mine) == _forms(loading)


def _process_weights(module: Any) -> None:
    """Run the layer's own ``process_weights_after_loading``, all of it: vLLM's method for plain experts leaves out what
    their kernel does with the weights (packs them, on CPU) whenever the kernel is there already."""
    method = module.quant_method
    kernel = getattr(module.quant_method, "moe_kernel", None)
    method.process_weights_after_loading(module)
    if kernel is not None and type(method).__name__ == "UnquantizedFusedMoEMethod":
        kernel.fused_experts.process_weights_after_loading(module)


def _as_parameter(meta: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``values`` with the class and attributes of the parameter that ``meta`` is a note of."""
    parameter = values.detach()
    parameter.__class__ = meta.__class__
    parameter.__dict__ = meta.__dict__.copy()
    return parameter


def _plain_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are neither registered as parameters nor as buffers."""
    yield from ((n, value) for n, value in vars(module).items() if isinstance(value, torch.Tensor))


def _forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {attribute: f"{tuple(t.shape)} of {t.dtype}" for attribute, t in tensors.items()}


def _quick_digest(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, and sums over rows of the tensor's memory: it is taken in the pause, and reads everything once. Elements
    that change places within 8 KiB are not noticed, any single write is."""
    storage = tensor.untyped_storage()
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    whole = content.numel() // (8 * _ROW_WORDS) * 8 * _ROW_WORDS
    rows = content[:whole].view(torch.int64).view(-1, _ROW_WORDS).sum(1)
    return (*tensor.stride(), place_sum(rows.view(torch.uint8)), place_sum(content[whole:]))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _other_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of more than one element that the modules keep besides their parameters."""
    for name, module in model.named_modules():
        for attribute, value in [*vars(module).items(), *module._buffers.items()]:
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter) and value.numel() > 1:
                yield f"{name}.{attribute}", value


def digests(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield by name: shape, strides, type and a 64-bit sum over places and values, on the tensor's device."""
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
