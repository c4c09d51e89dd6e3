"""Engines are freed under a running stage and serve again in the next round, on simulated engines."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec
import pytest
from builders.base import InstantClock
from builders.stages import episodes_on
from builders.weights import anchor

from streamrl.base.errors import EngineError
from streamrl.base.messages import EngineLoad
from streamrl.base.stage_messages import LaunchTrajectory, Scored, TrajectoryLost, TrajectoryOutcome
from streamrl.base.types import Prompt, Trajectory, TrajectoryId, token_array
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.control.actions import Decision, LaunchGroup, StepOptimizer
from streamrl.control.events import StopRequested
from streamrl.engines.elastic.elastic_engines import ElasticEngines
from streamrl.engines.elastic.engine_sets import SetChooser
from streamrl.engines.elastic.freeing import Freeing, FreeingSettings
from streamrl.engines.pool import UNAVAILABLE, EnginePool
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.recipe.scheduling import InFlight
from streamrl.recipe.topology import PreparedSet


class PacedEngine(SimulatedEngine):
    """Says that a token takes a second, of the real clock: what runs has no token yet, as far as is known."""

    def __init__(self, index: int, *, pace: float = 1.0) -> None:
        clock = InstantClock()
        lengths = LengthMixture(median=60.0, sigma=0.6, long_share=0.0)
        options = SimulationOptions(name=f"engine-{index}", lengths=lengths)
        super().__init__(options, clock=clock.now, sleep=clock.sleep)
        self.pace = pace

    def load(self) -> EngineLoad:
        load = super().load()
        steps = load.decode_steps if self.pace else 0
        return msgspec.structs.replace(load, decode_steps=steps, decode_s=steps * self.pace)


def launch(ids: Sequence[TrajectoryId], version: int) -> LaunchGroup:
    return LaunchGroup(group_id=0, ids=tuple(ids), policy_version=version, seed_base=0, round_kind="long")


class Rounds:
    """Rounds of 32 trajectories on four engines. ``looks``: why engines were freed, or not, in the last one."""

    def __init__(self, *, pace: float = 1.0, fatal_deaths: int | None = None) -> None:
        self.engines = {f"engine-{index}": PacedEngine(index, pace=pace) for index in range(4)}
        self.pool = EnginePool(self.engines, fatal_deaths=fatal_deaths)
        self.sync = WeightSync(self.engines, anchor, in_flight=InFlight.KEEP, timeout_s=300)
        self.cores: list[int] = []
        freeing = Freeing(300, settings=FreeingSettings(least_lengths=4))
        for number, tokens in enumerate(range(20, 120, 2)):  # of long rounds before the first one
            identity = TrajectoryId(prompt_id="before", group_id=-1, sample=number)
            freeing.note_launch("long", [identity])
            freeing.note_end(identity, tokens)
        freeing.begin_round()
        one = PreparedSet(count=4, tensor_parallel_size=1, kv_tokens=4_000, max_num_seqs=32)
        store = TrajectoryStore()
        store.add_prompts([Prompt(prompt_id="p", token_ids=token_array([2, 3]))])
        self.elastic = ElasticEngines(
            self.pool,
            None,  # type: ignore[arg-type] - no set is changed
            SetChooser([one], steps=100, switch_s=1.0),
            store,
            on_decision=self.decided,
            freeing=freeing,
            share_cores=self.share_cores,
        )
        self.version = -1
        self.finished: list[Trajectory] = []
        self.looks: list[Decision] = []

    def lose(self, name: str) -> None:
        """Its host dies, and recovery says so."""
        self.engines[name].fail(f"{name}: killed")
        self.pool.lose(name)
        self.sync.remove(self.engines[name])

    async def share_cores(self, freed: int) -> None:
        self.cores.append(freed)

    async def decided(self, decision: Decision, step: int, shown: bool) -> None:
        assert shown <= bool(self.elastic.freed)
        self.looks.append(decision)

    async def next_version(self) -> None:
        self.version += 1
        await self.elastic.on_weights_live(await self.sync.push(await anchor(self.version)), last=False)

    async def run(self) -> None:
        """One round, on the next version."""
        await self.next_version()
        episodes = episodes_on(self.pool)
        self.finished, self.looks = [], []
        ids = [TrajectoryId(prompt_id="p", group_id=n // 4, sample=n % 4, attempt=self.version) for n in range(32)]
        async with anyio.create_task_group() as group:
            group.start_soon(self.elastic.run, print)
            await self.elastic.on_action(launch(ids, self.version))
            async with episodes.running():
                for number, identity in enumerate(ids):
                    prompt = Prompt(prompt_id="p", token_ids=token_array([2, 3 + number // 4]))
                    order = LaunchTrajectory(id=identity, prompt=prompt, group_size=4, seed=number)
                    episodes.launch(order, self.take)
            await self.elastic.on_action(
                StepOptimizer(batch_id=0, policy_version=1, groups=8, samples=32, trained_tokens=1)
            )
            group.cancel_scope.cancel()
        assert len({trajectory.id for trajectory in self.finished}) == len(self.finished) == 32
        for trajectory in self.finished:
            assert trajectory.oldest_version == trajectory.newest_version == self.version

    async def take(self, outcome: TrajectoryOutcome) -> None:
        assert isinstance(outcome, Scored)
        self.finished.append(outcome.outcome.trajectory)
        self.elastic.on_outcome(outcome)


async def started(rounds: Rounds) -> Rounds:
    await rounds.pool.start()
    await rounds.run()
    return rounds


async def test_half_of_the_engines_are_freed_once() -> None:
    """Half of the engines are freed once, and all requests end on the others."""
    rounds = await started(Rounds())
    freed = rounds.elastic.freed
    assert len(freed) == 2 and len(rounds.pool.serving) == 2
    [look] = rounds.looks
    assert look.subject == "engines_freed" and look.figures["moved"] > 0
    assert 0.2 <= look.figures["progress"] < 0.3, "freed as soon as the window opened"
    assert not any(rounds.engines[name].load().running for name in freed)
    assert sorted(rounds.pool.attached) == sorted(rounds.pool.names) and rounds.cores == [2]
    generated = {name: engine.load().generated_tokens for name, engine in rounds.engines.items()}
    await rounds.run()
    assert rounds.cores == [2, 0, 2], "the cores went back before the next round"
    assert all(engine.load().generated_tokens > generated[name] for name, engine in rounds.engines.items()), "it served"


async def test_without_a_pace_or_once_the_run_ends_nothing_is_freed() -> None:
    paceless, ending = Rounds(pace=0.0), Rounds()
    await ending.elastic.on_event(StopRequested(reason="drained"))
    for rounds in (paceless, ending):
        await started(rounds)
        assert rounds.elastic.freed == () and not rounds.looks and not rounds.cores


async def test_an_engine_drained_by_others_is_left_alone() -> None:
    """An engine that others drained gets no requests, and is not readmitted."""
    rounds = Rounds()
    await rounds.pool.start()
    await rounds.pool.drain("engine-2", "weights")
    for _ in range(2):
        await rounds.run()
        assert "engine-2" not in rounds.elastic.freed and len(rounds.elastic.freed) == 1
    assert rounds.engines["engine-2"].load().generated_tokens == 0


async def test_an_engine_that_dies_while_it_is_drained_is_the_error() -> None:
    rounds = Rounds()
    patch_migrate(rounds, before=lambda to: [rounds.engines[n].fail(f"{n}: killed") for n in rounds.elastic.freed])
    with pytest.raises(BaseExceptionGroup) as raised:
        await started(rounds)
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EngineError) and ": killed" in str(error)


def patch_migrate(
    rounds: Rounds, *, before: Callable[[str], object] = lambda to: None, after: Callable[[str], object] | None = None
) -> None:
    """Do something as requests migrate."""
    migrate = rounds.pool.migrate

    async def migrating(request_ids: Sequence[str], to: str) -> None:
        before(to)
        await migrate(request_ids, to)
        if after is not None:
            after(to)

    rounds.pool.migrate = migrating  # type: ignore[method-assign]


async def test_an_engine_lost_while_drained_serves_again() -> None:
    """An engine that is lost while it is drained serves again when it is back."""
    rounds, lost = Rounds(fatal_deaths=9), list[str]()

    def lose(to: str) -> None:
        if not lost:
            lost.append(rounds.elastic.freed[0])
            rounds.lose(lost[0])

    patch_migrate(rounds, before=lose)
    await started(rounds)
    assert len(rounds.elastic.freed) == 2 and lost[0] in rounds.elastic.freed
    await rounds.next_version()
    assert rounds.cores == [2, 0] and set(rounds.pool.serving) == set(rounds.pool.names) - set(lost)
    await rounds.pool.attach(lost[0], PacedEngine(int(lost[0][-1])))
    rounds.pool.readmit(lost[0], UNAVAILABLE)
    assert rounds.pool.serving == rounds.pool.names, "nothing else keeps it from requests"


async def test_an_engine_that_requests_were_to_move_to_is_lost_before() -> None:
    rounds, targets = Rounds(fatal_deaths=9), list[str]()

    def lose(to: str) -> None:
        for other in set(rounds.pool.serving) - {to, *rounds.elastic.freed}:
            rounds.lose(other)

    patch_migrate(rounds, before=targets.append, after=lose)
    await started(rounds)
    assert len(targets) == 1, "the plan had two"


async def test_freed_engines_replace_lost_ones() -> None:
    """Freed engines serve again when the engines that served are lost."""
    rounds, freed = Rounds(fatal_deaths=9), list[str]()
    share_cores: Callable[[int], Awaitable[None]] = rounds.share_cores

    async def dying(count: int) -> None:
        await share_cores(count)
        if not freed:
            freed.extend(rounds.elastic.freed)
            for name in rounds.pool.serving:
                rounds.lose(name)

    rounds.elastic._share_cores = dying
    await started(rounds)
    assert rounds.cores[:2] == [2, 0] and set(rounds.pool.attached) == set(freed)


async def test_a_lost_trajectory_counts_as_finished() -> None:
    rounds = Rounds()
    await rounds.pool.start()
    await rounds.next_version()
    ids = [TrajectoryId(prompt_id="p", group_id=0, sample=n) for n in range(10)]
    async with anyio.create_task_group() as group:
        await rounds.elastic.on_action(launch(ids, 0))
        group.start_soon(rounds.elastic.run, print)
        for identity in ids[:3]:
            rounds.elastic.on_outcome(TrajectoryLost(id=identity, cancelled=True, reason="", tokens=0))
        await anyio.wait_all_tasks_blocked()
        group.cancel_scope.cancel()
    assert len(rounds.elastic.freed) == 2
