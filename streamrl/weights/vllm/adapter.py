"""The LoRA adapter of a vLLM worker, whose weights a push updates (``lora.sync = "adapter"``).

``weight_receiver.py`` calls these functions in vLLM's worker processes, ``engines/vllm/load_plan_probe.py`` in the dry
run. vLLM wraps linear layers and gives each wrapper stacked buffers for A and B. Here the buffers have one entry, which
all requests use: a commit writes the next version to it, in place, as it does with merged weights. So requests in
flight continue under the new version, and no request can name an older one. The state hash is read back from these
buffers.

The places of published tensors are recorded from vLLM's own loader of adapters, which runs on tensors without
values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from streamrl.base.errors import WeightError
from streamrl.weights.pull.replica import TensorSpecs
from streamrl.weights.vllm.load_plan import LoadPlan, Route, check_exact, flat_storage, record_copies, without_values

ADAPTER_ID = 1
ADAPTER_INDEX = 0


def adapter_request() -> Any:
    """Return vLLM's name for the one adapter, which every request carries."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "/none")  # vLLM does not read the path of an adapter that is loaded


def open_adapter(worker: Any) -> None:
    """Put an adapter of zeros into the buffers of a worker. To be called before the first request."""
    worker_manager = worker.model_runner.lora_manager
    worker_manager.add_dummy_lora(adapter_request(), worker_manager.lora_config.max_lora_rank)
    manager = worker.model_runner.get_model().lora_manager
    manager.activate_adapter(ADAPTER_ID)
    manager.remove_all_adapters = bool  # does nothing: vLLM would drop the adapter after each commit
    if manager.device.type == "cpu":
        manager.streamrl_used_buffers = set()
        for wrapper in manager.punica_wrapper_mapping.values():
            wrapper.add_lora_linear = partial(_add_linear, manager.streamrl_used_buffers)


def add_adapters(model: Module, vllm_config: Any) -> None:
    """Wrap the layers of a model as vLLM's worker does. Raises ``WeightError`` where vLLM has no adapters for the
    model."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    try:
        LoRAModelRunnerMixin().load_lora_model(model, vllm_config, torch.device("cpu"))
    except ValueError as error:
        raise WeightError(f'vLLM serves no adapter: {error}; set lora.sync = "merged"') from error


def _add_linear(
    used_buffers: set[int],
    y: Tensor,
    x: Tensor,
    a_stacked: tuple[Tensor, ...],
    b_stacked: tuple[Tensor, ...],
    scale: float,
    widths: tuple[int, ...],
    **_: Any,
) -> None:
    """Compute ``y += B (A x)`` for each slice of a layer that has an adapter. vLLM's own function on a CPU copies A and
    B for every token. ``used_buffers``: ``data_ptr()`` of the buffers with published tensors."""
    rows = x.reshape(-1, x.shape[-1])
    start = 0
    for a, b, width in zip(a_stacked, b_stacked, widths, strict=True):
        if b.data_ptr() in used_buffers:
            y_slice = y.view(-1, y.shape[-1])[:, start : start + width]
            y_slice += (rows @ a[ADAPTER_INDEX, 0].T) @ b[ADAPTER_INDEX, 0].T * scale
        start += width


def _keys_as_values(model: Module) -> tuple[str, ...]:
    """Return parts of the names of projections of keys that a model loads in the place of those of values, too: of
    Gemma 4 with ``attention_k_eq_v``. vLLM does so with weights, and not with adapters."""
    mappers = (getattr(module, "hf_to_vllm_mapper", None) for module in model.modules())
    stacked = [item for mapper in mappers if mapper for item in mapper.orig_to_new_stacked.items()]
    return tuple(part for part, (_, shards) in stacked if shards == ["k", "v"])


def record_adapter_plan(model: Module, tensors: TensorSpecs) -> LoadPlan:
    """Record where the published ``tensors`` of an adapter are in the stacked buffers of this worker. Raises
    ``WeightError`` naming a module for which vLLM computes no adapter."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    manager: Any = model.lora_manager
    sources = without_values(tensors)
    rank = max((spec.shape[0] for name, spec in tensors.items() if ".lora_A." in name), default=0)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        sources,
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
        device="meta",
        weights_mapper=mapper and mapper.get_rename_mapper(),
        skip_prefixes=getattr(model, "lora_skip_prefixes", None),
    )
    parts = _keys_as_values(model)
    adapter.loras |= {
        name.removesuffix("k_proj") + "v_proj": weights
        for name, weights in adapter.loras.items()
        if any(part in f"{name}." for part in parts)
    }
    manager._create_merged_loras_inplace(adapter)
    buffers = {
        f"{name}.{kind}.{index}": buffer
        for name, module in manager.modules.items()
        for kind, stacked in vars(module).items()
        if kind.endswith("_stacked") and isinstance(stacked, tuple)
        for index, buffer in enumerate(stacked)
    }

    def set_adapter() -> None:
        for name, module in manager.modules.items():
            weights = manager._get_lora_layer_weights(adapter, name)
            if weights:
                module.reset_lora = bool  # does nothing: the zeros that it writes are no published tensor
                module.set_lora(ADAPTER_INDEX, weights.lora_a, weights.lora_b)
                del module.reset_lora

    routes: dict[str, list[Route]] = {name: [] for name in tensors}
    for name, route in record_copies(sources, buffers, set_adapter):
        check_exact(tensors[name], route.parameter, buffers[route.parameter])
        routes[name].append(route)
    unplaced = [name for name, tensor_routes in routes.items() if not tensor_routes]
    if unplaced:
        module = unplaced[0].removeprefix("base_model.model.").rpartition(".lora_")[0]
        remedy = 'leave it out of lora.targets, or set lora.sync = "merged"'
        raise WeightError(f"vLLM computes no adapter on {module!r}: {remedy}")
    names = {route.parameter for tensor_routes in routes.values() for route in tensor_routes}
    getattr(manager, "streamrl_used_buffers", set()).update(buffers[name].data_ptr() for name in names)
    return LoadPlan(dict(tensors), routes, {name: flat_storage(buffers[name]) for name in names})
