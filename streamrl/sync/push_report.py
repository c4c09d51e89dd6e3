"""What became of one weight push."""

from __future__ import annotations

import msgspec

from streamrl.sync.weight_canary import CanaryReport


class PushReport(msgspec.Struct, frozen=True, kw_only=True):
    """One push. Seconds are of wall time. ``staged_s``: until the last engine had staged; ``paused_s``: the longest
    pause of an engine for its commit; ``held_s``: how long engines had been held when the push began; ``behind``:
    engines that are out of service after it; ``canary``: what engines answered about a version before it (None: no
    engine did)."""

    policy_version: int
    staged_s: float
    paused_s: float
    total_s: float
    payload_bytes: int
    changed_share: float
    reanchored: int
    held_s: float = 0.0
    behind: int = 0
    canary: CanaryReport | None = None
