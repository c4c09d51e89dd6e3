"""A push over several engines, some of which refuse it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine

import anyio
import msgspec
import pytest
from announcements import announced
from anyio.abc import TaskGroup

from streamrl.base.errors import EngineError, VersionLeft, WeightError
from streamrl.base.messages import EngineReady, Generate, OrderDone, PauseMode, WeightAnnouncement
from streamrl.base.types import Completion, token_array
from streamrl.base.waits import Waits
from streamrl.engines.simulated.engine import InstantClock, SimulatedEngine, SimulationOptions
from streamrl.recipe.scheduling import InFlight
from streamrl.sync.publisher import WeightPublisher

pytestmark = pytest.mark.asyncio


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
        await anyio.sleep_forever()
        raise AssertionError


async def test_a_push_that_takes_too_long_names_the_limit() -> None:
    clock = InstantClock()
    slow = SlowEngine(SimulationOptions(policy_version=4), clock=clock.now, sleep=clock.sleep)
    await slow.start()
    publisher = WeightPublisher([slow], Anchors().publish, in_flight=InFlight.KEEP, timeout_s=0.05)
    with pytest.raises(EngineError, match=r"within 0\.05 s \(weights\.advanced\.push_timeout_s\)"):
        await publisher.push(announced(5, 4))


async def test_it_says_which_engine_it_waits_for() -> None:
    clock = InstantClock()
    slow = SlowEngine(SimulationOptions(policy_version=4), clock=clock.now, sleep=clock.sleep)
    await slow.start()
    engines = {"engine-0": await engine_at(4), "engine-1": slow}
    names, waits = {engine: name for name, engine in engines.items()}, Waits()
    publisher = WeightPublisher(
        list(engines.values()),
        Anchors().publish,
        in_flight=InFlight.KEEP,
        timeout_s=5,
        waits=waits,
        name_of=lambda engine: names[engine],  # type: ignore[index]
    )
    async with anyio.create_task_group() as nursery:
        nursery.start_soon(publisher.push, announced(5, 4))
        await anyio.wait_all_tasks_blocked()
        assert [(wait.who, wait.what) for wait, _ in waits.open()] == [("the publisher", "engine-1 to fetch version 5")]
        nursery.cancel_scope.cancel()
    assert not waits.open()


class CountingEngine(SimulatedEngine):
    """Remembers in which order it was told to pause, commit and resume; refuses as many commits as it is told to."""

    def __init__(self, version: int, refusals: int = 0) -> None:
        clock = InstantClock()
        super().__init__(SimulationOptions(policy_version=version), clock=clock.now, sleep=clock.sleep)
        self.told: list[str] = []
        self.cleared: list[bool] = []
        self.refusals = refusals

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        self.told.append(f"pause {mode}")
        self.cleared.append(clear_cache)
        await super().pause(mode, clear_cache=clear_cache)

    async def commit(self, policy_version: int) -> OrderDone:
        self.told.append(f"commit {policy_version}")
        if self.refusals:
            self.refusals -= 1
            raise WeightError("planted")
        return await super().commit(policy_version)

    async def resume(self) -> None:
        self.told.append("resume")
        await super().resume()


def publisher_of(
    *engines: SimulatedEngine, in_flight: InFlight = InFlight.KEEP, on_hold: Callable[[bool], None] | None = None
) -> tuple[WeightPublisher, Anchors]:
    anchors = Anchors()
    return WeightPublisher(engines, anchors.publish, in_flight=in_flight, timeout_s=5, on_hold=on_hold), anchors


async def sampled_during(engine: SimulatedEngine, act: Callable[[], Awaitable[object]]) -> Completion:
    """What a request submitted before ``act`` samples in the end."""
    done: list[Completion] = []

    async def generate() -> None:
        request = Generate(request_id="r", token_ids=token_array([2]), max_tokens=20, seed=1, temperature=1.0)
        done.append(await engine.generate(request))

    async with anyio.create_task_group() as group:
        group.start_soon(generate)
        while not engine.load().waiting + engine.load().running:
            await anyio.lowlevel.checkpoint()
        await act()
    return done[0]


@pytest.mark.parametrize(
    ("in_flight", "pause", "clear"),
    [(InFlight.KEEP, "keep", False), (InFlight.RECOMPUTE, "keep", True), (InFlight.RESUME, "abort", True)],
)
async def test_a_push_after_a_hold_pauses_nothing_twice(in_flight: InFlight, pause: str, clear: bool) -> None:
    engines = [CountingEngine(4), CountingEngine(4)]
    publisher, _ = publisher_of(*engines, in_flight=in_flight)
    await publisher.hold()
    await publisher.hold()

    async def push() -> None:
        assert engines[0].load().generated_tokens == 0, "held: nothing is sampled before the push"
        report = await publisher.push(announced(5, 4))
        assert report.held_s > 0 and report.paused_s < report.held_s + report.total_s

    completion = await sampled_during(engines[0], push)
    assert {span.policy_version for span in completion.version_spans} == {5}
    assert all(engine.told == [f"pause {pause}", "commit 5", "resume"] for engine in engines)
    assert engines[0].cleared == [clear]
    report = await publisher.push(announced(6, 5))
    assert report.held_s == 0
    assert engines[1].told[3:] == [f"pause {pause}", "commit 6", "resume"], "the hold ended with its push"


async def test_a_hold_that_is_released_samples_under_the_live_version() -> None:
    engine = CountingEngine(4)
    publisher, _ = publisher_of(engine)
    await publisher.release()
    assert engine.told == [], "nothing was held"
    await publisher.hold()
    completion = await sampled_during(engine, publisher.release)
    assert {span.policy_version for span in completion.version_spans} == {4}
    assert engine.told == ["pause keep", "resume"]


async def test_a_held_engine_that_refuses_the_delta_is_reanchored_and_only_then_resumed() -> None:
    refuses, behind, sound = CountingEngine(4, refusals=1), CountingEngine(2), CountingEngine(4)
    publisher, anchors = publisher_of(refuses, behind, sound)
    await publisher.hold()
    report = await publisher.push(announced(5, 4))
    assert (report.reanchored, anchors.asked) == (2, [5])
    assert refuses.told == ["pause keep", "commit 5", "commit 5", "resume"]
    assert behind.told == ["pause keep", "commit 5", "resume"], "it refused to stage, and stayed paused"
    assert sound.told == ["pause keep", "commit 5", "resume"]


async def test_an_engine_that_joins_is_brought_to_the_live_version_and_then_gets_pushes() -> None:
    first, late = CountingEngine(4), CountingEngine(-1)
    publisher, anchors = publisher_of(first)
    await publisher.admit(late, 4)
    assert (anchors.asked, late.told) == ([4], ["pause keep", "commit 4", "resume"])
    assert (await publisher.push(announced(5, 4))).reanchored == 0
    await publisher.leave(late)
    await publisher.push(announced(6, 5))
    assert late.told[-2:] == ["commit 5", "resume"]
    await publisher.hold()
    await publisher.admit(late, 6)
    assert late.told[-2:] == ["pause keep", "commit 6"], "the others are held, and so is it"
    assert anchors.asked == [4], "what was pushed last did"
    await publisher.push(announced(7, 6))
    assert late.told[-2:] == ["commit 7", "resume"]
    with pytest.raises(EngineError, match="joined refused version 7: planted"):
        await publisher.admit(CountingEngine(-1, refusals=1), 7)


async def test_a_hold_is_told_once_when_it_begins_and_once_when_it_ended() -> None:
    told: list[bool] = []
    publisher, _ = publisher_of(CountingEngine(4), on_hold=told.append)
    await publisher.push(announced(5, 4))
    assert told == []
    await publisher.hold()
    await publisher.hold()
    assert told == [True]
    await publisher.push(announced(6, 5))
    assert told == [True, False]
    await publisher.hold()
    await publisher.release()
    assert told == [True, False, True, False]


# ---- engines that are behind -----------------------------------------------------------------------


class Service:
    """Remembers who was taken out and back; what catches up runs in a task group of the test."""

    def __init__(self, group: TaskGroup) -> None:
        self.group = group
        self.out: dict[SimulatedEngine, str] = {}
        self.told: list[str] = []
        self.changed = anyio.Event()

    async def take_out(self, engine: SimulatedEngine, reason: str) -> None:
        self.out[engine] = reason
        self.told.append("out")

    async def take_back(self, engine: SimulatedEngine) -> None:
        self.out.pop(engine, None)
        self.told.append("back")
        self.changed.set()

    def beside(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        self.group.start_soon(work)

    def lost(self, engine: SimulatedEngine, reason: str) -> bool:
        return False

    async def until_back(self) -> None:
        with anyio.fail_after(30):
            await self.changed.wait()
        self.changed = anyio.Event()


class StubbornEngine(CountingEngine):
    """Stages only when it is let; ``staging`` is set while somebody waits for that."""

    def __init__(self, version: int, refusals: int = 0) -> None:
        super().__init__(version, refusals)
        self.let, self.staging, self.cancelled = anyio.Event(), anyio.Event(), 0
        self.staged: list[WeightAnnouncement] = []

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        self.staged.append(announcement)
        self.staging.set()
        try:
            await self.let.wait()
        except BaseException:
            self.cancelled += 1
            raise
        return await super().stage(announcement)

    async def resume(self) -> None:
        await super().resume()
        self.staging = anyio.Event()


class FoldingEngine(StubbornEngine):
    """Asks for a delta on what it holds, as the real one does, and gets it."""

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        base = announcement.base_version and self._policy_version
        return await super().stage(msgspec.structs.replace(announcement, base_version=base))


async def test_an_engine_goes_on_as_soon_as_it_has_committed_whatever_the_others_do() -> None:
    fast, slow = StubbornEngine(4), StubbornEngine(4)
    publisher, _ = publisher_of(fast, slow)
    fast.let.set()
    async with anyio.create_task_group() as group:
        group.start_soon(publisher.push, announced(5, 4))
        with anyio.fail_after(30):
            while "resume" not in fast.told:
                await anyio.lowlevel.checkpoint()
        assert slow.told == [], "it generates while it fetches"
        slow.let.set()
    assert slow.told == fast.told == ["pause keep", "commit 5", "resume"]


async def test_an_engine_that_refuses_the_anchor_too_leaves_service_and_comes_back_by_the_next_one() -> None:
    sound, tainted = CountingEngine(4), CountingEngine(4, refusals=3)
    anchors = Anchors()
    async with anyio.create_task_group() as group:
        service = Service(group)
        publisher = WeightPublisher(
            [sound, tainted], anchors.publish, in_flight=InFlight.KEEP, timeout_s=5, service=service
        )
        report = await publisher.push(announced(5, 4))
        assert (report.reanchored, report.behind, list(service.out)) == (1, 1, [tainted])
        assert "planted" in service.out[tainted]
        assert anchors.asked == [5]
        await anyio.wait_all_tasks_blocked()
        assert tainted.refusals == 0, "beside the run it refused once more"
        assert tainted.told == ["pause keep", "commit 5", "commit 5", "commit 5"], "never resumed on what it holds"
        report = await publisher.push(announced(6, 5))
        assert (report.reanchored, report.behind, anchors.asked) == (0, 1, [5, 6])
        assert report.held_s == 0, "that one stands still is no hold of the others"
        await service.until_back()
        assert tainted.told[-2:] == ["commit 6", "resume"]
        report = await publisher.push(announced(7, 6))
        assert (report.reanchored, report.behind, anchors.asked) == (0, 0, [5, 6])
        assert tainted.told[-3:] == ["pause keep", "commit 7", "resume"], "a delta again"
    assert service.told == ["out", "back"]


@pytest.mark.parametrize("kind", [FoldingEngine, StubbornEngine])
async def test_an_engine_that_is_late_leaves_service_and_catches_up_beside_the_run(kind: type[StubbornEngine]) -> None:
    """By a delta over what it missed; one that gets none takes an anchor of the next version."""
    fast, slow = CountingEngine(4), kind(4)
    folds = kind is FoldingEngine
    anchors = Anchors()
    async with anyio.create_task_group() as group:
        service = Service(group)
        publisher = WeightPublisher(
            [fast, slow], anchors.publish, in_flight=InFlight.KEEP, timeout_s=5, service=service, patience_s=0.01
        )
        assert (await publisher.push(announced(5, 4))).behind == 1
        assert "still fetching version 5" in service.out[slow]
        assert slow.cancelled == 1
        assert (await publisher.push(announced(6, 5))).behind == 1, "nothing waits for it"
        await slow.staging.wait()
        assert slow.cancelled == 2, "it fetched version 5, which is of no use any more"
        assert slow.told == []
        slow.let.set()
        if not folds:
            await anyio.wait_all_tasks_blocked()
            assert (slow.told, anchors.asked) == ([], []), "it refused"
            assert (await publisher.push(announced(7, 6))).behind == 1
        await service.until_back()
        live = 6 if folds else 7
        assert slow.told == ["pause keep", f"commit {live}", "resume"]
        assert anchors.asked == ([] if folds else [7])
        assert [staged.policy_version for staged in slow.staged] == [5, 5, 6, 7][: live - 3]
        await publisher.hold()
        assert slow.told[-1] == "pause keep", "it is held with the others"
        assert (await publisher.push(announced(live + 1, live))).behind == 0


async def test_an_engine_that_is_behind_may_be_stopped_or_caught_by_a_hold() -> None:
    fast, gone, held = CountingEngine(4), StubbornEngine(4), StubbornEngine(4)
    async with anyio.create_task_group() as group:
        service = Service(group)
        publisher = WeightPublisher(
            [fast, gone, held],
            Anchors().publish,
            in_flight=InFlight.KEEP,
            timeout_s=5,
            service=service,
            patience_s=0.01,
        )
        assert (await publisher.push(announced(5, 4))).behind == 2
        await publisher.leave(gone)
        assert gone.cancelled == 2
        await publisher.hold()
        held.let.set()
        await service.until_back()
        assert held.told == ["pause keep", "commit 5"], "the others are held, and so is it"
        assert (await publisher.push(announced(6, 5))).behind == 0
        assert held.told[-2:] == ["commit 6", "resume"]


async def test_when_nobody_is_left_to_serve_the_run_ends_with_the_reason() -> None:
    async with anyio.create_task_group() as group:
        publisher = WeightPublisher(
            [CountingEngine(4, refusals=9)],
            Anchors().publish,
            in_flight=InFlight.KEEP,
            timeout_s=5,
            service=Service(group),
        )
        with pytest.raises(EngineError, match="refused version 5 as delta and as anchor: planted"):
            await publisher.push(announced(5, 4))


# ---- engines that are lost -------------------------------------------------------------------------


class ForgivingService(Service):
    """The run goes on without whoever is lost; remembers who that was, and why."""

    def __init__(self, group: TaskGroup) -> None:
        super().__init__(group)
        self.gone: dict[SimulatedEngine, str] = {}

    def lost(self, engine: SimulatedEngine, reason: str) -> bool:
        self.gone[engine] = reason
        return True


class DyingEngine(CountingEngine):
    """Its host dies at a word, or it hangs there; then nothing may be asked of it any more."""

    def __init__(self, version: int, word: str, *, hangs: bool = False) -> None:
        super().__init__(version)
        self.word, self.hangs, self.dead, self.asked = word, hangs, False, 0

    async def _reach(self, word: str) -> None:
        self.asked += self.dead
        if word == self.word or self.dead:
            self.dead = True
            if self.hangs:
                await anyio.sleep_forever()
            raise EngineError("its host is gone")

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        await self._reach("stage")
        return await super().stage(announcement)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self._reach("pause")
        await super().pause(mode, clear_cache=clear_cache)

    async def commit(self, policy_version: int) -> OrderDone:
        await self._reach("commit")
        return await super().commit(policy_version)

    async def resume(self) -> None:
        await self._reach("resume")
        await super().resume()


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("word", ["stage", "pause", "commit", "resume"])
async def test_an_engine_that_is_lost_at_any_step_is_left_out_and_another_takes_its_place(
    word: str, hangs: bool
) -> None:
    sound, dying, anchors = CountingEngine(4), DyingEngine(4, word, hangs=hangs), Anchors()
    async with anyio.create_task_group() as group:
        service = ForgivingService(group)
        publisher = WeightPublisher(
            [sound, dying],
            anchors.publish,
            in_flight=InFlight.KEEP,
            timeout_s=0.1 if hangs else 5,
            service=service,
        )
        await publisher.hold()
        report = await publisher.push(announced(5, 4))
        assert (report.behind, report.reanchored, list(service.gone)) == (0, 0, [dying])
        assert ("within 0.1 s" if hangs else "its host is gone") in service.gone[dying]
        assert sound.told == ["pause keep", "commit 5", "resume"]
        await publisher.push(announced(6, 5))
        await publisher.hold()
        await publisher.release()
        assert dying.asked == 0, "nothing is asked of the dead"
        fresh = CountingEngine(-1)
        publisher.join(fresh, ready(fresh))
        await service.until_back()
        assert anchors.asked == [6] and fresh.told == ["pause keep", "commit 6", "resume"]
        report = await publisher.push(announced(7, 6))
        assert report.reanchored == 0 and fresh.told[-2:] == ["commit 7", "resume"]


def ready(engine: SimulatedEngine, state_hash: int = 0, *, paused: bool = False) -> EngineReady:
    return EngineReady(
        engine="engine",
        policy_version=state_hash,
        max_model_len=1,
        max_num_seqs=1,
        state_hash=state_hash,
        paused=paused,
    )


async def test_all_may_be_lost_and_whoever_comes_takes_the_version_that_is_live() -> None:
    anchors = Anchors()
    async with anyio.create_task_group() as group:
        service = ForgivingService(group)
        publisher = WeightPublisher(
            [DyingEngine(4, "commit")], anchors.publish, in_flight=InFlight.KEEP, timeout_s=5, service=service
        )
        report = await publisher.push(announced(5, 4))
        assert (report.paused_s, report.behind) == (0.0, 0)
        fresh = CountingEngine(4)
        publisher.join(fresh, ready(fresh))
        await service.until_back()
        assert fresh.told == ["pause keep", "commit 5", "resume"] and not anchors.asked


class SlowToResume(CountingEngine):
    """Resumes when it is let, from the second time on."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.let = anyio.Event()

    async def resume(self) -> None:
        if "resume" in self.told:
            await self.let.wait()
        await super().resume()


async def test_who_comes_back_while_the_others_are_released_is_released_too() -> None:
    slow, fresh = SlowToResume(), CountingEngine(-1)
    async with anyio.create_task_group() as group:
        service = ForgivingService(group)
        publisher = WeightPublisher([slow], Anchors().publish, in_flight=InFlight.KEEP, timeout_s=5, service=service)
        await publisher.push(announced(5, None))
        await publisher.hold()
        group.start_soon(publisher.release)
        await anyio.wait_all_tasks_blocked()
        publisher.join(fresh, ready(fresh))
        await service.until_back()
        slow.let.set()
        await anyio.wait_all_tasks_blocked()
        assert fresh.told == ["pause keep", "commit 5", "resume"]


async def test_who_comes_before_anything_is_live_serves_after_the_first_push() -> None:
    fresh = CountingEngine(-1)
    async with anyio.create_task_group() as group:
        service = ForgivingService(group)
        publisher = WeightPublisher(
            [CountingEngine(-1)], Anchors().publish, in_flight=InFlight.KEEP, timeout_s=5, service=service
        )
        publisher.join(fresh, ready(fresh))
        await publisher.push(announced(5, None))
        await service.until_back()
        assert fresh.told == ["pause keep", "commit 5", "resume"]


@pytest.mark.parametrize("others", [0, 1])
async def test_who_refuses_the_live_version_waits_for_the_next_push_or_is_replaced_where_none_would_come(
    others: int,
) -> None:
    serving, anchors = [CountingEngine(4) for _ in range(others)], Anchors()
    async with anyio.create_task_group() as group:
        service = ForgivingService(group)
        publisher = WeightPublisher(
            [*serving, DyingEngine(4, "commit")], anchors.publish, in_flight=InFlight.KEEP, timeout_s=5, service=service
        )
        await publisher.push(announced(5, None))
        refusing = CountingEngine(-1, refusals=1)
        publisher.join(refusing, ready(refusing))
        await anyio.wait_all_tasks_blocked()
        assert ("no other serves" in service.gone.get(refusing, "")) is not bool(others)
        fresh = CountingEngine(-1)
        publisher.join(fresh, ready(fresh))
        await service.until_back()
        assert fresh.told == ["pause keep", "commit 5", "resume"]
        await publisher.push(announced(6, None))
        await anyio.wait_all_tasks_blocked()
        assert ("commit 6" in refusing.told) is bool(others)


async def test_where_the_trainer_has_left_the_live_version_the_next_one_is_waited_for() -> None:
    async def left(policy_version: int) -> WeightAnnouncement:
        if policy_version == 5:
            raise VersionLeft("version 5 is not held any more")
        return announced(policy_version, None)

    stranded: list[bool] = []
    async with anyio.create_task_group() as group:
        service = ForgivingService(group)
        dying = DyingEngine(4, "commit")
        publisher = WeightPublisher([dying], left, in_flight=InFlight.KEEP, timeout_s=5, service=service)
        publisher.stranded = lambda: stranded.append(True)
        await publisher.push(announced(5, 4))
        fresh = CountingEngine(-1)
        publisher.join(fresh, ready(fresh))
        await anyio.wait_all_tasks_blocked()
        assert stranded == [True] and list(service.gone) == [dying], "it is not replaced: another one could not either"
        await publisher.push(announced(6, 5))
        await service.until_back()
        assert fresh.told == ["pause keep", "commit 6", "resume"]


async def test_an_engine_that_joins_during_a_push_is_brought_to_its_version() -> None:
    slow, fresh, anchors = StubbornEngine(4), CountingEngine(-1), Anchors()
    async with anyio.create_task_group() as group:
        service = ForgivingService(group)
        publisher = WeightPublisher([slow], anchors.publish, in_flight=InFlight.KEEP, timeout_s=5, service=service)
        group.start_soon(publisher.push, announced(5, 4))
        await slow.staging.wait()
        publisher.join(fresh, ready(fresh))
        await anyio.wait_all_tasks_blocked()
        assert fresh.told == []
        slow.let.set()
        await service.until_back()
        assert fresh.told == ["pause keep", "commit 5", "resume"] and anchors.asked == [5]


async def test_an_engine_that_joins_after_a_failed_push_never_goes_back_to_the_version_before() -> None:
    returning, slow, anchors = CountingEngine(-1), StubbornEngine(-1), Anchors()
    slow.let.set()
    async with anyio.create_task_group() as group:
        service = ForgivingService(group)
        publisher = WeightPublisher(
            [returning, slow], anchors.publish, in_flight=InFlight.KEEP, timeout_s=5, service=service
        )
        await publisher.push(announced(4, None))
        slow.let = anyio.Event()
        async with anyio.create_task_group() as push:
            push.start_soon(publisher.push, announced(5, 4))
            await anyio.wait_all_tasks_blocked()
            assert returning.told[-2:] == ["commit 5", "resume"]
            push.cancel_scope.cancel()
        publisher.lose(returning)
        returning.told.clear()
        publisher.join(returning, ready(returning, 5))
        await anyio.wait_all_tasks_blocked()
        assert returning.told == [], "some engines hold version 5, and version 4 is over"
        slow.let.set()
        await publisher.push(announced(6, None))
        await service.until_back()
        assert returning.told == ["pause keep", "commit 6", "resume"]


@pytest.mark.parametrize(("held", "told"), [(5, ["resume"]), (4, ["commit 5", "resume"]), (0, ["commit 5", "resume"])])
async def test_an_engine_that_outlived_its_controller_is_sent_only_what_it_does_not_hold(
    held: int, told: list[str]
) -> None:
    engine = CountingEngine(4)
    publisher, _ = publisher_of(engine)
    publisher.greeted(engine, ready(engine, held, paused=True))
    await engine.pause(PauseMode.ABORT, clear_cache=True)
    engine.told.clear()
    await publisher.push(announced(5, None))
    assert engine.told == told, "it stood still already"
    await publisher.push(announced(6, None))
    assert engine.told[-3:] == ["pause keep", "commit 6", "resume"]
