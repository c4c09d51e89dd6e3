"""The seam between streamrl and an inference engine.

``VllmEngine`` (vLLM's ``AsyncLLM``; ``PlainVllmEngine`` is its part in the kernel), ``SimulatedEngine`` (no torch,
virtual or real time) and ``RemoteEngine`` (an engine host in another process, over streams) satisfy it and pass the
same tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from streamrl.base.messages import EngineLoad, EngineReady, Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.base.types import Completion


class Sampler(Protocol):
    """One engine, or a pool of them: what samples completions."""

    async def generate(self, request: Generate) -> Completion:
        """Sample one completion; returns a cut one (finish reason abort) when aborted."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask for requests to stop. Returns before the engine dropped them: the barrier is ``pause(ABORT)``."""
        ...


class Engine(Sampler, Protocol):
    """One inference engine. All methods may run concurrently unless they say otherwise.

    Life: ``start`` once; ``generate`` and ``abort`` any time (requests queue while paused);
    a weight push is ``stage`` (while generating) -> ``pause`` -> ``commit`` -> ``resume``.
    A failure that ends the engine raises ``EngineError`` from every pending call.
    """

    async def start(self) -> EngineReady:
        """Load the model. Called once, before anything else."""
        ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop sampling; after it returns no token is sampled until ``resume``."""
        ...

    async def resume(self) -> None:
        """Sample again."""
        ...

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Fetch and check a version while generating. Raises ``WeightError`` when it does not fit."""
        ...

    async def commit(self, policy_version: int) -> OrderDone:
        """Apply the staged version and verify its state hash on the live weights. Only while paused."""
        ...

    async def checksums(self) -> dict[str, str]:
        """Return the engine's own checksum of every live parameter, by runtime name (slow; for audits)."""
        ...

    def load(self) -> EngineLoad:
        """Return what it is doing now."""
        ...

    async def aclose(self) -> None:
        """Stop the engine and everything it started. Idempotent."""
        ...


class WeightPush(Protocol):
    """Makes versions live on engines, some of which come and go."""

    async def admit(self, name: str, engine: Engine, waits: Callable[[], object]) -> None:
        """Bring a started engine to the live version. ``waits`` is called where only the next version helps. Raises
        ``EngineError`` when it refuses, dies, or is late."""
        ...

    async def leave(self, engine: Engine) -> None:
        """Leave ``engine`` out of later pushes, once none is under way."""
        ...

    def remove(self, engine: Engine) -> None:
        """Leave ``engine`` out of pushes at once."""
        ...
