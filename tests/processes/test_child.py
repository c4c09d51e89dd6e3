"""The real entry point ``python -m streamrl.launch``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from builders.files import SORT_RECIPE as DEMO
from builders.recipe import small_recipe

from streamrl.base.run_process import PARENT_PID
from streamrl.base.waits import start_phases
from streamrl.launch.roles import role_main
from streamrl.processes.exit_reason import TERMINATED_CODE, ExitKind, read_reason
from streamrl.recipe.rules.load_recipe import dump_recipe, load_recipe
from streamrl.recipe.topology import Role, plan_topology

RECIPE = small_recipe()


def start(role: Role, run_directory: Path, **environment: str) -> subprocess.Popen[str]:
    folders = ["--run-directory", str(run_directory), "--socket-directory", str(run_directory / "s")]
    arguments = [sys.executable, "-m", "streamrl.launch", role.value, *folders]
    return subprocess.Popen(
        arguments, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run directory as the parent makes it, for the demo recipe."""
    recipe = load_recipe(DEMO)
    (tmp_path / "recipe.toml").write_text(dump_recipe(recipe))
    topology = plan_topology(recipe, tmp_path / "s")
    (tmp_path / "s").mkdir()
    (tmp_path / "topology.json").write_bytes(msgspec.json.encode(topology))
    return tmp_path


def test_a_failure_is_reported_in_the_log_and_in_the_reason_file(tmp_path: Path) -> None:
    with start(Role.REWARD, tmp_path) as process:
        output, _ = process.communicate(timeout=900)
    assert process.returncode == 1
    reason = read_reason(tmp_path, "reward-0")
    assert reason is not None
    assert reason.kind is ExitKind.CAUSE
    assert "recipe.toml" in reason.message
    assert "recipe.toml" in output


def test_sigterm_ends_a_role_and_ctrl_c_does_not(run_directory: Path) -> None:
    with start(Role.REWARD, run_directory) as process:
        assert process.stdout is not None
        wait_until_catching_sigterm(process.pid)
        process.send_signal(signal.SIGINT)  # ignored: were it not, the exit code would tell
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=900)
    assert process.returncode == TERMINATED_CODE, output
    assert read_reason(run_directory, "reward-0") is None


def wait_until_catching_sigterm(pid: int) -> None:
    """Until the process has a SIGTERM action of its own, as the kernel sees it."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1):
            return


def test_a_child_whose_parent_is_gone_already_does_not_start(run_directory: Path) -> None:
    with start(Role.REWARD, run_directory, **{PARENT_PID: "1"}) as process:
        output, _ = process.communicate(timeout=900)
    assert (process.returncode, output) == (1, "")


@pytest.mark.parametrize("role", [Role.CONTROLLER, Role.REWARD, Role.ENGINE])
def test_roles_load_nothing_that_is_slow_to_import(role: Role) -> None:
    code = f"import sys; from streamrl.launch.roles import *; role_main(Role('{role}')); print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "vllm", "transformers", "numba", "ray", "obstore"} & set(found)


@pytest.mark.torch
def test_trainer_role_loads() -> None:
    pytest.importorskip("torch")
    assert callable(role_main(Role.TRAINER))


def test_the_phase_of_a_start_is_the_last_note_of_its_log(tmp_path: Path) -> None:
    """Notes of an earlier start, and of processes that noted none, are no phases."""
    started = tmp_path / "topology.json"
    started.touch()
    line = time.strftime("%Y-%m-%d %H:%M:%S,000 INFO {}: {}\n", time.localtime(started.stat().st_mtime))
    notes = [line.format("streamrl.start", "imports vLLM"), line.format("streamrl.start", "loads the model")]
    earlier = "2026-11-27 23:59:59,999 INFO streamrl.start: loads the model\n"
    (tmp_path / "before.log").write_text(earlier + line.format("streamrl.engines", "imports nothing"))
    (tmp_path / "now.log").write_text(earlier + notes[0] + line.format("streamrl.engines", "imports nothing"))
    (tmp_path / "later.log").write_text("".join(notes))
    (tmp_path / "silent.log").touch()
    phases = start_phases(tmp_path, ["before", "now", "later", "silent", "absent"], started)
    assert phases == {"now": "imports vLLM", "later": "loads the model"}
