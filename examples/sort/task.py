"""The task: sort a list of digits by adjacent swaps, writing the whole list after every swap.

``60487:`` asks for ``06487;04687;04678.``: each step swaps the first pair that is out of order, and a full stop ends
the trace. A list of ``n`` digits needs up to ``n (n - 1) / 2`` swaps, so completions have a long tail: half of the
right ones take less than 45 tokens, one in a hundred more than 230.

``python task.py`` writes the prompt files. No training prompt is a held-out prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

SHORTEST, LONGEST = 3, 9
"""Digits in a list."""

HELD_OUT_SEED, HELD_OUT_PROMPTS = 2048, 2048
TRAINING_SEED, TRAINING_PROMPTS = 1, 8192


def random_lists(seed: int, *, excluded: Collection[str] = ()) -> Iterator[str]:
    """Endless random lists of digits, as strings such as ``"60487"``; equal for equal seeds."""
    rng = random.Random(seed)
    while True:
        digits = "".join(rng.choices("0123456789", k=rng.randint(SHORTEST, LONGEST)))
        if digits not in excluded:
            yield digits


def sorting_trace(digits: str) -> str:
    """The completion that a perfect policy writes after ``digits + ":"``."""
    line, lines = list(digits), []
    while descents := [i for i in range(len(line) - 1) if line[i] > line[i + 1]]:
        i = descents[0]
        line[i], line[i + 1] = line[i + 1], line[i]
        lines.append("".join(line))
    return ";".join(lines) + "."


def held_out_lists() -> list[str]:
    """The distinct lists that are never trained on."""
    distinct = dict.fromkeys(islice(random_lists(HELD_OUT_SEED), 2 * HELD_OUT_PROMPTS))
    return list(distinct)[:HELD_OUT_PROMPTS]


def write_prompts(path: Path, lists: Iterator[str] | list[str]) -> None:
    """One JSON object a line: the prompt, and the column that the reward needs."""
    rows = ({"prompt": f"{digits}:", "answer": "".join(sorted(digits))} for digits in lists)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Write ``train.jsonl`` and ``held_out.jsonl`` beside this file."""
    folder = Path(__file__).parent
    held_out = held_out_lists()
    write_prompts(folder / "held_out.jsonl", held_out)
    training = random_lists(TRAINING_SEED, excluded=frozenset(held_out))
    write_prompts(folder / "train.jsonl", islice(training, TRAINING_PROMPTS))


if __name__ == "__main__":
    main()
