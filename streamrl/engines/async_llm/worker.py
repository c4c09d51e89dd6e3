"""Changes of vLLM's own processes: they die with their parent, and keep weights that can be changed.

Our plugin (``engines.vllm.plugin``) calls these functions in each worker before vLLM builds the model."""

from __future__ import annotations

import multiprocessing
from typing import Any

from streamrl.base.run_process import die_with

KERNELS_VARIABLE = "STREAMRL_CPU_KERNELS"
"""Environment variable: "stock" leaves the kernels of a CPU as vLLM has them, to measure against."""


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, if multiprocessing made it (engine core, worker). Without
    this, core and workers of a killed owner run for ever. The resource tracker is not made in this way, and must live
    on, since it unlinks the shared memory."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        die_with(parent.pid)


def rotate_separate_heads() -> None:
    """Mend rotary embeddings of queries and keys whose heads are a dimension of their own (latent attention, LFM2).
    vLLM's kernel of a CPU takes the stride between heads for the one between tokens, and rotates other elements; these
    tensors now take vLLM's native path."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    original = RotaryEmbedding.forward_cpu
    if not current_platform.is_cpu() or hasattr(original, "streamrl_original"):
        return

    def forward_cpu(rope: Any, positions: Any, query: Any, key: Any = None) -> Any:
        if query.dim() == 2 and (key is None or key.dim() == 2):
            return original(rope, positions, query, key)
        return rope.forward_native(positions, query, key)

    forward_cpu.streamrl_original = original  # type: ignore[attr-defined]
    RotaryEmbedding.forward_cpu = forward_cpu


def route_by_sigmoid() -> None:
    """Route by sigmoid scores without groups (MiniMax-M2) as in one group. vLLM's router of a CPU has only softmax
    without groups, and its core dies of the first request."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    original = CPURouter.__init__
    if hasattr(original, "streamrl_original"):
        return

    def make(router: Any, *arguments: Any, **options: Any) -> None:
        original(router, *arguments, **options)
        if router.scoring_func == "sigmoid" and not router.custom_routing_function and not router.use_grouped_topk:
            router.use_grouped_topk = True
            router.num_expert_group = 1
            router.topk_group = 1

    make.streamrl_original = original  # type: ignore[attr-defined]
    CPURouter.__init__ = make


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
    _keep_latent_weights()


def _keep_latent_weights() -> None:
    """Keep the weight of ``kv_b_proj``, which vLLM drops once its AMX kernels of latent attention have packed it: a
    commit writes to it, and packs it again (``weights.vllm.latent_attention.derive_again``)."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    original = MLAAttention.process_weights_after_loading

    def process_weights(attention: Any, dtype: Any) -> None:
        weight = attention.kv_b_proj.weight
        original(attention, dtype)
        attention.kv_b_proj.weight = weight

    MLAAttention.process_weights_after_loading = process_weights
