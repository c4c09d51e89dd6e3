"""The tasks of ``streamrl init``, and the conversion of the user's rows to a task. Called by ``command`` in the
command's own process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec

from streamrl.base.errors import RecipeError
from streamrl.cli.init.folders import write_rows

GYM = "reasoning-gym"
TRAIN = "train.jsonl"
HELD_OUT = "held_out.jsonl"
WARM_UP = "warm_up.jsonl"
QUESTION = "A request: {completion}\\nIs it polite? Reply yes or no."
"""Question for the judge, escaped as in a string of TOML or Python."""
_LEAST_ROWS = 8
_MOST_HELD_OUT = 64
"""``_LEAST_ROWS`` rows are required; one in eight is held out, at most ``_MOST_HELD_OUT``."""
_IMITATED = ("completion", "solution", "answer")
"""Columns for a small model to imitate; the first one that is text is used."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """``title``: a line for the user. ``columns``: columns that the reward needs. ``until``: share of right completions
    at which the warm-up of a small model ends, so that there is still something to learn (0: no such share, as
    right completions differ). ``templates``: further directories of templates."""

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
    """Return the key in ``TASKS``, and the task of reasoning-gym with its options (empty for other kinds). Raises
    ``RecipeError`` with the list."""
    kind, colon, gym_task = name.partition(":")
    if kind not in TASKS or (colon and not (gym_task and kind == GYM)):
        raise RecipeError(f'--task "{name}" is none of {", ".join(TASKS)}, {GYM}:NAME: correct it')
    if kind == GYM:
        return kind, gym_task or _EASY
    return kind, ""


def write_corpus(path: Path, folder: Path, task: Task, *, imitated: bool) -> None:
    """Write the user's rows: JSON objects, one a line, with ``prompt`` and the columns of ``task``; or a text, each
    line of which begins as a prompt and goes on as its answer. ``imitated``: a small model needs a right completion in
    each row. Raises ``RecipeError`` naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--corpus {path} cannot be read ({error}): name JSON objects, one a line, or text") from None
    numbered = [(f"--corpus {path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    objects = bool(numbered) and numbered[0][1].lstrip().startswith("{")
    all_rows = [_row_of_object(place, line, task) if objects else _row_of_text(line) for place, line in numbered]
    for (place, _), row in zip(numbered, all_rows, strict=True):
        if imitated and not _imitated_text(row):
            raise RecipeError(f'{place} has no text "completion" or "answer" for a small model to imitate: add one')
    rows = list({row["prompt"]: row for row in all_rows}.values())
    if len(rows) < _LEAST_ROWS:
        raise RecipeError(f"--corpus {path} has {len(rows)} distinct prompts: give {_LEAST_ROWS} or more")
    random.Random(0).shuffle(rows)
    count = min(_MOST_HELD_OUT, len(rows) // _LEAST_ROWS)
    write_rows(folder / HELD_OUT, rows[:count])
    write_rows(folder / TRAIN, rows[count:])
    write_rows(folder / WARM_UP, ({"prompt": row["prompt"], "completion": _imitated_text(row)} for row in rows))


def _imitated_text(row: dict[str, Any]) -> str:
    return next((row[name] for name in _IMITATED if isinstance(row.get(name), str)), "")


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
