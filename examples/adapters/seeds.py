"""The rows of both games: seeds, which say what is drawn. No seed that is trained on is held out."""

from __future__ import annotations

from collections.abc import Iterator


def train() -> Iterator[dict[str, int]]:
    """Rows to train on."""
    return ({"seed": seed} for seed in range(4096))


def held_out() -> Iterator[dict[str, int]]:
    """256 rows to measure with."""
    return ({"seed": seed} for seed in range(100_000, 100_256))
