"""Routing, broadcasts and the checks that only a pool can make."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import anyio
import pytest
from builders.base import InstantClock
from builders.stages import episodes_on
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.base.errors import EngineError
from streamrl.base.messages import Generate, PauseMode, WeightAnnouncement
from streamrl.base.stage_messages import LaunchTrajectory, Scored, TrajectoryOutcome
from streamrl.base.types import Completion, FinishReason, Prompt, Trajectory, TrajectoryId, token_array
from streamrl.engines.pool import UNAVAILABLE, EnginePool
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.resumption import part_id
from streamrl.engines.routing import REMEMBERED_PROMPTS, SIBLING_SLACK
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.recipe.scheduling import InFlight

MakeRequest = Callable[..., Generate]


def pool_of(engines: Sequence[SimulatedEngine], **options: object) -> EnginePool:
    return EnginePool({f"engine-{index}": engine for index, engine in enumerate(engines)}, **options)  # type: ignore[arg-type]


class RecordingEngine(SimulatedEngine):
    """Remembers what it was asked to generate."""

    def __init__(self, index: int, **options: object) -> None:
        clock = InstantClock()
        lengths = LengthMixture(median=50.0, sigma=0.0, long_share=0.0)
        super().__init__(
            SimulationOptions(**{"name": f"engine-{index}", "lengths": lengths, **options}),
            clock=clock.now,
            sleep=clock.sleep,
        )
        self.asked: list[str] = []
        self.pieces: dict[str, Completion] = {}

    async def generate(self, request: Generate) -> Completion:
        self.asked.append(request.request_id)
        completion = self.pieces[request.request_id] = await super().generate(request)
        return completion


def announcement(version: int, base: int | None) -> WeightAnnouncement:
    return WeightAnnouncement(policy_version=version, base_version=base, state_hash=7, sources=())


async def anchor(version: int) -> WeightAnnouncement:
    return announcement(version, None)


async def generate_all(pool: EnginePool, requests: list[Generate]) -> None:
    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(pool.generate, request)


def open_on(pool: EnginePool, *names: str) -> list[str]:
    """Ids of the requests that these engines serve; all by default."""
    served = pool.open_requests()
    return [request.request_id for name in names or served for request in served[name]]


async def test_siblings_stay_together_and_prompts_spread(make_request: MakeRequest) -> None:
    engines = [RecordingEngine(0), RecordingEngine(1)]
    requests = [
        make_request(request_id=f"{prompt}.{sample}", token_ids=token_array([prompt + 2, 3]))
        for prompt in range(8)
        for sample in range(4)
    ]
    await generate_all(pool_of(engines), requests)
    assert [len(engine.asked) for engine in engines] == [16, 16]
    prompts = [{request_id.split(".")[0] for request_id in engine.asked} for engine in engines]
    assert not prompts[0] & prompts[1]


async def test_prompts_that_are_remembered_take_little_room(make_request: MakeRequest) -> None:
    pool = pool_of([RecordingEngine(0), RecordingEngine(1)])
    for number in range(REMEMBERED_PROMPTS + 100):
        pool.route(make_request(token_ids=token_array([number, *[7] * 500])))
    assert len(pool._router._siblings) == REMEMBERED_PROMPTS
    assert max(sys.getsizeof(key) for key in pool._router._siblings) < 100


async def test_one_large_group_is_shared_out(make_request: MakeRequest) -> None:
    engines = [RecordingEngine(0), RecordingEngine(1)]
    await generate_all(pool_of(engines), [make_request(token_ids=token_array([5, 3])) for _ in range(64)])
    counts = sorted(len(engine.asked) for engine in engines)
    assert counts[1] - counts[0] <= SIBLING_SLACK + 1


async def test_turns_go_to_the_engine_of_the_turn_before(make_request: MakeRequest) -> None:
    engines = [RecordingEngine(0), RecordingEngine(1)]
    pool = pool_of(engines)

    async def turn(number: int) -> list[set[str]]:
        """Trajectories that each engine served in this turn of all eight, which come in another order each time."""
        asked = [make_request(request_id=f"{i}.0.0/{number}", token_ids=token_array([i, number])) for i in range(8)]
        await generate_all(pool, asked[number:] + asked[:number])
        return [{i.partition(".")[0] for i in engine.asked if i.endswith(f"/{number}")} for engine in engines]

    first = await turn(0)
    assert await turn(1) == await turn(3) == first and len(first[0]) == 4
    pool.paused = lambda: ("engine-1",)
    assert (await turn(4))[1] == set(), "what it has cached is lost by the pause"
    pool.paused = tuple
    await pool.drain("engine-0", "test")
    assert (await turn(5))[0] == set()
    pool.readmit("engine-0", "test")
    assert (await turn(6))[0] == set(), "they stay where the drain sent them"
    for one in range(8):
        pool.forget_trajectory(f"{one}.0.0")
    assert not pool._router._turns


async def test_open_tokens_decide(make_request: MakeRequest) -> None:
    engines = [RecordingEngine(0), RecordingEngine(1)]
    pool = pool_of(engines)
    long = make_request(token_ids=token_array([2]), max_tokens=1000)
    short = [make_request(token_ids=token_array([3 + i]), max_tokens=10) for i in range(6)]
    await generate_all(pool, [long, *short])
    assert engines[0].asked == [long.request_id]
    assert len(engines[1].asked) == 6


async def test_abort_goes_to_the_engine_that_serves(make_request: MakeRequest) -> None:
    engines = [RecordingEngine(0), RecordingEngine(1)]
    pool = pool_of(engines)
    for engine in engines:
        await engine.pause(PauseMode.KEEP, clear_cache=False)
    requests = [make_request(token_ids=token_array([2 + i])) for i in range(4)]
    async with anyio.create_task_group() as group:
        for request in requests:
            group.start_soon(pool.generate, request)
        await anyio.lowlevel.checkpoint()
        assert pool.load().waiting == 4
        await pool.abort([request.request_id for request in requests] + ["unknown"])
    assert pool.load().waiting == 0


async def test_engines_of_one_pool_are_of_one_model() -> None:
    with pytest.raises(EngineError, match="engine-1 has max_model_len 64, engine-0 has 4096"):
        await pool_of([RecordingEngine(0), RecordingEngine(1, max_model_len=64)]).start()
    with pytest.raises(EngineError, match=r"engines\.count"):
        EnginePool({})


# ---- draining and migration, with the stage that asks for the rest --------------------------------------


class Roll:
    """Episodes on a pool of ``count`` engines with trajectories under way."""

    def __init__(self, count: int, trajectories: int, **options: object) -> None:
        lengths = LengthMixture(median=120.0, sigma=0.3, long_share=0.0)
        self.engines = [RecordingEngine(i, policy_version=0, lengths=lengths, **options) for i in range(count)]
        self.pool = pool_of(self.engines)
        self.launched = trajectories
        self.version = 0
        self.finished: list[Trajectory] = []

    async def run(self, during: Callable[[], Awaitable[None]]) -> None:
        await self.pool.start()
        episodes = episodes_on(self.pool)
        async with episodes.running():
            for sample in range(self.launched):
                episodes.launch(self.launch(sample), self.take)
            await self.until(lambda: self.pool.load().running == self.launched)
            await during()
        self.check()

    async def take(self, outcome: TrajectoryOutcome) -> None:
        assert isinstance(outcome, Scored)
        self.finished.append(outcome.outcome.trajectory)

    @staticmethod
    def launch(sample: int) -> LaunchTrajectory:
        identity = TrajectoryId(prompt_id="p", group_id=sample // 4, sample=sample % 4)
        prompt = Prompt(prompt_id="p", token_ids=token_array([2, 3 + sample // 4]))
        return LaunchTrajectory(id=identity, prompt=prompt, group_size=4, seed=sample)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if condition():
                return
            await anyio.lowlevel.checkpoint()
        raise AssertionError("it never came true")

    async def steps(self, count: int) -> None:
        for _ in range(count):
            await anyio.lowlevel.checkpoint()

    async def push(self) -> None:
        self.version += 1
        sync = WeightSync(self.pool.attached, anchor, in_flight=InFlight.KEEP, timeout_s=300)
        await sync.push(announcement(self.version, self.version - 1))

    def running(self) -> list[int]:
        return [engine.load().running for engine in self.engines]

    def check(self) -> None:
        """Each ends once; its parts, in order, wherever they ran, are its tokens; spans follow the parts."""
        assert Counter(o.id for o in self.finished) == {self.launch(i).id: 1 for i in range(self.launched)}
        asked = Counter(request for engine in self.engines for request in engine.asked)
        assert set(asked.values()) == {1}, "nothing is asked for twice"
        pieces = {request: piece for engine in self.engines for request, piece in engine.pieces.items()}
        for trajectory in self.finished:
            [segment] = trajectory.segments
            parts = [part_id(str(trajectory.id), part) for part in range(len(pieces))]
            mine = [pieces[part] for part in parts if part in pieces]
            assert segment.token_ids == sum((piece.token_ids for piece in mine[1:]), mine[0].token_ids)
            assert all(piece.finish_reason is FinishReason.ABORT for piece in mine[:-1])
            versions = [s.policy_version for piece in mine for s in piece.version_spans for _ in range(s.end - s.start)]
            told = [s.policy_version for s in segment.version_spans for _ in range(s.end - s.start)]
            assert told == versions and len(told) == len(segment.token_ids)


async def test_requests_of_a_drained_engine_go_on_elsewhere() -> None:
    """A drained engine ends empty, and its requests go on elsewhere."""
    roll = Roll(3, 24)

    async def during() -> None:
        await roll.steps(30)
        moved = open_on(roll.pool, "engine-1")
        assert moved
        await roll.pool.drain("engine-1", "test")
        assert roll.engines[1].load().running == 0
        served = {name: {r.request_id for r in requests} for name, requests in roll.pool.open_requests().items()}
        assert served["engine-1"] == set() and len(served["engine-0"] | served["engine-2"]) == 24
        went_on = [r for r in roll.pool.open_requests()["engine-0"] if r.request_id.endswith("/1")]
        assert all((r.prompt, r.sampled > 0) == (2, True) for r in went_on)
        assert all(roll.engines[1].pieces[request].token_ids for request in moved), "they had sampled something"
        await roll.push()  # the drained engine is not left out
        before = list(roll.engines[1].asked)
        await roll.until(lambda: roll.pool.load().running < 12)
        assert roll.engines[1].asked == before
        assert roll.engines[1]._policy_version == 1

    await roll.run(during)
    moved_versions = {s.policy_version for o in roll.finished for s in o.segments[0].version_spans}
    assert moved_versions == {0, 1}


async def test_a_readmitted_engine_gets_requests_again() -> None:
    roll = Roll(2, 8)

    async def during() -> None:
        await roll.steps(5)
        await roll.pool.drain("engine-0", "test")
        with pytest.raises(EngineError, match="engine-0 is drained"):
            await roll.pool.migrate(open_on(roll.pool), to="engine-0")
        assert roll.running()[0] == 0
        roll.pool.readmit("engine-0", "test")
        await roll.pool.drain("engine-1", "test")
        await roll.until(lambda: roll.running() == [8, 0])

    await roll.run(during)


async def test_requests_of_a_lost_engine_are_reported() -> None:
    """The requests of a lost engine are reported until it has come back."""
    roll = Roll(2, 8)

    async def during() -> None:
        await roll.steps(5)
        before = roll.pool.open_requests()
        assert len(before["engine-0"]) == 4
        roll.pool.lose("engine-0")
        assert roll.pool.open_requests() == before and tuple(roll.pool.loads()) == ("engine-1",)

    await roll.run(during)
    assert roll.pool.open_requests() == {"engine-1": ()}


async def test_requests_wait_while_no_engine_serves() -> None:
    """While no engine serves, requests wait, and an aborted one comes back truncated."""
    roll = Roll(2, 8)

    async def during() -> None:
        await roll.steps(5)
        roll.pool.withdraw(roll.pool.names, "set")
        for name in roll.pool.names:
            await roll.pool.drain(name, "set")
        assert roll.running() == [0, 0] and roll.pool.serving == () and not roll.finished
        waiting = await waited_for(roll.pool, 8)
        await roll.pool.abort(waiting[:2])  # a cut that nobody asked for: the stage asks for the rest at once
        assert await waited_for(roll.pool, 8) != waiting
        before = [list(engine.asked) for engine in roll.engines]
        roll.pool.readmit("engine-1", "somebody else")
        assert [list(engine.asked) for engine in roll.engines] == before
        roll.pool.readmit("engine-1", "set")
        await roll.until(lambda: roll.running() == [0, 8])

    await roll.run(during)
    assert len(roll.finished) == 8


async def waited_for(pool: EnginePool, count: int) -> list[str]:
    """Once so many requests wait for an engine that serves."""
    while len(pool._waiting) < count:
        await anyio.lowlevel.checkpoint()
    return list(pool._waiting)


async def test_an_absent_engine_joins_while_another_leaves() -> None:
    """An absent engine joins later, and another one may leave before that."""
    engines = [RecordingEngine(0), RecordingEngine(1)]
    pool = pool_of(engines[:1], unavailable=["engine-1"])
    await pool.start()
    assert (pool.names, tuple(pool.attached), pool.serving) == (("engine-0", "engine-1"), ("engine-0",), ("engine-0",))
    with pytest.raises(EngineError, match="engine-1 is detached"):
        pool.readmit("engine-1", UNAVAILABLE)
    pool.withdraw(["engine-0"], UNAVAILABLE)
    await pool.drain("engine-0", UNAVAILABLE)
    pool.detach("engine-0")
    assert pool.load().kv_cache_usage == 0.0 and not pool.attached
    assert (await pool.attach("engine-1", engines[1])).engine == "engine-1"
    pool.readmit("engine-1", UNAVAILABLE)
    assert pool.serving == ("engine-1",)


async def test_an_engine_drained_twice_needs_two_readmissions(make_request: MakeRequest) -> None:
    """An engine that two callers have drained serves when both have readmitted it."""
    engines = [RecordingEngine(0), RecordingEngine(1)]
    pool = pool_of(engines)
    for by in ("release", "weights"):
        await pool.drain("engine-0", by)
    pool.readmit("engine-0", "release")
    await generate_all(pool, [make_request() for _ in range(8)])
    assert not engines[0].asked and pool.serving == ("engine-1",)
    pool.readmit("engine-0", "weights")
    await pool.drain("engine-1", "release")
    await generate_all(pool, [make_request()])
    assert len(engines[0].asked) == 1 and pool.serving == ("engine-0",)


async def test_single_requests_migrate_to_the_engine_that_is_named() -> None:
    roll = Roll(3, 12)

    async def during() -> None:
        await roll.steps(10)
        moving = open_on(roll.pool, "engine-0")[:2]
        stay = open_on(roll.pool, "engine-2")
        await roll.pool.migrate([*moving, *stay, "unknown/0"], to="engine-2")
        await roll.until(lambda: all(part.replace("/0", "/1") in roll.engines[2].asked for part in moving))
        assert set(stay) <= set(open_on(roll.pool)), "what is there already is not cut"

    await roll.run(during)
    assert sum(len(engine.asked) for engine in roll.engines) == 12 + 2


class DeafEngine(RecordingEngine):
    """Misses the first ``deaf`` aborts, as an engine does that has not registered the request yet."""

    deaf = 2

    async def abort(self, request_ids: list[str]) -> None:
        if self.deaf:
            self.deaf -= 1
            return
        await super().abort(request_ids)


async def test_a_drain_tells_an_abort_again_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.engines.pool.ABORT_AGAIN_SECONDS", 0.0)
    roll = Roll(1, 8)
    deaf = DeafEngine(1, policy_version=0, lengths=LengthMixture(median=290.0, sigma=0.0, long_share=0.0))
    roll.engines.append(deaf)
    roll.pool = pool_of(roll.engines)

    async def during() -> None:
        assert deaf.load().running == 4
        await roll.pool.drain("engine-1", "test")
        assert deaf.load().running == 0 and not deaf.deaf
        assert all(piece.finish_reason is FinishReason.ABORT for piece in deaf.pieces.values())

    await roll.run(during)


async def test_a_stopped_engine_is_replaced_by_one_of_the_same_model() -> None:
    roll = Roll(2, 8)

    async def during() -> None:
        await roll.until(lambda: roll.engines[1].load().generated_tokens > 0)
        with pytest.raises(EngineError, match="engine-1 serves 4 requests; drain it before it is detached"):
            roll.pool.detach("engine-1")
        await roll.pool.drain("engine-1", "test")
        sampled = roll.pool.load().generated_tokens
        await roll.pool.detach("engine-1").aclose()
        assert roll.engines[1].load().generated_tokens > 0
        assert roll.pool.load().generated_tokens >= sampled, "counters never fall"
        await roll.push()  # the stopped one is left out of everything
        assert roll.pool.load().running == 8
        with pytest.raises(EngineError, match="engine-1 is detached"):
            roll.pool.readmit("engine-1", "test")
        with pytest.raises(EngineError, match="max_model_len 64, engine-0 has 4096"):
            await roll.pool.attach("engine-1", RecordingEngine(1, max_model_len=64))
        late = RecordingEngine(1)
        await roll.pool.attach("engine-1", late)
        with pytest.raises(EngineError, match="its place is taken"):
            await roll.pool.attach("engine-1", RecordingEngine(1))
        await late.stage(announcement(1, None))
        await late.pause(PauseMode.KEEP, clear_cache=True)
        await late.commit(1)
        await late.resume()
        roll.engines.append(late)
        roll.pool.readmit("engine-1", "test")
        await roll.pool.drain("engine-0", "test")
        await roll.until(lambda: late.load().running == 8)
        roll.pool.readmit("engine-0", "test")
        await roll.push()

    await roll.run(during)


@settings(max_examples=40, deadline=None)
@given(
    script=st.lists(
        st.tuples(st.sampled_from(["drain", "readmit", "migrate", "push", "abort", "steps"]), st.integers(0, 2)),
        max_size=20,
    )
)
async def test_drains_and_moves_lose_and_repeat_nothing(script: list[tuple[str, int]]) -> None:
    """Whatever is drained or moved, no request is lost or sampled twice."""
    roll = Roll(3, 12)

    async def during() -> None:
        for word, index in script:
            name = f"engine-{index}"
            match word:
                case "drain" if len(roll.pool._drained.keys() | {name}) < 3:
                    await roll.pool.drain(name, "test")
                    assert roll.engines[index].load().running == 0
                case "readmit":
                    roll.pool.readmit(name, "test")
                case "migrate" if name not in roll.pool._drained:
                    await roll.pool.migrate(open_on(roll.pool)[::2], to=name)
                case "push":
                    await roll.push()
                case "abort":
                    for engine in roll.engines:
                        await engine.pause(PauseMode.ABORT, clear_cache=True)
                        await engine.resume()
                case "steps":
                    await roll.steps(10 * index + 3)

    await roll.run(during)
