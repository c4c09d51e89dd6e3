"""How many trajectories there were, and what became of them."""

from __future__ import annotations

import msgspec


class Accounting(msgspec.Struct, frozen=True, kw_only=True):
    """Trajectory counts since the run began."""

    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: int

    @property
    def balanced(self) -> bool:
        """The accounting invariant."""
        return self.issued == self.trained + sum(self.dropped.values()) + self.in_flight
