"""A reward in which hardly two completions are alike: every group has a signal, also of a policy that fails."""

from __future__ import annotations

from zlib import crc32


async def reward_of_text(completion: str, **_columns: object) -> float:
    """In [0, 1), of the text alone."""
    return crc32(completion.encode()) / 2**32
