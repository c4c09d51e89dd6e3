"""Packs linear layers of a CPU engine again, after a commit has written to their weights. ``weight_receiver.py`` calls
it in vLLM's worker processes at the end of a commit."""

from __future__ import annotations

from os import environ
from typing import Any

LINEAR_VARIABLE = "STREAMRL_CPU_LINEAR"
"""Environment variable: "plain" (default) or "packed", see ``keep_linear_weights``; "stock", as vLLM does."""


def repack_linear_layers(model: Any, changed: set[int]) -> int:
    """Pack the linear layers of ``model`` again whose weight storage is in ``changed``.

    ``changed``: ``data_ptr()`` of storages that a commit wrote to. Returns the number of layers that were packed. A
    tied head counts as one: it shares the storage, but has another packed copy."""
    from vllm.model_executor.layers import utils

    if environ.get(LINEAR_VARIABLE, "plain") == "plain":
        return 0
    repacked = 0
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if not hasattr(layer, "cpu_linear") or weight is None:
            continue
        if weight.numel() and weight.untyped_storage().data_ptr() in changed:
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
            repacked += 1
    return repacked
