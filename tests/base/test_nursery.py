"""Work for a task group that may be ending."""

from __future__ import annotations

import anyio
import pytest
from anyio.abc import TaskGroup

from streamrl.base.concurrent_calls import start_unless_ending


async def test_work_is_dropped_once_its_group_has_ended() -> None:
    """Work starts while its task group runs, and is dropped once that group has ended with an error."""
    done: list[str] = []

    async def work(what: str) -> None:
        done.append(what)

    groups: list[TaskGroup] = []
    with pytest.raises(ExceptionGroup, match="unhandled"):
        async with anyio.create_task_group() as group:
            groups.append(group)
            start_unless_ending(group, work, "while it runs")
            await anyio.wait_all_tasks_blocked()
            raise LookupError("what it ends of")
    start_unless_ending(groups[0], work, "too late")
    assert done == ["while it runs"]


async def test_a_cancelled_group_takes_no_work() -> None:
    """A group that is cancelled from outside takes no work either."""
    async with anyio.create_task_group() as outer:
        async with anyio.create_task_group() as group:
            outer.cancel_scope.cancel()
            await anyio.sleep(1)
        raise AssertionError("not reached")
    start_unless_ending(group, anyio.sleep, 0)
