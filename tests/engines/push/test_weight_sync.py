"""A push over several engines, some of which refuse it, are late, die, or are started again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection

import anyio
import pytest
from builders.base import InstantClock

from streamrl.base.errors import EngineError, VersionLeft, WeightError
from streamrl.base.messages import Generate, OrderDone, PauseMode, WeightAnnouncement, WeightSource
from streamrl.base.types import Completion, token_array
from streamrl.base.waits import Waits
from streamrl.contracts import Engine
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.simulated.engine import SimulatedEngine, SimulationOptions
from streamrl.recipe.scheduling import InFlight


def announced(version: int, base: int | None) -> WeightAnnouncement:
    source = WeightSource(
        rank=0, endpoint="", manifest_digest="", payload_bytes=8, changed_elements=1, total_elements=4
    )
    return WeightAnnouncement(policy_version=version, base_version=base, state_hash=version, sources=(source,))


class Trainer:
    """Publishes versions complete; ``left``: versions that it holds no more."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.left: set[int] = set()

    async def publish_anchor(self, policy_version: int) -> WeightAnnouncement:
        self.asked.append(policy_version)
        if policy_version in self.left:
            raise VersionLeft(f"version {policy_version} is not held any more")
        return announced(policy_version, None)


class Recorded(SimulatedEngine):
    """Remembers the order of its calls to pause, commit and resume. Refuses as many commits as ``refusals``; waits
    in the step ``at`` until ``let`` is set, or dies there; ``lies``: about what it holds."""

    def __init__(self, version: int, *, refusals: int = 0, waits: str = "", dies: str = "", lies: bool = False) -> None:
        clock = InstantClock()
        super().__init__(SimulationOptions(policy_version=version), clock=clock.now, sleep=clock.sleep)
        self.told: list[str] = []
        self.cleared: list[bool] = []
        self.refusals, self.waits, self.dies, self.lies = refusals, waits, dies, lies
        self.let, self.reached, self.dead, self.asked_when_dead = anyio.Event(), anyio.Event(), False, 0

    async def _reach(self, step: str) -> None:
        self.asked_when_dead += self.dead
        if step == self.dies or self.dead:
            self.dead = True
            raise EngineError("its process is gone")
        if step == self.waits:
            self.reached.set()
            await self.let.wait()

    async def stage(self, announcement: WeightAnnouncement) -> OrderDone:
        await self._reach("stage")
        return await super().stage(announcement)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self._reach("pause")
        self.told.append(f"pause {mode}")
        self.cleared.append(clear_cache)
        await super().pause(mode, clear_cache=clear_cache)

    async def commit(self, policy_version: int) -> OrderDone:
        await self._reach("commit")
        self.told.append(f"commit {policy_version}")
        if self.refusals:
            self.refusals -= 1
            raise WeightError("planted")
        done = await super().commit(policy_version)
        return OrderDone(order_id=0, seconds=done.seconds, state_hash=done.state_hash + 1) if self.lies else done

    async def resume(self) -> None:
        await self._reach("resume")
        self.told.append("resume")
        await super().resume()


class Run:
    """A sync over ``engines``; with ``tolerates``, engines may fail and are noted in ``failed``."""

    def __init__(
        self,
        *engines: SimulatedEngine,
        tolerates: bool = True,
        timeout_s: float = 300.0,
        in_flight: InFlight = InFlight.KEEP,
    ) -> None:
        self.trainer = Trainer()
        self.failed: dict[Engine, str] = {}
        self.pauses: list[bool] = []
        self.waits = Waits()
        self.routes: list[tuple[int | None, str, tuple[str, ...]]] = []
        self.sync = WeightSync(
            {f"engine-{index}": engine for index, engine in enumerate(engines)},
            self.trainer.publish_anchor,
            in_flight=in_flight,
            timeout_s=timeout_s,
            on_pause=self.pauses.append,
            on_failure=self.on_failure if tolerates else None,
            waits=self.waits,
            add_relays=self.with_relays,
        )

    def with_relays(self, announced: WeightAnnouncement, name: str, engines: Collection[str]) -> WeightAnnouncement:
        self.routes.append((announced.base_version, name, tuple(engines)))
        return announced

    def on_failure(self, engine: Engine, reason: str) -> bool:
        self.failed[engine] = reason
        return True


TAKEN = ["pause keep", "commit 5", "resume"]


async def test_an_engine_on_another_base_gets_the_anchor() -> None:
    """An engine on another base gets the anchor, and the others take the delta."""
    run = Run(Recorded(4), Recorded(2))
    assert ((await run.sync.push(announced(5, 4))).reanchored, run.trainer.asked) == (1, [5])
    assert (await run.sync.push(announced(6, 5))).reanchored == 0, "after the anchor both hold the same base"
    await run.sync.admit("engine-9", Recorded(-1))
    both, joined = ("engine-0", "engine-1"), ("engine-9", ("engine-0", "engine-1"))
    delta = [(base, name, both) for base in (4, 5) for name in both]
    anchor = [(None, "engine-1", ("engine-1",))]
    assert run.routes == [*delta[:2], *anchor, *delta[2:], (5, *joined), (None, *joined)]


async def test_an_engine_resumes_as_soon_as_it_has_committed() -> None:
    """An engine goes on as soon as it has committed, whatever the others do."""
    fast, slow = Recorded(4), Recorded(4, waits="stage")
    run = Run(fast, slow)
    async with anyio.create_task_group() as group:
        group.start_soon(run.sync.push, announced(5, 4))
        await anyio.wait_all_tasks_blocked()
        assert (fast.told, slow.told) == (TAKEN, []), "it generates while it fetches"
        assert [(w.who, w.event) for w, _ in run.waits.open()] == [("the weight sync", "engine-1 to fetch version 5")]
        slow.let.set()
    assert slow.told == TAKEN and not run.waits.open() and run.pauses == [], "one of them computes at any time"


@pytest.mark.parametrize("tolerates", [False, True])
async def test_an_engine_that_refuses_the_anchor_is_left_out(tolerates: bool) -> None:
    """An engine that refuses the anchor too is left out, or ends the run with its reason."""
    sound, broken = Recorded(4), Recorded(4, refusals=9)
    run = Run(sound, broken, tolerates=tolerates)
    reason = "engine-1 refused version 5 as delta and as anchor: planted"
    if not tolerates:
        with pytest.raises(EngineError, match=reason):
            await run.sync.push(announced(5, 4))
        return
    await run.sync.push(announced(5, 4))
    assert run.failed == {broken: reason} and sound.told == TAKEN
    assert broken.told == ["pause keep", "commit 5", "commit 5"], "never resumed on what it holds"
    await run.sync.push(announced(6, 5))
    assert broken.told[-1] == "commit 5", "later pushes leave it out"


async def test_a_wrong_state_hash_is_never_resumed_on() -> None:
    lying = Recorded(4, lies=True)
    with pytest.raises(EngineError, match="live weights hash to"):
        await Run(lying, tolerates=False).sync.push(announced(5, 4))
    assert "resume" not in lying.told


async def test_a_push_that_takes_too_long_names_the_limit() -> None:
    run = Run(Recorded(4, waits="stage"), tolerates=False, timeout_s=0.05)
    with pytest.raises(EngineError, match=r"within 0\.05 s \(weights\.advanced\.push_timeout_s\)"):
        await run.sync.push(announced(5, 4))


# ---- pauses ahead of a push ----------------------------------------------------------------------------


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
async def test_a_push_after_a_pause_pauses_nothing_twice(in_flight: InFlight, pause: str, clear: bool) -> None:
    engines = [Recorded(4), Recorded(4)]
    run = Run(*engines, in_flight=in_flight)
    await run.sync.pause()
    await run.sync.pause()

    async def push() -> None:
        assert engines[0].load().generated_tokens == 0, "paused: nothing is sampled before the push"
        report = await run.sync.push(announced(5, 4))
        assert report.paused_s <= report.total_s

    completion = await sampled_during(engines[0], push)
    assert {span.policy_version for span in completion.version_spans} == {5}
    assert all(engine.told == [f"pause {pause}", "commit 5", "resume"] for engine in engines)
    assert engines[0].cleared == [clear] and run.pauses == [True, False]
    await run.sync.push(announced(6, 5))
    assert engines[1].told[3:] == [f"pause {pause}", "commit 6", "resume"], "the pause ended with its push"


async def test_a_pause_without_a_push_samples_by_the_live_version() -> None:
    engine = Recorded(4)
    run = Run(engine)
    await run.sync.resume()
    assert engine.told == [] and run.pauses == [], "nothing was paused"
    await run.sync.pause()
    completion = await sampled_during(engine, run.sync.resume)
    assert {span.policy_version for span in completion.version_spans} == {4}
    assert engine.told == ["pause keep", "resume"] and run.pauses == [True, False]
    await run.sync.push(announced(5, 4))
    assert run.pauses == [True, False] * 2, "it computes nothing while it commits"


async def test_a_paused_engine_resumes_after_its_anchor() -> None:
    """A paused engine that refuses the delta gets the anchor, and resumes only then."""
    refuses, behind, sound = Recorded(4, refusals=1), Recorded(2), Recorded(4)
    run = Run(refuses, behind, sound)
    await run.sync.pause()
    assert ((await run.sync.push(announced(5, 4))).reanchored, run.trainer.asked) == (2, [5])
    assert refuses.told == ["pause keep", "commit 5", "commit 5", "resume"]
    assert behind.told == sound.told == TAKEN


# ---- engines that fail, and those that are started again -----------------------------------------------


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("step", ["stage", "pause", "commit", "resume"])
async def test_an_engine_that_fails_in_a_push_is_replaced(step: str, late: bool) -> None:
    """An engine that fails at any step of a push is left out, and another takes its place."""
    failing = Recorded(4, waits=step) if late else Recorded(4, dies=step)
    sound = Recorded(4)
    run = Run(sound, failing, timeout_s=0.1 if late else 300.0)
    await run.sync.pause()
    report = await run.sync.push(announced(5, 4))
    assert report.reanchored == 0 and list(run.failed) == [failing]
    assert ("within 0.1 s" if late else "its process is gone") in run.failed[failing]
    assert sound.told == TAKEN
    await run.sync.push(announced(6, 5))
    await run.sync.pause()
    await run.sync.resume()
    assert failing.asked_when_dead == 0, "nothing is asked of the dead"
    fresh = Recorded(-1)
    await run.sync.admit("engine-1", fresh)
    assert run.trainer.asked == [6] and fresh.told == ["pause keep", "commit 6", "resume"]
    assert (await run.sync.push(announced(7, 6))).reanchored == 0 and fresh.told[-2:] == ["commit 7", "resume"]


async def test_the_next_engine_takes_the_live_version_if_all_fail() -> None:
    """All engines may fail; the next one to come takes the version that is live."""
    run = Run(Recorded(4, dies="commit"))
    assert (await run.sync.push(announced(5, 4))).paused_s == 0.0
    fresh = Recorded(4)
    await run.sync.admit("engine-0", fresh)
    assert fresh.told == TAKEN and not run.trainer.asked


async def test_an_engine_that_joins_is_brought_to_its_version() -> None:
    """An engine that joins before or during a push is brought to the version of that push."""
    slow, first, second = Recorded(4, waits="stage"), Recorded(4), Recorded(-1)
    run = Run(slow)
    async with anyio.create_task_group() as group:
        group.start_soon(run.sync.admit, "engine-1", first)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(run.sync.push, announced(5, 4))
        await slow.reached.wait()
        group.start_soon(run.sync.admit, "engine-2", second)
        await anyio.wait_all_tasks_blocked()
        assert first.told == second.told == []
        slow.let.set()
    assert first.told == second.told == TAKEN and run.trainer.asked == [5]


@pytest.mark.parametrize(("refusals", "commits"), [(0, ["commit 5"]), (2, ["commit 5", "commit 5"])])
async def test_an_overtaken_engine_serves_only_the_newer_version(refusals: int, commits: list[str]) -> None:
    """An engine that a push overtakes serves only with the newer version. Also where the push had the trainer drop the
    anchor that the engine was fetching."""
    slow = Recorded(-1, waits="commit", refusals=refusals)
    run = Run(Recorded(-1))
    await run.sync.push(announced(5, None))
    async with anyio.create_task_group() as group:
        group.start_soon(run.sync.admit, "engine-1", slow)
        await slow.reached.wait()
        await run.sync.push(announced(6, 5))
        slow.waits = ""
        slow.let.set()
    assert slow.told == ["pause keep", *commits, "commit 6", "resume"] and not run.failed


async def test_an_engine_that_joins_while_all_are_paused_is_paused_too() -> None:
    fresh = Recorded(-1)
    run = Run(Recorded(-1))
    await run.sync.push(announced(5, None))
    await run.sync.pause()
    await run.sync.admit("engine-1", fresh)
    assert fresh.told == TAKEN[:2]
    await run.sync.resume()
    assert fresh.told == TAKEN


async def test_what_was_removed_gets_no_push() -> None:
    leaving = Recorded(4)
    run = Run(Recorded(4), leaving)
    await run.sync.push(announced(5, 4))
    run.sync.remove(leaving)
    await run.sync.push(announced(6, 5))
    assert leaving.told == TAKEN


async def test_a_started_engine_that_refuses_the_anchor_is_named() -> None:
    run = Run(Recorded(-1))
    await run.sync.push(announced(5, None))
    with pytest.raises(EngineError, match="engine-1 refused version 5 as delta and as anchor: planted"):
        await run.sync.admit("engine-1", Recorded(-1, refusals=2))


@pytest.mark.parametrize("others", [0, 1])
async def test_the_next_version_is_awaited_if_the_live_one_is_gone(others: int) -> None:
    """Where the trainer has left the live version, the next version is waited for."""
    run = Run(*(Recorded(4) for _ in range(others)), Recorded(4, dies="commit"))
    left: list[bool] = []
    run.sync.on_version_left = lambda: left.append(True)
    run.trainer.left = {5}
    await run.sync.push(announced(5, 4))
    fresh = Recorded(-1)
    async with anyio.create_task_group() as group:
        group.start_soon(run.sync.admit, "engine-1", fresh)
        await anyio.wait_all_tasks_blocked()
        assert left == [True] * (not others), "no engine holds it any more"
        await run.sync.push(announced(6, 5))
    assert fresh.told == ["pause keep", "commit 6", "resume"]


async def test_no_engine_goes_back_after_a_failed_push() -> None:
    """After a failed push no engine goes back to the version before."""
    first, slow, joining = Recorded(-1), Recorded(-1), Recorded(-1)
    run = Run(first, slow)
    await run.sync.push(announced(4, None))
    slow.waits = "stage"
    async with anyio.create_task_group() as push:
        push.start_soon(run.sync.push, announced(5, 4))
        await slow.reached.wait()
        await anyio.wait_all_tasks_blocked()
        assert first.told[-2:] == ["commit 5", "resume"]
        push.cancel_scope.cancel()
    slow.let.set()
    async with anyio.create_task_group() as group:
        group.start_soon(run.sync.admit, "engine-2", joining)
        await anyio.wait_all_tasks_blocked()
        assert joining.told == [], "some engines hold version 5, and version 4 is over"
        await run.sync.push(announced(6, None))
    assert joining.told == ["pause keep", "commit 6", "resume"]
