"""Runs whose engines and trainer ranks take turns, beside runs that sample and train side by side."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders.files import EXAMPLES
from safetensors import deserialize

from streamrl.cli.show import read_run
from streamrl.recipe.toml_text import toml_value

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

STEPS = 9
EVALUATED = 3
KILLER = """
import os, re, signal, time
from pathlib import Path
import psutil
from streamrl.contracts import Observer

KILLS = {
    "StepOptimizer": ("controller", "engine", "trainer"),  # the engines go to sleep, then the rank trains
    "trained": ("controller", "engine", "trainer"),  # the rank has moved its state away, the engines sleep
    "PublishWeights": ("controller", "engine"),  # the engines wake
    "WriteCheckpoint": ("trainer",),  # the engines sample, and the rank writes what it has moved away
}

class Killer(Observer):
    def kill_next(self, phase):
        done = Path(__file__).with_name("done")
        killed = done.read_text().split() if done.exists() else []
        for victim in KILLS.get(phase, ()):
            if f"{phase}.{victim}" not in killed:
                with done.open("a") as file:
                    file.write(f"{phase}.{victim}\\n")
                return self.kill(victim)

    def kill(self, victim):
        if victim == "controller":
            os.kill(os.getpid(), signal.SIGKILL)
        for process in psutil.Process(os.getppid()).children():
            line = process.cmdline()
            if "streamrl.launch" in line and line[line.index("streamrl.launch") + 1] == victim:
                process.kill()

    async def on_action(self, action):
        self.kill_next(type(action).__name__)

    def on_trained(self, policy_version, batch, metrics):
        self.kill_next("trained")
"""


def begun(root: Path, **settings: Any) -> subprocess.Popen[str]:
    root.mkdir()
    (root / "reward.py").write_text("async def reward(completion):\n    return len(completion) % 7 / 6\n")
    (root / "killer.py").write_text(KILLER)
    chosen = {
        "run.directory": str(root / "runs"),
        "run.steps": STEPS,
        "run.deterministic": True,
        "run.advanced.restarts": 20,
        "engines.kind": "simulated",
        "engines.count": 2,
        "engines.advanced.restarts": 20,
        "rewards.0.function": f"{root / 'reward.py'}:reward",
        "rollout.rounds": "tail_batching",
        "rollout.prompts_per_batch": 4,
        "rollout.group_size": 4,
        "sampling.max_tokens": 64,
        "evaluation.every": EVALUATED,
        "evaluation.limit": 4,
        "evaluation.at_start": False,
        "evaluation.at_end": False,
        "checkpoint.every": 2,
    } | {key.replace("__", "."): value for key, value in settings.items()}
    flags = [part for key, value in chosen.items() for part in ("--set", f"{key}={toml_value(value)}")]
    command = [sys.executable, "-m", "streamrl", "train", str(EXAMPLES / "sort" / "recipe.toml"), *flags]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def weights(run: Path) -> dict[str, bytes]:
    """Digest of each tensor of the last checkpoint, masters and moments too."""
    digests = {}
    for path in (run / "checkpoints" / f"step-{STEPS:06d}").rglob("*.safetensors"):
        for name, tensor in deserialize(path.read_bytes()):
            digests[f"{path.name} {name}"] = hashlib.sha256(tensor["data"]).digest()
    return digests


def steps_of(run: Path) -> dict[int, dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if line["kind"] == "step"}


@pytest.mark.long
@pytest.mark.seconds(120)
def test_kills_in_each_phase_of_turns_lose_nothing(tmp_path: Path) -> None:
    """A run in turns, in which processes are killed in each phase, ends with the bits of an undisturbed one side by
    side: batches, evaluations, weights, moments."""
    beside = begun(tmp_path / "beside", engines__advanced__gpu_sharing="side_by_side")
    killer = (f"{tmp_path / 'turns' / 'killer.py'}:Killer",)
    turns = begun(tmp_path / "turns", engines__advanced__gpu_sharing="in_turns", run__advanced__observers=killer)
    try:
        outputs = [process.communicate(timeout=900)[0] for process in (beside, turns)]
        assert (beside.returncode, turns.returncode) == (0, 0), outputs
        assert len((tmp_path / "turns" / "done").read_text().split()) == 9, "every kill was made"
    finally:
        beside.kill()
        turns.kill()
    runs = [tmp_path / name / "runs" / "latest" for name in ("beside", "turns")]
    whole, made = map(weights, runs)
    assert whole and made == whole
    steps, made_steps = map(steps_of, runs)
    assert list(made_steps) == list(range(1, STEPS + 1))
    for name in ("reward/mean", "completion/length_mean", "optim/grad_norm"):
        assert [step[name] for step in made_steps.values()] == [step[name] for step in steps.values()]
    assert any("time/engines_sleep_s" in step for step in made_steps.values())
    assert not any("time/engines_sleep_s" in step for step in steps.values())
    summary = read_run(runs[1]).summary
    assert not summary.violations and summary.accounting.in_flight == 0
