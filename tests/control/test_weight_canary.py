"""Engines that hold the same weights and compute something else with them are found, anchored, and not served by."""

from __future__ import annotations

import math

import anyio
import pytest

from streamrl.config.scheduling import InFlight
from streamrl.control.publisher import WeightPublisher
from streamrl.control.weight_canary import MARGIN, PROBES, SMALLEST_TOLERANCE, WeightCanary, deviation
from streamrl.errors import EngineError
from streamrl.messages import Generate, OrderDone, WeightAnnouncement
from streamrl.types import Completion, FinishReason, float_array, token_array
from tests.control.test_publisher import Anchors, CountingEngine, Service, announced

pytestmark = pytest.mark.asyncio


class ComputingEngine(CountingEngine):
    """Its logprobs are off by ``error``, and by less than ``noise`` each time anew; ``odd``: probes that begin with
    another token. An anchor ends the error where it is told so."""

    def __init__(self, error: float = 0.0, noise: float = 0.0, odd: int = 0, healed: bool = False) -> None:
        super().__init__(4)
        self.error, self.noise, self.odd, self.healed, self.asked = error, noise, odd, healed, 0
        self.anchored = 0

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        if announcement.base_version is None:
            self.anchored += 1
            self.error *= not self.healed
        return await super().stage(announcement)

    async def generate(self, request: Generate) -> Completion:
        self.asked += 1
        assert not self.told or self.told[-1] == "resume", "after the push, not while it is paused"
        probe = int(request.request_id.rpartition("-")[2])
        shift = self.error + self.noise * (self.asked % 3)
        tokens = [9 if probe < self.odd else 3, 4, 5, 6][: request.max_tokens]
        return Completion(
            token_ids=token_array(tokens),
            behavior_logprobs=float_array([-1.0 - shift] * len(tokens)),
            finish_reason=FinishReason.LENGTH,
            version_spans=(),
        )


def publisher_of(*engines: ComputingEngine, service: Service | None = None) -> tuple[WeightPublisher, Anchors]:
    anchors = Anchors()
    options = {"in_flight": InFlight.KEEP, "timeout_s": 5.0, "canary": WeightCanary(), "service": service}
    return WeightPublisher(engines, anchors.publish, **options), anchors  # type: ignore[arg-type]


async def test_sound_engines_pass_within_what_was_measured_with_the_first_version() -> None:
    """Rounding, and one prompt whose first token lies between two: no deviation."""
    engines = [ComputingEngine(noise=0.01), ComputingEngine(noise=0.01, odd=1), ComputingEngine()]
    publisher, anchors = publisher_of(*engines)
    for version in (5, 6):
        report = await publisher.push(announced(version, version - 1))
        assert report.canary is not None
        assert report.canary.tolerance == pytest.approx(MARGIN * 0.02, rel=1e-3)
        assert report.canary.deviation <= 0.021
        assert report.canary.engines == 3
    assert anchors.asked == []


async def test_one_engine_alone_has_nobody_to_be_compared_with() -> None:
    publisher, _ = publisher_of(ComputingEngine(error=5.0))
    report = await publisher.push(announced(5, 4))
    assert report.canary is not None
    assert (report.canary.engines, report.canary.deviation, report.canary.tolerance) == (0, 0.0, SMALLEST_TOLERANCE)


@pytest.mark.parametrize("odd", [0, PROBES])
async def test_an_engine_that_deviates_leaves_service_and_comes_back_by_an_anchor(odd: int) -> None:
    sound, other, wrong = ComputingEngine(), ComputingEngine(), ComputingEngine(healed=True)
    async with anyio.create_task_group() as group:
        service = Service(group)
        publisher, anchors = publisher_of(sound, other, wrong, service=service)
        assert (await publisher.push(announced(5, 4))).behind == 0
        wrong.error, wrong.odd = 0.5, odd
        report = await publisher.push(announced(6, 5))
        assert report.canary is not None
        assert report.canary.deviation == (math.inf if odd else pytest.approx(0.5))
        assert list(service.out) == [wrong]
        assert "canary at version 6 is off by" in service.out[wrong]
        wrong.odd = 0
        await publisher.push(announced(7, 6))
        await service.until_back()
        assert (anchors.asked, wrong.anchored, sound.anchored) == ([7], 1, 0)
        report = await publisher.push(announced(8, 7))
        assert report.behind == 0
        assert anchors.asked == [7], "a delta again"


async def test_of_two_that_differ_both_take_an_anchor_and_the_run_ends_where_that_does_not_help() -> None:
    healing, lasting = ComputingEngine(), ComputingEngine(healed=True)
    publisher, anchors = publisher_of(healing, lasting)
    await publisher.push(announced(5, 4))
    lasting.error = 0.5
    await publisher.push(announced(6, 5))
    report = await publisher.push(announced(7, 6))
    assert (anchors.asked, healing.anchored, lasting.anchored) == ([7], 1, 1)
    assert [engine.told.count("commit 7") for engine in (healing, lasting)] == [1, 1], (
        "the anchor, and not a delta first"
    )
    assert report.canary is not None
    assert report.canary.deviation == 0.0
    lasting.error, lasting.healed = 0.5, False
    await publisher.push(announced(8, 7))
    with pytest.raises(EngineError, match=r"engines disagree .* canary at version 9 is off by 0\.5"):
        await publisher.push(announced(9, 8))


async def test_tokens_after_the_first_that_differs_are_not_compared() -> None:
    def sampled(tokens: list[int], logprobs: list[float]) -> Completion:
        return Completion(
            token_ids=token_array(tokens),
            behavior_logprobs=float_array(logprobs),
            finish_reason=FinishReason.LENGTH,
            version_spans=(),
        )

    first, second = sampled([1, 2, 3], [-1.0, -2.0, -3.0]), sampled([1, 2, 4], [-1.5, -2.0, -90.0])
    assert deviation([first], [second]) == pytest.approx(0.25)
    assert deviation([first], [sampled([7], [-1.0])]) == math.inf
