"""Our vLLM plugin, which vLLM runs in the engine process, its core and its workers before a model is built.

It does nothing unless streamrl started the process (``STREAMRL_ENGINE=1``): vLLM loads every installed plugin, even in
engines of other programs."""

from __future__ import annotations

import sys
from os import environ
from typing import Any

from streamrl.base.run_process import name_shared_memory
from streamrl.engines.async_llm.image_packages import import_without_torchvision
from streamrl.engines.async_llm.worker import (
    KERNELS_VARIABLE,
    die_with_parent,
    keep_linear_weights,
    rotate_separate_heads,
    route_by_sigmoid,
)
from streamrl.weights import ENGINE_VARIABLE, WEIGHT_BACKEND
from streamrl.weights.vllm.linear_layers import LINEAR_VARIABLE


def register() -> None:
    """Entry point ``vllm.general_plugins``."""
    if environ.get(ENGINE_VARIABLE) != "1":
        return
    die_with_parent()
    name_memory_of_workers(name_shared_memory())
    make_numba_harmless()
    import_without_torchvision()
    ask_for_tiles()
    register_weight_backend()
    if environ.get(LINEAR_VARIABLE) != "stock":
        keep_linear_weights(packed=environ.get(LINEAR_VARIABLE) == "packed")
    if environ.get(KERNELS_VARIABLE) != "stock":
        rotate_separate_heads()
        route_by_sigmoid()
    watch_after_loading()
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # On a GPU vLLM has another model runner, and importing this one compiles Triton's kernels.
        from streamrl.engines.vllm.routing_capture import add_routing_capture
        from streamrl.engines.vllm.sampler_patches import add_continuation

        add_continuation()
        add_routing_capture()


def name_memory_of_workers(prefix: str) -> None:
    """Name the memory that the workers of one CPU engine share after the run, since vLLM never unlinks it."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    if prefix and not hasattr(original, "streamrl_original"):

        def make_group_name(communicator: Any) -> str:
            return f"{prefix}{original(communicator)}"

        make_group_name.streamrl_original = original  # type: ignore[attr-defined]
        _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)


def make_numba_harmless() -> None:
    """Let a worker start in a process that has imported numba, for example through the main module of its owner.

    vLLM's CPU worker reads the instance dictionary of every object in every module. llvmlite's wrapper of its library
    looks this attribute up in the library, and the worker dies. The patched wrapper raises ``AttributeError``."""
    ffi = sys.modules.get("llvmlite.binding.ffi")
    wrapper = getattr(ffi, "_lib_wrapper", None)
    if wrapper is None or hasattr(wrapper, "streamrl_original"):
        return
    original = wrapper.__getattr__

    def look_up(library: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(library, name)

    wrapper.streamrl_original = original
    wrapper.__getattr__ = look_up


def ask_for_tiles() -> None:
    """Ask Linux for the tile registers of AMX, if the processor has them: without permission their first use is SIGILL.

    vLLM's bfloat16 attention uses them without asking. It works after a matrix product of torch, which has asked, but a
    worker whose layers are all packed or quantised computes none before."""
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def register_weight_backend() -> None:
    """Make ``WeightTransferConfig(backend="streamrl")`` known to this process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if WEIGHT_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            WEIGHT_BACKEND, "streamrl.weights.vllm.weight_receiver", "StreamrlWeightTransfer"
        )


def watch_after_loading() -> None:
    """Record on every model the changes that vLLM makes to its parameters after they are loaded; the load plan of
    weight pushes reads them. On a CPU the norms and gates of the model then get vLLM's C kernels."""
    from vllm.model_executor.model_loader import base_loader

    original = base_loader.process_weights_after_loading
    if hasattr(original, "streamrl_original"):
        return

    def process_weights(model: Any, model_config: Any, target_device: Any) -> None:
        from streamrl.engines.vllm.cpu_kernels import use_cpu_kernels
        from streamrl.weights.vllm.post_load_changes import record_post_load_changes

        record_post_load_changes(model, lambda: original(model, model_config, target_device))
        if target_device.type == "cpu" and environ.get(KERNELS_VARIABLE) != "stock":
            use_cpu_kernels(model, model_config.dtype)

    process_weights.streamrl_original = original  # type: ignore[attr-defined]
    base_loader.process_weights_after_loading = process_weights
