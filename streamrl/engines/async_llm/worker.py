"""Changes of vLLM's own processes: they die with their parent, and keep weights that can be changed.

Our plugin (``engines.vllm.plugin``) calls these functions in each worker before vLLM builds the model."""

from __future__ import annotations

import multiprocessing
from typing import Any

from streamrl.base.run_process import die_with


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, if multiprocessing made it (engine core, worker). Without
    this, core and workers of a killed owner run for ever. The resource tracker is not made in this way, and must live
    on, since it unlinks the shared memory."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with(parent.pid)


def keep_linear_weights(*, packed: bool) -> None:
    """Keep the parameters of linear layers on a CPU, where stock vLLM empties them after packing.

    ``packed``: True keeps vLLM's packed kernels beside the parameter (twice the memory), and a commit must pack the
    changed layers again (``repack_linear_layers``); False computes torch's ``linear`` on the parameter"""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(utils.dispatch_cpu_unquantized_gemm, "streamrl_original"):
        return
    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if packed or layer.weight.is_meta or layer.weight.ndim != 2:
            original(layer, remove_weight=False)
        else:
            layer.cpu_linear = linear

    dispatch.streamrl_original = original  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch
