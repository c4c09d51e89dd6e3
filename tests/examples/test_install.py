"""The install shows that it moves, also where there is no terminal, and what pip said where it failed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "requirements" / "install.sh"
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
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)


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
