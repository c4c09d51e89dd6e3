"""Each recipe of examples/systems as a run of ten steps on simulated engines, killed in the middle and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders.files import EXAMPLES
from tiers import quick_only

from streamrl.cli.show import read_run
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.scheduling import System
from streamrl.recipe.toml_text import toml_value

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

SYSTEMS = EXAMPLES / "systems"
STEPS = 10


@pytest.mark.seconds(8)
@pytest.mark.parametrize("system", quick_only(System, [System.ROLLPACKER]))
def test_ten_steps_with_a_kill_in_the_middle(system: System, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("async def reward(completion):\n    return len(completion) % 7 / 6\n")
    settings = {
        "run.directory": str(tmp_path / "runs"),
        "run.steps": STEPS,
        "engines.kind": "simulated",
        "rewards.0.function": f"{tmp_path / 'reward.py'}:reward",
        "sampling.max_tokens": 96,
        "evaluation.prompts": "",
        "training.advanced.threads": 1,
    }
    command, run = [sys.executable, "-m", "streamrl"], tmp_path / "runs" / "latest"
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={toml_value(value)}")]

    def steps() -> list[dict[str, float]]:
        """Of the metrics, each once: one that was live and not reported when the run was killed may be there twice."""
        metrics = run / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        found = [json.loads(line) for line in lines if '"kind":"step"' in line and line.endswith("}")]
        return list({line["step"]: line for line in found}.values())

    with subprocess.Popen([*command, "train", str(SYSTEMS / f"{system}.toml"), *flags]) as first:
        while len(steps()) < STEPS // 2:
            assert first.poll() is None, "it ended before it was killed"
            time.sleep(0.01)
        first.kill()
    resumed = subprocess.run([*command, "resume", str(run)], capture_output=True, text=True, timeout=900, check=False)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    made = steps()
    assert [step["step"] for step in made] == list(range(1, STEPS + 1))
    summary = read_run(run).summary
    assert not summary.violations and summary.accounting.in_flight == 0
    recipe = load_recipe(run / "recipe.toml")
    assert recipe == load_recipe(SYSTEMS / f"{system}.toml", flags[1::2]), "the line was applied once, and recorded"
    staleness = max(step["async/staleness_oldest_max"] for step in made)
    assert staleness == 0 if recipe.on_policy else staleness <= recipe.rollout.max_staleness
