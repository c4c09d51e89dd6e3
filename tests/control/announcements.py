"""Versions that no trainer published, for engines that only look at their numbers."""

from __future__ import annotations

from streamrl.base.messages import WeightAnnouncement, WeightSource


def announced(version: int, base: int | None) -> WeightAnnouncement:
    source = WeightSource(
        rank=0, endpoint="", manifest_digest="", payload_bytes=8, changed_elements=1, total_elements=4
    )
    return WeightAnnouncement(policy_version=version, base_version=base, state_hash=version, sources=(source,))
