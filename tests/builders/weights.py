"""Announcements and bits of versions of weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement
from streamrl.weights.codec.state_hash import hash_range

Bits = dict[str, np.ndarray]


async def anchor(policy_version: int) -> WeightAnnouncement:
    """The announcement of complete weights, as a trainer answers a request for an anchor."""
    return WeightAnnouncement(policy_version=policy_version, base_version=None, state_hash=policy_version, sources=())


def changed(bits: Mapping[str, np.ndarray], seed: int, density: float = 0.01) -> Bits:
    """A copy of ``bits`` in which a share ``density`` of the elements moved by one unit in the last place."""
    random = np.random.default_rng(seed)
    return {name: b ^ (random.random(b.size) < density).astype(b.dtype) for name, b in bits.items()}


def state_hash(bits: Mapping[str, np.ndarray]) -> int:
    """The hash of a version with these bits."""
    return sum(hash_range(name, 0, b) for name, b in bits.items()) % HASH_MODULUS
