"""Routing, broadcasts and the checks that only a pool can make."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from streamrl.engines.engine_pool import SIBLING_SLACK, EnginePool
from streamrl.engines.simulated_engine import InstantClock, LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.errors import EngineError, WeightError
from streamrl.messages import Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.types import Completion, token_array

pytestmark = pytest.mark.asyncio

MakeRequest = Callable[..., Generate]


class RecordingEngine(SimulatedEngine):
    """Remembers what it was asked to generate; ``wrong_hash`` makes it lie after a commit."""

    def __init__(self, index: int, *, wrong_hash: bool = False, **options: object) -> None:
        clock = InstantClock()
        lengths = LengthMixture(median=50.0, sigma=0.0, long_share=0.0)
        super().__init__(
            SimulationOptions(**{"name": f"engine-{index}", "lengths": lengths, **options}),
            clock=clock.now,
            sleep=clock.sleep,
        )
        self.asked: list[str] = []
        self.wrong_hash = wrong_hash

    async def generate(self, request: Generate) -> Completion:
        self.asked.append(request.request_id)
        return await super().generate(request)

    async def commit(self, policy_version: int) -> OrderDone:
        done = await super().commit(policy_version)
        return OrderDone(order_id=0, seconds=0.0, state_hash=done.state_hash + 1) if self.wrong_hash else done


def announcement(version: int, base: int | None) -> WeightAnnouncement:
    return WeightAnnouncement(policy_version=version, base_version=base, state_hash=7, sources=())


async def generate_all(pool: EnginePool, requests: list[Generate]) -> None:
    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(pool.generate, request)


async def test_siblings_stay_together_and_prompts_spread(make_request: MakeRequest) -> None:
    engines = [RecordingEngine(0), RecordingEngine(1)]
    requests = [
        make_request(request_id=f"{prompt}.{sample}", token_ids=token_array([prompt + 2, 3]))
        for prompt in range(8)
        for sample in range(4)
    ]
    await generate_all(EnginePool(engines), requests)
    assert [len(engine.asked) for engine in engines] == [16, 16]
    prompts = [{request_id.split(".")[0] for request_id in engine.asked} for engine in engines]
    assert not prompts[0] & prompts[1]


async def test_one_large_group_is_shared_out(make_request: MakeRequest) -> None:
    engines = [RecordingEngine(0), RecordingEngine(1)]
    await generate_all(EnginePool(engines), [make_request(token_ids=token_array([5, 3])) for _ in range(64)])
    counts = sorted(len(engine.asked) for engine in engines)
    assert counts[1] - counts[0] <= SIBLING_SLACK + 1


async def test_open_tokens_decide(make_request: MakeRequest) -> None:
    engines = [RecordingEngine(0), RecordingEngine(1)]
    pool = EnginePool(engines)
    long = make_request(token_ids=token_array([2]), max_tokens=1000)
    short = [make_request(token_ids=token_array([3 + i]), max_tokens=10) for i in range(6)]
    await generate_all(pool, [long, *short])
    assert engines[0].asked == [long.request_id]
    assert len(engines[1].asked) == 6


async def test_abort_goes_to_the_engine_that_serves(make_request: MakeRequest) -> None:
    engines = [RecordingEngine(0), RecordingEngine(1)]
    pool = EnginePool(engines)
    await pool.pause(PauseMode.KEEP, clear_cache=False)
    requests = [make_request(token_ids=token_array([2 + i])) for i in range(4)]
    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(pool.generate, request)
        await anyio.lowlevel.checkpoint()
        assert pool.load().waiting == 4
        await pool.abort([request.request_id for request in requests] + ["unknown"])
    assert pool.load().waiting == 0


async def test_push_reaches_all_engines_and_one_hash_must_come_back() -> None:
    pool = EnginePool([RecordingEngine(0), RecordingEngine(1)])
    await pool.stage(announcement(0, None))
    await pool.pause(PauseMode.KEEP, clear_cache=True)
    assert (await pool.commit(0)).state_hash == 7
    await pool.resume()
    liar = EnginePool([RecordingEngine(0), RecordingEngine(1, wrong_hash=True)])
    await liar.stage(announcement(0, None))
    await liar.pause(PauseMode.KEEP, clear_cache=True)
    with pytest.raises(WeightError, match=r"different weights as version 0 \(engine-0: 0x0+7, engine-1: 0x0+8\)"):
        await liar.commit(0)


async def test_one_failing_engine_is_the_plain_error() -> None:
    engines = [RecordingEngine(0, policy_version=0), RecordingEngine(1, policy_version=1)]
    with pytest.raises(EngineError, match="engine-1 has policy_version 1, engine-0 has 0"):
        await EnginePool(engines).start()
    with pytest.raises(WeightError, match="engine-1 holds version 1"):
        await EnginePool(engines).stage(announcement(1, 0))
    with pytest.raises(EngineError, match=r"engines\.count"):
        EnginePool([])
