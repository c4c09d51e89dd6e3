"""Libraries in the place of an NVIDIA driver, compiled when they are first asked for."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from campaigns.pretended_gpu.cards import VARIABLE, Card

SOURCES = Path(__file__).parent / "libraries"
CPU_BUILDS = Path(__file__).parent / "site"
"""Folder on the path of a process that has the CPU builds of vLLM and torch."""
BUILT = Path(__file__).resolve().parents[2] / "build" / "pretended_gpu"
LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "cuda.c": "libcuda.so.1", "cudart.c": "fake_cudart.so"}


def variables(cards: Sequence[Card], *, runtime: bool = False) -> dict[str, str]:
    """Return the environment variables of a process that finds ``cards``. ``runtime``: also what FakeTensorMode asks of
    CUDA's runtime, with the CUDA build of torch. Raises ``CalledProcessError`` where gcc cannot compile."""
    folder = build()
    found = {
        VARIABLE: ",".join(map(str, cards)),
        "LD_LIBRARY_PATH": _before(folder, "LD_LIBRARY_PATH"),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch's count, which would else ask the driver itself
    }
    if "+cpu" in version("torch"):
        found["PYTHONPATH"] = _before(CPU_BUILDS, "PYTHONPATH")
    return found | ({"LD_PRELOAD": str(folder / LIBRARIES["cudart.c"])} if runtime else {})


def _before(folder: Path, variable: str) -> str:
    return ":".join([str(folder), *filter(None, [os.environ.get(variable)])])


def build() -> Path:
    """Compile the libraries that have changed since the last time; the folder that has them."""
    texts = b"".join((SOURCES / name).read_bytes() for name in LIBRARIES)
    folder = BUILT / hashlib.sha256(texts).hexdigest()[:12]
    if folder.is_dir():
        return folder
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as fresh:
        there = Path(fresh) / "libraries"
        there.mkdir()
        for source, library in LIBRARIES.items():
            command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-D_GNU_SOURCE", f"-Wl,-soname,{library}"]
            subprocess.run([*command, "-o", str(there / library), str(SOURCES / source)], check=True)
        if not folder.is_dir():  # another process may have been faster
            there.rename(folder)
    return folder
