"""Announcements and bits of versions of weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from streamrl.base.messages import HASH_MODULUS, WeightAnnouncement
from streamrl.weights.codec.codec import WeightPatch
from streamrl.weights.codec.state_hash import hash_range
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.pull.replica import FetchedVersion, ShardPatch, TensorSpec

Bits = dict[str, np.ndarray]


async def anchor(policy_version: int) -> WeightAnnouncement:
    """The announcement of complete weights, as a trainer answers a request for an anchor."""
    return WeightAnnouncement(policy_version=policy_version, base_version=None, state_hash=policy_version, sources=())


def changed(bits: Mapping[str, np.ndarray], seed: int, density: float = 0.01) -> Bits:
    """A copy of ``bits`` in which a share ``density`` of the elements moved by one unit in the last place."""
    random = np.random.default_rng(seed)
    return {name: b ^ (random.random(b.size) < density).astype(b.dtype) for name, b in bits.items()}


def fetched(specs: Mapping[str, TensorSpec], version: int, old: Bits | None, new: Bits) -> FetchedVersion:
    """Version ``version`` with the bits ``new`` of tensors ``specs``, as a receiver of ``old`` has decoded it (None: it
    gets all elements)."""
    patches = []
    for name, spec in specs.items():
        positions = None if old is None else np.flatnonzero(old[name] != new[name])
        values = new[name] if positions is None else new[name][positions]
        shard = ShardSpec(name, spec.dtype, spec.shape, 0, spec.elements)
        patches.append(ShardPatch(shard, WeightPatch(positions, values)))
    base = None if old is None else version - 1
    announcement = WeightAnnouncement(policy_version=version, base_version=base, state_hash=state_hash(new), sources=())
    return FetchedVersion(announcement, base, 0 if old is None else state_hash(old), patches, 0)


def state_hash(bits: Mapping[str, np.ndarray]) -> int:
    """The hash of a version with these bits."""
    return sum(hash_range(name, 0, b) for name, b in bits.items()) % HASH_MODULUS
