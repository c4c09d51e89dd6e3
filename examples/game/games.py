"""The games: ``python games.py`` writes the prompt files. No game that is trained on is held out."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

HELD_OUT_SEED, HELD_OUT_GAMES = 512, 512
TRAINING_SEED, TRAINING_GAMES = 1, 4096

Row = dict[str, int]


def random_games(seed: int, *, excluded: Collection[tuple[int, ...]] = ()) -> Iterator[Row]:
    """Endless random games of 21 to 31 numbers below 40; equal for equal seeds."""
    rng = random.Random(seed)
    while True:
        low = rng.randint(1, 9)
        high = low + rng.randint(20, 30)
        row = {"low": low, "high": high, "secret": rng.randint(low, high)}
        if tuple(row.values()) not in excluded:
            yield row


def held_out_games() -> list[Row]:
    """The distinct games that are never trained on."""
    distinct = {tuple(row.values()): row for row in islice(random_games(HELD_OUT_SEED), 2 * HELD_OUT_GAMES)}
    return list(distinct.values())[:HELD_OUT_GAMES]


def main() -> None:
    """Write ``train.jsonl`` and ``held_out.jsonl`` beside this file."""
    held_out = held_out_games()
    excluded = frozenset(tuple(row.values()) for row in held_out)
    training = islice(random_games(TRAINING_SEED, excluded=excluded), TRAINING_GAMES)
    for name, rows in {"train": training, "held_out": iter(held_out)}.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        Path(__file__).with_name(f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
