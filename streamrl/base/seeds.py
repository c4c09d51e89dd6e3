"""Seeds that are derived from the identity of a draw, so that it does not depend on the process or the time of the
draw. The controller, trainer ranks and environment workers use them."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*identity: int | str) -> int:
    """Derive a 63-bit seed: the hash of ``identity``, such as (run seed, prompt id, seed base, sample)."""
    text = "\x1f".join(str(part) for part in identity)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
