"""Several engines behind one ``Sampler``: each request goes to the engine that the ``Router`` chooses.

The pool lives in the controller. ``elastic.engine_processes`` makes it and attaches and loses engines;
``stages.episodes`` samples with it; ``elastic.elastic_engines`` drains and readmits engines.

An engine can be drained: it gets no new request, and other engines continue the requests that it served. A drained
engine can be detached and replaced. A drained engine still gets every weight push, so that it may be readmitted at any
time; a new engine in the place of a detached one must hold the live version first (``WeightSync.admit``).

An engine may also be lost, when its process died. Its requests are returned aborted, without tokens, and are submitted
again with the same seeds: the completion is the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from anyio import Event, current_time, move_on_after
from msgspec.structs import replace

from streamrl.base.concurrent_calls import all_of
from streamrl.base.errors import EngineError, RequestRefused
from streamrl.base.messages import EngineLoad, EngineReady, Generate
from streamrl.base.types import Completion, FinishReason, Texts
from streamrl.contracts import Engine
from streamrl.engines.prefix_hits import PrefixHits
from streamrl.engines.resumption import completion_id_of, empty_completion
from streamrl.engines.routing import Router, ServedRequest, forget_oldest

UNAVAILABLE = "unavailable"
"""The reason to drain an engine that does not run: its process died or is withdrawn, or its set is not in use."""

LENT = "lent"
"""The reason to drain an engine whose host needs its GPU for a while (`streamrl engine`)."""

ABORT_AGAIN_SECONDS = 0.05
"""Interval between the aborts that are sent to a draining engine: an abort may overtake its request in the engine."""

COUNTERS = (
    "generated_tokens",
    "preemptions",
    "decode_steps",
    "decode_s",
    "decode_tokens",
    "drafted_tokens",
    "accepted_tokens",
    "prefilled_tokens",
    "prefill_s",
)
"""Fields of ``EngineLoad`` that count since the start of the engine."""


class EnginePool:
    """A ``Sampler`` over several engines.

    ``engines``: attached engines by name
    ``unavailable``: names of engines that are drained and detached at first
    ``fatal_deaths``: number of engines that may die while they serve a request before it is refused, since it may be
    the cause (0: no request is refused; None: the death of an engine is an error)"""

    def __init__(
        self, engines: Mapping[str, Engine], *, unavailable: Sequence[str] = (), fatal_deaths: int | None = None
    ) -> None:
        if not engines:
            raise EngineError("the pool has no engine; set engines.count to 1 or more")
        self.names = (*engines, *unavailable)
        """Names of all engines, drained and detached ones included."""
        self.lost_requests = 0
        """Number of requests that were lost because their engine died."""
        self.on_routed: Callable[[str, str], object] = lambda completion_id, engine: None
        """Called with the id of a completion and the name of the engine that gets one of its parts."""
        self.paused: Callable[[], Collection[str]] = tuple
        """Returns the names of engines that are paused for new weights."""
        self.prefix_hits = PrefixHits()
        self._engines = dict(engines)
        self._drained = {name: {UNAVAILABLE} for name in unavailable}  # reasons by engine
        self._emptied = {name: Event() for name in self.names}
        self._router = Router(self.names)
        self._choose_serving()
        self._waiting: dict[str, Event] = {}  # by the id of a request that waits for a serving engine
        self._first_ready: EngineReady | None = None  # every other engine must have the same model
        self._past = EngineLoad()  # counters of detached engines
        self._fatal_deaths = fatal_deaths
        self._deaths: dict[str, int] = {}  # deaths of engines that served a completion, by its id

    @property
    def attached(self) -> Mapping[str, Engine]:
        """The engines that are not detached, by name. The mapping is a view, which follows every change."""
        return MappingProxyType(self._engines)

    @property
    def serving(self) -> Texts:
        """Names of the engines that are sent requests. The tuple stays the same object until the engines change."""
        return self._serving

    def _choose_serving(self) -> None:
        self._serving = tuple(name for name in self.names if name not in self._drained)

    def serving_engines(self) -> dict[str, Engine]:
        """Return the engines that are sent requests, by name. All of them hold the live version."""
        return {name: self._engines[name] for name in self.serving}

    async def start(self) -> EngineReady:
        """Start all engines; return their combined readiness. Raises ``EngineError`` when their models differ."""
        return self.joined(await all_of([engine.start for engine in self._engines.values()]))

    def joined(self, readiness: Sequence[EngineReady]) -> EngineReady:
        """Return the combined readiness of started engines. Raises ``EngineError`` when their models differ."""
        first = readiness[0]
        self._first_ready = first
        for ready in readiness[1:]:
            _refuse_difference(first, ready)
        return replace(
            first,
            engine="+".join(self.names),
            max_num_seqs=sum(ready.max_num_seqs for ready in readiness),
            kv_tokens=sum(ready.kv_tokens for ready in readiness),
        )

    # ---- requests ----------------------------------------------------------------------------------

    async def generate(self, request: Generate) -> Completion:
        """Sample one completion. A partial completion (finish reason abort) is returned when its engine is drained or
        dies, or the request migrates: then submit the next part of the same completion. Waits while no engine serves.
        Raises ``RequestRefused`` for a request that was open on too many engines when they died."""
        if not await self._until_one_serves(request.request_id):
            return empty_completion(FinishReason.ABORT)
        paused = self.paused()
        name = self.route(request, paused)
        engine = self._engines[name]
        completion_id = completion_id_of(request.request_id)
        self._router.add_request(_served_request(request, name))
        self.on_routed(completion_id, name)
        try:
            completion = await engine.generate(request)
            completion = self.prefix_hits.note_answer(request, name, completion, paused)
            if completion.finish_reason is not FinishReason.ABORT:
                self._router.note_turn(request.request_id)
                self._deaths.pop(completion_id, None)
        except EngineError:
            if self._fatal_deaths is None:
                raise
            completion = self._lose_request(request.request_id, name, engine)
        finally:
            self._router.remove_request(request.request_id)
            if not self._router.open_on(name):
                self._emptied[name].set()
        return completion

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engines that serve these requests to stop them. Ids of unknown requests, and of requests that a lost
        engine served, are ignored."""
        by_engine: dict[str, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._waiting:
                self._waiting.pop(request_id).set()
            name = self._router.engine_of(request_id)
            if name is not None and name in self._engines:
                by_engine.setdefault(name, []).append(request_id)
        await all_of([partial(self._engines[name].abort, ids) for name, ids in by_engine.items()])

    def route(self, request: Generate, paused: Collection[str] = ()) -> str:
        """Choose the engine that gets ``request``."""
        serving = self.serving
        if len(serving) == 1:
            return serving[0]
        # The router gets a hash: prompts may be long, it remembers thousands of them, and a collision does no harm.
        prompt = hash(request.token_ids[: len(request.token_ids) - request.prefix_length].tobytes())
        return self._router.choose(request.request_id, prompt, serving, paused)

    def forget_trajectory(self, completion_id: str) -> None:
        """Forget the turns of a trajectory that has no further request. ``completion_id``: common id of its
        requests."""
        self._router.forget_trajectory(completion_id)
        self.prefix_hits.forget_trajectory(completion_id)

    async def _until_one_serves(self, request_id: str) -> bool:
        """Wait for a serving engine. Returns False for a request that was aborted while it waited."""
        while not self.serving:
            event = self._waiting[request_id] = Event()
            try:
                await event.wait()
                if request_id not in self._waiting:
                    return False
            finally:
                self._waiting.pop(request_id, None)
        return True

    def _lose_request(self, request_id: str, name: str, engine: Engine) -> Completion:
        """Return an empty completion for a request whose engine died. Raises ``RequestRefused`` after too many
        deaths."""
        if self._engines.get(name) is engine:  # the death may not have been reported yet
            self.withdraw([name], UNAVAILABLE)
        self.lost_requests += 1
        completion_id = completion_id_of(request_id)
        deaths = self._deaths.pop(completion_id, 0) + 1  # inserted again as the newest entry
        self._deaths[completion_id] = deaths
        forget_oldest(self._deaths)
        if self._fatal_deaths and deaths >= self._fatal_deaths:
            raise RequestRefused(
                f"{completion_id} was being sampled when {deaths} engines died (engines.advanced.fatal_deaths), "
                f"the last of them {name}: it may be what they died of"
            )
        return empty_completion(FinishReason.ABORT)

    # ---- engines -----------------------------------------------------------------------------------

    def withdraw(self, names: Iterable[str], reason: str) -> None:
        """Send these engines no more requests from now on. Requests wait while no other engine serves. An engine serves
        again once it is readmitted for every reason that it was withdrawn for."""
        for name in names:
            self._drained.setdefault(name, set()).add(reason)
        self._choose_serving()

    async def drain(self, name: str, reason: str) -> None:
        """Send ``name`` no more requests and abort the requests that it serves; returns when it serves none. Requests
        of a lost engine end without an abort."""
        self.withdraw([name], reason)
        while self._router.open_on(name) and name in self._drained and name in self._engines:
            self._emptied[name] = Event()
            await self._engines[name].abort(self._router.served_by(name))
            with move_on_after(ABORT_AGAIN_SECONDS):
                if self._router.open_on(name):
                    await self._emptied[name].wait()

    def readmit(self, name: str, reason: str) -> None:
        """Send ``name`` requests again, unless it was drained for another reason, too. Raises ``EngineError`` when the
        engine is detached."""
        reasons = self._drained.get(name, set())
        if name not in self._engines and (reason == UNAVAILABLE or UNAVAILABLE not in reasons):
            raise EngineError(f"{name} is detached; attach an engine that holds the live version first")
        reasons.discard(reason)
        if not reasons:
            self._drained.pop(name, None)
            self._choose_serving()
            for event in self._waiting.values():
                event.set()

    async def migrate(self, request_ids: Sequence[str], to: str) -> None:
        """Abort requests that other engines serve; the next part of each completion goes to ``to``. Ids of requests
        that are not open are ignored. Raises ``EngineError`` when ``to`` is drained."""
        if to in self._drained:
            raise EngineError(f"{to} is drained; readmit it before requests migrate to it")
        moving = [request_id for request_id in request_ids if self._router.engine_of(request_id) not in (None, to)]
        for request_id in moving:
            self._router.move(request_id, to)
        await self.abort(moving)

    def detach(self, name: str) -> Engine:
        """Remove a drained engine from the pool, so that it may be stopped, and return it. Raises ``EngineError``
        unless it is drained and serves no request."""
        if name not in self._drained or self._router.open_on(name):
            raise EngineError(f"{name} serves {self._router.open_on(name)} requests; drain it before it is detached")
        return self._remove(name)

    def lose(self, name: str) -> None:
        """Remove an engine at once, whose process died. The requests that it served are returned aborted."""
        self.withdraw([name], UNAVAILABLE)
        if name in self._engines:
            self._remove(name)

    async def attach(self, name: str, engine: Engine) -> EngineReady:
        """Start ``engine`` in the place of a detached one; it stays drained. Raises ``EngineError`` when it has another
        model, or the place is taken."""
        if name in self._engines:
            raise EngineError(f"{name} is not detached; its place is taken")
        ready = await engine.start()
        if self._first_ready is not None:
            _refuse_difference(self._first_ready, ready)
        self._engines[name] = engine
        self._add_to_past(engine, -1)  # an engine that slept continues its counters
        return ready

    def _remove(self, name: str) -> Engine:
        engine = self._engines.pop(name)
        self._router.forget_engine(name)
        self.prefix_hits.forget_engine(name)
        self._add_to_past(engine, 1)
        return engine

    def _add_to_past(self, engine: Engine, sign: int) -> None:
        load = engine.load()
        counters = {name: getattr(self._past, name) + sign * getattr(load, name) for name in COUNTERS}
        self._past = replace(self._past, **counters)

    # ---- requests and load of the engines ----------------------------------------------------------

    def open_requests(self) -> dict[str, tuple[ServedRequest[str], ...]]:
        """Return the open requests of each attached engine, by name. A lost engine is listed while it has some."""
        by_engine: dict[str, list[ServedRequest[str]]] = {name: [] for name in self._engines}
        for request in self._router:
            by_engine.setdefault(request.engine, []).append(request)
        return {name: tuple(requests) for name, requests in by_engine.items()}

    def loads(self) -> dict[str, EngineLoad]:
        """Return the load of each attached engine now, by name."""
        return {name: engine.load() for name, engine in self._engines.items()}

    def load(self) -> EngineLoad:
        """Return the combined load of the engines. The counters include detached engines; the cache usage is the usage
        of the fullest engine."""
        loads = [engine.load() for engine in self._engines.values()]
        return EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_cache_usage=max((load.kv_cache_usage for load in loads), default=0.0),
            **{name: sum(getattr(load, name) for load in (self._past, *loads)) for name in COUNTERS},
        )

    async def aclose(self) -> None:
        """Close all attached engines."""
        await all_of([engine.aclose for engine in list(self._engines.values())])


def _served_request(request: Generate, engine: str) -> ServedRequest[str]:
    prompt = len(request.token_ids) - request.prefix_length
    return ServedRequest(
        request_id=request.request_id,
        engine=engine,
        prompt=prompt,
        sampled=request.prefix_length,
        max_tokens=prompt + request.max_tokens,
        since=current_time(),
    )


def _refuse_difference(first: EngineReady, other: EngineReady) -> None:
    for field in ("max_model_len", "tokenizer_digest"):
        if getattr(other, field) != getattr(first, field):
            raise EngineError(
                f"{other.engine} has {field} {getattr(other, field)!r}, {first.engine} has"
                f" {getattr(first, field)!r}; start both with the same recipe and model"
            )
