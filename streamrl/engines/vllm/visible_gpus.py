"""The GPUs that this process may use, as NVML lists them.

The checks before a run (the command's process), the daemon of a host in a cluster, and engine processes read them."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

from msgspec import Struct

from streamrl.base.run_process import CUDA_DEVICES
from streamrl.engines.vllm.options import installed_device


class Gpu(Struct, frozen=True):
    """A GPU: its name in ``CUDA_VISIBLE_DEVICES``, and its memory in bytes (0: unknown)."""

    name: str
    memory: int


def visible_gpus() -> tuple[Gpu, ...]:
    """List the GPUs of ``CUDA_VISIBLE_DEVICES``, in its order. As in CUDA, names after an unknown one are ignored;
    unlike in CUDA, an abbreviated GPU UUID is unknown: write the full UUID. Empty when the installed packages compute
    on the CPU, or no driver answers."""
    if installed_device() == "cpu":
        return ()
    try:
        nvml = importlib.import_module("pynvml")  # comes with vLLM's CUDA build
    except ImportError:
        return ()
    gpus: list[Gpu] = []
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        all_devices = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
        for name in map(str.strip, os.environ.get(CUDA_DEVICES, all_devices).split(",")):
            if name.isdigit():
                handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
            else:
                handle = nvml.nvmlDeviceGetHandleByUUID(name)
            memory = 0
            with suppress(nvml.NVMLError):  # a GPU that shares the host's memory has no size of its own
                memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
            gpus.append(Gpu(name, memory))
    return tuple(gpus)
