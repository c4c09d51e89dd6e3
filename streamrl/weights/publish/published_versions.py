"""The versions that a rank may still be asked for, by work unit: the acknowledged one (the *shadow*), those published
since, and what the shadow held before.

The shadow is whole; everything else is only how it differs. One thread publishes and acknowledges; ``copy_at`` and
``part_hash`` may be called from any.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.base.errors import WeightError
from streamrl.weights.codec.bits import BitArray, PositionArray
from streamrl.weights.codec.codec import WeightPatch

MAXIMUM_EARLIER = 256  # versions before the acknowledged one, however little they changed
MAXIMUM_PENDING = 4  # versions published and not acknowledged; the oldest is dropped, a newer delta replaces it


class PendingVersion(msgspec.Struct, frozen=True, eq=False):
    """A published version that is not acknowledged: how it differs from the shadow, by work unit."""

    policy_version: int
    patches: Mapping[int, WeightPatch]
    part_hash: int


class _Overwritten(msgspec.Struct, frozen=True, eq=False):
    """What an advance of the shadow overwrote: uint32 positions within the work unit, and the bits there."""

    positions: npt.NDArray[np.uint32]
    old_bits: BitArray


class _EarlierVersion(msgspec.Struct, frozen=True, eq=False):
    """A version that was acknowledged once. ``overwritten``: what the next one changed of it, by work unit."""

    policy_version: int
    part_hash: int
    overwritten: Mapping[int, _Overwritten]
    size: int


class PublishedVersions:
    """``history_bytes``: how much may be kept of versions before the acknowledged one, about 6 bytes (bfloat16) for
    each element that a version changed; the oldest go first."""

    def __init__(self, units: int, history_bytes: int) -> None:
        self.shadow: list[BitArray] | None = None
        self.acknowledged: int | None = None
        self.acknowledged_hash = 0
        self.pending: dict[int, PendingVersion] = {}
        self._units = units
        self._lock = threading.Lock()
        self._earlier: deque[_EarlierVersion] = deque()
        self._history_bytes = history_bytes
        self._earlier_bytes = 0

    @property
    def newest(self) -> int | None:
        """The last version that was published."""
        return max(self.pending, default=self.acknowledged)

    def add(self, pending: PendingVersion) -> None:
        """A new version, newer than all others. Those that would be too many are forgotten."""
        with self._lock:
            self.pending[pending.policy_version] = pending
            while len(self.pending) > MAXIMUM_PENDING:
                del self.pending[min(self.pending)]

    def part_hash(self, policy_version: int) -> int:
        """The rank's part of the state hash of a version. Raises ``WeightError`` when it is not kept."""
        with self._lock:
            if policy_version in self.pending:
                return self.pending[policy_version].part_hash
            if policy_version == self.acknowledged:
                return self.acknowledged_hash
            return self._earlier_version(policy_version).part_hash

    def copy_at(self, unit: int, policy_version: int) -> BitArray:
        """A unit's bits at any version that is kept. Raises ``WeightError`` for others."""
        with self._lock:
            if policy_version in self.pending or policy_version == self.acknowledged:
                return self.bits_at(unit, policy_version).copy()
            assert self.shadow is not None
            self._earlier_version(policy_version)
            bits = self.shadow[unit].copy()
            for earlier in reversed(self._earlier):
                overwritten = earlier.overwritten.get(unit)
                if overwritten is not None:
                    bits[overwritten.positions] = overwritten.old_bits
                if earlier.policy_version == policy_version:
                    break
            return bits

    def bits_at(self, unit: int, policy_version: int) -> BitArray:
        """A unit's bits at the acknowledged or a pending version. Read only: they may be the shadow."""
        patch = None if policy_version == self.acknowledged else self.pending[policy_version].patches.get(unit)
        if patch is not None and patch.positions is None:
            return patch.values
        assert self.shadow is not None
        if patch is None:
            return self.shadow[unit]
        bits = self.shadow[unit].copy()
        bits[patch.positions] = patch.values
        return bits

    def acknowledge(self, policy_version: int) -> None:
        """The shadow advances to a pending version, in proportion to what changed. ``WeightError`` for others."""
        held = self.pending.get(policy_version)
        if held is None:
            raise WeightError(
                f"version {policy_version} was acknowledged; pending are {sorted(self.pending)}, "
                f"the shadow is at {self.acknowledged}"
            )
        with self._lock:
            newer = [pending for version, pending in sorted(self.pending.items()) if version > policy_version]
            self.pending = {pending.policy_version: self._rebased(pending, held) for pending in newer}
            if self.shadow is None:
                self.shadow = [held.patches[unit].values for unit in range(self._units)]
            else:
                self._overwrite(self.shadow, held)
            self.acknowledged, self.acknowledged_hash = policy_version, held.part_hash

    def _overwrite(self, shadow: list[BitArray], held: PendingVersion) -> None:
        assert self.acknowledged is not None
        overwritten, size = {}, 0
        for unit, patch in held.patches.items():
            assert patch.positions is not None
            old = shadow[unit][patch.positions]
            shadow[unit][patch.positions] = patch.values
            overwritten[unit] = _Overwritten(patch.positions.astype(np.uint32), old)
            size += old.nbytes + 4 * old.size
        self._earlier.append(_EarlierVersion(self.acknowledged, self.acknowledged_hash, overwritten, size))
        self._earlier_bytes += size
        while self._earlier_bytes > self._history_bytes or len(self._earlier) > MAXIMUM_EARLIER:
            self._earlier_bytes -= self._earlier.popleft().size

    def _earlier_version(self, policy_version: int) -> _EarlierVersion:
        for earlier in self._earlier:
            if earlier.policy_version == policy_version:
                return earlier
        kept = [earlier.policy_version for earlier in self._earlier]
        raise WeightError(
            f"version {policy_version} is not kept (any more): kept are {kept}, acknowledged is {self.acknowledged}, "
            f"pending are {sorted(self.pending)}"
        )

    def _rebased(self, newer: PendingVersion, held: PendingVersion) -> PendingVersion:
        """How ``newer`` differs from ``held``, which becomes the shadow."""
        patches = {}
        for unit in sorted(newer.patches.keys() | held.patches.keys()):
            base = None if self.shadow is None else self.shadow[unit]
            patch = _difference(newer.patches.get(unit), held.patches.get(unit), base)
            if patch.values.size:
                patches[unit] = patch
        return PendingVersion(newer.policy_version, patches, newer.part_hash)


def _difference(newer: WeightPatch | None, held: WeightPatch | None, base: BitArray | None) -> WeightPatch:
    """How ``newer`` differs from ``held``, both given by how they differ from ``base`` (None: both are complete)."""
    if base is None:
        assert newer is not None
        assert held is not None
        positions = np.flatnonzero(newer.values != held.values).astype(np.int64, copy=False)
        return WeightPatch(positions, newer.values[positions])
    places = [_positions_of(newer), _positions_of(held)]
    positions = np.union1d(*places)
    bits = [base[positions], base[positions]]
    for side, own, patch in zip(bits, places, (newer, held), strict=True):
        if patch is not None:
            side[np.searchsorted(positions, own)] = patch.values
    differs = bits[0] != bits[1]
    return WeightPatch(positions[differs], bits[0][differs])


def _positions_of(patch: WeightPatch | None) -> PositionArray:
    if patch is None or patch.positions is None:  # a complete patch of an empty unit
        return np.zeros(0, dtype=np.int64)
    return patch.positions
