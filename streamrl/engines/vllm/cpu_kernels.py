"""Faster operators of a CPU engine, which the plugin sets in each worker process after the model is loaded.

RMSNorm and SiluAndMul get vLLM's own C kernels, which vLLM 0.32 calls on GPUs only. Parameters become plain tensors for
torch. With few requests, the time of a decode step is mostly the fixed cost of its operators: a norm has eight of them,
and vLLM's class of parameters takes each operator through Python, to no effect."""

from __future__ import annotations

from collections import Counter
from copy import copy
from logging import getLogger
from types import MethodType
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.parameter import BasevLLMParameter

_log = getLogger(__name__)


def use_cpu_kernels(model: Any, dtype: torch.dtype) -> None:
    """Set the C kernels in the norms and gates of a loaded model that computes in ``dtype``, each after a trial on
    random numbers. Logs one line about the modules that stay on vLLM's native path."""
    BasevLLMParameter.__torch_function__ = Parameter.__torch_function__
    modules = [module for module in model.modules() if isinstance(module, RMSNorm | SiluAndMul)]
    native: Counter[str] = Counter()
    for module in modules:
        kernel = _gate if isinstance(module, SiluAndMul) else _norm
        reason = _difference(module, kernel, dtype)
        if reason:
            native[f"{type(module).__name__}: {reason}"] += 1
        else:
            module._forward_method = MethodType(kernel, module)
    if native or not modules:
        reasons = "; ".join(f"{count} {kind}" for kind, count in native.items()) or "there are no others"
        with_kernel = len(modules) - native.total()
        _log.warning("C kernels compute %d norms and gates of this model (%s)", with_kernel, reasons)


def _norm(norm: Any, x: Any, residual: Any = None) -> Any:
    """Compute ``RMSNorm``, with a residual in place. The kernels need contiguous rows of one type."""
    weight = norm.weight  # looked up in each call, since a reload may set another one
    same_type = x.dtype is weight.dtype
    same_residual = residual is None or (residual.dtype, residual.shape) == (x.dtype, x.shape)
    if not same_type or not same_residual:
        return norm.forward_native(x, residual)
    x = x.contiguous()  # the heads of queries and keys are slices
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm.default(out, x, weight, norm.variance_epsilon)
        return out
    residual = residual.contiguous()
    torch.ops._C.fused_add_rms_norm.default(x, residual, weight, norm.variance_epsilon)
    return x, residual


def _gate(gate: Any, x: Any) -> Any:
    """Compute ``SiluAndMul``. The kernel needs contiguous rows, in two halves of full vectors of 8."""
    if x.shape[-1] % 16:
        return gate.forward_native(x)
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    torch.ops._C.silu_and_mul.default(out, x.contiguous())
    return out


def _difference(module: Any, kernel: Any, dtype: torch.dtype) -> str:
    """Return the reason why ``kernel`` cannot replace ``module``; empty when both give the same for random rows, up to
    rounding."""
    trial = copy(module)
    is_norm = type(module) is RMSNorm
    if not is_norm and type(module) is not SiluAndMul:
        return "a variant"
    if is_norm and (not module.has_weight or module.weight.dtype is not dtype or module.variance_size_override):
        return "a variant"
    generator = torch.Generator().manual_seed(0)  # the engine's own generator is for sampling
    size = (3, len(module.weight) if is_norm else 80)
    x, residual, weights = (8 * torch.randn(size, generator=generator).to(dtype) for _ in range(3))
    trial._parameters = {"weight": weights[0]}
    bound = max(1e-5, 2 * torch.finfo(dtype).eps)  # four roundings
    try:
        for rows in [(x,), (x, residual)] if is_norm else [(x,)]:
            output = kernel(trial, *(tensor.clone() for tensor in rows))
            torch.testing.assert_close(output, trial.forward_native(*rows), rtol=bound, atol=bound)
    # The outputs differ; this vLLM lacks the kernel; the kernel refuses such rows.
    except (AssertionError, AttributeError, RuntimeError) as error:
        return " ".join(str(error).split())[:120]
    return ""
