"""One mistake: a change of a folder that trains, a command line, and the words that the refusal must have."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from campaigns.front_door.folders import DEMO_MODEL
from streamrl.cli.main import main

DRY_RUN = "train recipe.toml --dry-run"
SORT = DEMO_MODEL.parent
RECIPE = """\
[run]
name = "first"
steps = 2

[model]
path = "model"

[prompts]
train = "train.jsonl"

[[rewards]]
function = "reward.py:sorted_trace"

[rollout]
prompts_per_batch = 4
group_size = 4

[sampling]
max_tokens = 64

[training]
learning_rate = 2e-4

[engines]
max_model_len = 128

[evaluation]
prompts = "held_out.jsonl"
"""

SENTENCE = re.compile(
    r"error: 1 problem; [a-z ]+\n  (.+)|error: (?!\d+ problem)(.+)"
    r"|usage: streamrl.*\n(?: .*\n)*streamrl[a-z -]*: error: (.+)"
)
"""What stderr has of a refusal: a head and one problem, one line, or the usage of the command and one line."""

Change = Callable[[Path], object]


@dataclass(frozen=True)
class Mistake:
    """``change``: what is wrong in the folder. ``said``: words of the refusal in their order: place, value, remedy.
    ``command``: words of the command line, behind ``streamrl``."""

    change: Change
    said: tuple[str, ...]
    command: str = DRY_RUN


def recipe(old: str, new: str, *said: str, command: str = DRY_RUN) -> Mistake:
    """A mistake in the recipe: ``new`` stands in the place of ``old``, or at the end where ``old`` is empty."""
    return Mistake(edited("recipe.toml", old, new), said, command)


def overridden(words: str, *said: str) -> Mistake:
    """A mistake in an override, on the command line of a recipe that is right."""
    return Mistake(nothing, said, f"{DRY_RUN} {words}")


def command(words: str, *said: str, change: Change | None = None) -> Mistake:
    """A mistake in the words of a command line."""
    return Mistake(change or nothing, said, words)


def nothing(folder: Path) -> None:
    """The folder is right."""


def edited(name: str, old: str, new: str) -> Change:
    """A file with ``new`` in the place of ``old``; at its end where ``old`` is empty."""

    def change(folder: Path) -> None:
        file = folder / name
        text = file.read_text()
        if old not in text:
            raise ValueError(f"{name} has no {old!r}")
        file.write_text(text.replace(old, new, 1) if old else text + new)

    return change


def written(name: str, content: str | bytes) -> Change:
    """A file of this content."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def removed(name: str) -> Change:
    """A folder without this file."""
    return lambda folder: (folder / name).unlink()


def each(*changes: Change) -> Change:
    """Several changes, one after the other."""

    def change(folder: Path) -> None:
        for one in changes:
            one(folder)

    return change


def make_folder(folder: Path) -> Path:
    """A folder that trains."""
    shutil.copytree(DEMO_MODEL, folder / "model")
    for name in ("reward.py", "task.py"):
        shutil.copy(SORT / name, folder)
    for name, rows in {"train.jsonl": 64, "held_out.jsonl": 16}.items():
        lines = (SORT / name).read_text().splitlines(keepends=True)
        different = {line.partition('"answer"')[0]: line for line in lines[: 2 * rows]}
        (folder / name).write_text("".join(list(different.values())[:rows]))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


def refusal(folder: Path, words: Sequence[str]) -> tuple[int, str]:
    """Exit code and stderr of a command, run in this process and in ``folder``."""
    with _working_directory(folder), tempfile.TemporaryFile("w+") as stderr, _stderr_in(stderr):
        try:
            exit_code = main(words)
        except SystemExit as ended:
            exit_code = int(ended.code or 0)
        stderr.seek(0)
        return exit_code, stderr.read()


@contextlib.contextmanager
def _stderr_in(file: IO[str]) -> Iterator[None]:
    """Let this process and its children write stderr into ``file``, and no stdout."""
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(file):
            yield
    finally:
        os.dup2(before, 2)
        os.close(before)


@contextlib.contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def problem_of(mistake: Mistake, folder: Path) -> str:
    """What is wrong in the answer to a mistake, in one line; '' where nothing is."""
    mistake.change(make_folder(folder))
    before = psutil.Process().children(recursive=True)
    exit_code, said = refusal(folder, shlex.split(mistake.command))
    children = [child.cmdline() for child in psutil.Process().children(recursive=True) if child not in before]
    if children or (folder / "runs").exists():
        return f"something was started: {children}"
    return wrong_in(exit_code, said, mistake.said)


def wrong_in(exit_code: int, said: str, expected: Sequence[str]) -> str:
    """What is wrong in an exit code and a text on stderr, in one line; '' where nothing is."""
    if exit_code != 2 or "Traceback" in said:
        return f"exit code {exit_code}: {said}"
    match = SENTENCE.fullmatch(said.rstrip())
    if match is None:
        return f"not one sentence: {said}"
    (sentence,) = filter(None, match.groups())
    place = 0
    for words in expected:
        found = sentence.find(words, place)
        if found < 0:
            return f"no {words!r} behind the first {place} characters of {sentence!r}"
        place = found + len(words)
    return ""
