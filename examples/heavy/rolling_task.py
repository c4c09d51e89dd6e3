"""The task: roll digits until there were enough low ones in a row, stop exactly there, and say which row it was.

``3b:418`` asks for two rolls in a row below 3 (``b``: the second letter); 418 is the number of the game and only tells
prompts apart. A low roll is followed by a letter that counts the row. ``741a51a0b=3b.`` is right: 7, 4, the low roll 1,
5, the low rolls 1 and 0; that makes two, so ``=`` and the row follow.

How long that takes hangs on the prompt (from a handful of rolls to a thousand, on average) and on luck, so that lengths
have a heavy tail between prompts and within a prompt. What can go wrong is a wrong letter, the wrong moment to stop, or
the wrong row at the end; the last hangs on no length at all, and a policy that learns it goes on writing completions of
the same lengths.

``python rolling_task.py`` writes the prompt files. No training prompt is a held-out prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

DIGITS = "0123456789"
LETTERS = "abcd"
COMMON = ("2b", "3b", "4b", "3c", "4c", "5c", "4d", "5d")
"""Rows that come up after 6 to 65 rolls, on average."""

RARE, RARE_SHARE = ("2d", "1c"), 0.08
"""Rows that come up after 780 and 1,110 rolls, on average, and the share of prompts that ask for one."""

NUMBER_DIGITS = 3
HELD_OUT_SEED, HELD_OUT_PROMPTS = 1024, 1024
TRAINING_SEED, TRAINING_PROMPTS = 1, 4096


def random_prompts(seed: int, *, excluded: Collection[str] = ()) -> Iterator[str]:
    """Endless random prompts such as ``"3b:418"``; equal for equal seeds."""
    rng = random.Random(seed)
    while True:
        row = rng.choice(RARE if rng.random() < RARE_SHARE else COMMON)
        prompt = f"{row}:{''.join(rng.choices(DIGITS, k=NUMBER_DIGITS))}"
        if prompt not in excluded:
            yield prompt


def lettered(row: str, rolls: Iterable[str]) -> str:
    """``rolls`` with the letters that they get, up to the one that completes ``row`` (``"3b"``) or to the last roll."""
    low, last_letter = row[0], row[1]
    text, in_a_row = [], 0
    for roll in rolls:
        text.append(roll)
        in_a_row = in_a_row + 1 if roll < low else 0
        if in_a_row:
            text.append(LETTERS[in_a_row - 1])
        if text[-1] == last_letter:
            break
    return "".join(text)


def is_right(prompt: str, completion: str) -> bool:
    """Whether ``completion`` has the right letters, stops where the row is complete, and names it."""
    row = prompt.partition(":")[0]
    text, _, answer = completion.partition("=")
    rolls = [character for character in text if character in DIGITS]
    return text.endswith(row[1]) and text == lettered(row, rolls) and answer == f"{row}."


def held_out_prompts() -> list[str]:
    """The distinct prompts that are never trained on."""
    distinct = dict.fromkeys(islice(random_prompts(HELD_OUT_SEED), 2 * HELD_OUT_PROMPTS))
    return list(distinct)[:HELD_OUT_PROMPTS]


def write_prompts(path: Path, prompts: Iterator[str] | list[str]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


def main() -> None:
    """Write ``train.jsonl`` and ``held_out.jsonl`` beside this file."""
    folder = Path(__file__).parent
    held_out = held_out_prompts()
    write_prompts(folder / "held_out.jsonl", held_out)
    training = random_prompts(TRAINING_SEED, excluded=frozenset(held_out))
    write_prompts(folder / "train.jsonl", islice(training, TRAINING_PROMPTS))


if __name__ == "__main__":
    main()
