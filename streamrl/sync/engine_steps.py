"""The steps of a push on single engines: pause, commit and verify, resume; each in time, or without that engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import anyio

from streamrl.base.errors import EngineError, WeightError
from streamrl.base.messages import EngineReady, PauseMode, WeightAnnouncement
from streamrl.base.waits import Waits
from streamrl.recipe.scheduling import InFlight
from streamrl.sync.pushed_engine import EngineService, PushedEngine

Step = Callable[[PushedEngine], Coroutine[None, None, object]]


class EngineSteps:
    """``service`` says whether the run goes on without an engine that fails (None: it does not); ``lose`` is told then.
    ``waits``: where it is said what each engine, by ``name_of`` it, is waited for.

    ``paused_at``: engines that stand still, and since when.
    """

    def __init__(
        self,
        *,
        in_flight: InFlight,
        timeout_s: float,
        service: EngineService | None,
        lose: Callable[[PushedEngine], None],
        waits: Waits,
        name_of: Callable[[PushedEngine], str],
    ) -> None:
        self.paused_at: dict[PushedEngine, float] = {}
        self._holds: dict[PushedEngine, tuple[int, int]] = {}
        self._in_flight = in_flight
        self._timeout_s = timeout_s
        self._service = service
        self._lose = lose
        self._waits = waits
        self._name_of = name_of

    def greeted(self, engine: PushedEngine, ready: EngineReady) -> None:
        """What ``engine`` said when it came: that it stands still, and what it holds."""
        if ready.paused:
            self.paused_at[engine] = anyio.current_time()
        if ready.state_hash:
            self._holds[engine] = ready.policy_version, ready.state_hash

    def forget(self, engine: PushedEngine) -> None:
        """It is gone."""
        self.paused_at.pop(engine, None)
        self._holds.pop(engine, None)

    def has(self, engine: PushedEngine, announced: WeightAnnouncement) -> bool:
        """Whether it said, when it came, that it holds this version, bit for bit, and stands still."""
        return engine in self.paused_at and self._holds.get(engine) == (announced.policy_version, announced.state_hash)

    async def stage(self, engine: PushedEngine, announced: WeightAnnouncement) -> None:
        """Fetch and check a version that it does not hold."""
        if not self.has(engine, announced):
            with self._waiting(engine, f"fetch version {announced.policy_version}"):
                await engine.stage(announced)

    async def pause(self, engine: PushedEngine) -> None:
        """Once: an engine that is held, or whose commit was refused, is paused already."""
        if engine in self.paused_at:
            return
        self.paused_at[engine] = anyio.current_time()
        mode = PauseMode.ABORT if self._in_flight is InFlight.RESUME else PauseMode.KEEP
        with self._waiting(engine, "pause"):
            await engine.pause(mode, clear_cache=self._in_flight is not InFlight.KEEP)

    async def resume(self, engine: PushedEngine) -> None:
        """Let it sample by what it holds, which was verified."""
        with self._waiting(engine, "resume"):
            await engine.resume()
        self.paused_at.pop(engine, None)

    async def commit(self, engine: PushedEngine, announced: WeightAnnouncement) -> float:
        """Commit what is staged, verify, resume; never on weights that were not verified. Seconds that the engine stood
        still for it."""
        began = anyio.current_time()
        await self.verified_commit(engine, announced)
        await self.resume(engine)
        return anyio.current_time() - began

    async def verified_commit(self, engine: PushedEngine, announced: WeightAnnouncement) -> None:
        """Leaves the engine paused. Raises ``WeightError`` where the live weights are not what was published."""
        if self.has(engine, announced):
            del self._holds[engine]
            return
        await self.pause(engine)
        with self._waiting(engine, f"commit version {announced.policy_version}"):
            done = await engine.commit(announced.policy_version)
        if done.state_hash != announced.state_hash:
            raise WeightError(
                f"live weights hash to {done.state_hash:016x} at version {announced.policy_version}, "
                f"the trainer published {announced.state_hash:016x}"
            )
        self._holds.pop(engine, None)

    def _waiting(self, engine: PushedEngine, step: str) -> AbstractContextManager[None]:
        return self._waits.waiting_for(f"{self._name_of(engine)} to {step}", who="the publisher")

    # ---- in time, or without it --------------------------------------------------------------------

    def deadline(self) -> float:
        """``anyio.current_time()`` until which what begins now must be done."""
        return anyio.current_time() + self._timeout_s

    @contextmanager
    def in_time(self, failure: str, deadline: float) -> Iterator[None]:
        """Raises ``EngineError`` where what is done within is not done at ``deadline``."""
        try:
            with anyio.fail_after(deadline - anyio.current_time()):
                yield
        except TimeoutError as error:
            raise EngineError(f"{failure} within {self._timeout_s:g} s (weights.advanced.push_timeout_s)") from error

    async def on_each(
        self, step: Step, engines: Sequence[PushedEngine], late: str, deadline: float | None = None
    ) -> None:
        """Do ``step`` on all of ``engines`` at once. Raises ``EngineError``, alone and not in a group, where one fails
        that the run does not do without."""
        until, failed = deadline or self.deadline(), list[EngineError]()

        async def one(engine: PushedEngine) -> None:
            try:
                with self.in_time(late, until):
                    await step(engine)
            except EngineError as error:
                try:
                    self.go_on_without(engine, error)
                except EngineError as fatal:
                    failed.append(fatal)
                    group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for engine in engines:
                group.start_soon(one, engine)
        if failed:
            raise failed[0]

    def go_on_without(self, engine: PushedEngine, error: EngineError) -> None:
        """Raises ``error`` where the run ends by it."""
        if self._service is None or not self._service.lost(engine, str(error)):
            raise error
        self._lose(engine)


class CatchingUp:
    """An engine that catches up beside the run. What it fetches may be given up; a commit is seen to its end."""

    def __init__(self) -> None:
        self.given_up = False
        self.ended = anyio.Event()
        self._scope = anyio.CancelScope()

    def give_up(self) -> None:
        """Fetch no more, now or later."""
        self.given_up = True
        self._scope.cancel()

    def fetching(self) -> anyio.CancelScope:
        """What is fetched within is given up by ``give_up``."""
        self._scope = anyio.CancelScope()
        if self.given_up:
            self._scope.cancel()
        return self._scope
