"""What a weight push needs of an engine, and of who sends it requests."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Protocol

from streamrl.base.messages import Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.base.types import Completion


class PushedEngine(Protocol):
    """The part of ``streamrl.engines.engine.Engine`` that a push needs."""

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone: ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None: ...

    async def commit(self, policy_version: int) -> OrderDone: ...

    async def resume(self) -> None: ...

    async def generate(self, request: Generate) -> Completion: ...


class EngineService(Protocol):
    """Keeps requests away from engines that are behind, and lets them catch up."""

    async def take_out(self, engine: PushedEngine, reason: str) -> None:
        """Send it no requests; what it served goes on elsewhere. Raises ``EngineError`` when nobody else serves."""
        ...

    async def take_back(self, engine: PushedEngine) -> None:
        """It holds the live version: send it requests again."""
        ...

    def lost(self, engine: PushedEngine, reason: str) -> bool:
        """It died, or does not do what it is told. Whether the run goes on without it; then its host is ended."""
        ...

    def beside(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Run ``work`` as a child of the run."""
        ...
