"""What stands in for vLLM: the product's simulated engine, whose tokens say by which weights they were sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec

from campaigns.faults.fault_plan import Phase
from campaigns.faults.ledger import MODULUS, digest_of, stamp_of
from campaigns.faults.virtual_time import PROCESS
from campaigns.faults.world_state import WorldState
from streamrl.base.errors import RequestRefused, WeightError
from streamrl.base.messages import Generate, OrderDone, WeightAnnouncement
from streamrl.base.types import Completion, FloatArray, float_array
from streamrl.engines.simulated import engine as simulated_engine
from streamrl.engines.simulated.engine import SimulatedEngine, SimulationOptions


class _OpenRequests(dict[str, Any]):
    """Tells each request which engine runs it."""

    def __init__(self, engine: StampedEngine) -> None:
        super().__init__()
        self._engine = engine

    def __setitem__(self, request_id: str, running: Any) -> None:
        running.engine = self._engine
        running.stamps = []
        super().__setitem__(request_id, running)


class StampedEngine(SimulatedEngine):
    """An engine whose tokens say by which weights they were sampled. Weights are numbers, one for each rank, made from
    what was fetched: nobody can claim to hold what it did not take."""

    def __init__(self, world: WorldState, name: str, options: SimulationOptions) -> None:
        super().__init__(options, clock=world.loop.time, sleep=asyncio.sleep)
        self._open: Any = _OpenRequests(self)
        self.world, self.name = world, name
        process = PROCESS.get()
        self.life = repr(process)
        self.content = tuple(digest_of("random weights", name, rank) for rank in range(world.shape.ranks))
        self.taken: tuple[int, ...] | None = None
        self.committing = False

    @property
    def live_hash(self) -> int:
        return sum(digest_of(part) for part in self.content) % MODULUS

    async def generate(self, request: Generate) -> Completion:
        world = self.world
        phase = Phase.EVALUATION if request.request_id.startswith("-") else Phase.ROLLOUT
        world.ledger.asked(self.name, request)
        world.enter(phase)
        try:
            if world.faults.take(self.name, "refuse_request"):
                raise RequestRefused("planted: this request is refused")
            completion = await super().generate(request)
        finally:
            world.leave(phase)
        world.ledger.sampled_by(self.name, request.request_id, completion)
        if phase is Phase.EVALUATION and len(set(completion.behavior_logprobs)) > 1:
            world.ledger.violated(
                "versions", f"{self.name} sampled {request.request_id} of an evaluation by two versions"
            )
        return completion

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        self.world.enter(Phase.STAGE)
        try:
            return await self._stage(announcement)
        finally:
            self.world.leave(Phase.STAGE)

    async def _stage(self, announcement: WeightAnnouncement) -> OrderDone:
        world = self.world
        mischief = world.faults.take(self.name, "refuse_delta", "corrupt_delta", "slow_fetch")
        seconds = world.random.expovariate(1 / world.shape.fetch_s) * (20 if mischief == "slow_fetch" else 1)
        await asyncio.sleep(seconds)
        parts = [world.published[source.manifest_digest] for source in announcement.sources]
        if mischief == "refuse_delta":
            raise WeightError(f"{self.name}: planted: version {announcement.policy_version} is refused")
        if any(part.life is not None and part.life.dead for part in parts):  # type: ignore[attr-defined]
            raise WeightError(f"{self.name}: nobody serves version {announcement.policy_version} any more")
        cumulative = world.shape.cumulative and announcement.base_version is not None
        if cumulative:  # it asks for one delta on what it holds, as the real one does
            announcement = msgspec.structs.replace(announcement, base_version=self._policy_version)
        taken = [
            part.content if cumulative or part.base in (None, held) else digest_of("mixed", held, part.content)
            for held, part in zip(self.content, parts, strict=True)
        ]
        if mischief == "corrupt_delta":
            taken[0] ^= 1
        done = await super().stage(announcement)
        self.taken = tuple(taken)
        return done

    async def commit(self, policy_version: int) -> OrderDone:
        world = self.world
        world.enter(Phase.COMMIT)
        self.committing = True
        # A controller that goes on may begin at the version before: what was not written down never was. What the one
        # before it ordered may still be done when it has started.
        ordered_by = f"{self.life} by controller#{world.ledger.life_heard(self.name, 'controller')}"
        try:
            await asyncio.sleep(world.random.expovariate(1 / world.shape.commit_s))
            done = await super().commit(policy_version)
            assert self.taken is not None
            self.content = self.taken
            if policy_version in world.ledger.hash_of and self.live_hash in world.ledger.hash_of[policy_version]:
                world.ledger.committed(ordered_by, policy_version)
            return msgspec.structs.replace(done, state_hash=self.live_hash)
        finally:
            self.committing = False
            world.leave(Phase.COMMIT)


def _stamped_sample(self: Any, policy_version: int) -> None:
    before = self.sampled
    _SAMPLE(self, policy_version)
    engine: StampedEngine = self.engine
    live = engine.live_hash
    engine.world.ledger.token_by(engine.name, policy_version, live)
    if engine.committing:
        engine.world.ledger.violated("versions", f"{engine.name} sampled a token while it committed")
    self.stamps += [stamp_of(live)] * (self.sampled - before)


def _stamped_completion(self: Any, *arguments: Any) -> Completion:
    logprobs: FloatArray = float_array(self.stamps)
    return msgspec.structs.replace(_COMPLETION(self, *arguments), behavior_logprobs=logprobs)


_SAMPLE: Callable[..., None] = simulated_engine._OpenRequest.sample
_COMPLETION: Callable[..., Completion] = simulated_engine._OpenRequest.completion


@contextmanager
def stamped_tokens() -> Iterator[None]:
    with (
        mock.patch.object(simulated_engine._OpenRequest, "sample", _stamped_sample),
        mock.patch.object(simulated_engine._OpenRequest, "completion", _stamped_completion),
    ):
        yield
