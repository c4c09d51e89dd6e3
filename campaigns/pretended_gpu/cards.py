"""Cards by name, memory and compute capability, as the variable FAKE_GPUS has them."""

from __future__ import annotations

from typing import NamedTuple

VARIABLE = "FAKE_GPUS"
GIB = 1 << 30


class Card(NamedTuple):
    """``gib``: memory that the driver reports, which is less than on the box."""

    name: str
    gib: float
    capability: tuple[int, int]

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self.gib * GIB)

    def __str__(self) -> str:
        return f"{self.name}:{self.gib}:{self.capability[0]}.{self.capability[1]}"


KNOWN = {
    "T4": Card("Tesla T4", 14.6, (7, 5)),
    "A100-40": Card("NVIDIA A100-SXM4-40GB", 39.4, (8, 0)),
    "A100-80": Card("NVIDIA A100-SXM4-80GB", 79.2, (8, 0)),
    "4090": Card("NVIDIA GeForce RTX 4090", 23.5, (8, 9)),
    "L4": Card("NVIDIA L4", 22.0, (8, 9)),
    "H100": Card("NVIDIA H100 80GB HBM3", 79.6, (9, 0)),
    "H200": Card("NVIDIA H200", 139.8, (9, 0)),
    "B200": Card("NVIDIA B200", 178.4, (10, 0)),
}


def cards_of(text: str) -> tuple[Card, ...]:
    """Read cards, separated by commas: a name of ``KNOWN``, or NAME:GiB:MAJOR.MINOR. Raises ``ValueError``."""
    return tuple(_card_of(one.strip()) for one in text.split(","))


def _card_of(text: str) -> Card:
    if text in KNOWN:
        return KNOWN[text]
    try:
        name, gib, capability = text.split(":")
        major, minor = capability.split(".")
        return Card(name, float(gib), (int(major), int(minor)))
    except ValueError:
        known = ", ".join(KNOWN)
        raise ValueError(
            f"{text!r} is no card: write one of {known}, or NAME:GiB:MAJOR.MINOR (NVIDIA H100:79.6:9.0)"
        ) from None
