"""A bug that is planted in the product (or in the simulator), to see that it is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec

Patch = tuple[Any, str, Any]


class Planted(msgspec.Struct, frozen=True):
    """One bug: the invariant that it breaks, and the names that are replaced. ``check``: what looks for it where no
    world does; it plants the bug itself, and returns what it found."""

    name: str
    invariant: str
    patches: tuple[Patch, ...] = ()
    check: Callable[[], str] | None = None

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The product with the bug."""
        patchers = [mock.patch.object(owner, name, value) for owner, name, value in self.patches]
        for patcher in patchers:
            patcher.start()
        try:
            yield
        finally:
            for patcher in patchers:
                patcher.stop()


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """``owner.name`` made of what it was."""
    return owner, name, make(getattr(owner, name))


def every(times: int) -> Callable[[], bool]:
    """True at every so-many-th call."""
    seen = [0]

    def due() -> bool:
        seen[0] += 1
        return seen[0] % times == 0

    return due
