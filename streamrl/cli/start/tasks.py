"""The tasks of ``streamrl init``, and rows of the user's in the form of a task."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.cli.start.folders import write_rows

GYM = "reasoning-gym"
TRAIN = "train.jsonl"
HELD_OUT = "held_out.jsonl"
WARM_UP = "warm_up.jsonl"
QUESTION = "A request: {completion}\\nIs it polite? Reply yes or no."
"""For the judge, as a string of TOML and Python has it."""
_LEAST_ROWS = 8
_MOST_HELD_OUT = 64
"""Rows that are needed, of which one in eight is held out."""
_SHOWN = ("completion", "solution", "answer")
"""Columns that may say what a small model imitates; the first that is text."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """``title``: one line. ``columns``: those that the reward needs. ``until``: the share of right completions at which
    the warm-up of a small model ends, so that something is left to learn (0: right ones differ). ``templates``: further
    directories of templates."""

    title: str
    columns: tuple[str, ...] = ("answer",)
    until: float = 0.35
    templates: tuple[str, ...] = ("ended",)


TASKS = {
    "own": Task(title="your own: a reward in Python, and rows with a prompt and an answer", templates=()),
    "math": Task(title="answers that are numbers or expressions, compared as mathematics"),
    "choice": Task(title="multiple choice: the answer is a letter", until=0.55, templates=()),
    "code": Task(title="programs that pass tests, in a sandbox", columns=("tests",)),
    "judge": Task(title="a language model judges", columns=(), until=0.0, templates=()),
    GYM: Task(title=f"a task of reasoning-gym, with its verifier ({GYM}:NAME?KEY=VALUE; sums where none is named)"),
}
_EASY = "chain_sum?max_terms=2&max_digits=1"


def find_task(name: str) -> tuple[str, str]:
    """The key in ``TASKS``, and the task of reasoning-gym with its options. Raises ``RecipeError`` with the list."""
    kind, colon, of_gym = name.partition(":")
    if kind not in TASKS or (colon and not (of_gym and kind == GYM)):
        raise RecipeError(f'--task "{name}" is none of {", ".join(TASKS)}, {GYM}:NAME: correct it')
    return kind, (of_gym or _EASY) if kind == GYM else ""


def write_corpus(path: Path, folder: Path, task: Task, *, imitated: bool) -> None:
    """Write rows of the user's: JSON objects, one a line, with ``prompt`` and the columns of ``task``; or a text, of
    which each line begins as a prompt and goes on as its answer. ``imitated``: a small model needs to see each right
    completion. Raises ``RecipeError`` naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--corpus {path} cannot be read ({error}): name JSON objects, one a line, or text") from None
    numbered = [(f"--corpus {path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    objects = bool(numbered) and numbered[0][1].lstrip().startswith("{")
    every = [_row_of_object(place, line, task) if objects else _row_of_text(line) for place, line in numbered]
    for (place, _), row in zip(numbered, every, strict=True):
        if imitated and not _shown(row):
            raise RecipeError(f'{place} has no text "completion" or "answer" for a small model to imitate: add one')
    rows = list({row["prompt"]: row for row in every}.values())
    if len(rows) < _LEAST_ROWS:
        raise RecipeError(f"--corpus {path} has {len(rows)} distinct prompts: give {_LEAST_ROWS} or more")
    random.Random(0).shuffle(rows)
    count = min(_MOST_HELD_OUT, len(rows) // _LEAST_ROWS)
    write_rows(folder / HELD_OUT, rows[:count])
    write_rows(folder / TRAIN, rows[count:])
    write_rows(folder / WARM_UP, ({"prompt": row["prompt"], "completion": _shown(row)} for row in rows))


def _shown(row: dict[str, Any]) -> str:
    return next((row[name] for name in _SHOWN if isinstance(row.get(name), str)), "")


def _row_of_object(place: str, line: str, task: Task) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RecipeError(f"{place} is no JSON ({error}): correct it") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise RecipeError(f'{place} has no text "prompt": write {{"prompt": "...", "answer": "..."}}')
    for column in task.columns:
        if column not in row:
            raise RecipeError(f'{place} has no column "{column}", which the reward needs: add it')
    return row


def _row_of_text(line: str) -> dict[str, Any]:
    words = line.split()
    third = max(1, len(words) // 3)
    return {"prompt": " ".join(words[:third]) + " ", "answer": " ".join(words[third:])}
