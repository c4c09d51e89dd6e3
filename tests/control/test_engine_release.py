"""Engines are freed under a running stage and are back for the next round, on simulated engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec
import pytest

from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineLoad, WeightAnnouncement
from streamrl.base.stage_messages import FinishedTrajectory, LaunchTrajectory
from streamrl.base.types import Prompt, TrajectoryId, token_array
from streamrl.comm.memory_stream import memory_stream
from streamrl.control.actions import Explain
from streamrl.elastic.engine_planning import PlanningSettings
from streamrl.elastic.engine_release import EngineRelease, EngineSizes
from streamrl.engines.engine_pool import LOST, EnginePool
from streamrl.engines.simulated.engine import InstantClock, LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.recipe.scheduling import InFlight
from streamrl.stages.rollout import RolloutStage
from streamrl.sync.publisher import WeightPublisher

pytestmark = pytest.mark.asyncio


class PacedEngine(SimulatedEngine):
    """Says that a token takes a second, of the real clock: what runs has no token yet, as far as is known."""

    def __init__(self, index: int, *, pace: float = 1.0) -> None:
        clock = InstantClock()
        lengths = LengthMixture(median=60.0, sigma=0.6, long_share=0.0)
        options = SimulationOptions(name=f"engine-{index}", lengths=lengths)
        super().__init__(options, clock=clock.now, sleep=clock.sleep)
        self.pace = pace

    def load(self) -> EngineLoad:
        return msgspec.structs.replace(super().load(), token_s=self.pace)


class MemoryHosts:
    """Engines that are stopped and made anew; ``never`` is waited for before one is ready."""

    def __init__(self, pool: EnginePool, make: Callable[[int], PacedEngine]) -> None:
        self.pool, self.make = pool, make
        self.told: list[str] = []
        self.starting = anyio.Event()
        self.never: anyio.Event | None = None

    def detach(self, name: str) -> SimulatedEngine:
        engine = self.pool.detach(name)
        assert isinstance(engine, SimulatedEngine) and not engine.load().running
        self.told.append(f"detach {name}")
        return engine

    async def stop(self, name: str) -> None:
        self.told.append(f"stop {name}")

    async def start(self, name: str) -> SimulatedEngine:
        self.starting.set()
        if self.never is not None:
            await self.never.wait()
        engine = self.make(int(name[-1]))
        await self.pool.attach(name, engine)
        self.told.append(f"start {name}")
        return engine

    async def give_up(self, name: str) -> None:
        self.told.append(f"give up {name}")


async def anchor(policy_version: int) -> WeightAnnouncement:
    return WeightAnnouncement(policy_version=policy_version, base_version=None, state_hash=policy_version, sources=())


class Rounds:
    """Rounds of 32 trajectories on four engines. ``looks``: why engines were freed, or not, in the last one."""

    def __init__(
        self,
        *,
        pace: float = 1.0,
        stops: bool = False,
        start_timeout_s: float = 10.0,
        fatal_deaths: int | None = None,
    ) -> None:
        self.engines = [PacedEngine(index, pace=pace) for index in range(4)]
        self.pool = EnginePool(self.engines, fatal_deaths=fatal_deaths)
        self.publisher = WeightPublisher(self.engines, anchor, in_flight=InFlight.KEEP, timeout_s=5)
        self.hosts = MemoryHosts(self.pool, self.make)
        self.cores: list[int] = []
        self.release = EngineRelease(
            self.pool,
            EngineSizes(kv_tokens=4_000, max_num_seqs=32, cap=300),
            publisher=self.publisher,
            share_cores=self.share_cores,
            hosts=self.hosts if stops else None,
            start_timeout_s=start_timeout_s,
            settings=PlanningSettings(least_lengths=4),
        )
        self.teach()
        self.version = -1
        self.finished: list[FinishedTrajectory] = []
        self.looks: list[Explain] = []

    def lose(self, name: str) -> None:
        """Its host dies, and whoever sees to that says so."""
        engine = self.engines[int(name[-1])]
        engine.fail(f"{name}: killed")
        self.pool.lose(name)
        self.publisher.lose(engine)

    def make(self, index: int) -> PacedEngine:
        self.engines[index] = PacedEngine(index)
        return self.engines[index]

    def teach(self) -> None:
        """Lengths of long rounds before the first one."""
        for number, tokens in enumerate(range(20, 120, 2)):
            identity = TrajectoryId(prompt_id="before", group_id=-1, sample=number)
            self.release.launched("long", [identity])
            self.release.ended(identity, tokens)

    async def share_cores(self, freed: int) -> None:
        self.cores.append(freed)

    async def decided(self, decision: Explain, done: bool) -> None:
        assert done == bool(self.release.freed)
        self.looks.append(decision)

    async def next_version(self) -> None:
        self.version += 1
        await self.publisher.push(await anchor(self.version))
        await self.release.begin_round(self.version)

    async def run(self) -> None:
        """One round, on the next version."""
        give, orders = memory_stream(64)
        outcomes, take = memory_stream(64)
        await self.next_version()
        stage = RolloutStage(self.pool, max_tokens=300, temperature=1.0, top_p=1.0)
        self.finished, self.looks = [], []
        ids = [TrajectoryId(prompt_id="p", group_id=n // 4, sample=n % 4, attempt=self.version) for n in range(32)]
        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                group.start_soon(stage.run, orders, outcomes)
                group.start_soon(self.release.run, self.decided)
                self.release.launched("long", ids)
                for number, identity in enumerate(ids):
                    prompt = Prompt(prompt_id="p", token_ids=token_array([2, 3 + number // 4]))
                    await give.send(LaunchTrajectory(id=identity, prompt=prompt, group_size=4, seed=number))
                await give.aclose()
                async for outcome in take:
                    assert isinstance(outcome, FinishedTrajectory)
                    self.finished.append(outcome)
                    self.release.ended(outcome.trajectory.id, outcome.trajectory.generated_tokens)
                group.cancel_scope.cancel()


async def started(rounds: Rounds) -> Rounds:
    await rounds.pool.start()
    await rounds.run()
    return rounds


def assert_all_once(rounds: Rounds) -> None:
    assert len({o.trajectory.id for o in rounds.finished}) == len(rounds.finished) == 32
    for outcome in rounds.finished:
        assert outcome.trajectory.oldest_version == outcome.trajectory.newest_version == rounds.version


@pytest.mark.parametrize("stops", [False, True])
async def test_half_of_the_engines_are_freed_once_and_everything_ends_on_the_others(stops: bool) -> None:
    rounds = await started(Rounds(stops=stops))
    freed = rounds.release.freed
    assert len(freed) == 2 and rounds.release.serving == 2
    [look] = rounds.looks
    assert look.subject == "engines_freed" and look.figures["moved"] > 0
    assert 0.2 <= look.figures["progress"] < 0.3, "freed as soon as the window opened"
    assert_all_once(rounds)
    for name in freed:
        assert rounds.engines[int(name[-1])].load().running == 0
    assert sorted(rounds.pool.attached) == sorted(set(rounds.pool.names) - (set(freed) if stops else set()))
    assert rounds.cores == [2]
    before, generated = list(rounds.engines), [engine.load().generated_tokens for engine in rounds.engines]
    await rounds.run()
    assert_all_once(rounds)
    assert rounds.cores == [2, 0, 2], "the cores went back before the next round"
    anew = [f"engine-{i}" for i in range(4) if rounds.engines[i] is not before[i]]
    assert anew == (sorted(freed) if stops else [])
    for index, engine in enumerate(rounds.engines):
        assert engine.load().generated_tokens > (0 if engine is not before[index] else generated[index]), "it served"
    assert [told for told in rounds.hosts.told if "start" in told] == [f"start {name}" for name in anew]


async def test_without_a_pace_nothing_is_freed() -> None:
    rounds = await started(Rounds(pace=0.0))
    assert rounds.release.freed == () and not rounds.looks and not rounds.cores


async def test_a_stopped_engine_gets_no_push_and_comes_back_at_the_live_version() -> None:
    rounds = await started(Rounds(stops=True))
    [index, _] = [int(name[-1]) for name in rounds.release.freed]
    gone = rounds.engines[index]
    await rounds.next_version()
    back = rounds.engines[index]
    assert (await gone.start()).policy_version == 0 and (await back.start()).policy_version == 1
    await rounds.next_version()
    assert (await back.start()).policy_version == 2, "later pushes reach it"


async def test_processes_that_were_called_back_early_are_not_started_twice() -> None:
    rounds = await started(Rounds(stops=True))
    freed = sorted(rounds.release.freed)
    rounds.hosts.told.clear()
    await rounds.release.call_back()
    assert sorted(rounds.hosts.told) == [f"start {name}" for name in freed]
    assert sorted(rounds.release.freed) == freed and len(rounds.pool.serving) == 2, "they serve nothing yet"
    await rounds.run()
    assert_all_once(rounds)
    assert [t for t in rounds.hosts.told if "start" in t] == [f"start {name}" for name in freed]
    # And one that was ready when the run was asked to end is not left on old weights.
    await rounds.release.call_back()
    rounds.release.give_up()
    await rounds.next_version()
    assert not rounds.release.freed and len(rounds.pool.serving) == 4
    assert [(await engine.start()).policy_version for engine in rounds.engines] == [rounds.version] * 4


async def during_a_start(rounds: Rounds, act: Callable[[], Awaitable[None]]) -> None:
    """The next version, while no freed engine becomes ready; ``act`` once they are being started."""
    rounds.hosts.never, rounds.hosts.starting = anyio.Event(), anyio.Event()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(rounds.next_version)
            await rounds.hosts.starting.wait()
            await act()


async def test_a_start_is_given_up_when_the_run_ends_and_nothing_is_freed_afterwards() -> None:
    rounds = await started(Rounds(stops=True))
    freed = rounds.release.freed

    async def stop() -> None:
        rounds.release.give_up()

    await during_a_start(rounds, stop)
    assert rounds.release.freed == freed
    assert sorted(t for t in rounds.hosts.told if "up" in t) == [f"give up {name}" for name in sorted(freed)]
    rounds.hosts.told.clear()
    await rounds.run()  # what is left of the run: an evaluation, say
    assert_all_once(rounds)
    assert not rounds.hosts.told and not rounds.looks and rounds.release.freed == freed


async def test_nothing_is_freed_once_the_run_ends() -> None:
    rounds = Rounds()
    await rounds.pool.start()
    rounds.release.give_up()
    await rounds.run()
    assert_all_once(rounds)
    assert not rounds.looks and not rounds.release.freed


async def test_a_start_that_takes_too_long_names_the_engines_and_the_limit() -> None:
    rounds = await started(Rounds(stops=True, start_timeout_s=0.05))
    names = ", ".join(rounds.release.freed)
    with pytest.raises(ExceptionGroup) as raised:
        await during_a_start(rounds, anyio.lowlevel.checkpoint)
    [error] = raised.value.exceptions
    assert isinstance(error, EngineError)
    assert str(error).startswith(f"{names}: not ready within 0.05 s") and "engines.advanced.start_timeout_s" in str(
        error
    )


async def test_an_engine_that_others_drained_gets_nothing_and_is_not_readmitted() -> None:
    rounds = Rounds()
    await rounds.pool.start()
    await rounds.pool.drain("engine-2", by="weights")
    for _ in range(2):
        await rounds.run()
        assert_all_once(rounds)
        assert "engine-2" not in rounds.release.freed and len(rounds.release.freed) == 1
    assert rounds.engines[2].load().generated_tokens == 0


async def test_late_results_of_the_last_round_do_not_count() -> None:
    rounds = Rounds()
    await rounds.pool.start()
    late = [TrajectoryId(prompt_id="late", group_id=100, sample=n) for n in range(32)]
    rounds.release.launched("long", late)
    await rounds.next_version()
    fresh = [TrajectoryId(prompt_id="p", group_id=101, sample=n) for n in range(32)]
    rounds.release.launched("long", fresh)
    for identity in late:
        rounds.release.ended(identity, 50)
    async with anyio.create_task_group() as group:
        group.start_soon(rounds.release.run, rounds.decided)
        await anyio.wait_all_tasks_blocked()
        assert not rounds.release.freed and not rounds.looks
        for identity in fresh[:7]:
            rounds.release.ended(identity, 50)
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert len(rounds.release.freed) == 2


async def test_an_engine_that_dies_while_it_is_drained_is_the_error() -> None:
    rounds = Rounds()
    migrate = rounds.pool.migrate

    async def dying(request_ids: Sequence[str], to: str) -> None:
        for name in rounds.release.freed:
            rounds.engines[int(name[-1])].fail(f"{name}: killed")
        await migrate(request_ids, to)

    rounds.pool.migrate = dying  # type: ignore[method-assign]
    await rounds.pool.start()
    with pytest.raises(BaseExceptionGroup) as raised:
        await rounds.run()
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EngineError) and ": killed" in str(error)


async def test_an_engine_that_is_lost_while_it_is_drained_serves_again_when_it_is_back() -> None:
    rounds = Rounds(fatal_deaths=9)
    migrate, lost = rounds.pool.migrate, list[str]()

    async def dying(request_ids: Sequence[str], to: str) -> None:
        if not lost:
            lost.append(rounds.release.freed[0])
            rounds.lose(lost[0])
        await migrate(request_ids, to)

    rounds.pool.migrate = dying  # type: ignore[method-assign]
    await started(rounds)
    assert_all_once(rounds)
    assert len(rounds.release.freed) == 2 and lost[0] in rounds.release.freed
    await rounds.next_version()
    assert rounds.cores == [2, 0] and set(rounds.pool.serving) == set(rounds.pool.names) - set(lost)
    await rounds.pool.attach(lost[0], rounds.make(int(lost[0][-1])))
    rounds.pool.readmit(lost[0], by=LOST)
    assert rounds.pool.serving == rounds.pool.names, "nobody else keeps it from requests"


async def test_an_engine_that_requests_were_to_move_to_is_lost_before() -> None:
    rounds = Rounds(fatal_deaths=9)
    migrate, targets = rounds.pool.migrate, list[str]()

    async def dying(request_ids: Sequence[str], to: str) -> None:
        targets.append(to)
        await migrate(request_ids, to)
        for other in set(rounds.pool.serving) - {to, *rounds.release.freed}:
            rounds.lose(other)

    rounds.pool.migrate = dying  # type: ignore[method-assign]
    await started(rounds)
    assert_all_once(rounds)
    assert len(targets) == 1, "the plan had two"


async def test_freed_engines_serve_again_when_those_that_served_are_lost() -> None:
    rounds = Rounds(fatal_deaths=9)
    share_cores, freed = rounds.share_cores, list[str]()

    async def dying(count: int) -> None:
        await share_cores(count)
        if not freed:
            freed.extend(rounds.release.freed)
            for name in rounds.pool.serving:
                rounds.lose(name)

    rounds.release._share_cores = dying
    await started(rounds)
    assert_all_once(rounds)
    assert rounds.cores[:2] == [2, 0] and set(rounds.pool.attached) == set(freed)
