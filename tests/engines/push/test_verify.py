"""Engines that hold the right weights and compute something else with them are found; nobody waits for it."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from streamrl.base.errors import EngineError
from streamrl.base.messages import FirstProbe, Generate, OrderDone, WeightAnnouncement
from streamrl.base.types import Completion, FinishReason, VersionSpan, float_array
from streamrl.contracts import PushReport
from streamrl.engines.push.verify import CanaryReport, WeightCanary
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.learning.canary import (
    EXACT,
    PROBE_TOKENS,
    QUANTISED,
    ROUNDED,
    CanaryBounds,
    canary_bounds,
    median_difference,
    probe_tokens,
)
from streamrl.recipe.scheduling import InFlight
from streamrl.recipe.sections import Engines, EngineShape, Training
from tests.engines.push.test_weight_sync import Recorded, Trainer, announced

TOKENS = probe_tokens(300)
FP8 = {"quantization": "fp8_per_channel"}
EXPECTED = tuple(-0.25 * place for place in range(1, PROBE_TOKENS))


class ComputingEngine(Recorded):
    """Its logprobs are off by ``error``. An anchor ends the error if the test says so. ``room``: a full engine answers
    when it is set. ``version``: what it says it scored with, if not the version that it holds."""

    def __init__(self, error: float = 0.0, healed: bool = False) -> None:
        super().__init__(4)
        self.error, self.healed, self.anchored = error, healed, 0
        self.asked: list[Generate] = []
        self.room = anyio.Event()
        self.room.set()
        self.dies_asked = self.aborts = False
        self.error_of_steps = 0.0
        self.longest = PROBE_TOKENS

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        if announcement.base_version is None:
            self.anchored += 1
            self.error *= not self.healed
        return await super().stage(announcement)

    async def generate(self, request: Generate) -> Completion:
        self.asked.append(request)
        assert not self.told or self.told[-1] == "resume", "after the push, not while it is paused"
        await self.room.wait()
        if self.dies_asked:
            raise EngineError("it died")
        version = int(next(told for told in reversed(self.told) if told.startswith("commit")).split()[1])
        kept = 0 if self.aborts else request.scored_tokens
        error = self.error
        if request.max_tokens > 1:  # sampled token by token
            kept = min(request.max_tokens, self.longest)
            error = self.error_of_steps
        return Completion(
            token_ids=request.token_ids[:1] * kept,
            behavior_logprobs=float_array([logprob - error for logprob in EXPECTED[:kept]]),
            finish_reason=FinishReason.ABORT,
            version_spans=(VersionSpan(start=0, end=kept, policy_version=version),) if kept else (),
        )


def scored(version: int) -> WeightAnnouncement:
    return msgspec.structs.replace(announced(version, version - 1), probe_logprobs=EXPECTED)


class Pushing:
    def __init__(self, engines: Sequence[ComputingEngine], bounds: CanaryBounds = EXACT) -> None:
        self.trainer = Trainer()
        self.canary: WeightCanary = WeightCanary(TOKENS, bounds, "lfm2")
        self.sync = WeightSync(
            {f"engine-{index}": engine for index, engine in enumerate(engines)},
            self.trainer.publish_anchor,
            in_flight=InFlight.KEEP,
            timeout_s=300.0,
            canary=self.canary,
        )

    async def push(self, version: int) -> PushReport:
        """And let the engines answer, if they can."""
        report = await self.sync.push(scored(version))
        await anyio.wait_all_tasks_blocked()
        return report


@asynccontextmanager
async def pushing(*engines: ComputingEngine, bounds: CanaryBounds = EXACT) -> AsyncIterator[Pushing]:
    async with anyio.create_task_group() as group:
        this = Pushing(engines, bounds)
        group.start_soon(this.sync.run)
        await anyio.wait_all_tasks_blocked()
        yield this
        group.cancel_scope.cancel()


async def test_each_engine_is_asked_once_a_version() -> None:
    """Each engine is asked once a version, and the next push reports the answer."""
    one, other = ComputingEngine(0.01), ComputingEngine(0.02)
    async with pushing(one, other) as this:
        assert (await this.push(5)).canary is None
        for version in (6, 7):
            report = (await this.push(version)).canary
            assert report is not None
            assert (report.policy_version, report.engines) == (version - 1, 2)
            assert report.deviation == pytest.approx(0.02)
        assert this.trainer.asked == []
    [request, *_] = one.asked
    assert len(one.asked) == len({r.request_id for r in one.asked}) == 3
    assert (list(request.token_ids), request.scored_tokens) == (list(TOKENS), PROBE_TOKENS - 1)


async def test_one_engine_alone_that_is_off_takes_an_anchor() -> None:
    engine = ComputingEngine(healed=True)
    async with pushing(engine) as this:
        await this.push(5)
        engine.error = 0.5
        await this.push(6)
        report = await this.push(7)
        assert report.canary is not None
        assert report.canary.deviation == pytest.approx(0.5)
        assert (report.reanchored, engine.anchored, this.trainer.asked) == (1, 1, [7])
        assert engine.told.count("commit 7") == 1, "the anchor, and not a delta first"
        assert (await this.push(8)).canary == CanaryReport(7, 0.0, 1)
        assert this.trainer.asked == [7], "a delta again"


async def test_who_is_off_after_an_anchor_as_before_ends_the_run() -> None:
    sound, wrong = ComputingEngine(), ComputingEngine(0.5)
    async with pushing(sound, wrong) as this:
        await this.push(5)
        await this.push(6)
        assert (sound.anchored, wrong.anchored) == (0, 1)
        with pytest.raises(
            EngineError, match=r"1 engines compute something else.*0\.5 nats.*weights\.advanced\.canary = false"
        ):
            await this.push(7)


async def test_full_engines_delay_no_push_and_answer_in_order() -> None:
    """Full engines delay nothing, and answer for the version that scored."""
    engine = ComputingEngine()
    engine.room = anyio.Event()
    async with pushing(engine) as this:
        for version in (5, 6, 7):
            assert (await this.push(version)).canary is None
        assert len(engine.asked) == 1, "one question is open at a time"
        engine.error = 0.01
        engine.room.set()
        await anyio.wait_all_tasks_blocked()
        assert (await this.push(8)).canary == CanaryReport(7, pytest.approx(0.01, rel=1e-4), 1)  # type: ignore[arg-type]


async def test_an_aborted_question_is_no_answer() -> None:
    """A question that is aborted, or whose engine dies, is no answer."""
    aborting, dying, sound = ComputingEngine(), ComputingEngine(), ComputingEngine()
    aborting.aborts = dying.dies_asked = True
    async with pushing(aborting, dying, sound) as this:
        await this.push(5)
        sound.aborts = True
        assert (await this.push(6)).canary == CanaryReport(5, 0.0, 1)
        assert len(aborting.asked) == 2, "it is asked again"
        assert (await this.push(7)).canary is None, "an answer is reported once"


async def test_an_engine_that_leaves_is_not_waited_for() -> None:
    leaving, staying = ComputingEngine(0.5), ComputingEngine()
    leaving.room = anyio.Event()
    async with pushing(leaving, staying) as this:
        await this.push(5)
        this.sync.remove(leaving)
        leaving.room.set()
        await anyio.wait_all_tasks_blocked()
        assert (await this.push(6)).canary == CanaryReport(5, 0.0, 1)
        assert leaving.told.count("commit 6") == 0


async def test_nothing_is_said_where_the_trainer_did_not_score() -> None:
    engine = ComputingEngine(0.5)
    async with pushing(engine) as this:
        await this.push(5)
        for version in (6, 7):
            report = await this.sync.push(announced(version, version - 1))
            await anyio.wait_all_tasks_blocked()
            assert (report.canary, report.reanchored) == (None, 0)


async def test_the_median_token_counts_and_nan_is_far_off() -> None:
    """The median token counts, and a value that is not a number is far off."""
    expected = [-1.0, -2.0, -3.0]
    assert median_difference([-1.25, -2.25, -90.0], expected) == pytest.approx(0.25)
    assert median_difference([math.nan, math.nan, -3.0], expected) == math.inf
    assert median_difference([-1.0, -2.0, math.nan], expected) == 0.0


@pytest.mark.parametrize(
    ("error", "error_of_steps", "bounds", "rounding", "found"),
    [
        (0.18, 0.18, EXACT, 0.02, r"'lfm2'.*a prefill of the engine and the trainer are 0\.18 nats.*at most 0\.001"),
        (0.0, 0.01, EXACT, 0.02, r"sampled tokens and a prefill of the same engine are 0\.01 nats"),
        (0.07, 0.07, ROUNDED, 0.005, r"0\.07 nats apart \(median of 32 tokens; at most 0\.03; bfloat16 costs 0\.005"),
        (0.0005, 0.0002, EXACT, 0.02, ""),
        (0.07, 0.07, ROUNDED, 0.03, ""),
        (0.2, 0.2, QUANTISED, 0.005, ""),
        (0.3, 0.3, QUANTISED, 0.005, r"0\.3 nats apart \(median of 32 tokens; at most 0\.24"),
        (0.3, 0.3, QUANTISED, 0.02, ""),
        (1.1, 0.3, QUANTISED, 0.2, r"1\.1 nats apart"),
    ],
)
async def test_an_engine_is_looked_at_before_the_first_step(
    error: float, error_of_steps: float, bounds: CanaryBounds, rounding: float, found: str
) -> None:
    """What an engine computes in a prefill and in single steps is compared with the trainer's logprobs, and a run does
    not begin beyond three times what the dtype costs."""
    engine = ComputingEngine(error)
    engine.error_of_steps = error_of_steps
    probe = FirstProbe(logprobs=EXPECTED, rounding=rounding)
    async with pushing(engine, bounds=bounds) as this:
        await this.push(0)
        if not found:
            await this.sync.check_first_tokens(probe)
            return
        with pytest.raises(EngineError, match=found):
            await this.sync.check_first_tokens(probe)


@pytest.mark.parametrize("quantised", [Engines(args=FP8), Engines(sets=(EngineShape(count=1, args=FP8),))])
async def test_quantised_engines_have_bounds_of_their_own(quantised: Engines) -> None:
    """Such engines differ by more than bfloat16 costs, also where only those of one set are quantised."""
    for device, dtype, bounds in (("cpu", "float32", EXACT), ("cuda", "bfloat16", ROUNDED)):
        assert canary_bounds(Training(), quantised, device, dtype) == QUANTISED
        assert canary_bounds(Training(), Engines(), device, dtype) == bounds


async def test_the_first_look_does_not_judge_by_a_few_tokens() -> None:
    """A policy may sample its end token at once: rounding moves a single logprob far."""
    engine = ComputingEngine(0.0)
    engine.error_of_steps = 0.2
    probe = FirstProbe(logprobs=EXPECTED, rounding=0.005)
    async with pushing(engine, bounds=ROUNDED) as this:
        await this.push(0)
        for engine.longest in (0, 1, 7):
            await this.sync.check_first_tokens(probe)
        engine.longest = 8
        with pytest.raises(EngineError, match="median of 8 tokens"):
            await this.sync.check_first_tokens(probe)


async def test_every_engine_is_looked_at_before_the_first_step() -> None:
    async with pushing(ComputingEngine(), ComputingEngine(0.07), bounds=ROUNDED) as this:
        await this.push(0)
        with pytest.raises(EngineError, match=r"0\.07 nats apart"):
            await this.sync.check_first_tokens(FirstProbe(logprobs=EXPECTED, rounding=0.005))


async def test_an_engine_that_dies_at_the_first_look_is_left() -> None:
    """The owner of an engine handles its death; a run without engines has nothing to look at."""
    engine = ComputingEngine(0.5)
    async with pushing(engine) as this:
        await this.push(0)
        engine.dies_asked = True
        probe = FirstProbe(logprobs=EXPECTED, rounding=0.0)
        await this.sync.check_first_tokens(probe)
        this.sync.remove(engine)
        await this.sync.check_first_tokens(probe)
