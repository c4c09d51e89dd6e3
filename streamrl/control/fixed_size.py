"""Groups of the size that the recipe says."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.control.model import GroupLengths
from streamrl.control.round_policy import SizingDecision


class FixedSize:
    """``GroupSizer`` with the recipe's group size."""

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def observe(self, groups: Sequence[GroupLengths], batches: int = 1) -> SizingDecision:
        return SizingDecision(size=self._size, reason="fixed by the recipe", figures={})

    def snapshot(self) -> dict[str, object]:
        return {}

    def restore(self, state: dict[str, object]) -> None:
        """Do nothing: the size is the recipe's."""
