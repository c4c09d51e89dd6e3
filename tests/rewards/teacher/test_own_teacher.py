"""A teacher that the run serves: a real vLLM engine, asked for the logprobs of what the policy sampled, and killed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from builders.files import SORT, SORT_MODEL
from builders.recipe import small_recipe
from msgspec.structs import replace

from streamrl.base.errors import RecipeError
from streamrl.cli.show import read_run
from streamrl.recipe.objective import Objective
from streamrl.recipe.objectives.teacher import Teacher
from streamrl.recipe.sections import Engines, Recipe
from streamrl.recipe.toml_text import toml_value
from streamrl.recipe.topology import Role
from streamrl.rewards.served.options import served_options

STEPS = 6


def recipe(**fields: object) -> Recipe:
    """A recipe whose teacher is the demo's model."""
    teacher = Teacher(model=str(SORT_MODEL), **fields)  # type: ignore[arg-type]
    return small_recipe(str(SORT_MODEL), objective=Objective(algorithm="distillation"), teacher=teacher)


def test_it_takes_the_longest_sequence_and_one_token_more() -> None:
    """Also where the policy samples as many tokens as both models have positions."""
    made = replace(recipe(), engines=Engines(max_model_len=1024))
    options = served_options(made, Role.TEACHER, "/s", device="cpu")
    assert options.max_model_len == 1025 and not options.pushed
    assert options.variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1"
    with pytest.raises(RecipeError, match=r"teacher.advanced.max_model_len: 1024 has no room for sequences of 1024"):
        served_options(
            replace(recipe(max_model_len=1024), engines=Engines(max_model_len=1024)), Role.TEACHER, "/s", device="cpu"
        )


@pytest.mark.vllm
@pytest.mark.torch
@pytest.mark.long
@pytest.mark.started
def test_a_run_serves_its_teacher_and_starts_it_again(tmp_path: Path) -> None:
    """The teacher is the demo's model, and the policy a sharper one, which has a gradient; it is killed twice."""
    from safetensors.torch import load_file, save_file

    policy = Path(shutil.copytree(SORT_MODEL, tmp_path / "policy"))
    tensors = load_file(policy / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, policy / "model.safetensors", {"format": "pt"})
    settings = {
        "model.path": str(policy),
        "run.directory": str(tmp_path),
        "run.steps": STEPS,
        "objective.algorithm": "distillation",
        "teacher.model": str(SORT_MODEL),
        "teacher.advanced.batch": 8,
        "rollout.prompts_per_batch": 4,
        "rollout.group_size": 4,
        "sampling.max_tokens": 64,
        "training.learning_rate": 0.0,
        "training.advanced.threads": 1,
        "evaluation.prompts": "",
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={toml_value(value)}")]
    metrics = tmp_path / "latest" / "metrics.jsonl"
    kills = 0
    command = [sys.executable, "-m", "streamrl", "train", str(SORT / "recipe.toml"), *flags]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as run:
        while run.poll() is None:
            steps = metrics.read_text().count('"kind":"step"') if metrics.exists() else 0
            if kills < 2 and steps > 2 * kills and (teacher := teacher_process(run.pid)):
                teacher.send_signal(signal.SIGKILL)
                kills += 1
            time.sleep(0.05)
    output = (tmp_path / "log").read_text()
    assert run.returncode == 0, output
    assert kills == 2
    assert output.count("teacher-0 was killed by SIGKILL") == kills, output
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    made = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in made] == list(range(1, STEPS + 1))
    assert all(line["policy/teacher_kl"] > 0.005 and line["optim/grad_norm"] > 0 for line in made), made
    # What a teacher answered between its last report and its death is not counted.
    assert made[-1]["teacher/questions_total"] >= (STEPS - kills) * 16
    summary = read_run(tmp_path / "latest").summary
    assert not summary.violations and summary.accounting.in_flight == 0


def teacher_process(run: int) -> psutil.Process | None:
    """The process of the teacher of a run; None: there is none at the moment."""
    for process in psutil.Process(run).children(recursive=True):
        try:
            if "streamrl.launch teacher" in " ".join(process.cmdline()):
                return process
        except psutil.Error:
            continue
    return None
