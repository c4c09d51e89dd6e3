"""Tensors that vLLM derives from the weight of another layer after loading: ``W_UK_T`` and ``W_UV`` of latent
attention (MLA), from ``kv_b_proj``. Kernels for AMX have packed ones of their own instead.

No published tensor is loaded into them. The load plan leaves them out, and ``weight_receiver.py`` makes them again, in
vLLM's worker processes, at the end of each commit that writes to the weight."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.nn import Module

_DERIVED = ("W_UK_T", "W_UV")
_SOURCE = "kv_b_proj"


def derived_parameters(model: Module) -> frozenset[str]:
    """Return the names of the derived parameters of ``model``."""
    return frozenset(
        f"{name}.{attribute}".removeprefix(".")
        for name, module in _latent_attention(model)
        for attribute in _DERIVED
        if attribute in module._parameters
    )


def derive_again(model: Module, changed: Container[int], dtype: torch.dtype) -> int:
    """Derive the parameters again whose source was written to, into the same memory. ``changed``: ``data_ptr()`` of
    storages. ``dtype``: dtype in which the engine computes. Returns the number of layers."""
    count = 0
    for _, module in _latent_attention(model):
        weight = getattr(module, _SOURCE).weight
        if weight.untyped_storage().data_ptr() in changed:
            with torch.no_grad():
                module.process_weights_after_loading(dtype)
            count += 1
    return count


def _latent_attention(model: Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, _SOURCE) and hasattr(module, "process_weights_after_loading"):
            yield name, module
