"""Several engines as one: requests are routed, everything else goes to all of them at once.

An engine can be drained (it gets no request, what it serves goes on elsewhere) and, once drained, detached and
replaced. A drained engine still gets every weight push, so that it may be readmitted at any time; one that was detached
must hold the live version before it is readmitted (``WeightPublisher.admit``).

An engine may also be lost: its host died. What it served comes back cut, with nothing, and is asked for again, with the
seed that it had: the completion is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import anyio
import msgspec

from streamrl.base.concurrent_calls import all_of
from streamrl.base.errors import EngineError, RequestRefused, WeightError
from streamrl.base.messages import EngineLoad, EngineReady, Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.base.types import Completion, FinishReason
from streamrl.engines.engine import Engine
from streamrl.engines.pooled_answers import (
    agreed_checksums,
    joined_load,
    joined_readiness,
    nothing_sampled,
    refuse_difference,
    with_counters,
)
from streamrl.engines.resumption import whole_of
from streamrl.engines.routing import Router, ServedRequest, forget_oldest

LOST = "lost"
"""Who drains an engine whose host died."""

ABORT_AGAIN_SECONDS = 0.5
"""While an engine is drained: an abort that overtook its request inside of the engine is told again after so long."""


class EnginePool:
    """Sends each request to the engine that ``Router`` chooses. Satisfies ``Engine``."""

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        absent: Sequence[str] = (),
        by: str = "",
        fatal_deaths: int | None = None,
        readiness: Sequence[EngineReady] = (),
    ) -> None:
        """``absent``: names of engines that are not there yet, as if ``by`` had drained and detached them.

        ``fatal_deaths`` None: the death of an engine is an error. Else the run goes on, and a request that was being
        served at so many deaths is refused (0: none is): it may be what they died of. ``readiness``: of engines that
        were started already.
        """
        if not engines:
            raise EngineError("the pool has no engine; set engines.count to 1 or more")
        self._engines = dict(enumerate(engines))
        names = [ready.engine for ready in readiness] or [f"engine-{index}" for index in range(len(engines))]
        self._names = [*names, *absent]
        self._routing = Router(len(self._names))
        self._unserved: dict[str, anyio.Event] = {}
        self._drained = {index: {by} for index in range(len(engines), len(self._names))}
        self._detached = set(self._drained)
        self._emptied = [anyio.Event() for _ in self._names]
        self._readiness = readiness[0] if readiness else None
        self._by_name: dict[str, Engine] = {}
        self._list_attached()
        self._past = EngineLoad(running=0, waiting=0, kv_cache_usage=0.0, generated_tokens=0)
        self._fatal_deaths = fatal_deaths
        self._deaths: dict[str, int] = {}
        self.lost_requests = 0
        """Requests that came back with nothing because their engine died."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all engines, also of those that are drained or detached."""
        return tuple(self._names)

    @property
    def attached(self) -> Mapping[str, Engine]:
        """The engines that are not detached, by name: a view, which follows every change."""
        return MappingProxyType(self._by_name)

    async def start(self) -> EngineReady:
        """Start all. Raises ``EngineError`` when they do not hold the same model and version."""
        readiness = await all_of([engine.start for engine in self._attached])
        self._names[: len(readiness)] = [ready.engine for ready in readiness]
        self._list_attached()
        self._readiness = readiness[0]
        for ready in readiness[1:]:
            refuse_difference(readiness[0], ready, ("policy_version",))
        return msgspec.structs.replace(
            joined_readiness(self._names[: len(readiness)], readiness), engine="+".join(self._names)
        )

    async def generate(self, request: Generate) -> Completion:
        """Sample one completion on the engine that ``route`` chooses. It comes back cut (finish reason abort) when that
        engine is drained or dies, or the request migrates: ask for the rest of it, as the next part of the same
        completion. While no engine serves (see ``drain``) it waits. Raises ``RequestRefused`` for one that too many
        engines died of, as it seems."""
        if not await self._served_again(request.request_id):
            return nothing_sampled()
        index = self.route(request)
        self._routing.opened(_served(request, index))
        engine, whole = self._engines[index], whole_of(request.request_id)
        try:
            completion = await engine.generate(request)
            self._answered(whole, complete=completion.finish_reason is not FinishReason.ABORT)
        except EngineError:
            if self._fatal_deaths is None:
                raise
            completion = self._lost_with(index, engine, request.request_id)
        finally:
            self._routing.closed(request.request_id)
            if not self._routing.open_on(index):
                self._emptied[index].set()
        return completion

    def _answered(self, whole: str, *, complete: bool) -> None:
        if complete:
            self._routing.ended(whole)
            self._deaths.pop(whole, None)

    def _lost_with(self, index: int, engine: Engine, request_id: str) -> Completion:
        if self._engines[index] is engine:  # nobody is to be sent to it before whoever sees to it does so
            self._drained.setdefault(index, set()).add(LOST)
        self.lost_requests += 1
        whole = whole_of(request_id)
        deaths = self._deaths[whole] = self._deaths.pop(whole, 0) + 1
        forget_oldest(self._deaths)
        if self._fatal_deaths and deaths >= self._fatal_deaths:
            raise RequestRefused(
                f"{whole} was being sampled when {deaths} engines died (engines.advanced.fatal_deaths), the last of "
                f"them "
                f"{self._names[index]}: it may be what they died of"
            )
        return nothing_sampled()

    @property
    def serving(self) -> tuple[str, ...]:
        """Names of the engines that are sent requests."""
        return tuple(name for index, name in enumerate(self._names) if index not in self._drained)

    async def _served_again(self, request_id: str) -> bool:
        """Wait until an engine serves it. False: the request was aborted meanwhile."""
        while len(self._drained) == len(self._names):
            woken = self._unserved[request_id] = anyio.Event()
            try:
                await woken.wait()
                if request_id not in self._unserved:
                    return False
            finally:
                self._unserved.pop(request_id, None)
        return True

    def served(self) -> dict[str, tuple[ServedRequest, ...]]:
        """What each attached engine serves, by name, and a lost one until it is back: for who plans which to free."""
        found: dict[str, list[ServedRequest]] = {name: [] for name in self._attached_names}
        for request in self._routing:
            found.setdefault(self._names[request.engine], []).append(request)
        return {name: tuple(requests) for name, requests in found.items()}

    def loads(self) -> dict[str, EngineLoad]:
        """What each attached engine is doing now, by name."""
        return {name: engine.load() for name, engine in zip(self._attached_names, self._attached, strict=True)}

    def route(self, request: Generate) -> int:
        """Index of the engine that gets ``request``."""
        serving = [i for i in range(len(self._names)) if i not in self._drained]
        if len(serving) == 1:
            return serving[0]
        # Its hash: prompts may be long, thousands are remembered, and one that is taken for another is no harm.
        prompt = hash(request.token_ids[: len(request.token_ids) - request.prefix_length].tobytes())
        return self._routing.choose(request.request_id, prompt, serving)

    def withdraw(self, names: Sequence[str], *, by: str = "") -> None:
        """Send these engines no more requests, from now on, also when no other serves: requests then wait until one is
        readmitted. ``drain`` each of them to cut what it serves."""
        for name in names:
            self._drained.setdefault(self._index(name), set()).add(by)

    async def drain(self, name: str, *, by: str = "") -> None:
        """Send ``name`` no more requests and cut those that it serves; returns when it serves none.

        ``by``: who drains it. It is sent requests again when everybody who drained it has readmitted it. What a lost
        one served comes back by itself. Raises ``EngineError`` for the last engine that serves (see ``withdraw``), and
        for an unknown name.
        """
        index = self._index(name)
        if index not in self._drained and len(self._drained) == len(self._names) - 1:
            raise EngineError(f"{name} is the last engine that serves requests; readmit another one before draining it")
        self._drained.setdefault(index, set()).add(by)
        while self._routing.open_on(index) and index in self._drained and index not in self._detached:
            self._emptied[index] = anyio.Event()
            await self._engines[index].abort(self._routing.served_by(index))
            with anyio.move_on_after(ABORT_AGAIN_SECONDS):
                if self._routing.open_on(index):
                    await self._emptied[index].wait()

    def readmit(self, name: str, *, by: str = "") -> None:
        """Send ``name`` requests again, unless somebody else drained it too, or it was lost: then when it is back.
        Raises ``EngineError`` while it is detached otherwise."""
        index = self._index(name)
        reasons = self._drained.get(index, set())
        lost = by != LOST and LOST in reasons
        if index in self._detached and not lost:
            raise EngineError(f"{name} is detached; attach an engine that holds the live version first")
        reasons.discard(by)
        if not reasons:
            self._drained.pop(index, None)
            for waiting in self._unserved.values():
                waiting.set()

    async def migrate(self, request_ids: Sequence[str], to: str) -> None:
        """Cut requests that other engines serve and send the rest of each, its next part, to ``to``.

        Ids that are not open are ignored. Raises ``EngineError`` when ``to`` is drained.
        """
        target = self._index(to)
        if target in self._drained:
            raise EngineError(f"{to} is drained; readmit it before requests migrate to it")
        moving = [i for i in request_ids if self._routing.engine_of(i) not in (None, target)]
        for request_id in moving:
            self._routing.move(request_id, target)
        await self.abort(moving)

    def detach(self, name: str) -> Engine:
        """Leave a drained engine out of everything, so that it may be stopped, and return it.

        Raises ``EngineError`` unless it is drained and serves nothing.
        """
        index = self._index(name)
        if index not in self._drained or self._routing.open_on(index):
            requests = self._routing.open_on(index)
            raise EngineError(f"{name} serves {requests} requests; drain it before it is detached")
        self._detached.add(index)
        self._list_attached()
        self._past = with_counters(self._past, [self._past, self._engines[index].load()])
        return self._engines[index]

    def lose(self, name: str) -> int:
        """Leave an engine out of everything at once: its host died. How many requests it served; they come back cut.

        One that is detached already is left as it is.
        """
        index = self._index(name)
        if index in self._detached:
            return 0
        self._drained.setdefault(index, set()).add(LOST)
        self._detached.add(index)
        self._list_attached()
        self._past = with_counters(self._past, [self._past, self._engines[index].load()])
        return self._routing.open_on(index)

    async def attach(self, name: str, engine: Engine) -> EngineReady:
        """Start ``engine`` in the place of ``name``, which is detached. It stays drained until ``readmit``.

        Raises ``EngineError`` when its model is not that of the others.
        """
        index = self._index(name)
        if index not in self._detached:
            raise EngineError(f"{name} is not detached; its place is taken")
        ready = await engine.start()
        if self._readiness is not None:
            refuse_difference(self._readiness, ready, ("max_model_len", "tokenizer_digest"))
        self._engines[index] = engine
        self._detached.discard(index)
        self._list_attached()
        return ready

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engines that serve them; unknown ids are ignored, and those that a lost engine served."""
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._unserved:
                self._unserved.pop(request_id).set()
            if (index := self._routing.engine_of(request_id)) is not None and index not in self._detached:
                by_engine.setdefault(index, []).append(request_id)
        await all_of([partial(self._engines[index].abort, ids) for index, ids in by_engine.items()])

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause all; returns when the last one stopped."""
        await all_of([partial(engine.pause, mode, clear_cache=clear_cache) for engine in self._attached])

    async def resume(self) -> None:
        """Resume all."""
        await all_of([engine.resume for engine in self._attached])

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Stage on all. Seconds are of the slowest, bytes of all together."""
        return _joined(await all_of([partial(engine.stage, announcement) for engine in self._attached]))

    async def commit(self, policy_version: int) -> OrderDone:
        """Commit on all. Raises ``WeightError`` when their live weights have different state hashes."""
        done = await all_of([partial(engine.commit, policy_version) for engine in self._attached])
        hashes = [answer.state_hash for answer in done]
        if len(set(hashes)) > 1:
            held = ", ".join(f"{name}: {value:#018x}" for name, value in zip(self._attached_names, hashes, strict=True))
            raise WeightError(f"engines hold different weights as version {policy_version} ({held}); publish an anchor")
        return _joined(done)

    async def checksums(self) -> dict[str, str]:
        """Checksums that all engines agree on. Raises ``WeightError`` naming the first parameter that differs."""
        return agreed_checksums(self._attached_names, await all_of([engine.checksums for engine in self._attached]))

    def load(self) -> EngineLoad:
        """Sums over the engines, in the counters also of those that were detached. Cache usage is that of the fullest,
        the time of a decode step the mean of those that decode."""
        return joined_load(self._past, [engine.load() for engine in self._attached])

    async def aclose(self) -> None:
        """Close all."""
        await all_of([engine.aclose for engine in self._attached])

    @property
    def _attached(self) -> list[Engine]:
        return [engine for index, engine in sorted(self._engines.items()) if index not in self._detached]

    @property
    def _attached_names(self) -> list[str]:
        return [name for index, name in enumerate(self._names) if index not in self._detached]

    def _list_attached(self) -> None:
        self._by_name.clear()
        self._by_name.update(zip(self._attached_names, self._attached, strict=True))

    def _index(self, name: str) -> int:
        if name not in self._names:
            raise EngineError(f"no engine is called {name!r}; the pool has {', '.join(self._names)}")
        return self._names.index(name)


def _served(request: Generate, engine: int) -> ServedRequest:
    prompt = len(request.token_ids) - request.prefix_length
    return ServedRequest(
        request_id=request.request_id,
        engine=engine,
        prompt=prompt,
        sampled=request.prefix_length,
        most_tokens=prompt + request.max_tokens,
        since=anyio.current_time(),
    )


def _joined(done: Sequence[OrderDone]) -> OrderDone:
    return msgspec.structs.replace(
        done[0],
        seconds=max(answer.seconds for answer in done),
        payload_bytes=sum(answer.payload_bytes for answer in done),
    )
