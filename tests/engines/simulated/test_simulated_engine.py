"""The simulated engine: time, weights and death."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from builders.base import InstantClock

from streamrl.base.errors import WeightError
from streamrl.base.messages import Generate, PauseMode, WeightAnnouncement
from streamrl.base.types import Completion, VersionSpan
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.engines.step_cost import StepCost

MakeRequest = Callable[..., Generate]
FIXED = LengthMixture(median=100.0, sigma=0.0, long_share=0.0)


def instant(**options: object) -> tuple[SimulatedEngine, InstantClock]:
    clock = InstantClock()
    engine = SimulatedEngine(SimulationOptions(**{"lengths": FIXED, **options}), clock=clock.now, sleep=clock.sleep)
    return engine, clock


def announcement(version: int, base: int | None, state_hash: int = 7) -> WeightAnnouncement:
    return WeightAnnouncement(policy_version=version, base_version=base, state_hash=state_hash, sources=())


async def generate_all(engine: SimulatedEngine, requests: list[Generate]) -> dict[str, Completion]:
    completions: dict[str, Completion] = {}

    async def one(request: Generate) -> None:
        completions[request.request_id] = await engine.generate(request)

    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(one, request)
    return completions


async def test_its_load_counts_decode_steps(make_request: MakeRequest) -> None:
    engine, clock = instant(step=StepCost(base_s=2e-3, per_running_s=0.5e-3), max_num_seqs=4)
    await generate_all(engine, [make_request(max_tokens=100) for _ in range(4)])
    assert clock.now() == pytest.approx(100 * (2.0 + 4 * 0.5) / 1000, rel=0.02)  # the first step runs one alone
    first = engine.load()
    assert first.decode_s == pytest.approx(clock.now()) and first.decode_tokens == first.generated_tokens == 400
    await engine.generate(make_request(max_tokens=10))
    later = engine.load()
    assert later.decode_steps == first.decode_steps + 10
    assert later.decode_s == pytest.approx(first.decode_s + 10 * 2.5e-3)
    assert later.decode_tokens == first.decode_tokens + 10


async def test_more_than_max_running_wait(make_request: MakeRequest) -> None:
    engine, clock = instant(step=StepCost(base_s=1e-3, per_running_s=0.0), max_num_seqs=4)
    await generate_all(engine, [make_request(max_tokens=50) for _ in range(8)])
    assert clock.now() == pytest.approx(2 * 50 / 1000, rel=0.02)
    assert engine.load().generated_tokens == 8 * 50


async def test_completions_do_not_depend_on_company(make_request: MakeRequest) -> None:
    engine, _ = instant(lengths=LengthMixture())
    requests = [make_request(max_tokens=400) for _ in range(32)]
    together = await generate_all(engine, requests)
    for request in reversed(requests):
        assert await engine.generate(request) == together[request.request_id]
    assert len({len(completion.token_ids) for completion in together.values()}) > 8


async def test_spans_cross_a_commit_under_keep(make_request: MakeRequest) -> None:
    engine, clock = instant(policy_version=3)

    async def push() -> None:
        while clock.now() < 0.05:
            await anyio.lowlevel.checkpoint()
        await engine.stage(announcement(4, 3))
        await engine.pause(PauseMode.KEEP, clear_cache=False)
        tokens = engine.load().generated_tokens
        done = await engine.commit(4)
        assert (done.state_hash, engine.load().generated_tokens) == (7, tokens)
        await engine.resume()

    completions: dict[str, Completion] = {}
    async with anyio.create_task_group() as group:
        group.start_soon(push)
        completions = await generate_all(engine, [make_request(max_tokens=100) for _ in range(3)])
    for completion in completions.values():
        first, second = completion.version_spans
        assert first == VersionSpan(start=0, end=first.end, policy_version=3)
        assert 0 < first.end < 100
        assert second == VersionSpan(start=first.end, end=100, policy_version=4)


async def test_weights_follow_the_rules_of_a_push() -> None:
    engine, _ = instant(policy_version=3)
    with pytest.raises(WeightError, match="holds version 3, the delta to version 6 starts from 5"):
        await engine.stage(announcement(6, 5))
    await engine.stage(announcement(6, None))
    with pytest.raises(WeightError, match="pause first"):
        await engine.commit(6)
    await engine.pause(PauseMode.KEEP, clear_cache=True)
    with pytest.raises(WeightError, match="version 6 is staged"):
        await engine.commit(5)
    await engine.commit(6)
    with pytest.raises(WeightError, match="nothing is staged"):
        await engine.commit(6)
    await engine.stage(announcement(6, 3))  # a replay of what it holds is harmless
    await engine.commit(6)


async def test_the_driver_hands_over_when_cancelled(make_request: MakeRequest) -> None:
    engine, _ = instant()
    others: dict[str, Completion] = {}
    async with anyio.create_task_group() as group:
        driver = anyio.CancelScope()

        async def drive() -> None:
            with driver:
                await engine.generate(make_request(max_tokens=400))

        async def follow() -> None:
            others.update(await generate_all(engine, [make_request(max_tokens=50) for _ in range(3)]))

        group.start_soon(drive)
        await anyio.lowlevel.checkpoint()
        group.start_soon(follow)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
        driver.cancel()
    assert {len(completion.token_ids) for completion in others.values()} == {50}
