"""Runs a user's script of TRL with trainers that record their arguments in place of TRL's, and makes a recipe of them.
``streamrl init --from SCRIPT`` calls ``translate_script``; ``main`` runs in a child process, in a folder of its own."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec import Struct, json

from streamrl.base.errors import RecipeError
from streamrl.base.run_process import PARENT_PID, die_with_parent, end_session, start_session
from streamrl.cli.dialects import trl_trainers
from streamrl.cli.dialects.translation import Translation, translated
from streamrl.cli.dialects.trl_objects import foreign_of_trainer
from streamrl.recipe.user_code import describe_error

TIME_LIMIT_S = 600.0


class _Answer(Struct):
    """Result of the child process: a translation, or problems."""

    translation: Translation | None = None
    problems: list[str] = []


class _TrainIsCalled(BaseException):
    """Ends a script at ``train()``."""

    def __init__(self, translation: Translation) -> None:
        super().__init__()
        self.translation = translation


def translate_script(script: Path, words: Sequence[str], folder: Path) -> Translation:
    """Run ``script`` with the arguments ``words`` until it calls ``train()``, and translate the objects that it gave
    to the trainer. Its output goes to stderr. Files of rows and rewards are written to ``folder``.

    Raises ``RecipeError`` for a script that fails, makes no trainer, or takes longer than ``TIME_LIMIT_S``."""
    with tempfile.TemporaryDirectory(prefix="streamrl-script-") as directory:
        for entry in Path.cwd().iterdir():  # what it reads is there, and what it writes stays in the folder
            (Path(directory) / entry.name).symlink_to(entry)
        print(
            f"{script} is run as it is, in {directory} with links to the files of this directory, for at most "
            f"{TIME_LIMIT_S:.0f} s: its trainers record their arguments and train nothing",
            file=sys.stderr,
        )
        with tempfile.NamedTemporaryFile() as answer:
            arguments = [str(script.absolute()), str(folder.absolute()), answer.name, *words]
            child = start_session(
                [sys.executable, "-P", "-m", __name__, *arguments],
                cwd=directory,
                env={**os.environ, PARENT_PID: str(os.getpid())},
                stdout=sys.stderr,
            )
            if not end_session(child, TIME_LIMIT_S):
                raise RecipeError(
                    f"{script} did not call train() within {TIME_LIMIT_S:.0f} s: let it load less, such as its datasets"
                )
            content = answer.read()
    if not content:
        raise RecipeError(
            f"{script} ended with exit code {child.returncode} before its trainer had a recipe: see its output above"
        )
    decoded = json.decode(content, type=_Answer)
    if decoded.translation is None:
        raise RecipeError(*decoded.problems)
    return decoded.translation


class _Script:
    """The trainers that a script makes, and the recipe of the one that it trains."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._made: list[tuple[str, Mapping[str, Any]]] = []

    def recipe(self, words: Sequence[str]) -> Translation:
        """Run the script with the arguments ``words`` until ``train()``. Raises ``RecipeError``."""
        name = self._path.name
        sys.argv = [str(self._path), *words]
        sys.path.insert(0, str(self._path.parent))
        sys.modules["unsloth"] = None  # type: ignore[assignment] # its import fails
        try:
            self._replace_trainers()
            runpy.run_path(str(self._path), run_name="__main__")
        except _TrainIsCalled as call:
            return call.translation
        except (RecipeError, SystemExit) as error:
            if isinstance(error, RecipeError):
                raise
        except BaseException as error:  # the user's script may raise anything
            remedy = "mend it, or install it"
            if getattr(error, "name", "") == "unsloth":
                remedy = trl_trainers.WITHOUT_UNSLOTH
            raise RecipeError(f"{name} ended with {describe_error(error)}: {remedy}") from error
        if len(self._made) != 1:
            raise RecipeError(f"{name} never called train(), and made {len(self._made)} trainers: let it make one")
        return self._translated(*self._made[0])

    def _translated(self, method: str, objects: Mapping[str, Any]) -> Translation:
        return translated(foreign_of_trainer(method, self._path.name, objects, self._write))

    def _write(self, name: str, ending: str, content: bytes) -> str:
        (self._folder / f"{name}{ending}").write_bytes(content)
        return f"{name}{ending}"

    def _replace_trainers(self) -> None:
        """Put recording trainers in place of TRL's, and a refusal in place of its other trainers."""
        import transformers.training_args
        import trl
        import trl.trainer

        import streamrl.trl

        # A script for a GPU is recorded on any host: nothing trains.
        transformers.training_args.is_torch_bf16_gpu_available = lambda: True
        for name in [name for name in dir(trl) if name.endswith("Trainer")]:
            trainer = self._trainer(name)
            submodule = ModuleType(f"trl.trainer.{name.removesuffix('Trainer').lower()}_trainer")
            sys.modules[submodule.__name__] = submodule
            for module in (trl, trl.trainer, submodule, streamrl.trl):
                setattr(module, name, trainer)

    def _trainer(self, name: str) -> type:
        script = self
        base = getattr(trl_trainers, name, trl_trainers.GRPOTrainer)

        class RecordingTrainer(base):  # type: ignore[valid-type, misc]
            __module__ = base.__module__  # not a class of the script

            def _take(self, objects: Mapping[str, Any]) -> None:
                if not hasattr(trl_trainers, name):
                    raise RecipeError(f"{script._path.name} makes a {name}: {trl_trainers.ONLY_BY_REWARDS}")
                self.arguments = (self.method, objects)
                script._made.append(self.arguments)

            def train(self, resume_from_checkpoint: Any = None) -> Path:
                raise _TrainIsCalled(script._translated(*self.arguments))

        return RecordingTrainer


def main(arguments: Sequence[str]) -> None:
    """Run a script: its path, the folder for files, the file for the answer, and the script's own arguments."""
    die_with_parent()
    script, folder, answer, *words = arguments
    try:
        result = _Answer(translation=_Script(Path(script), Path(folder)).recipe(words))
    except RecipeError as error:
        result = _Answer(problems=error.problems)
    Path(answer).write_bytes(json.encode(result, enc_hook=str))
    sys.stdout.flush()
    os._exit(0)  # threads of the script do not hold up the command


if __name__ == "__main__":
    main(sys.argv[1:])
