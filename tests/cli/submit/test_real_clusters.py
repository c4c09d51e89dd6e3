"""``streamrl launch ssh`` with a real Ray, on this host alone: a whole run, and what is left when the launcher dies."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'streamrl[ray]'")

RECIPE = Path("examples/sort/recipe.toml").resolve()
SMALL = ["engines.kind=simulated", "run.steps=3", "rollout.prompts_per_batch=4", "rollout.group_size=4"]
SMALL += ["sampling.max_tokens=32", "evaluation.prompts="]


class Launched:
    """``streamrl launch ssh`` on this host, in a folder whose name needs quotes."""

    def __init__(self, folder: Path, *settings: str) -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        words = ["launch", "ssh", str(RECIPE), "--hosts", "localhost", "--port", str(self.port), "--gpus-per-node", "0"]
        words += [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
        self.output = folder / "output"
        with self.output.open("wb") as output:
            command = [sys.executable, "-m", "streamrl", *words]
            environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 180
        while text not in self.output.read_text():
            assert time.monotonic() < deadline and self.process.poll() is None, self.output.read_text()[-2000:]
            time.sleep(0.2)

    def left(self) -> list[list[str]]:
        """Commands of processes of its Ray, and of the run on it."""

        def lines() -> Iterator[list[str]]:
            for process in psutil.process_iter():
                with suppress(psutil.Error):
                    yield process.cmdline()

        marks = (f":{self.port}", str(self.output.parent))
        return [line for line in lines() if any(mark in " ".join(line) for mark in marks)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / 'it\'s a "folder"'
    path.mkdir()
    return path


@pytest.mark.long
def test_a_run_on_this_host_ends_well_and_leaves_nothing(folder: Path) -> None:
    launched = Launched(folder)
    assert launched.process.wait(300) == 0, launched.output.read_text()
    text = launched.output.read_text()
    said = ["localhost: reached", "1 of 1 hosts are in the cluster", "finished: 3 of 3 steps"]
    assert all(sentence in text for sentence in said), text
    assert not launched.left()


@pytest.mark.long
def test_nothing_is_left_of_a_launcher_that_is_killed(folder: Path) -> None:
    launched = Launched(folder, "run.steps=10000")
    launched.wait_for("reward-0 ready")
    assert launched.left()
    launched.process.kill()
    launched.process.wait()
    deadline = time.monotonic() + 40
    while launched.left():
        assert time.monotonic() < deadline, launched.left()
        time.sleep(0.2)
