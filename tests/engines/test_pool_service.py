"""A tainted engine of a real pool: what it served goes on elsewhere, and it serves again once it was anchored."""

from __future__ import annotations

import anyio
import pytest

from streamrl.base.errors import EngineError, WeightError
from streamrl.base.messages import Generate, OrderDone, WeightAnnouncement, WeightSource
from streamrl.base.types import Completion, FinishReason, token_array
from streamrl.engines.engine_pool import EnginePool
from streamrl.engines.pool_service import PoolService
from streamrl.engines.simulated.engine import InstantClock, SimulatedEngine, SimulationOptions
from streamrl.recipe.scheduling import InFlight
from streamrl.sync.publisher import WeightPublisher

pytestmark = pytest.mark.asyncio


class TaintedEngine(SimulatedEngine):
    """Takes no delta, and anchors only from version ``heals_at`` on."""

    heals_at = 6

    async def commit(self, policy_version: int) -> OrderDone:
        if policy_version < self.heals_at:
            raise WeightError(f"version {policy_version}: planted")
        return await super().commit(policy_version)


def announced(version: int, base: int | None) -> WeightAnnouncement:
    source = WeightSource(
        rank=0, endpoint="", manifest_digest="", payload_bytes=8, changed_elements=1, total_elements=4
    )
    return WeightAnnouncement(policy_version=version, base_version=base, state_hash=version, sources=(source,))


async def anchor(version: int) -> WeightAnnouncement:
    return announced(version, None)


async def test_requests_of_a_tainted_engine_go_elsewhere_until_it_is_whole_again() -> None:
    clock = InstantClock()
    options = [SimulationOptions(name=f"engine-{index}", policy_version=4) for index in range(2)]
    sound = SimulatedEngine(options[0], clock=clock.now, sleep=clock.sleep)
    tainted = TaintedEngine(options[1], clock=clock.now, sleep=clock.sleep)
    pool = EnginePool([sound, tainted])
    await pool.start()
    service = PoolService(pool)
    publisher = WeightPublisher([sound, tainted], anchor, in_flight=InFlight.KEEP, timeout_s=5, service=service)

    async def sample(name: str) -> Completion:
        prompt = token_array([len(name)])  # siblings would stay together
        request = Generate(request_id=name, token_ids=prompt, max_tokens=20, seed=1, temperature=1.0)
        return await pool.generate(request)

    async with anyio.create_task_group() as group:
        group.start_soon(service.run)
        await publisher.hold()
        ended: list[Completion] = []

        async def submit(name: str) -> None:
            ended.append(await sample(name))

        async with anyio.create_task_group() as waiting:
            for name in ("one", "each"):
                waiting.start_soon(submit, name)
            await anyio.wait_all_tasks_blocked()
            assert [engine.load().waiting + engine.load().running for engine in (sound, tainted)] == [1, 1]
            assert (await publisher.push(announced(5, 4))).behind == 1
        assert sorted(completion.finish_reason for completion in ended) == [FinishReason.ABORT, FinishReason.LENGTH]
        with anyio.fail_after(30):
            first = await sample("other")
            second = await sample("another")
        assert {first.finish_reason, second.finish_reason} == {FinishReason.LENGTH}
        assert {span.policy_version for span in (*first.version_spans, *second.version_spans)} == {5}
        with pytest.raises(EngineError, match="last engine that serves"):
            await pool.drain("engine-0")
        assert (await publisher.push(announced(6, 5))).behind == 1
        with anyio.fail_after(30):
            while "engine-1" in pool_drained(pool):
                await anyio.lowlevel.checkpoint()
        assert (await publisher.push(announced(7, 6))).behind == 0
        await pool.drain("engine-0")
        assert {span.policy_version for span in (await sample("last")).version_spans} == {7}
        group.cancel_scope.cancel()


def pool_drained(pool: EnginePool) -> set[str]:
    return {pool.names[index] for index in pool._drained}
