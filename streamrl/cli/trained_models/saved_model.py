"""Finds a saved model by its name on the command line. ``eval`` takes a folder, a checkpoint, a run or a version of a
run (``find_model``), ``export`` and ``push`` a run and a version (``saved_model``), each in the command's process."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from streamrl.base.errors import InputError
from streamrl.learning.state.durable_files import surviving_directory
from streamrl.recipe.remote_names import HUB, is_bare_name
from streamrl.run.checkpoints import LATEST, SCORES, read_scores

BEST = "best"
"""The version of a run with the highest held-out score."""


class SavedModel(Struct, frozen=True, kw_only=True):
    """The model of ``version`` of the run in the directory ``run``, in ``checkpoint``."""

    run: Path
    version: int
    checkpoint: Path

    @property
    def folder(self) -> Path:
        """The folder in Hugging Face format; with LoRA it holds the merged model."""
        return self.checkpoint / "hf"


def saved_model(run: Path, version: str = "") -> SavedModel:
    """Return the model of ``version`` of a run: a number, ``latest`` (also if empty), or ``best``. Raises
    ``StreamRLError`` that names the existing versions."""
    if not (run / "recipe.toml").is_file():
        raise InputError(f"{run} is not the directory of a run: name one, such as runs/latest")
    checkpoints = run / "checkpoints"
    folders = {int(path.parent.name[5:]): path.parent for path in sorted(checkpoints.glob("step-*/hf"))}
    number: int | None = int(version) if version.isdecimal() else None
    if version == BEST:
        scores = {number: score for number, score in read_scores(checkpoints / SCORES).items() if number in folders}
        number = max(scores, key=lambda step: (scores[step], step), default=None)
    elif version in ("", LATEST) and folders:
        # After a crash while ``latest`` was replaced: the directory that was moved aside.
        latest = surviving_directory(checkpoints / LATEST)
        number = next((step for step, path in folders.items() if path.resolve() == latest), max(folders))
    if number not in folders:
        versions = f"it has versions {', '.join(map(str, folders))}" if folders else "it has no checkpoint yet"
        if version == BEST and folders:
            versions += "; the best is kept where checkpoint.keep_best is 1 or more"
        raise InputError(
            f"{run} has no checkpoint of version {version or LATEST!r} (a number, latest, best): {versions}"
        )
    return SavedModel(run=run, version=number, checkpoint=folders[number])


def find_model(name: str) -> tuple[str, SavedModel | None]:
    """Return the folder of the model that ``name`` stands for, with the ``SavedModel`` where it belongs to a run.
    ``name``: a folder in Hugging Face format, a checkpoint, a run (its latest version), or ``RUN@VERSION``; names on
    the Hub are returned unchanged. Raises ``StreamRLError``."""
    path = Path(name)
    if (path / "config.json").is_file():
        return str(path.resolve()), None
    if (path / "hf").is_dir() and path.resolve().parent.name == "checkpoints":
        run = path.resolve().parent.parent
        version = path.resolve().name.removeprefix("step-")
    elif path.is_dir():
        run = path
        version = ""
    else:
        run = Path(name.rpartition("@")[0])
        version = name.rpartition("@")[2]
        if "@" not in name or not run.is_dir():
            if is_bare_name(name) or name.startswith(HUB):
                return name, None
            raise InputError(f"{name} is no model: give a folder, a run, RUN@VERSION, or a name on the Hub")
    saved = saved_model(run, version)
    return str(saved.folder.resolve()), saved
