"""Several engines that sample as one: each request goes to the engine that the ``Router`` chooses.

An engine can be drained (it gets no request, what it serves is sampled on elsewhere) and, once drained, detached and
replaced. A drained engine still gets every weight push, so that it may be readmitted at any time; one that was detached
must hold the live version before it is readmitted (``WeightSync.admit``).

An engine may also be lost: its host died. Its requests come back cut, without tokens, and are submitted again with
their seeds: the completion is the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import anyio
import msgspec

from streamrl.base.concurrent_calls import all_of
from streamrl.base.errors import EngineError, RequestRefused
from streamrl.base.messages import EngineLoad, EngineReady, Generate
from streamrl.base.types import Completion, FinishReason
from streamrl.contracts import Engine
from streamrl.engines.prefix_hits import PrefixHits
from streamrl.engines.resumption import empty_completion, whole_of
from streamrl.engines.routing import Router, ServedRequest, forget_oldest

UNAVAILABLE = "unavailable"
"""The reason to drain an engine that is not there: its host died, or its set is not in use."""

ABORT_AGAIN_SECONDS = 0.5
"""While an engine is drained: an abort that overtook its request inside of the engine is sent again after so long."""

_OF_STEPS = ("decode_steps", "decode_s", "decode_tokens", "drafted_tokens", "accepted_tokens")
COUNTERS = ("generated_tokens", "preemptions", *_OF_STEPS)
"""The fields of ``EngineLoad`` that count since the start."""


class EnginePool:
    """``engines`` by name, and the names of those that are ``unavailable`` at first, drained and detached. A
    ``Sampler``. ``fatal_deaths`` None: the death of an engine is an error. Else the run continues, and a request that
    was being served at so many deaths is refused (0: none is): it may be what they died of."""

    def __init__(
        self, engines: Mapping[str, Engine], *, unavailable: Sequence[str] = (), fatal_deaths: int | None = None
    ) -> None:
        if not engines:
            raise EngineError("the pool has no engine; set engines.count to 1 or more")
        self.names = (*engines, *unavailable)
        """Names of all engines, also of those that are drained or detached."""
        self.lost_requests = 0
        """Requests that came back with nothing because their engine died."""
        self.on_routed: Callable[[str, str], object] = lambda whole, engine: None
        """Called with the common id of a completion's parts and the engine that gets one of them."""
        self.paused: Callable[[], Collection[str]] = tuple
        """Returns the names of engines that are paused for new weights."""
        self.prefix_hits = PrefixHits()
        self._engines = dict(engines)
        self._drained = {name: {UNAVAILABLE} for name in unavailable}
        self._emptied = {name: anyio.Event() for name in self.names}
        self._router = Router(self.names)
        self._choose_serving()
        self._waiting: dict[str, anyio.Event] = {}
        self._like: EngineReady | None = None
        self._past = EngineLoad()
        self._fatal_deaths = fatal_deaths
        self._deaths: dict[str, int] = {}

    @property
    def attached(self) -> Mapping[str, Engine]:
        """The engines that are not detached, by name: a view, which follows every change."""
        return MappingProxyType(self._engines)

    @property
    def serving(self) -> tuple[str, ...]:
        """Names of the engines that are sent requests: one tuple until that changes."""
        return self._serving

    def _choose_serving(self) -> None:
        self._serving = tuple(name for name in self.names if name not in self._drained)

    def serving_engines(self) -> dict[str, Engine]:
        """Return the engines that are sent requests, by name: all of them hold the live version."""
        return {name: self._engines[name] for name in self.serving}

    async def start(self) -> EngineReady:
        """Start all; return what they are together. Raises ``EngineError`` when they are not of one model."""
        return self.joined(await all_of([engine.start for engine in self._engines.values()]))

    def joined(self, readiness: Sequence[EngineReady]) -> EngineReady:
        """Return what engines that said this are together. Raises as ``start`` does."""
        self._like = readiness[0]
        for ready in readiness[1:]:
            _refuse_difference(self._like, ready)
        return msgspec.structs.replace(
            self._like,
            engine="+".join(self.names),
            max_num_seqs=sum(ready.max_num_seqs for ready in readiness),
            kv_tokens=sum(ready.kv_tokens for ready in readiness),
        )

    # ---- requests ----------------------------------------------------------------------------------

    async def generate(self, request: Generate) -> Completion:
        """Sample one completion. It comes back cut (finish reason abort) when its engine is drained or dies, or the
        request migrates: submit the rest of it, as the next part of the same completion. While no engine serves it
        waits. Raises ``RequestRefused`` for one that was being sampled while too many engines died."""
        if not await self._until_one_serves(request.request_id):
            return empty_completion(FinishReason.ABORT)
        paused = self.paused()
        name = self.route(request, paused)
        engine = self._engines[name]
        self._router.opened(_served(request, name))
        self.on_routed(whole_of(request.request_id), name)
        try:
            completion = self.prefix_hits.answered(request, name, await engine.generate(request), paused)
            if completion.finish_reason is not FinishReason.ABORT:
                self._router.answered(request.request_id)
                self._deaths.pop(whole_of(request.request_id), None)
        except EngineError:
            if self._fatal_deaths is None:
                raise
            completion = self._lost_with(name, engine, request.request_id)
        finally:
            self._router.closed(request.request_id)
            if not self._router.open_on(name):
                self._emptied[name].set()
        return completion

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engines that serve them; unknown ids are ignored, and those that a lost engine served."""
        by_engine: dict[str, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._waiting:
                self._waiting.pop(request_id).set()
            if (name := self._router.engine_of(request_id)) is not None and name in self._engines:
                by_engine.setdefault(name, []).append(request_id)
        await all_of([partial(self._engines[name].abort, ids) for name, ids in by_engine.items()])

    def route(self, request: Generate, paused: Collection[str] = ()) -> str:
        """Choose the engine that gets ``request``."""
        serving = self.serving
        if len(serving) == 1:
            return serving[0]
        # Its hash: prompts may be long, thousands are remembered, and one that is taken for another is no harm.
        prompt = hash(request.token_ids[: len(request.token_ids) - request.prefix_length].tobytes())
        return self._router.choose(request.request_id, prompt, serving, paused)

    def ended(self, trajectory: str) -> None:
        """Forget the turns of a trajectory, the common id of its requests: none comes any more."""
        self._router.ended(trajectory)
        self.prefix_hits.ended(trajectory)

    async def _until_one_serves(self, request_id: str) -> bool:
        """False: the request was aborted while it waited."""
        while not self.serving:
            woken = self._waiting[request_id] = anyio.Event()
            try:
                await woken.wait()
                if request_id not in self._waiting:
                    return False
            finally:
                self._waiting.pop(request_id, None)
        return True

    def _lost_with(self, name: str, engine: Engine, request_id: str) -> Completion:
        if self._engines.get(name) is engine:  # it gets nothing more, also before its death was reported
            self.withdraw([name], UNAVAILABLE)
        self.lost_requests += 1
        whole = whole_of(request_id)
        deaths = self._deaths[whole] = self._deaths.pop(whole, 0) + 1
        forget_oldest(self._deaths)
        if self._fatal_deaths and deaths >= self._fatal_deaths:
            raise RequestRefused(
                f"{whole} was being sampled when {deaths} engines died (engines.advanced.fatal_deaths), the last of "
                f"them {name}: it may be what they died of"
            )
        return empty_completion(FinishReason.ABORT)

    # ---- engines -----------------------------------------------------------------------------------

    def withdraw(self, names: Iterable[str], reason: str) -> None:
        """Send these engines no more requests, from now on; requests wait where no other serves. An engine serves again
        when it was readmitted for every reason."""
        for name in names:
            self._drained.setdefault(name, set()).add(reason)
        self._choose_serving()

    async def drain(self, name: str, reason: str) -> None:
        """Send ``name`` no more requests and cut those that it serves; returns when it serves none. Requests of a lost
        one come back by themselves."""
        self.withdraw([name], reason)
        while self._router.open_on(name) and name in self._drained and name in self._engines:
            self._emptied[name] = anyio.Event()
            await self._engines[name].abort(self._router.served_by(name))
            with anyio.move_on_after(ABORT_AGAIN_SECONDS):
                if self._router.open_on(name):
                    await self._emptied[name].wait()

    def readmit(self, name: str, reason: str) -> None:
        """Send ``name`` requests again, unless it was drained for another reason, too. Raises ``EngineError`` where a
        detached engine would serve."""
        reasons = self._drained.get(name, set())
        if name not in self._engines and (reason == UNAVAILABLE or UNAVAILABLE not in reasons):
            raise EngineError(f"{name} is detached; attach an engine that holds the live version first")
        reasons.discard(reason)
        if not reasons:
            self._drained.pop(name, None)
            self._choose_serving()
            for waiting in self._waiting.values():
                waiting.set()

    async def migrate(self, request_ids: Sequence[str], to: str) -> None:
        """Cut requests that other engines serve; the rest of each, its next part, goes to ``to``. Ids that are not open
        are ignored. Raises ``EngineError`` when ``to`` is drained."""
        if to in self._drained:
            raise EngineError(f"{to} is drained; readmit it before requests migrate to it")
        moving = [i for i in request_ids if self._router.engine_of(i) not in (None, to)]
        for request_id in moving:
            self._router.move(request_id, to)
        await self.abort(moving)

    def detach(self, name: str) -> Engine:
        """Leave a drained engine out of everything, so that it may be stopped, and return it. Raises ``EngineError``
        unless it is drained and serves nothing."""
        if name not in self._drained or self._router.open_on(name):
            raise EngineError(f"{name} serves {self._router.open_on(name)} requests; drain it before it is detached")
        return self._take_out(name)

    def lose(self, name: str) -> None:
        """Leave an engine out of everything at once: its host died. The requests that it served come back cut."""
        self.withdraw([name], UNAVAILABLE)
        if name in self._engines:
            self._take_out(name)

    async def attach(self, name: str, engine: Engine) -> EngineReady:
        """Start ``engine`` in the place of one that is detached; it stays drained. Raises ``EngineError`` when it is of
        another model, or the place is taken."""
        if name in self._engines:
            raise EngineError(f"{name} is not detached; its place is taken")
        ready = await engine.start()
        if self._like is not None:
            _refuse_difference(self._like, ready)
        self._engines[name] = engine
        self._count_as_past(engine, -1)  # of one that slept: it goes on counting
        return ready

    def _take_out(self, name: str) -> Engine:
        engine = self._engines.pop(name)
        self._router.lost(name)
        self.prefix_hits.lost(name)
        self._count_as_past(engine, 1)
        return engine

    def _count_as_past(self, engine: Engine, sign: int) -> None:
        load = engine.load()
        done = {name: getattr(self._past, name) + sign * getattr(load, name) for name in COUNTERS}
        self._past = msgspec.structs.replace(self._past, **done)

    # ---- what they do ------------------------------------------------------------------------------

    def served(self) -> dict[str, tuple[ServedRequest[str], ...]]:
        """Return what each attached engine serves, by name; a lost one too, until its requests came back."""
        found: dict[str, list[ServedRequest[str]]] = {name: [] for name in self._engines}
        for request in self._router:
            found.setdefault(request.engine, []).append(request)
        return {name: tuple(requests) for name, requests in found.items()}

    def loads(self) -> dict[str, EngineLoad]:
        """Return what each attached engine is doing now, by name."""
        return {name: engine.load() for name, engine in self._engines.items()}

    def load(self) -> EngineLoad:
        """Return sums over the engines, in the counters also of those that were detached. Cache usage is that of the
        fullest."""
        loads = [engine.load() for engine in self._engines.values()]
        return EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_cache_usage=max((load.kv_cache_usage for load in loads), default=0.0),
            **{name: sum(getattr(load, name) for load in (self._past, *loads)) for name in COUNTERS},
        )

    async def aclose(self) -> None:
        """Close all."""
        await all_of([engine.aclose for engine in list(self._engines.values())])


def _served(request: Generate, engine: str) -> ServedRequest[str]:
    prompt = len(request.token_ids) - request.prefix_length
    return ServedRequest(
        request_id=request.request_id,
        engine=engine,
        prompt=prompt,
        sampled=request.prefix_length,
        most_tokens=prompt + request.max_tokens,
        since=anyio.current_time(),
    )


def _refuse_difference(first: EngineReady, other: EngineReady) -> None:
    for field in ("max_model_len", "tokenizer_digest"):
        if getattr(other, field) != getattr(first, field):
            raise EngineError(
                f"{other.engine} has {field} {getattr(other, field)!r}, {first.engine} has"
                f" {getattr(first, field)!r}; start both with the same recipe and model"
            )
