"""An adapter that a vLLM worker computes beside the base weights, written by the transaction of a push.

vLLM wraps linear layers and has stacked buffers for A and B in each. Here they have one slot, which every request uses
for good: a commit writes the next version into it, in place, as it writes merged weights. So a request that is being
sampled goes on under the new version as it does there, and none can name an older one, since none is left. What is live
is read back and hashed from these buffers.

vLLM's own mapping is recorded, not written again: it is asked to place tensors that have no values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from streamrl.base.errors import WeightError
from streamrl.weights.pull.replica import TensorSpec
from streamrl.weights.vllm.load_plan import LoadPlan, Route, check_exact, flat_storage, record_copies, without_values

ADAPTER_ID = 1
SLOT = 0


def adapter_request() -> Any:
    """vLLM's name for the adapter in the slot: what every request carries."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER_ID, "/none")  # a path that is not read: the adapter is there


def open_adapter(worker: Any) -> None:
    """Put an adapter of zeros into the slot of a worker, for good. Before the first request."""
    manager = worker.model_runner.lora_manager
    manager.add_dummy_lora(adapter_request(), manager.lora_config.max_lora_rank)
    placed = worker.model_runner.get_model().lora_manager
    placed.activate_adapter(ADAPTER_ID)
    placed.remove_all_adapters = bool  # vLLM calls it after each commit, for adapters on other base weights
    if placed.device.type == "cpu":
        placed.used_buffers = set()
        for wrapper in placed.punica_wrapper_mapping.values():
            wrapper.add_lora_linear = partial(_add_linear, placed.used_buffers)


def add_adapters(model: torch.nn.Module, vllm_config: Any) -> None:
    """Wrap the layers of a model as its worker does. Raises ``WeightError`` where vLLM cannot."""
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    try:
        LoRAModelRunnerMixin().load_lora_model(model, vllm_config, torch.device("cpu"))
    except ValueError as error:
        raise WeightError(f'vLLM serves no adapter: {error}; set lora.sync = "merged"') from error


def _add_linear(
    used: set[int],
    y: torch.Tensor,
    x: torch.Tensor,
    a_stacked: tuple[torch.Tensor, ...],
    b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    widths: tuple[int, ...],
    **_: Any,
) -> None:
    """``y += B (A x)`` for each slice of a layer that has an adapter, the one there is. vLLM's own on a CPU copies A
    and B for every token. ``used``: storages that something is published for."""
    rows = x.reshape(-1, x.shape[-1])
    begin = 0
    for a, b, width in zip(a_stacked, b_stacked, widths, strict=True):
        if b.data_ptr() in used:
            part = y.view(-1, y.shape[-1])[:, begin : begin + width]
            part += (rows @ a[SLOT, 0].T) @ b[SLOT, 0].T * scale
        begin += width


def record_adapter_plan(model: torch.nn.Module, tensors: Mapping[str, TensorSpec]) -> LoadPlan:
    """The places of the published ``tensors`` of an adapter in the stacked buffers of this worker. Raises
    ``WeightError`` naming a module on which vLLM computes none."""
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
    manager._create_merged_loras_inplace(adapter)
    buffers = {
        f"{name}.{kind}.{index}": buffer
        for name, module in manager.modules.items()
        for kind, stacked in vars(module).items()
        if kind.endswith("_stacked") and isinstance(stacked, tuple)
        for index, buffer in enumerate(stacked)
    }

    def place() -> None:
        for name, module in manager.modules.items():
            if weights := manager._get_lora_layer_weights(adapter, name):
                module.reset_lora = bool  # what it writes is nothing published
                module.set_lora(SLOT, weights.lora_a, weights.lora_b)
                del module.reset_lora

    routes: dict[str, list[Route]] = {name: [] for name in tensors}
    for name, route in record_copies(sources, buffers, place):
        check_exact(tensors[name], route.parameter, buffers[route.parameter])
        routes[name].append(route)
    if lost := [name for name, found in routes.items() if not found]:
        module = lost[0].removeprefix("base_model.model.").rpartition(".lora_")[0]
        remedy = 'leave it out of lora.targets, or set lora.sync = "merged"'
        raise WeightError(f"vLLM computes no adapter on {module!r}: {remedy}")
    used = {route.parameter for found in routes.values() for route in found}
    getattr(manager, "used_buffers", set()).update(buffers[name].data_ptr() for name in used)
    return LoadPlan(dict(tensors), routes, {name: flat_storage(buffers[name]) for name in used})
