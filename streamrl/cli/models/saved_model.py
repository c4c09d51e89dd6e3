"""Models by the names that people give them: a folder, a checkpoint, a run, a version of a run."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.base.errors import StreamRLError
from streamrl.learning.state.durable_files import surviving
from streamrl.recipe.rules.hub_names import HUB, is_bare_name
from streamrl.run.checkpoints import LATEST, SCORES, read_scores

BEST = "best"
"""Of the versions of a run, the one with the highest held-out score."""


class SavedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model of ``version`` of the run in the directory ``run``, in ``checkpoint``."""

    run: Path
    version: int
    checkpoint: Path

    @property
    def folder(self) -> Path:
        """The folder in Hugging Face format: with LoRA the merged model."""
        return self.checkpoint / "hf"


def saved_model(run: Path, version: str = "") -> SavedModel:
    """The model of ``version`` of a run: a number, ``latest`` (also where it is empty), or ``best``. Raises
    ``StreamRLError`` that names the versions that there are."""
    if not (run / "recipe.toml").is_file():
        raise StreamRLError(f"{run} is not the directory of a run: give one, such as runs/latest")
    checkpoints = run / "checkpoints"
    there = {int(path.parent.name[5:]): path.parent for path in sorted(checkpoints.glob("step-*/hf"))}
    known = f"it has versions {', '.join(map(str, there))}" if there else "it has no checkpoint yet"
    number: int | None = int(version) if version.isdecimal() else None
    if version == BEST:
        scores = {number: score for number, score in read_scores(checkpoints / SCORES).items() if number in there}
        number = max(scores, key=lambda one: (scores[one], one), default=None)
    elif version in ("", LATEST) and there:
        latest = surviving(checkpoints / LATEST)
        number = next((one for one, path in there.items() if path.resolve() == latest), max(there))
    if number not in there:
        kept = "; the best is kept where checkpoint.keep_best is 1 or more" if version == BEST and there else ""
        raise StreamRLError(
            f"{run} has no checkpoint of version {version or LATEST!r} (a number, latest, best): {known}{kept}"
        )
    return SavedModel(run=run, version=number, checkpoint=there[number])


def find_model(name: str) -> tuple[str, SavedModel | None]:
    """The folder of the model that ``name`` means, and where it is a run's also which: a folder in Hugging Face format,
    a checkpoint, a run (its latest version), or ``RUN@VERSION``; a name on the Hub as it is. Raises
    ``StreamRLError``."""
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
            raise StreamRLError(f"{name} is no model: give a folder, a run, RUN@VERSION, or a name on the Hub")
    made = saved_model(run, version)
    return str(made.folder.resolve()), made
