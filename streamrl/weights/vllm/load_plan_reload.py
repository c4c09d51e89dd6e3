"""Layers that vLLM packs or quantises after loading them: rebuilt as they were loaded, into the memory they have.

The load plan of such a layer leads to its parameters *as its loader sees them* (bfloat16 weights, say), which the
engine keeps no longer. They are made again from checkpoint bits, the layer's own ``process_weights_after_loading`` is
run on them, and what comes of it is copied into the tensors that the layer serves with, so that nothing that points to
those (a captured graph) is lost. It is what vLLM's layerwise reload does to all layers at once, for those that changed.

vLLM notes, when it makes a model, what each parameter was like before loading. That note is all that is used of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from streamrl.base.errors import WeightError
from streamrl.weights.vllm.load_plan_layouts import REMEDY, AfterLoading, after_loading, has_known_layout, place_sum

_NOTES = "vllm.model_executor.model_loader.reload.layerwise"
_ONLINE_LOADER = "online_process_loader"
_ROW_WORDS = 1024
_FINISHED = "_already_called_process_weights_after_loading"
_KEPT = frozenset({"bias"})
"""Parameters that are never replaced after loading: plain copies reach them."""


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
        own, buffers = dict(module._parameters), dict(module._buffers)
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
        """Whether it was rebuilt, or compared with what a rebuild gives."""
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
        """By attribute: what the layer's quantisation method makes of ``loaded``. Whatever else it sets, a packed
        kernel without tensors, say, is in service from now on."""
        derived = dict(_plain_tensors(self._module))
        with torch.no_grad(), self.as_loaded({n: _as_parameter(self.loading[n], t) for n, t in loaded.items()}):
            self._module.__dict__.pop(_FINISHED, None)
            self._module.quant_method.process_weights_after_loading(self._module)  # type: ignore[union-attr,operator]
            if hasattr(self._module, "update_param_tp_status"):
                self._module.update_param_tp_status()  # type: ignore[operator]
            built = dict(self._tensors())
        for attribute, tensor in derived.items():
            self._module.__dict__[attribute] = tensor
        return built

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the module serves with, by attribute, without the parameters that plain copies reach."""
        module = self._module
        registered = [*module._parameters.items(), *module._buffers.items()]
        yield from ((name, t) for name, t in registered if t is not None and name not in _KEPT)
        yield from _plain_tensors(module)

    def _digests(self) -> dict[str, tuple[int, ...]]:
        return {attribute: _quick_digest(tensor) for attribute, tensor in self._tensors()}

    def _check_forms(self, built: Mapping[str, torch.Tensor], served: Mapping[str, torch.Tensor]) -> None:
        forms, wanted = _forms(built), _forms(served)
        for attribute in sorted(forms.keys() | wanted.keys()):
            if forms.get(attribute) != wanted.get(attribute):
                now, before = forms.get(attribute, "not there"), wanted.get(attribute, "not there")
                raise WeightError(
                    f"layer {self.name!r}: {attribute!r} is {now} after a reload, and was {before} after loading: "
                    f"updates of this model cannot be applied in place. {REMEDY}"
                )


def reloaded_layers(model: torch.nn.Module) -> dict[str, ReloadedLayer]:
    """By module, the layers that plain copies do not reach. Those of which no note is there are left out."""
    noted = after_loading(model)
    found = {}
    for name, module in model.named_modules():
        loading = loading_parameters(module)
        finishes = hasattr(getattr(module, "quant_method", None), "process_weights_after_loading")
        if loading and finishes and not _reached_by_copies(model, name, module, loading, noted):
            found[name] = ReloadedLayer(name, module, loading)
    return found


def loading_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What vLLM noted of the parameters of ``module`` before they were loaded, as meta tensors with their loaders.

    Empty where it noted nothing: another kind of module, or an older vLLM.
    """
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
    model: torch.nn.Module,
    name: str,
    module: torch.nn.Module,
    loading: Mapping[str, torch.Tensor],
    noted: AfterLoading,
) -> bool:
    prefix = f"{name}." if name else ""
    if any(derived.rpartition(".")[0] == name for derived in noted.derived):
        return False
    mine = {attribute: p for attribute, p in module._parameters.items() if p is not None and attribute not in _KEPT}
    changed = [f"{prefix}{attribute}" for attribute in mine if f"{prefix}{attribute}" in noted.rearranged]
    if changed:
        return all(has_known_layout(model, parameter) for parameter in changed)
    if getattr(module.quant_method, "uses_meta_device", False):
        return False
    return _forms(mine) == _forms(loading)


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
