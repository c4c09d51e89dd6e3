"""vLLM's own C kernels of a CPU for RMSNorm and SiluAndMul, which vLLM 0.32 calls on GPUs only, and parameters that
torch takes for plain tensors. Where few requests run, a decode step is mostly the fixed cost of its operators: a norm
is eight of them, and vLLM's class of parameters takes each operator through Python, to no effect."""

from __future__ import annotations

import logging
from collections import Counter
from copy import copy
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.parameter import BasevLLMParameter

KERNELS_VARIABLE = "STREAMRL_CPU_KERNELS"  # "stock": as vLLM does, to measure against
_log = logging.getLogger(__name__)


def use_cpu_kernels(model: Any, dtype: torch.dtype) -> None:
    """Have norms and gates of a loaded model that computes in ``dtype`` call the kernels, each after a trial on random
    numbers. Logs one line about those that stay on vLLM's native path."""
    BasevLLMParameter.__torch_function__ = torch.nn.Parameter.__torch_function__
    modules = [module for module in model.modules() if isinstance(module, RMSNorm | SiluAndMul)]
    left: Counter[str] = Counter()
    for module in modules:
        kernel = _gate if isinstance(module, SiluAndMul) else _norm
        if reason := _difference(module, kernel, dtype):
            left[f"{type(module).__name__}: {reason}"] += 1
        else:
            module._forward_method = MethodType(kernel, module)
    if left or not modules:
        why = "; ".join(f"{count} {what}" for what, count in left.items()) or "there are no others"
        _log.warning("C kernels compute %d norms and gates of this model (%s)", len(modules) - left.total(), why)


def _norm(norm: Any, x: Any, residual: Any = None) -> Any:
    """Compute what ``RMSNorm`` does, with a residual in place. The kernels take rows without gaps, all of one type."""
    weight = norm.weight  # looked up in each call: a reload may put another there
    if x.dtype is not weight.dtype or not (residual is None or (residual.dtype, residual.shape) == (x.dtype, x.shape)):
        return norm.forward_native(x, residual)
    x = x.contiguous()  # heads of queries and keys are slices
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm.default(out, x, weight, norm.variance_epsilon)
        return out
    residual = residual.contiguous()
    torch.ops._C.fused_add_rms_norm.default(x, residual, weight, norm.variance_epsilon)
    return x, residual


def _gate(gate: Any, x: Any) -> Any:
    """Compute what ``SiluAndMul`` does. The kernel takes rows without gaps, of two halves of whole vectors of 8."""
    if x.shape[-1] % 16:
        return gate.forward_native(x)
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    torch.ops._C.silu_and_mul.default(out, x.contiguous())
    return out


def _difference(module: Any, kernel: Any, dtype: torch.dtype) -> str:
    """Return why ``kernel`` cannot replace ``module``; empty where both round random rows alike."""
    trial = copy(module)
    is_norm = type(module) is RMSNorm
    other = is_norm and (not module.has_weight or module.weight.dtype is not dtype or module.variance_size_override)
    if other or not (is_norm or type(module) is SiluAndMul):
        return "a variant"
    generator = torch.Generator().manual_seed(0)  # not the engine's own, which samples
    size = (3, len(module.weight) if is_norm else 80)
    x, residual, weights = (8 * torch.randn(size, generator=generator).to(dtype) for _ in range(3))
    trial._parameters = {"weight": weights[0]}
    bound = max(1e-5, 2 * torch.finfo(dtype).eps)  # four roundings
    try:
        for rows in [(x,), (x, residual)] if is_norm else [(x,)]:
            found = kernel(trial, *(one.clone() for one in rows))
            torch.testing.assert_close(found, trial.forward_native(*rows), rtol=bound, atol=bound)
    except (AssertionError, AttributeError, RuntimeError) as error:  # others; missing in this vLLM; not for such rows
        return " ".join(str(error).split())[:120]
    return ""
