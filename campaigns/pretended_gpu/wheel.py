"""The Python of vLLM's CUDA wheel, without its dependencies: nothing of it can be run here, and it can be read."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LOCK = Path(__file__).resolve().parents[2] / "requirements" / "cuda.lock"


def vllm_for_cuda() -> Path:
    """Return a folder with the package ``vllm`` of the lock of CUDA, outside of the tree. The first time it is
    downloaded: 330 MB. Raises ``CalledProcessError`` without a network."""
    pin = next(line for line in LOCK.read_text().split() if line.startswith("vllm=="))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamrl"
    folder = cache / f"{pin.replace('==', '-')}-cuda"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as fresh:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", fresh, pin], check=True)
        (wheel,) = Path(fresh).glob("*.whl")
        sources = Path(fresh) / "sources"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(sources, [name for name in archive.namelist() if name.endswith(".py")])
        sources.rename(folder)
    return folder
