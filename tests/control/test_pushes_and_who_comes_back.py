"""A push, or a hold, in the moment in which an engine comes back to service."""

from __future__ import annotations

from collections.abc import Callable, Coroutine

import anyio
import pytest
from announcements import announced
from anyio.abc import TaskGroup

from streamrl.base.messages import OrderDone, PauseMode, WeightAnnouncement
from streamrl.engines.simulated.engine import SimulatedEngine, SimulationOptions
from streamrl.recipe.scheduling import InFlight
from streamrl.sync.publisher import WeightPublisher

pytestmark = pytest.mark.asyncio


async def anchor(policy_version: int) -> WeightAnnouncement:
    return announced(policy_version, None)


class Timed(SimulatedEngine):
    """Takes its time to pause, to stage and to resume; ``hangs``: its commit never ends."""

    def __init__(self, name: str) -> None:
        super().__init__(SimulationOptions(name=name))
        self.name = name
        self.hangs = False
        self.paused = False
        self.committed = anyio.Event()

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        await anyio.sleep(0.0 if self.hangs else 0.8)
        return await super().stage(announcement)

    async def commit(self, policy_version: int) -> OrderDone:
        if self.hangs:
            await anyio.sleep_forever()
        done = await super().commit(policy_version)
        self.committed.set()
        return done

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await anyio.sleep(0.02)
        await super().pause(mode, clear_cache=clear_cache)
        self.paused = True

    async def resume(self) -> None:
        await anyio.sleep(0.005)
        await super().resume()
        self.paused = False


class Service:
    """Lets the run go on without an engine."""

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self.ended: list[str] = []
        self.back = anyio.Event()

    async def take_out(self, engine: Timed, reason: str) -> None:
        raise AssertionError(reason)

    async def take_back(self, engine: Timed) -> None:
        self.back.set()

    def lost(self, engine: Timed, reason: str) -> bool:
        self.ended.append(engine.name)
        return True

    def beside(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self._group.start_soon(work)


async def test_a_commit_beside_the_run_that_hangs_takes_no_time_from_the_engines_of_a_push() -> None:
    well, sick = [Timed("engine-0"), Timed("engine-1")], Timed("engine-2")
    async with anyio.create_task_group() as group:
        service = Service(group)
        publisher = WeightPublisher(well, anchor, in_flight=InFlight.KEEP, timeout_s=1.5, service=service)
        await publisher.push(announced(0, None))
        sick.hangs = True
        publisher.join(sick, await sick.start())
        await anyio.sleep(0.1)  # it commits now: for longer than the others have then
        await publisher.push(announced(1, 0))
        assert service.ended == ["engine-2"]
        group.cancel_scope.cancel()


async def test_who_comes_back_while_the_others_are_being_held_is_held_too() -> None:
    one, other = Timed("engine-0"), Timed("engine-1")
    async with anyio.create_task_group() as group:
        service = Service(group)
        publisher = WeightPublisher([one], anchor, in_flight=InFlight.KEEP, timeout_s=5, service=service)
        await publisher.push(announced(0, None))
        publisher.join(other, await other.start())
        await other.committed.wait()
        await publisher.hold()  # while it is being resumed
        await service.back.wait()
        assert one.paused and other.paused
        await publisher.push(announced(1, 0))
        assert not one.paused and not other.paused
        group.cancel_scope.cancel()
