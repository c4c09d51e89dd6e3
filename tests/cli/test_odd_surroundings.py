"""``streamrl`` in odd surroundings: screens that take nothing, closed descriptors, odd directories, signals."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config.toml_text import toml_value

EXAMPLE = Path(__file__).parents[2] / "examples" / "sort" / "recipe.toml"
STREAMRL = shlex.join([sys.executable, "-m", "streamrl"])


def arguments(root: Path, **settings: object) -> list[str]:
    """Of the demo with simulated engines: two steps of eight completions."""
    (root / "reward.py").write_text("async def reward(completion):\n    return len(completion) % 7 / 6\n")
    common = {
        "run.directory": str(root / "runs"),
        "run.steps": 2,
        "engines.kind": "simulated",
        "rewards.0.function": f"{root / 'reward.py'}:reward",
        "rollout.prompts_per_batch": 2,
        "rollout.group_size": 4,
        "sampling.max_tokens": 32,
        "evaluation.prompts": "",
        "training.threads": 1,
        "checkpoint.min_free_gib": 0.0,
    }
    chosen = common | {key.replace("__", "."): value for key, value in settings.items()}
    return [str(EXAMPLE), *(part for key, value in chosen.items() for part in ("--set", f"{key}={toml_value(value)}"))]


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run by a shell, for its redirections."""
    env = os.environ | environment
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=90, check=False, env=env)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("redirection", [">/dev/full", ">/dev/full 2>&1"])
def test_a_dry_run_ends_as_it_would_on_a_screen(tmp_path: Path, redirection: str) -> None:
    done = shell(
        f"{STREAMRL} train {shlex.join(arguments(tmp_path))} --dry-run {redirection}",
        PYTHONIOENCODING="ascii",
    )
    assert done.returncode == 0, done.stderr
    noted = [line for line in done.stderr.splitlines() if "stdout cannot be written" in line]
    assert len(noted) == (redirection == ">/dev/full") and "Traceback" not in done.stderr


@pytest.mark.timeout(100)
@pytest.mark.torch
def test_a_screen_that_takes_nothing_ends_no_run(tmp_path: Path) -> None:
    command = f"{STREAMRL} train {shlex.join(arguments(tmp_path))} >/dev/full 2>&1 <&-"
    assert shell(command, PYTHONIOENCODING="ascii").returncode == 0
    run = tmp_path / "runs" / "latest"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2]
    log = (run / "logs" / "supervisor.log").read_text()
    assert log.count("stdout cannot be written (No space left on device)") == 1
