"""A push over several engines, some of which refuse it."""

from __future__ import annotations

import pytest

from streamrl.config.recipe import InFlight
from streamrl.control.publisher import WeightPublisher
from streamrl.engines.simulated_engine import InstantClock, SimulatedEngine, SimulationOptions
from streamrl.errors import EngineError, WeightError
from streamrl.messages import OrderDone, WeightAnnouncement, WeightSource

pytestmark = pytest.mark.asyncio


def announced(version: int, base: int | None) -> WeightAnnouncement:
    source = WeightSource(
        rank=0, endpoint="", manifest_digest="", payload_bytes=8, changed_elements=1, total_elements=4
    )
    return WeightAnnouncement(policy_version=version, base_version=base, state_hash=version, sources=(source,))


async def engine_at(version: int) -> SimulatedEngine:
    clock = InstantClock()
    engine = SimulatedEngine(SimulationOptions(policy_version=version), clock=clock.now, sleep=clock.sleep)
    await engine.start()
    return engine


class Anchors:
    def __init__(self) -> None:
        self.asked: list[int] = []

    async def publish(self, policy_version: int) -> WeightAnnouncement:
        self.asked.append(policy_version)
        return announced(policy_version, None)


async def test_an_engine_on_another_base_is_reanchored_and_the_others_are_not_held_up() -> None:
    engines, anchors = [await engine_at(4), await engine_at(2)], Anchors()
    publisher = WeightPublisher(engines, anchors.publish, in_flight=InFlight.KEEP, timeout_s=5)
    report = await publisher.push(announced(5, 4))
    assert (report.reanchored, anchors.asked) == (1, [5])
    report = await publisher.push(announced(6, 5))
    assert report.reanchored == 0, "after the anchor both hold the same base"


class RefusingEngine(SimulatedEngine):
    """Its live weights never verify."""

    async def commit(self, policy_version: int) -> OrderDone:
        raise WeightError(f"version {policy_version}: planted")


async def test_an_engine_that_refuses_the_anchor_too_ends_the_run_with_its_reason() -> None:
    clock = InstantClock()
    broken = RefusingEngine(SimulationOptions(policy_version=4), clock=clock.now, sleep=clock.sleep)
    await broken.start()
    publisher = WeightPublisher([await engine_at(4), broken], Anchors().publish, in_flight=InFlight.KEEP, timeout_s=5)
    with pytest.raises(EngineError, match="refused version 5 as delta and as anchor: version 5: planted"):
        await publisher.push(announced(5, 4))


class LyingEngine(SimulatedEngine):
    """Says that it committed, and holds something else."""

    async def commit(self, policy_version: int) -> OrderDone:
        done = await super().commit(policy_version)
        return OrderDone(order_id=0, seconds=done.seconds, state_hash=done.state_hash + 1)


async def test_a_wrong_state_hash_is_never_resumed_on() -> None:
    clock = InstantClock()
    lying = LyingEngine(SimulationOptions(policy_version=4), clock=clock.now, sleep=clock.sleep)
    await lying.start()
    publisher = WeightPublisher([lying], Anchors().publish, in_flight=InFlight.KEEP, timeout_s=5)
    with pytest.raises(EngineError, match="live weights hash to"):
        await publisher.push(announced(5, 4))
    assert lying.load().running == 0


class SlowEngine(SimulatedEngine):
    """Never finishes staging."""

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        import anyio

        await anyio.sleep_forever()
        raise AssertionError


async def test_a_push_that_takes_too_long_names_the_limit() -> None:
    clock = InstantClock()
    slow = SlowEngine(SimulationOptions(policy_version=4), clock=clock.now, sleep=clock.sleep)
    await slow.start()
    publisher = WeightPublisher([slow], Anchors().publish, in_flight=InFlight.KEEP, timeout_s=0.05)
    with pytest.raises(EngineError, match=r"within 0\.05 s \(weights\.push_timeout_s\)"):
        await publisher.push(announced(5, 4))
