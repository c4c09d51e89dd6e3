"""Several engines as one: requests are routed, everything else goes to all of them at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from streamrl.engines.concurrent_calls import all_of
from streamrl.engines.engine import Engine
from streamrl.errors import EngineError, WeightError
from streamrl.messages import EngineLoad, EngineReady, Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.types import Completion

SIBLING_SLACK = 8
"""How many more open requests than the idlest engine one may have and still get the siblings of its prompt."""

REMEMBERED_PROMPTS = 4096


class EnginePool:
    """Routes a request to the engine with the fewest open tokens; siblings of a prompt stay together, so that they
    share its prefix blocks, as long as the loads are near. Satisfies ``Engine``."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise EngineError("the pool has no engine; set engines.count to 1 or more")
        self._engines = tuple(engines)
        self._names = [f"engine-{index}" for index in range(len(engines))]
        self._open_requests = [0] * len(engines)
        self._open_tokens = [0] * len(engines)
        self._serving: dict[str, int] = {}
        self._siblings: dict[bytes, int] = {}

    async def start(self) -> EngineReady:
        """Start all. Raises ``EngineError`` when they do not hold the same model and version."""
        readiness = await all_of([engine.start for engine in self._engines])
        self._names = [ready.engine for ready in readiness]
        first = readiness[0]
        for ready in readiness[1:]:
            for field in ("policy_version", "max_context", "tokenizer_digest"):
                if getattr(ready, field) != getattr(first, field):
                    raise EngineError(
                        f"{ready.engine} has {field} {getattr(ready, field)!r}, {first.engine} has"
                        f" {getattr(first, field)!r}; start both with the same recipe and model"
                    )
        return msgspec.structs.replace(
            first,
            engine="+".join(self._names),
            max_running=sum(ready.max_running for ready in readiness),
        )

    async def generate(self, request: Generate) -> Completion:
        """Sample one completion on the engine that ``route`` chooses."""
        index = self.route(request)
        tokens = len(request.token_ids) + request.max_tokens - request.prefix_length
        self._open_requests[index] += 1
        self._open_tokens[index] += tokens
        self._serving[request.request_id] = index
        try:
            return await self._engines[index].generate(request)
        finally:
            del self._serving[request.request_id]
            self._open_requests[index] -= 1
            self._open_tokens[index] -= tokens

    def route(self, request: Generate) -> int:
        """Index of the engine that gets ``request``."""
        if len(self._engines) == 1:
            return 0
        prompt = request.token_ids[: len(request.token_ids) - request.prefix_length].tobytes()
        idlest = min(range(len(self._engines)), key=lambda i: (self._open_tokens[i], self._open_requests[i], i))
        sibling = self._siblings.pop(prompt, idlest)
        near = self._open_requests[sibling] <= self._open_requests[idlest] + SIBLING_SLACK
        chosen = sibling if near else idlest
        self._siblings[prompt] = chosen
        if len(self._siblings) > REMEMBERED_PROMPTS:
            del self._siblings[next(iter(self._siblings))]
        return chosen

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ask the engines that serve them; unknown ids are ignored."""
        by_engine: dict[int, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._serving:
                by_engine.setdefault(self._serving[request_id], []).append(request_id)
        await all_of([partial(self._engines[index].abort, ids) for index, ids in by_engine.items()])

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause all; returns when the last one stopped."""
        await all_of([partial(engine.pause, mode, clear_cache=clear_cache) for engine in self._engines])

    async def resume(self) -> None:
        """Resume all."""
        await all_of([engine.resume for engine in self._engines])

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        """Stage on all. Seconds are of the slowest, bytes of all together."""
        return self._joined(await all_of([partial(engine.stage, announcement) for engine in self._engines]))

    async def commit(self, policy_version: int) -> OrderDone:
        """Commit on all. Raises ``WeightError`` when their live weights have different state hashes."""
        done = await all_of([partial(engine.commit, policy_version) for engine in self._engines])
        hashes = [answer.state_hash for answer in done]
        if len(set(hashes)) > 1:
            held = ", ".join(f"{name}: {value:#018x}" for name, value in zip(self._names, hashes, strict=True))
            raise WeightError(f"engines hold different weights as version {policy_version} ({held}); publish an anchor")
        return self._joined(done)

    async def checksums(self) -> dict[str, str]:
        """Checksums that all engines agree on. Raises ``WeightError`` naming the first parameter that differs."""
        parts = await all_of([engine.checksums for engine in self._engines])
        for name, part in zip(self._names[1:], parts[1:], strict=True):
            differing = _first_difference(parts[0], part)
            if differing is not None:
                raise WeightError(f"{name} and {self._names[0]} hold different {differing}; publish an anchor")
        return parts[0]

    def load(self) -> EngineLoad:
        """Sums over the engines; cache usage is the mean."""
        loads = [engine.load() for engine in self._engines]
        return EngineLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_cache_usage=sum(load.kv_cache_usage for load in loads) / len(loads),
            generated_tokens=sum(load.generated_tokens for load in loads),
            preemptions=sum(load.preemptions for load in loads),
        )

    async def aclose(self) -> None:
        """Close all."""
        await all_of([engine.aclose for engine in self._engines])

    @staticmethod
    def _joined(done: Sequence[OrderDone]) -> OrderDone:
        return msgspec.structs.replace(
            done[0],
            seconds=max(answer.seconds for answer in done),
            payload_bytes=sum(answer.payload_bytes for answer in done),
        )


def _first_difference(left: Mapping[str, str], right: Mapping[str, str]) -> str | None:
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            return name
    return None
