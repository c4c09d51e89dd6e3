"""The task: a sum of two numbers, in words that a chat model knows: ``What is 12 + 7? Reply with the number only.``

``python sums_task.py`` writes the files of rows: of all 171 sums of 1 to 19 and 1 to 9, 40 are held out. The first
``FORMAT`` of the others have a completion, too, in a format that the model does not know."""

from __future__ import annotations

import json
import random
from pathlib import Path

HELD_OUT = 40
FORMAT = 32
SEED = 0


def pairs() -> list[tuple[int, int]]:
    """All pairs of numbers, in an order that depends on ``SEED``; the first ``HELD_OUT`` are not trained on."""
    every = [(one, other) for one in range(1, 20) for other in range(1, 10)]
    random.Random(SEED).shuffle(every)
    return every


def row_of(one: int, other: int) -> dict[str, str]:
    """The prompt, and the column that the reward needs."""
    return {"prompt": f"What is {one} + {other}? Reply with the number only.", "answer": str(one + other)}


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write ``train.jsonl``, ``held_out.jsonl`` and ``format.jsonl`` beside this file."""
    folder = Path(__file__).parent
    rows = [row_of(one, other) for one, other in pairs()]
    trained = rows[HELD_OUT:]
    write_rows(folder / "held_out.jsonl", rows[:HELD_OUT])
    write_rows(folder / "train.jsonl", trained)
    write_rows(folder / "format.jsonl", [{**row, "completion": f"[[{row['answer']}]]"} for row in trained[:FORMAT]])


if __name__ == "__main__":
    main()
