"""A plain weight push to a fixed set of engines, for a ``Controller`` in one process as in
``examples/sort/one_process.py``. A run uses ``engines.push``, which pushes to engines that come and go."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from streamrl.base.concurrent_calls import all_of
from streamrl.base.messages import PauseMode, WeightAnnouncement
from streamrl.contracts import Engine, PushReport


class PlainPush:
    """A ``WeightPush``: every engine stages a version while it samples, then all of them pause, commit and resume."""

    def __init__(self, engines: Sequence[Engine], *, keep: bool) -> None:
        """``keep``: whether requests in flight are frozen during the push and go on; False: none are in flight."""
        self._engines = engines
        self._mode = PauseMode.KEEP if keep else PauseMode.ABORT
        self.on_version_left: Callable[[], object] = lambda: None

    async def push(self, announced: WeightAnnouncement) -> PushReport:
        await self._each(lambda engine: engine.stage(announced))
        await self.pause()
        await self._each(lambda engine: engine.commit(announced.policy_version))
        await self.resume()
        return PushReport(policy_version=announced.policy_version)

    async def pause(self) -> None:
        await self._each(lambda engine: engine.pause(self._mode, clear_cache=True))

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

    async def _each(self, order: Callable[[Engine], Awaitable[object]]) -> None:
        await all_of([partial(order, engine) for engine in self._engines])
