"""``streamrl top`` in a terminal (tmux) and the page in Chromium, on a simulated run that is killed under them."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from builders.files import SORT_RECIPE as EXAMPLE

from tests.observe.test_page import CHROMIUM, PANELS, browsing, served

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")]


class Terminal:
    """A tmux server of its own with one window."""

    def __init__(self, directory: Path, width: int, height: int, command: list[str]) -> None:
        self._socket = str(directory / "tmux")
        self("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), shlex.join(command))

    def __call__(self, *arguments: str) -> str:
        return subprocess.run(
            ["tmux", "-S", self._socket, *arguments], capture_output=True, text=True, check=True
        ).stdout

    def until(self, condition: Callable[[str], bool]) -> str:
        while not condition(text := self("capture-pane", "-p")):
            time.sleep(0.2)
        return text


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    settings = [f"run.directory={tmp_path / 'runs'}", "run.steps=5000", "engines.kind=simulated", "engines.count=2"]
    settings += ["rollout.prompts_per_batch=8", "evaluation.prompts=", "training.advanced.threads=1"]
    command = [sys.executable, "-m", "streamrl", "train", str(EXAMPLE), *settings]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield process
        for one in (*psutil.Process(process.pid).children(recursive=True),) if process.poll() is None else ():
            one.kill()
        process.kill()


@pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM} is missing: apt-get install chromium")
def test_a_run_is_seen_in_a_terminal_and_on_the_page(
    run: subprocess.Popen[bytes], tmp_path: Path, socket_directory: Path
) -> None:
    """A run is seen in a terminal and on the page, and its death is reported."""
    while not list(tmp_path.glob("runs/latest/topology.json")):
        assert run.poll() is None
        time.sleep(0.1)
    shown = Terminal(
        socket_directory, 80, 24, [sys.executable, "-m", "streamrl", "top", str(tmp_path / "runs" / "latest")]
    )
    try:
        text = shown.until(lambda text: "reward/mean" in text)
        assert " running " in text and "engine-1" in text and max(map(len, text.splitlines())) <= 80
        shown("send-keys", "l")
        shown.until(lambda text: "controller: " in text or "trainer-0: " in text)
        shown("send-keys", "l", "d")
        shown.until(lambda text: "drain" in text and "y: do it" in text)
        shown("send-keys", "n")
        with served(tmp_path / "runs") as address, browsing(viewport={"width": 1280, "height": 800}) as visit:
            visit.page.goto(address)
            state = visit.page.locator("#state")
            visit.until(lambda: "running · step" in state.inner_text(), "it runs")
            visit.until(lambda: visit.empty() == ["races"], "every panel is filled, but none lost a race")
            drawn = "panels.map(one => one.body.childElementCount > 0)"
            visit.until(lambda: visit.page.evaluate(drawn) == [True] * len(PANELS), "those out of sight, too")
            step, bars = state.inner_text(), visit.page.evaluate("[...timelines][0].columns.count")
            visit.until(lambda: state.inner_text() != step, "it goes on")
            visit.until(lambda: visit.page.evaluate("[...timelines][0].columns.count") > bars, "new bars")
            os.kill(run.pid, signal.SIGKILL)
            visit.until(lambda: "stopped · step" in state.inner_text(), "its end")
            visit.until(lambda: "killed; streamrl resume goes on" in visit.text("overview"), "what ended it")
            assert visit.complaints == []
        text = shown.until(lambda text: "DIED: no process publishes any more; the picture is of " in text)
        assert "engine-1" in text and "reward/mean" in text, "the last picture stays"
    finally:
        shown("kill-server")
