"""Work that one part of the run gives to the task group of another, which may be ending."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVarTuple

from anyio.abc import TaskGroup

Arguments = TypeVarTuple("Arguments")


def start_unless_ending(
    group: TaskGroup, work: Callable[[*Arguments], Coroutine[Any, Any, object]], *arguments: *Arguments
) -> None:
    """``work`` as a child of ``group``. Nothing where that is cancelled: anyio refuses a child of a group that has
    ended, and its RuntimeError would hide what the run ends of."""
    if not group.cancel_scope.cancel_called:
        group.start_soon(work, *arguments)
