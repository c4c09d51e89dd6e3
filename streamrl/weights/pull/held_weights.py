"""What a receiver holds, and which delta it asks for: the announced one, one on what it does hold, or an anchor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.codec.bits import BitArray
from streamrl.weights.manifest import CHECKPOINT_VERSION, MODULUS, Manifest, ShardSpec
from streamrl.weights.publish.loaded_checkpoint import CheckpointBase
from streamrl.weights.pull.received_part import ReceivedPart

Ask = Callable[[Callable[[ReceivedPart], bool]], None]
"""Ask and take until every part satisfies the condition; no chunk is asked for."""


class HeldWeights(Protocol):
    """The committed version of the receiver, by which deltas are decoded (``CheckpointMirror`` is one)."""

    policy_version: int | None
    state_hash: int

    @property
    def tensors(self) -> Mapping[str, Any]:
        """By name: ``dtype`` and ``shape``."""
        ...

    def bits(self, name: str) -> BitArray:
        """All elements of a tensor, flat."""
        ...


def choose_held(
    announced: WeightAnnouncement,
    parts: Sequence[ReceivedPart],
    ask: Ask,
    held: HeldWeights | None,
    checkpoint: CheckpointBase | None,
) -> HeldWeights | None:
    """What the version is decoded against, with every part set on the payload that goes with it; None for an anchor.

    Raises ``WeightError`` for a delta on something that is not held, and cannot be had as one on what is.
    """
    holds_nothing = held is None or held.policy_version is None
    if holds_nothing and checkpoint is not None:
        base, reason = _fold_on(CHECKPOINT_VERSION, parts, ask, checkpoint.of)
        if base is not None:
            return base
    if announced.base_version is None:
        _fetch_as_announced(parts)
        return None
    base_hash = _base_hash(part.announced_manifest for part in parts)
    if held is None or holds_nothing:
        refusal = f"; the checkpoint it has loaded is of no use: {reason}" if checkpoint is not None else ""
        raise WeightError(
            f"version {announced.policy_version} is a delta on {announced.base_version}; this engine holds no "
            f"published version yet and needs an anchor{refusal}"
        )
    if (announced.base_version, base_hash) == (held.policy_version, held.state_hash):
        _fetch_as_announced(parts)
        return held
    assert held.policy_version is not None
    base, reason = _fold_on(held.policy_version, parts, ask, lambda _: held)
    if base is None:
        raise WeightError(
            f"version {announced.policy_version} is a delta on version {announced.base_version} with state hash "
            f"{base_hash:#018x}; this engine holds version {held.policy_version} with "
            f"{held.state_hash:#018x}, and gets no delta on that ({reason}): publish an anchor"
        )
    return base


def _fold_on(
    base_version: int,
    parts: Sequence[ReceivedPart],
    ask: Ask,
    base_of: Callable[[Sequence[ShardSpec]], HeldWeights],
) -> tuple[HeldWeights | None, str]:
    """Set every part on a delta on ``base_version``. Returns the base, or None and why there is no such delta."""
    for part in parts:
        part.fold_from(base_version)
    ask(lambda part: part.manifest is not None or bool(part.fold_refusal))
    refusals = [part.fold_refusal for part in parts if part.fold_refusal]
    if refusals:
        return None, refusals[0]
    try:
        base = base_of([shard for part in parts if part.manifest for shard in part.manifest.shards])
    except WeightError as error:
        return None, str(error)
    theirs = _base_hash(part.manifest for part in parts)
    if theirs != base.state_hash:
        return None, f"version {base_version} has state hash {theirs:#018x} there and {base.state_hash:#018x} here"
    return base, ""


def _fetch_as_announced(parts: Sequence[ReceivedPart]) -> None:
    for part in parts:
        part.fold_from(None)


def _base_hash(manifests: Iterable[Manifest | None]) -> int:
    return sum(manifest.base_part_hash for manifest in manifests if manifest is not None) % MODULUS
