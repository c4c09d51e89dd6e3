"""The GPUs that this process may use, as NVML lists them."""

from __future__ import annotations

import contextlib
import importlib
import os

import msgspec

from streamrl.base.run_process import CUDA_DEVICES
from streamrl.engines.vllm.options import installed_device


class Gpu(msgspec.Struct, frozen=True):
    """A GPU: its name in ``CUDA_VISIBLE_DEVICES``, its memory in bytes (0: not known), and the number of its host."""

    name: str
    memory: int
    host: int = 0


def visible_gpus() -> tuple[Gpu, ...]:
    """List the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order. As in CUDA, names after an unknown one are
    ignored; unlike in CUDA, an abbreviated GPU UUID is unknown: write it whole. Empty where the installed packages
    compute on the CPU, or no driver answers."""
    if installed_device() == "cpu":
        return ()
    try:
        nvml = importlib.import_module("pynvml")  # comes with vLLM's CUDA build
    except ImportError:
        return ()
    found: list[Gpu] = []
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        every = ",".join(map(str, range(nvml.nvmlDeviceGetCount())))
        for name in map(str.strip, os.environ.get(CUDA_DEVICES, every).split(",")):
            by_number = nvml.nvmlDeviceGetHandleByIndex
            handle = by_number(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
            memory = 0
            with contextlib.suppress(nvml.NVMLError):  # a GPU that shares the host's memory does not say it
                memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
            found.append(Gpu(name, memory))
    return tuple(found)
