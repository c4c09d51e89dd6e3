"""The task: a sum of two numbers, in words that a chat model knows: ``What is 12 + 7? Reply with the number only.``

``python sums_task.py`` writes the prompt files: of all 171 sums of 1 to 19 and 1 to 9, 40 are held out."""

from __future__ import annotations

import json
import random
from pathlib import Path

HELD_OUT = 40
SEED = 0


def pairs() -> list[tuple[int, int]]:
    """All pairs of numbers, in an order that depends on ``SEED``; the first ``HELD_OUT`` are not trained on."""
    every = [(one, other) for one in range(1, 20) for other in range(1, 10)]
    random.Random(SEED).shuffle(every)
    return every


def write_prompts(path: Path, numbers: list[tuple[int, int]]) -> None:
    """One JSON object a line: the prompt, and the column that the reward needs."""
    rows = (
        {"prompt": f"What is {one} + {other}? Reply with the number only.", "answer": str(one + other)}
        for one, other in numbers
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write ``train.jsonl`` and ``held_out.jsonl`` beside this file."""
    folder = Path(__file__).parent
    write_prompts(folder / "held_out.jsonl", pairs()[:HELD_OUT])
    write_prompts(folder / "train.jsonl", pairs()[HELD_OUT:])


if __name__ == "__main__":
    main()
