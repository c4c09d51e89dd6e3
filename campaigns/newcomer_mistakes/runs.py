"""Runs that have ended: their versions, checkpoints and steps, and what was changed before they are resumed."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from campaigns.newcomer_mistakes.mistake import Change, Mistake, each, make_folder, recipe

RESUMED = '[checkpoint]\nresume_from = "before/checkpoints/latest"\n'
SIMULATED = ("engines.kind=simulated", "evaluation.at_start=false", "checkpoint.advanced.min_free_gib=0", "lora.rank=4")


@cache
def ended_run() -> Path:
    """A run of two steps, with adapters and simulated engines, made once for all mistakes."""
    directory = tempfile.TemporaryDirectory(prefix="mistakes-run-")
    atexit.register(directory.cleanup)
    folder = make_folder(Path(directory.name) / "folder")
    command = [sys.executable, "-m", "streamrl", "train", "recipe.toml", *SIMULATED]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (folder / "runs/latest").resolve()


def _copied(folder: Path) -> None:
    shutil.copytree(ended_run(), folder / "before", symlinks=True)


def _without_journal(folder: Path) -> None:
    shutil.rmtree(folder / "before/journal")


def _without_tensors(folder: Path) -> None:
    next((folder / "before/checkpoints/latest/trainer").glob("*.safetensors")).unlink()


def _run(command: str, *said: str, change: Change | None = None) -> Mistake:
    """A mistake with a copy of the run, the folder ``before``."""
    return Mistake(each(_copied, change) if change else _copied, said, command)


def _resumed(more: str, *said: str, change: Change | None = None) -> Mistake:
    """A recipe that begins with the checkpoint of the run."""
    one = recipe("", RESUMED + more)
    return Mistake(each(*filter(None, [_copied, one.change, change])), said)


MISTAKES: dict[str, Mistake] = {
    "a version that is not there": _run("export before out --version 99", "before", "'99'", "it has versions 2"),
    "a version in words": _run("export before out --version newest", "'newest'", "(a number, latest, best)"),
    "an export over a folder": _run("export before model", "model is not empty", "not there yet"),
    "a size of shards in words": _run("export before out --shard-size small", "--shard-size small", "write it as 2GB"),
    "a version to evaluate that is not there": _run("eval before@99 recipe.toml", "'99'", "it has versions 2"),
    "a step without completions": _run("samples before --step 99", "before", "training has steps 1 to 2"),
    "a tracker that is none": _run("sync before --to wandbb", '"wandbb"', "take one of tensorboard, wandb"),
    "a tracker that asks": _run("sync before --to prometheus", "prometheus", "set metrics.report_to"),
    "another rate on resume": _run(
        "resume before training.learning_rate=1e-3", "training.learning_rate was 0.0002, now 0.001", "with --force"
    ),
    "another batch on resume": _run(
        "resume before rollout.group_size=8", "rollout.group_size was 4, now 8", "undo that, or go on", "--force"
    ),
    "a misspelt key on resume": _run("resume before run.step=9", "run.step: unknown key", '"steps"'),
    "a number in words on resume": _run("resume before run.steps=many", "run.steps:", '"many"', "an integer > 0"),
    "a run without its journal": _run(
        "resume before", "before/journal holds nothing of this run", "bring it back", change=_without_journal
    ),
    "another rank of adapters": _resumed("[lora]\nrank = 8\n", "lora.rank: 8", "the checkpoint has 4", "keep it"),
    "a checkpoint that is damaged": _resumed(
        "[lora]\nrank = 4\n", "checkpoint.resume_from:", "is missing", "resume from another checkpoint",
        change=_without_tensors,
    ),
    "the folder of a run for a checkpoint": recipe(
        "", '[checkpoint]\nresume_from = "before"\n', "checkpoint.resume_from:", "before", "checkpoints/latest"
    ),
}  # fmt: skip
