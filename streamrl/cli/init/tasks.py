"""The tasks of ``streamrl init``, and the conversion of the user's rows to a task. Called by ``command`` in the
command's own process."""

from __future__ import annotations

import random
import re
from contextlib import closing
from pathlib import Path, PurePath

from msgspec import Struct

from streamrl.base.errors import RecipeError
from streamrl.base.types import JsonObject, Texts
from streamrl.cli.init.folders import write_rows
from streamrl.run.prompts.data_files import FORMATS
from streamrl.run.prompts.json_rows import open_json
from streamrl.run.prompts.open_prompts import open_rows
from streamrl.run.prompts.prompt_rows import BadRow, to_form
from streamrl.run.prompts.prompt_spec import read_spec

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


class Task(Struct, frozen=True, kw_only=True):
    """``title``: a line for the user. ``columns``: columns that the reward needs. ``until``: share of right completions
    at which the warm-up of a small model ends, so that there is still something to learn (0: no such share, as
    right completions differ). ``templates``: further directories of templates."""

    title: str
    columns: Texts = ("answer",)
    until: float = 0.35
    templates: Texts = ("ended",)


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


def write_corpus(path: Path, folder: Path, task: Task, *, imitated: bool) -> str:
    """Write the user's rows: a file of rows that ``prompts.train`` reads, with ``prompt`` and the columns of ``task``;
    or a text, each line of which begins as a prompt and goes on as its answer. Returns what was read, for the user.
    ``imitated``: a small model needs a right completion in each row. Raises ``RecipeError`` naming the line."""
    kind, all_rows = _read_text(path) if _is_text(path) else _read_rows(path, task)
    for place, row in all_rows:
        if imitated and not _imitated_text(row):
            raise RecipeError(f'{place} has no text "completion" or "answer" for a small model to imitate: add one')
    rows = list({row["prompt"]: row for _, row in all_rows}.values())
    if len(rows) < _LEAST_ROWS:
        raise RecipeError(f"--corpus {path} has {len(rows)} distinct prompts: give {_LEAST_ROWS} or more")
    random.Random(0).shuffle(rows)
    count = min(_MOST_HELD_OUT, len(rows) // _LEAST_ROWS)
    write_rows(folder / HELD_OUT, rows[:count])
    write_rows(folder / TRAIN, rows[count:])
    write_rows(folder / WARM_UP, ({"prompt": row["prompt"], "completion": _imitated_text(row)} for row in rows))
    double = len(all_rows) - len(rows)
    return f"{len(all_rows)} {kind}: {len(rows) - count} to train, {count} held out, {double} double"


def _is_text(path: Path) -> bool:
    """Return whether a file is prose: it has no name of a file of rows, and does not begin as JSON."""
    if PurePath(path.name.partition("?")[0]).suffix in FORMATS or path.is_dir():
        return False
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"[")
    except OSError as error:
        reason = error.strerror
        raise RecipeError(f"--corpus {path} cannot be read ({reason}): name a file of rows, or a text") from None


def _read_rows(path: Path, task: Task) -> tuple[str, list[tuple[str, JsonObject]]]:
    """Return the format, and each row with its place. Raises ``RecipeError``."""
    source = PurePath(path.name.partition("?")[0]).suffix
    try:
        spec = read_spec(str(path)) if source in FORMATS or path.is_dir() else None
        with closing(open_rows(spec) if spec else open_json([path])) as store:
            rows = []
            for index in range(store.size):
                place = f"--corpus {path}, {store.place(index)}"
                row = store.row(index)
                if spec:
                    row = to_form(row, spec.form)
                if not isinstance(row.get("prompt"), str):
                    raise BadRow('has no text "prompt": write {"prompt": "...", "answer": "..."}')
                for column in task.columns:
                    if row.get(column) is None:
                        raise BadRow(f'has no column "{column}", which the reward needs: add it')
                rows.append((place, row))
    except BadRow as error:
        raise RecipeError(f"{place} {error}") from None
    except RecipeError as error:
        raise RecipeError(*(f"--corpus: {problem}" for problem in error.problems)) from None
    return f"rows of {FORMATS.get(source, 'JSON')}", rows


def _read_text(path: Path) -> tuple[str, list[tuple[str, JsonObject]]]:
    """Return the kind of text, and the row of each line with its place. Raises ``RecipeError``."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise RecipeError(f"--corpus {path} is no text in UTF-8 ({error}): save it as UTF-8") from None
    if "prompt" in re.split(r"[,;\t]", lines[0].strip()):
        raise RecipeError(f"--corpus {path}:1 names columns ({lines[0].strip():.80}): rename the file to .csv or .tsv")
    numbered = enumerate(lines, 1)
    return "lines of text", [(f"--corpus {path}:{n}", _row_of_text(line)) for n, line in numbered if line.strip()]


def _imitated_text(row: JsonObject) -> str:
    return next((row[name] for name in _IMITATED if isinstance(row.get(name), str)), "")


def _row_of_text(line: str) -> JsonObject:
    words = line.split()
    third = max(1, len(words) // 3)
    return {"prompt": " ".join(words[:third]) + " ", "answer": " ".join(words[third:])}
