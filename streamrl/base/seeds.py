"""Seeds derived from identity, so that what is drawn does not depend on when or where it is drawn."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*identity: int | str) -> int:
    """A 63-bit seed: the hash of (run seed, prompt, sample, attempt, policy version, segment) or any other identity."""
    text = "\x1f".join(str(part) for part in identity)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
