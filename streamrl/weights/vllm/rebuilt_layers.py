"""Layers that an update rebuilds, because vLLM packed or quantised their weights after loading them, or computed
parameters while loading them (``-exp(A_log)`` of Mamba).

The load plan of such a layer leads to its *loading-time parameters*: the ones that the model's loader writes (bfloat16
weights, say) and that the engine does not keep. An update makes them again from checkpoint bits
(``live_weights_layers.py``, in vLLM's worker processes), runs the layer's ``process_weights_after_loading`` on them, on
the layer's device, and copies the result into the tensors with which the layer serves, so that pointers to these (a
captured graph) stay valid. vLLM's layerwise reload does the same for all layers of a model.

When vLLM makes a model, it notes the class, shape and loader of each parameter before loading. Only this note of its
reload is used."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from streamrl.base.errors import WeightError
from streamrl.weights.vllm.post_load_changes import (
    REMEDY,
    PostLoadChanges,
    Tensors,
    bytes_of,
    place_sum,
    read_post_load_changes,
)

_NOTES = "vllm.model_executor.model_loader.reload.layerwise"
_ONLINE_LOADER = "online_process_loader"
_COMPUTING_LOADER = "composed_loader"
_COMPUTATION = "streamrl_computation"
_ROW_WORDS = 1024
_FINISHED = "_already_called_process_weights_after_loading"
_NEVER_REPLACED = frozenset({"bias", "e_score_correction_bias"})
"""Parameters that vLLM does not replace after loading: updates copy into them, also in a rebuilt layer. The expert bias
is not in vLLM's note either."""


class RebuiltLayer:
    """One module that is rebuilt. ``name``: name of the module in the model. ``loading_parameters``: parameters of the
    module before loading, as meta tensors by attribute."""

    def __init__(self, name: str, module: Module, loading_parameters: Tensors) -> None:
        self.name = name
        self.loading_parameters = dict(loading_parameters)
        self._module = module
        self._verified_digests: dict[str, tuple[int, ...]] | None = None

    @contextmanager
    def with_parameters(self, parameters: Tensors) -> Iterator[None]:
        """Give the module ``parameters`` in place of all parameters that vLLM replaces after loading; afterwards
        restore its parameters and buffers."""
        module = self._module
        saved_parameters = dict(module._parameters)
        saved_buffers = dict(module._buffers)
        try:
            for attribute, parameter in saved_parameters.items():
                if parameter is not None and attribute not in _NEVER_REPLACED:
                    del module._parameters[attribute]
            for attribute, tensor in parameters.items():
                module.register_parameter(attribute, tensor)  # type: ignore[arg-type]
            yield
        finally:
            for current, saved in ((module._parameters, saved_parameters), (module._buffers, saved_buffers)):
                current.clear()
                current.update(saved)  # type: ignore[arg-type]

    def rebuild(self, loaded: Tensors) -> None:
        """Rebuild the layer and copy the result into the tensors with which it serves. ``loaded``: values of
        ``loading_parameters``, on any device. Raises ``WeightError`` where the layer's method fails, or naming a tensor
        whose shape or dtype would change; nothing was copied then."""
        built = self._built(loaded)
        served_tensors = dict(self._tensors())
        self._check_forms(built, served_tensors)
        for attribute, tensor in built.items():
            if tensor.data_ptr() != served_tensors[attribute].data_ptr():
                served_tensors[attribute].data.copy_(tensor.data)
        self._verified_digests = self._digests()

    def compare(self, loaded: Tensors) -> None:
        """Raise ``WeightError`` unless a rebuild from ``loaded``, on any device, gives bit for bit the tensors with
        which the layer serves."""
        served_tensors = {attribute: tensor.clone() for attribute, tensor in self._tensors()}
        built = self._built(loaded)
        self._check_forms(built, served_tensors)
        for attribute, tensor in built.items():
            different = bytes_of(tensor) != bytes_of(served_tensors[attribute])
            if different.any():
                raise WeightError(
                    f"layer {self.name!r}: {int(different.count_nonzero())} bytes of {attribute!r} are not what comes "
                    "of its published weights"
                )
        self._verified_digests = self._digests()

    @property
    def is_verified(self) -> bool:
        """Return whether the layer was rebuilt, or compared with a rebuild."""
        return self._verified_digests is not None

    def check_untouched(self, moment: str) -> None:
        """Raise ``WeightError`` when a tensor of a verified layer was written to since then. Only reads."""
        if self._verified_digests is None:
            return
        digests = self._digests()
        for attribute, digest in self._verified_digests.items():
            if digests.get(attribute) != digest:
                raise WeightError(
                    f"layer {self.name!r}: {attribute!r} has other bits {moment} than after its last rebuild: "
                    "something else than a commit wrote to it"
                )

    def _built(self, loaded: Tensors) -> dict[str, Tensor]:
        """Run the layer's quantisation method on ``loaded``, and return the tensors that it sets, by attribute. Other
        objects that it sets (a packed kernel without tensors, say) are in use from then on. Raises ``WeightError``."""
        plain_tensors = dict(_plain_tensors(self._module))
        device = next((tensor.device for _, tensor in self._tensors()), torch.device("cpu"))
        try:
            parameters = {
                name: _as_parameter(self.loading_parameters[name], values.to(device)) for name, values in loaded.items()
            }
            with torch.no_grad(), self.with_parameters(parameters):
                self._module.__dict__.pop(_FINISHED, None)
                _process_weights(self._module)
                if hasattr(self._module, "update_param_tp_status"):
                    self._module.update_param_tp_status()  # type: ignore[operator]
                built = dict(self._tensors())
        except Exception as error:
            method = type(self._module.quant_method).__name__
            raise WeightError(
                f"layer {self.name!r}: {method} fails when it is run again ({type(error).__name__}: {error}): updates "
                f"of this model cannot be applied in place. {REMEDY}"
            ) from error
        finally:
            self._module.__dict__.update(plain_tensors)
        return built

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with which the module serves, by attribute, without those that vLLM never replaces."""
        module = self._module
        registered = [*module._parameters.items(), *module._buffers.items()]
        yield from ((name, t) for name, t in registered if t is not None and name not in _NEVER_REPLACED)
        yield from _plain_tensors(module)

    def _digests(self) -> dict[str, tuple[int, ...]]:
        return {attribute: _quick_digest(tensor) for attribute, tensor in self._tensors()}

    def _check_forms(self, built: Tensors, served_tensors: Tensors) -> None:
        """Raise ``WeightError`` unless a rebuild has the attributes, shapes and dtypes of the layer."""
        built_forms = _forms(built)
        served_forms = _forms(served_tensors)
        for attribute in sorted(built_forms.keys() | served_forms.keys()):
            if built_forms.get(attribute) != served_forms.get(attribute):
                now = built_forms.get(attribute, "not there")
                before = served_forms.get(attribute, "not there")
                raise WeightError(
                    f"layer {self.name!r}: {attribute!r} is {now} after a reload, and was {before} after loading: "
                    f"updates of this model cannot be applied in place. {REMEDY}"
                )


class ComputedParameters(RebuiltLayer):
    """Parameters of one module that their loader computes from what it has loaded. Its other parameters are updated by
    copies."""

    @contextmanager
    def with_parameters(self, parameters: Tensors) -> Iterator[None]:
        """Give the module ``parameters`` in place of the computed ones; afterwards restore these."""
        registered = self._module._parameters
        saved = dict(registered)
        try:
            for attribute, tensor in parameters.items():
                registered[attribute] = tensor  # type: ignore[assignment]
            yield
        finally:
            registered.clear()
            registered.update(saved)

    def _built(self, loaded: Tensors) -> dict[str, Tensor]:
        """Compute the parameters from ``loaded``, as their loader does."""
        built = {}
        for attribute, parameter in self._tensors():
            compute = _computation_of(self.loading_parameters[attribute])
            assert compute is not None
            with torch.no_grad():
                built[attribute] = compute(loaded[attribute].to(parameter.device)).to(parameter.dtype)
        return built

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for attribute in self.loading_parameters:
            parameter = self._module._parameters[attribute]
            assert parameter is not None
            yield attribute, parameter


def rebuilt_layers(model: Module) -> dict[str, RebuiltLayer]:
    """Return the layers, by name of the module, that copies alone do not update and about which vLLM has a note."""
    changes = read_post_load_changes(model)
    layers = {}
    for name, module in model.named_modules():
        parameters = loading_parameters(module)
        is_processed = hasattr(getattr(module, "quant_method", None), "process_weights_after_loading")
        if parameters and is_processed and not _is_updated_by_copies(name, module, parameters, changes):
            layers[name] = RebuiltLayer(name, module, parameters)
            continue
        computed = {attribute: p for attribute, p in parameters.items() if _computation_of(p) is not None}
        if computed:
            layers[name] = ComputedParameters(name, module, computed)
    return layers


def loading_parameters(module: Module) -> dict[str, Tensor]:
    """Return vLLM's note of the parameters of ``module`` before loading, as meta tensors with their loaders. Empty
    where vLLM has none: another kind of module, or an older vLLM."""
    layerwise = sys.modules.get(_NOTES)  # imported by the loader that made the model
    notes = getattr(layerwise, "LAYERWISE_INFO", None)
    note = notes.get(module) if notes is not None else None
    if note is None:
        return {}
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    noted_parameters, _ = note.restore_metadata
    parameters = {}
    for attribute, noted_parameter in noted_parameters.items():
        if attribute not in _NEVER_REPLACED:
            parameters[attribute] = restore_layer_refs(to_meta_tensor(noted_parameter), module)
            _unwrap_loader(parameters[attribute])
    return parameters


def _unwrap_loader(parameter: Any) -> None:
    """Replace a loader that wraps another one by the wrapped loader: that of online quantisation, which gathers what is
    loaded, and one that computes the parameter from what was loaded (see ``_computation_of``)."""
    loader = getattr(parameter, "weight_loader", None)
    while getattr(loader, "__name__", "") == _ONLINE_LOADER:
        loader = loader.__wrapped__  # type: ignore[union-attr]
        parameter.weight_loader = loader
    if getattr(loader, "__name__", "") == _COMPUTING_LOADER:
        variables = inspect.getclosurevars(loader).nonlocals  # type: ignore[arg-type]
        parameter.weight_loader = variables["loader"]
        setattr(parameter, _COMPUTATION, variables["fn"])


def _computation_of(parameter: Any) -> Callable[[Tensor], Tensor] | None:
    """Return the function by which vLLM's loader computes a parameter from what it has loaded; None without one."""
    return getattr(parameter, _COMPUTATION, None)


def _is_updated_by_copies(name: str, module: Module, noted_parameters: Tensors, changes: PostLoadChanges) -> bool:
    """Return whether the parameters of ``module`` are as they were loaded, so that copies update them."""
    if any(derived.rpartition(".")[0] == name for derived in changes.derived):
        return False
    parameters = {
        attribute: parameter
        for attribute, parameter in module._parameters.items()
        if parameter is not None and attribute not in _NEVER_REPLACED
    }
    # A parameter of the root module, whose name is empty, has no dot before it.
    if any(f"{name}.{attribute}".removeprefix(".") in changes.rearranged for attribute in parameters):
        return False
    if getattr(module.quant_method, "uses_meta_device", False):
        return False
    return _forms(parameters) == _forms(noted_parameters)


def _process_weights(module: Any) -> None:
    """Run the layer's ``process_weights_after_loading``, with the kernel's part of it. vLLM's method for plain experts
    leaves out what the kernel does with the weights (packs them, on a CPU) whenever there is a kernel already."""
    method = module.quant_method
    kernel = getattr(module.quant_method, "moe_kernel", None)
    method.process_weights_after_loading(module)
    if kernel is not None and type(method).__name__ == "UnquantizedFusedMoEMethod":
        kernel.fused_experts.process_weights_after_loading(module)


def _as_parameter(meta: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` with the class and attributes of the meta parameter."""
    parameter = values.detach()
    parameter.__class__ = meta.__class__
    parameter.__dict__ = meta.__dict__.copy()
    return parameter


def _plain_tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module that are registered neither as parameters nor as buffers, by attribute."""
    yield from ((n, value) for n, value in vars(module).items() if isinstance(value, Tensor))


def _forms(tensors: Tensors) -> dict[str, str]:
    return {attribute: f"{tuple(t.shape)} of {t.dtype}" for attribute, t in tensors.items()}


def _quick_digest(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides, and sums over rows of the tensor's memory. It is taken in the pause and reads all memory
    once. It changes with any single write, but not where elements change places within 8 KiB."""
    storage = tensor.untyped_storage()
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
    row_bytes = content.numel() // (8 * _ROW_WORDS) * 8 * _ROW_WORDS
    rows = content[:row_bytes].view(torch.int64).view(-1, _ROW_WORDS).sum(1)
    return (*tensor.stride(), place_sum(rows.view(torch.uint8)), place_sum(content[row_bytes:]))
