"""Frees engines late in a round, as ``engine_planning`` decides, and has them back before the next round: the acting
part, between the core and the engines.

A freed engine is drained: what it serves goes on elsewhere, from its tokens. Then it stands idle and still gets every
weight push; or, where ``EngineHosts`` can stop it, its process ends, and a new one is brought to the live version.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import anyio
import msgspec

from streamrl.base.errors import EngineError, StreamRLError
from streamrl.base.messages import EngineLoad
from streamrl.base.types import TrajectoryId
from streamrl.control.actions import Explain
from streamrl.elastic.engine_planning import (
    Lengths,
    OpenRequest,
    PlanningSettings,
    ReleasePlan,
    RoundProgress,
    ServingEngine,
    plan_release,
)
from streamrl.recipe.sections import Recipe
from streamrl.sync.publisher import PushedEngine

RECENT_LENGTHS = 2048
"""Completions of one kind of round that are remembered: about what four rounds of 64 prompts and 8 samples keep."""

RELEASE = "release"
"""Who drains, as the pool knows it: an engine that somebody else drained is not readmitted from here."""

DRAIN_SECONDS = 60.0
"""An engine that has not dropped its requests by then does not work any more."""

ALONE_LOOK_S = 1.0
"""Between looks at whether the engines that were not freed still live."""


class Served(Protocol):
    """A request under way, in tokens; ``since``: ``anyio.current_time()`` at which its last part was asked for."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt(self) -> int: ...
    @property
    def sampled(self) -> int: ...
    @property
    def since(self) -> float: ...


class DrainablePool(Protocol):
    """The part of ``streamrl.engines.engine_pool.EnginePool`` that freeing needs."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def serving(self) -> Sequence[str]: ...

    def served(self) -> Mapping[str, Sequence[Served]]: ...

    def loads(self) -> Mapping[str, EngineLoad]: ...

    async def drain(self, name: str, *, by: str) -> None: ...

    def readmit(self, name: str, *, by: str) -> None: ...

    async def migrate(self, request_ids: Sequence[str], to: str) -> None: ...


class EnginePushes(Protocol):
    """The part of ``streamrl.sync.publisher.WeightPublisher`` that stopping and starting needs."""

    async def leave(self, engine: PushedEngine) -> None: ...

    async def admit(self, engine: PushedEngine, policy_version: int) -> None: ...


class EngineHosts(Protocol):
    """Stops and starts engine processes: ``streamrl.engines.engine_seat.SeatedEngines``."""

    def detach(self, name: str) -> PushedEngine: ...

    async def stop(self, name: str) -> None: ...

    async def start(self, name: str) -> PushedEngine: ...

    async def give_up(self, name: str) -> None: ...


class EngineSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one engine, in tokens: its KV cache, in blocks of ``block_tokens``, and the longest completion (``cap``)."""

    kv_tokens: int
    max_num_seqs: int
    cap: int
    block_tokens: int = 16


def engine_sizes(recipe: Recipe, kv_tokens: int, block_tokens: int) -> EngineSizes:
    """Of one engine of ``recipe``, whose cache holds ``kv_tokens``. Raises ``StreamRLError`` when that is not known."""
    if not kv_tokens:
        raise StreamRLError(
            f'engines.release = "{recipe.engines.release}" must know how many tokens a KV cache holds, and these '
            'engines do not say it: set release = "never"'
        )
    return EngineSizes(
        kv_tokens=kv_tokens,
        max_num_seqs=recipe.engines.max_num_seqs,
        cap=recipe.sampling.max_tokens,
        block_tokens=block_tokens,
    )


class EngineRelease:
    """``run`` beside the round, told of what is ``launched`` and ``ended``; ``begin_round`` before the next one.

    ``share_cores`` is told how many engines do nothing. ``hosts`` None: processes go on, idle. ``start_timeout_s``: for
    a process to be ready.
    """

    def __init__(
        self,
        pool: DrainablePool,
        sizes: EngineSizes,
        *,
        publisher: EnginePushes,
        share_cores: Callable[[int], Awaitable[None]],
        hosts: EngineHosts | None = None,
        start_timeout_s: float = 300.0,
        settings: PlanningSettings = PlanningSettings(),  # noqa: B008 - frozen
    ) -> None:
        self._pool = pool
        self._sizes = sizes
        self._publisher = publisher
        self._share_cores = share_cores
        self._hosts = hosts
        self._start_timeout_s = start_timeout_s
        self._settings = settings
        self._lengths: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=RECENT_LENGTHS))
        self._paces: dict[str, float] = {}
        self._open: set[TrajectoryId] = set()
        self._launched, self._round_kind, self._looked_at = 0, "", -1.0
        self._freed: tuple[str, ...] = ()
        self._started: dict[str, PushedEngine] = {}
        self._given_up = False
        self._starting = anyio.CancelScope()
        self._changed = anyio.Event()
        self._one_at_a_time = anyio.Lock()

    @property
    def freed(self) -> tuple[str, ...]:
        """Engines that do nothing until the next round."""
        return self._freed

    @property
    def serving(self) -> int:
        """How many engines serve requests."""
        return len(self._pool.names) - len(self._freed)

    # ---- a round ---------------------------------------------------------------------------------

    def launched(self, round_kind: str, ids: Sequence[TrajectoryId]) -> None:
        """Trajectories of a round of that kind were ordered."""
        self._round_kind = round_kind
        self._launched += len(ids)
        self._open.update(ids)

    def ended(self, trajectory: TrajectoryId, tokens: int | None) -> None:
        """A trajectory came back: with a completion of so many tokens, or without one. Late ones do not count."""
        if trajectory not in self._open:
            return
        self._open.remove(trajectory)
        if tokens is not None:
            self._lengths[self._round_kind].append(tokens)
        self._changed.set()

    async def run(self, decided: Callable[[Explain, bool], Awaitable[None]]) -> None:
        """Free engines whenever they can be spared, until cancelled. ``decided``: told why or why not, and whether
        anything is done, before it is done."""
        while True:
            with anyio.move_on_after(ALONE_LOOK_S if self._freed and self._hosts is None else None):
                await self._changed.wait()
            self._changed = anyio.Event()
            async with self._one_at_a_time:
                if self._freed and not self._pool.serving:  # those that served were lost
                    await self._serve_again()
                plan = self._look()
                self._freed = self._freed or plan.free
                if plan.because is not None:
                    await decided(plan.because, bool(plan.free))
                if plan.free:
                    await self._free(plan)

    async def call_back(self) -> None:
        """Start what was stopped, while the round's batch is trained: ``begin_round`` waits for less then.

        Raises ``EngineError`` when an engine is not ready in time.
        """
        async with self._one_at_a_time:
            await self._start()

    async def begin_round(self, policy_version: int) -> None:
        """Have back what was freed, at the live ``policy_version``; the next round may be launched when it returns.

        Raises ``EngineError`` when an engine is not ready in time or refuses the weights.
        """
        async with self._one_at_a_time:
            self._open.clear()
            self._launched, self._looked_at = 0, -1.0
            await self._start()
            async with anyio.create_task_group() as group:
                for engine in self._started.values():
                    group.start_soon(self._publisher.admit, engine, policy_version)
            back = self._freed if self._hosts is None else tuple(self._started)
            self._started.clear()
            self._freed = tuple(name for name in self._freed if name not in back)
            if back:
                await self._share_cores(len(self._freed))
            for name in back:
                self._pool.readmit(name, by=RELEASE)

    def give_up(self) -> None:
        """The run ends: nothing more is freed, and no process is started or waited for."""
        self._given_up = True
        self._starting.cancel()

    # ---- freeing ---------------------------------------------------------------------------------

    def _look(self) -> ReleasePlan:
        """At most once in a step of progress: else there is nothing to be decided."""
        finished = self._launched - len(self._open)
        progress = finished / max(self._launched, 1)
        low, high = self._settings.window
        due = 0.0 if self._looked_at < 0 else self._looked_at + self._settings.progress_step
        if self._given_up or self._freed or not max(low, due) <= progress <= high:
            return ReleasePlan()
        engines = self._engines()
        if engines is None:
            return ReleasePlan()
        round_now = RoundProgress(
            round_kind=self._round_kind,
            finished=finished,
            launched=self._launched,
            engines=engines,
            looked_at=self._looked_at,
        )
        lengths = Lengths(ascending=tuple(sorted(self._lengths[self._round_kind])), cap=self._sizes.cap)
        plan = plan_release(round_now, lengths, self._settings)
        if plan.looked:
            self._looked_at = progress
        return plan

    async def _free(self, plan: ReleasePlan) -> None:
        by_target: dict[str, list[str]] = defaultdict(list)
        for move in plan.moves:
            by_target[move.to].append(move.request_id)
        try:
            with anyio.fail_after(DRAIN_SECONDS):
                # An engine that was lost since the plan takes no requests, and the last one that serves is kept.
                for target, request_ids in by_target.items():
                    if target in self._pool.serving:
                        await self._pool.migrate(request_ids, target)
                for name in plan.free:
                    if set(self._pool.serving) - {name}:
                        await self._pool.drain(name, by=RELEASE)
        except TimeoutError as error:
            names = ", ".join(plan.free)
            raise EngineError(f"{names}: requests were not dropped within {DRAIN_SECONDS:g} s of an abort") from error
        await self._share_cores(len(plan.free))
        if self._hosts is not None:
            # A process that was told to end is seen to its end, also when the run ends meanwhile.
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as group:
                    for name in plan.free:
                        group.start_soon(self._stop, self._hosts, name)

    async def _stop(self, hosts: EngineHosts, name: str) -> None:
        await self._publisher.leave(hosts.detach(name))
        await hosts.stop(name)

    # ---- back again ------------------------------------------------------------------------------

    async def _serve_again(self) -> None:
        """In the midst of a round: idle engines hold the live version."""
        back, self._freed = self._freed, ()
        await self._share_cores(0)
        for name in back:
            self._pool.readmit(name, by=RELEASE)

    async def _start(self) -> None:
        """Start the processes that were stopped; what is given up meanwhile stays stopped."""
        hosts = self._hosts
        absent = [name for name in self._freed if name not in self._started]
        if hosts is None or self._given_up or not absent:
            return

        async def start(name: str) -> None:
            self._started[name] = await hosts.start(name)

        try:
            with anyio.fail_after(self._start_timeout_s), anyio.CancelScope() as self._starting:
                async with anyio.create_task_group() as group:
                    for name in absent:
                        group.start_soon(start, name)
        except TimeoutError as error:
            late = ", ".join(name for name in absent if name not in self._started)
            raise EngineError(
                f"{late}: not ready within {self._start_timeout_s:g} s of being started again "
                f"(engines.advanced.start_timeout_s)"
            ) from error
        for name in absent:
            if name not in self._started:
                await hosts.give_up(name)

    def _engines(self) -> tuple[ServingEngine, ...] | None:
        """What each engine serves; None where it cannot be told how far its requests are."""
        now, serving = anyio.current_time(), self._pool.serving
        served = {name: requests for name, requests in self._pool.served().items() if name in serving}
        # A report tells the pace of the moments before it: of none, when a round has only begun.
        self._paces |= {name: load.token_s for name, load in self._pool.loads().items() if load.token_s}
        if any(requests and name not in self._paces for name, requests in served.items()):
            return None
        return tuple(self._serving(name, requests, now) for name, requests in served.items())

    def _serving(self, name: str, requests: Sequence[Served], now: float) -> ServingEngine:
        """Engines return tokens when a completion ends: how many it has by now follows from their pace."""
        token_s = self._paces.get(name, 0.0)

        def sampled(request: Served) -> int:
            by_now = request.sampled + int((now - request.since) / token_s) if token_s else request.sampled
            return min(by_now, self._sizes.cap)

        return ServingEngine(
            name=name,
            kv_tokens=self._sizes.kv_tokens,
            max_num_seqs=self._sizes.max_num_seqs,
            block_tokens=self._sizes.block_tokens,
            requests=tuple(OpenRequest(request_id=r.request_id, prompt=r.prompt, sampled=sampled(r)) for r in requests),
        )
