"""Folders of ``streamrl init`` run as they are: each task on simulated engines, one on vLLM with its own model."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from builders.files import SORT_MODEL as MODEL

from streamrl.cli.init.tasks import TASKS

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.torch]

SMALL = ["run.steps=2", "rollout.prompts_per_batch=2", "rollout.group_size=2", "evaluation.limit=2"]


def streamrl(folder: Path, *arguments: str) -> str:
    """What a command writes on both streams. It must end well."""
    command = [sys.executable, "-m", "streamrl", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def steps_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "step"]


class Judging(BaseHTTPRequestHandler):
    """A judge that finds a long question polite."""

    def do_POST(self) -> None:
        question = self.rfile.read(int(self.headers["Content-Length"]))
        content = json.dumps({"choices": [{"text": "yes" if len(question) % 2 else "no"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judging) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_each_task_trains_on_simulated_engines(task: str, tmp_path: Path, endpoint: str) -> None:
    """The judge is elsewhere: the run's own would be a vLLM engine."""
    streamrl(tmp_path, "init", "new", "--task", task, "--model", str(MODEL))
    judge = [f"rewards.0.options.endpoint={endpoint}", "rewards.0.options.model=m", "judge.model="]
    settings = [*SMALL, "engines.kind=simulated", "sampling.max_tokens=16", *(judge if task == "judge" else [])]
    streamrl(tmp_path / "new", "train", "recipe.toml", *settings)
    steps = steps_of(tmp_path / "new")
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["reward/mean"] is not None for step in steps)


@pytest.mark.long
def test_a_new_task_trains_on_its_small_model(tmp_path: Path) -> None:
    """A task of one's own trains on the small model that was made for it. The warm-up shows its progress, and leaves
    something to learn; vLLM and the trainer agree about its weights."""
    report = streamrl(tmp_path, "init", "new", "--task", "own", "--model", "tiny", "--warm-up-steps", "50")
    assert "warm-up: step 25 of at most 50  loss " in report
    shown = streamrl(tmp_path / "new", "train", "recipe.toml", *SMALL)
    steps = steps_of(tmp_path / "new")
    assert [step["step"] for step in steps] == [1, 2] and "eval at step 2: held_out " in shown
    assert all(step["policy/mismatch_abs_mean"] < 1e-3 for step in steps if step["reward/std"])
