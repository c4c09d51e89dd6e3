"""Trajectories that control pauses, resumes and cancels: nothing lost, nothing twice, tokens and version spans kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest
from builders.base import InstantClock, identity
from builders.stages import ZeroRewards, episodes_on
from builders.weights import anchor
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.base.errors import RequestRefused
from streamrl.base.messages import Generate, PauseMode
from streamrl.base.stage_messages import (
    LaunchTrajectory,
    SampledSoFar,
    Scored,
    TrajectoryLost,
    TrajectoryOutcome,
    TrajectoryPaused,
)
from streamrl.base.types import Completion, FinishReason, Prompt, Trajectory, TrajectoryId, VersionSpan, token_array
from streamrl.contracts import Journal
from streamrl.engines.resumption import completion_id_of
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.stages.episodes import Episode, EpisodeCancelled, Episodes, OpenTrajectory, completion_or, one_completion

LONG = LengthMixture(median=200, sigma=0.01, long_share=0.0)


def launch(sample: int) -> LaunchTrajectory:
    prompt = Prompt(prompt_id="p", token_ids=token_array([2, 3]))
    return LaunchTrajectory(id=identity(sample), prompt=prompt, group_size=2, seed=7 + sample)


Order = Callable[[Episodes], None]


def pause(sample: int) -> Order:
    return lambda episodes: episodes.pause([identity(sample)])


def resume(sample: int) -> Order:
    return lambda episodes: episodes.resume([identity(sample)])


def cancel(sample: int) -> Order:
    return lambda episodes: episodes.cancel([identity(sample)])


class RecordingEngine(SimulatedEngine):
    """Remembers every request and what it returned for it."""

    def __init__(self, lengths: LengthMixture = LONG) -> None:
        clock = InstantClock()
        options = SimulationOptions(lengths=lengths, policy_version=0)
        super().__init__(options, clock=clock.now, sleep=clock.sleep)
        self.pieces: dict[str, Completion] = {}
        self.asked: dict[str, Generate] = {}

    async def generate(self, request: Generate) -> Completion:
        assert request.request_id not in self.asked, "asked for twice"
        self.asked[request.request_id] = request
        completion = await super().generate(request)
        self.pieces[request.request_id] = completion
        return completion

    async def push(self, version: int) -> None:
        await self.stage(await anchor(version))
        await self.pause(PauseMode.KEEP, clear_cache=False)
        await self.commit(version)
        await self.resume()


class Bench:
    """Episodes that run, with what was heard of them so far."""

    def __init__(self, engine: RecordingEngine, **options: Any) -> None:
        self.engine = engine
        self.stage = episodes_on(engine, **options)
        self.seen: list[Any] = []

    async def take(self, outcome: TrajectoryOutcome) -> None:
        self.seen.append(outcome)

    def launch(self, *samples: int) -> None:
        for sample in samples:
            self.stage.launch(launch(sample), self.take)

    def order(self, *orders: Order) -> None:
        for order in orders:
            order(self.stage)

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if condition():
                return
            await anyio.lowlevel.checkpoint()
        raise AssertionError("it never came true")

    async def steps(self, count: int) -> None:
        """Let so many tokens be sampled."""
        wanted = self.engine.load().generated_tokens + count
        await self.until(lambda: self.engine.load().generated_tokens >= wanted)

    def of(self, kind: type) -> list[Any]:
        return [outcome for outcome in self.seen if isinstance(outcome, kind)]

    @property
    def paused(self) -> dict[int, int]:
        return {outcome.id.sample: outcome.tokens for outcome in self.of(TrajectoryPaused)}


ANSWER = token_array([9, 9, 8])


def talk(turns: int) -> Episode:
    """An episode of so many turns, with ``ANSWER`` between them."""

    async def episode(model: OpenTrajectory) -> None:
        await model.sample()
        for _ in range(turns - 1):
            await model.sample(ANSWER)

    return episode


async def roll(
    during: Callable[[Bench], Awaitable[None]],
    lengths: LengthMixture = LONG,
    launched: int = 2,
    engine: RecordingEngine | None = None,
    **options: Any,
) -> Bench:
    """Launch, let ``during`` interfere once all run, end the orders, and wait for every outcome."""
    bench = Bench(engine or RecordingEngine(lengths), **options)
    await bench.engine.start()
    async with bench.stage.running():
        bench.launch(*range(launched))
        await bench.until(lambda: bench.engine.load().running == launched)
        await during(bench)
    ends = Counter(
        outcome.outcome.trajectory.id if isinstance(outcome, Scored) else outcome.id
        for outcome in bench.seen
        if not isinstance(outcome, TrajectoryPaused)
    )
    assert ends == {identity(sample): 1 for sample in range(launched)}, "each ends exactly once"
    assert bench.stage.statistics().running == 0
    return bench


def assert_joined(bench: Bench, sample: int) -> Trajectory:
    """The finished trajectory is its parts in order, each asked for with all tokens before it and a seed of its own."""
    [finished] = [o.outcome.trajectory for o in bench.of(Scored) if o.outcome.trajectory.id.sample == sample]
    turns, segments = [token_array()], finished.segments
    seeds = set()
    parts = len([i for i in bench.engine.asked if i.startswith(f"{identity(sample)}/")])
    for part in range(parts):
        request = bench.engine.asked[f"{identity(sample)}/{part}"]
        assert request.token_ids == sum(turns, token_array([2, 3]))
        assert request.prefix_length == len(turns[-1])
        piece = bench.engine.pieces[request.request_id]
        if piece.token_ids:
            assert request.seed not in seeds, "noise is never repeated"
            seeds.add(request.seed)
        turns[-1] += piece.token_ids
        if piece.finish_reason is not FinishReason.ABORT and part < parts - 1:
            turns += [ANSWER, token_array()]
    assert [(segment.token_ids, segment.trained) for segment in segments] == [
        (tokens, place % 2 == 0) for place, tokens in enumerate(turns)
    ]
    for segment in segments[::2]:
        assert len(segment.behavior_logprobs) == len(segment.token_ids)
        assert [span.start for span in segment.version_spans] == [0, *(span.end for span in segment.version_spans[:-1])]
        assert segment.version_spans[-1].end == len(segment.token_ids)
    assert isinstance(finished, Trajectory) and finished.generated_tokens == sum(map(len, turns[::2]))
    return finished


async def test_a_prompt_has_its_own_limit_of_tokens() -> None:
    """The engine gets the limit of the prompt's set where it is lower than that of the run."""
    bench = Bench(RecordingEngine(), max_tokens=300)
    async with bench.stage.running():
        for sample, limit in enumerate((0, 5, 400)):
            order = launch(sample)
            bench.stage.launch(replace(order, prompt=replace(order.prompt, max_tokens=limit)), bench.take)
        await bench.until(lambda: len(bench.of(Scored)) == 3)
    assert [request.max_tokens for request in bench.engine.asked.values()] == [300, 5, 300]
    lengths = sorted(scored.outcome.trajectory.generated_tokens for scored in bench.of(Scored))
    assert lengths[0] == 5


async def test_a_prompt_with_tokens_needs_no_environment() -> None:
    """Beside episodes, whose environment writes the prompt, a prompt with tokens is sampled as one completion."""

    async def episode(model: OpenTrajectory) -> None:
        await model.sample(ANSWER)
        await model.sample(ANSWER)

    bench = Bench(RecordingEngine(), episode=completion_or(episode))
    async with bench.stage.running():
        bench.launch(0)
        order = launch(1)
        bench.stage.launch(replace(order, prompt=replace(order.prompt, token_ids=token_array())), bench.take)
        await bench.until(lambda: len(bench.of(Scored)) == 2)
    turns = {scored.outcome.trajectory.id.sample: scored.outcome.trajectory.segments for scored in bench.of(Scored)}
    assert [segment.trained for segment in turns[0]] == [True]
    assert [segment.trained for segment in turns[1]] == [False, True, False, True]
    assert bench.engine.asked[f"{identity(0)}/0"].token_ids == token_array([2, 3])


async def test_a_paused_trajectory_goes_on_with_the_next_version() -> None:
    """A paused trajectory leaves the engine and goes on from its tokens with the next version."""
    at_pause: list[float] = []

    async def during(bench: Bench) -> None:
        await bench.steps(40)
        bench.order(pause(0))
        await bench.until(lambda: bool(bench.paused))
        assert bench.engine.load().running == 1
        assert bench.stage.statistics().running == 1
        await bench.engine.push(1)
        await bench.until(lambda: bool(bench.of(Scored)))
        assert bench.engine.load().running == 0, "the paused one is not in the engine"
        at_pause.append(bench.stage.statistics().busy_seconds)
        await bench.engine.push(2)
        bench.order(resume(0))
        await bench.until(lambda: len(bench.of(Scored)) == 2)

    bench = await roll(during)
    finished = assert_joined(bench, 0)
    prefix = bench.engine.pieces["0.0.0/0"]
    assert bench.paused == {0: len(prefix.token_ids)} and 15 <= len(prefix.token_ids) <= 25
    [segment] = finished.segments
    assert segment.version_spans == (
        VersionSpan(start=0, end=bench.paused[0], policy_version=0),
        VersionSpan(start=bench.paused[0], end=len(segment.token_ids), policy_version=2),
    )
    assert [span.policy_version for span in assert_joined(bench, 1).segments[0].version_spans] == [0, 1]


async def test_a_cancelled_paused_trajectory_loses_its_tokens() -> None:
    """A paused trajectory that is cancelled is lost with its tokens."""

    async def during(bench: Bench) -> None:
        await bench.steps(20)
        bench.order(pause(0))
        await bench.until(lambda: bool(bench.paused))
        bench.order(cancel(0))
        await bench.until(lambda: bool(bench.of(TrajectoryLost)))

    bench = await roll(during)
    [lost] = bench.of(TrajectoryLost)
    assert (lost.id.sample, lost.cancelled, lost.tokens) == (0, True, bench.paused[0]) and lost.tokens > 0
    assert_joined(bench, 1)


class LateEngine(RecordingEngine):
    """Aborts take effect when they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[str] = []

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.late.extend(request_ids)

    async def let_through(self) -> None:
        await super().abort(self.late)


async def test_a_resume_that_overtakes_an_abort_loses_nothing() -> None:
    """A resume that overtakes the abort of its pause loses nothing."""
    engine = LateEngine()

    async def during(bench: Bench) -> None:
        await bench.steps(20)
        bench.order(pause(0), resume(0), pause(0), resume(0), pause(1))
        await bench.until(lambda: len(engine.late) == 3)
        await engine.let_through()
        await bench.until(lambda: bool(bench.paused))
        await bench.until(lambda: bool(bench.of(Scored)))
        bench.order(resume(1))

    bench = await roll(during, engine=engine)
    for sample in (0, 1):
        assert_joined(bench, sample)


async def test_a_push_that_aborts_keeps_paused_what_is_paused() -> None:
    async def during(bench: Bench) -> None:
        await bench.steps(20)
        bench.order(pause(0))
        await bench.engine.pause(PauseMode.ABORT, clear_cache=True)  # races with the pause
        await bench.engine.resume()
        await bench.until(lambda: bool(bench.paused))
        parts = [request for request in bench.engine.asked if request.startswith("0.0.0/")]
        await bench.engine.pause(PauseMode.ABORT, clear_cache=True)
        await bench.engine.resume()
        await bench.until(lambda: bool(bench.of(Scored)))
        assert parts == [request for request in bench.engine.asked if request.startswith("0.0.0/")]
        bench.order(resume(0))

    bench = await roll(during)
    for sample in (0, 1):
        assert_joined(bench, sample)


async def test_what_is_paused_at_the_end_is_lost_and_the_episodes_end() -> None:
    async def during(bench: Bench) -> None:
        await bench.steps(20)
        bench.order(pause(0))
        await bench.until(lambda: bool(bench.paused))
        bench.order(pause(1))  # this one ends while its abort is under way

    bench = await roll(during)
    assert {(o.id.sample, o.cancelled, o.reason) for o in bench.of(TrajectoryLost)} == {
        (sample, True, "paused when the run ended") for sample in (0, 1)
    }


async def test_trajectories_can_be_paused_right_after_launch() -> None:
    """A trajectory can be paused or cancelled as soon as it is launched."""
    bench = Bench(RecordingEngine())
    await bench.engine.start()
    async with bench.stage.running():
        bench.launch(0, 1)
        bench.order(pause(0), cancel(1))
        await bench.until(lambda: bool(bench.paused) and bool(bench.of(TrajectoryLost)))
        assert bench.engine.load().running == 0
        bench.order(resume(0))
    assert_joined(bench, 0)


async def test_what_is_submitted_to_paused_engines_keeps_none_busy() -> None:
    async def during(bench: Bench) -> None:
        await bench.engine.pause(PauseMode.KEEP, clear_cache=False)
        bench.stage.engines_paused(True)
        before = bench.stage.statistics()
        await anyio.sleep(0.01)
        assert bench.stage.statistics() == before
        bench.stage.engines_paused(False)
        await anyio.sleep(0.01)
        after = bench.stage.statistics()
        assert after.busy_seconds > before.busy_seconds and after.working_seconds > before.working_seconds
        await bench.engine.resume()

    await roll(during)


class RefusingEngine(RecordingEngine):
    """Refuses every part but the first."""

    async def generate(self, request: Generate) -> Completion:
        if request.prefix_length:
            raise RequestRefused("planted")
        return await super().generate(request)


async def test_a_part_that_is_refused_tells_the_tokens_that_it_had() -> None:
    bench = Bench(RefusingEngine())
    await bench.engine.start()
    async with bench.stage.running():
        bench.launch(0)
        await bench.steps(20)
        bench.order(pause(0), resume(0))
    [lost] = bench.of(TrajectoryLost)
    assert (lost.cancelled, lost.reason, lost.tokens) == (
        False,
        "planted",
        len(bench.engine.pieces["0.0.0/0"].token_ids),
    )


@pytest.mark.parametrize("between", range(4))
async def test_requests_survive_the_abort_of_the_timekeeper(between: int) -> None:
    """Requests go on when the one that would have advanced time is aborted first."""
    engine = RecordingEngine()
    await engine.start()
    async with anyio.create_task_group() as group:
        for sample in range(3):
            request = Generate(
                request_id=str(sample), token_ids=token_array([2]), max_tokens=300, seed=sample, temperature=1.0
            )
            group.start_soon(engine.generate, request)
        while engine.load().generated_tokens < 9:
            await anyio.lowlevel.checkpoint()
        engine._finish_open([engine._open["0"]])
        for _ in range(between):
            await anyio.lowlevel.checkpoint()
        await engine.abort(["1"])
    assert engine.pieces["2"].finish_reason is not FinishReason.ABORT


Step = tuple[str, int]


@settings(max_examples=60, deadline=None)
@given(
    script=st.lists(
        st.tuples(st.sampled_from(["pause", "resume", "cancel", "abort", "push", "sample"]), st.integers(0, 3)),
        max_size=25,
    ),
    seed=st.integers(0, 3),
    turns=st.integers(1, 3),
)
async def test_whatever_is_ordered_each_trajectory_ends_once_and_whole(
    script: list[Step], seed: int, turns: int
) -> None:
    pauses: Counter[int] = Counter()

    async def during(bench: Bench) -> None:
        version = 0
        for word, sample in script:
            match word:
                case "pause":
                    pauses[sample] += 1
                    bench.order(pause(sample))
                case "resume":
                    bench.order(resume(sample))
                case "cancel":
                    bench.order(cancel(sample))
                case "abort":
                    await bench.engine.pause(PauseMode.ABORT, clear_cache=True)
                    await bench.engine.resume()
                case "push":
                    version += 1
                    await bench.engine.push(version)
                case "sample":
                    for _ in range(5 * sample + seed):
                        await anyio.lowlevel.checkpoint()

    bench = await roll(during, LengthMixture(median=60 // turns**2, sigma=0.5), 4, episode=talk(turns))
    cancelled = {o.id.sample for o in bench.of(TrajectoryLost)}
    for lost in bench.of(TrajectoryLost):
        pieces = [piece for name, piece in bench.engine.pieces.items() if name.startswith(f"{lost.id}/")]
        assert lost.cancelled and lost.tokens == sum(len(piece.token_ids) for piece in pieces)
    for sample in set(range(4)) - cancelled:
        finished = assert_joined(bench, sample)
        assert finished.finish_reason is not FinishReason.ABORT and len(finished.segments) == 2 * turns - 1
    answers = Counter(o.id.sample for o in bench.of(TrajectoryPaused))
    assert all(answers[sample] <= pauses[sample] for sample in range(4))


async def test_what_runs_beyond_the_capacity_does_not_count_as_busy() -> None:
    async def during(bench: Bench) -> None:
        await bench.engine.pause(PauseMode.KEEP, clear_cache=False)
        assert bench.stage.statistics().running == 6
        before = bench.stage.statistics()
        await anyio.sleep(0.05)
        after = bench.stage.statistics()
        seconds = after.working_seconds - before.working_seconds
        assert seconds > 0 and after.busy_seconds - before.busy_seconds == pytest.approx(2 * seconds)
        await bench.engine.resume()

    await roll(during, launched=6, capacity=2)


# ---- how episodes end ----------------------------------------------------------------------------


class Rewards(ZeroRewards):
    """Rewards that come when they are let through, and what was heard of siblings that are lost."""

    def __init__(self) -> None:
        self.through, self.lost_ones = anyio.Event(), list[TrajectoryId]()

    async def score(self, trajectory: Trajectory, group_size: int) -> Scored:
        await self.through.wait()
        return await super().score(trajectory, group_size)

    async def lost(self, trajectory: TrajectoryId, group_size: int) -> None:
        self.lost_ones.append(trajectory)


async def samples_nothing(model: OpenTrajectory) -> None: ...


@pytest.mark.parametrize(
    ("turns", "error"),
    [("0 0", "has appended nothing"), ("0 1:5", "after turn 5, and has 1 turns"), ("0 1 1:-1 1:0", "")],
)
async def test_turns_go_on_from_turns_that_there_are(turns: str, error: str) -> None:
    """``1:0``: one token is appended to turn 0."""
    raised: list[str] = []

    async def episode(model: OpenTrajectory) -> None:
        try:
            for turn in turns.split():
                appended, _, after = turn.partition(":")
                await model.sample(ANSWER[: int(appended)], after=int(after) if after else None)
        except ValueError as wrong:
            raised.append(str(wrong))

    bench = Bench(RecordingEngine(), episode=episode)
    await bench.engine.start()
    async with bench.stage.running():
        bench.launch(0)
    assert error in "".join(raised) and len(raised) == bool(error)
    if error:
        assert len(assert_joined(bench, 0).segments) == 1
        return
    [outcome] = bench.of(Scored)
    segments = outcome.outcome.trajectory.segments
    assert [segment.trained for segment in segments] == [True, False, True, False, True, False, True]
    assert [segment.follows for segment in segments] == [None, None, None, -1, None, 0, None]
    prompt, requests = token_array([2, 3]), list(bench.engine.asked.values())
    assert requests[2].token_ids == prompt + ANSWER[:1]
    assert requests[3].token_ids == prompt + segments[0].token_ids + ANSWER[:1]
    assert len({request.seed for request in requests}) == len({request.request_id for request in requests}) == 4


@pytest.mark.parametrize("turns", [1, 3])
async def test_later_turns_go_before_what_was_launched_after_them(turns: int) -> None:
    """And while a trajectory is in its environment it is counted there, and holds no engine."""
    back = anyio.Event()

    async def away_before_the_last(model: OpenTrajectory) -> None:
        for turn in range(turns):
            if turn == turns - 1:
                await back.wait()
            await model.sample(ANSWER if turn else ANSWER[:0])

    episode = one_completion if turns == 1 else away_before_the_last
    bench = Bench(RecordingEngine(), episode=episode, capacity=2)
    await bench.engine.start()
    async with bench.stage.running():
        bench.launch(0, 1, 2)
        if turns > 1:
            await bench.until(lambda: bench.stage.statistics().environment == 3 and len(bench.engine.pieces) == 6)
            outer, before, inner = anyio.current_time(), bench.stage.statistics(), anyio.current_time()
            await anyio.sleep(0.01)
            least = 2 * (anyio.current_time() - inner)
            seconds = bench.stage.statistics().environment_seconds - before.environment_seconds
            assert least <= seconds <= 2 * (anyio.current_time() - outer), "three would fill the two free slots"
        back.set()
    assert bench.stage.statistics().environment == 0
    asked = {(completion_id_of(one.request_id), one.priority) for one in bench.engine.asked.values()}
    assert asked == {(str(identity(sample)), (sample + 1) * (turns > 1)) for sample in range(3)}


class PausesKept(Journal):
    """Remembers what is recorded of paused trajectories."""

    def __init__(self) -> None:
        self.kept: list[SampledSoFar] = []

    async def on_paused(self, trajectory: TrajectoryId, done: SampledSoFar) -> None:
        self.kept.append(done)


@pytest.mark.parametrize("turns", [1, 2])
async def test_a_later_life_gets_only_the_first_turns_tokens(turns: int) -> None:
    """A later life is given only the tokens that were sampled in a first turn."""

    async def during(bench: Bench) -> None:
        await bench.until(lambda: len(bench.engine.asked) == turns)
        await bench.steps(5)
        bench.order(pause(0))
        await bench.until(lambda: bool(bench.paused))
        bench.order(resume(0))

    episode = one_completion if turns == 1 else talk(turns)
    bench = await roll(during, launched=1, journal=(journal := PausesKept()), episode=episode)
    assert len(assert_joined(bench, 0).segments) == 2 * turns - 1
    assert [done.completion.token_ids for done in journal.kept] == (
        [bench.engine.pieces["0.0.0/0"].token_ids] if turns == 1 else []
    )


async def survives_its_end(model: OpenTrajectory) -> None:
    with suppress(EpisodeCancelled):
        await model.sample()


@pytest.mark.parametrize("episode", [one_completion, survives_its_end, samples_nothing])
async def test_an_episode_without_completion_is_lost_once(episode: Any) -> None:
    """An episode without a whole completion is lost once, and its siblings get notice of it."""
    bench = Bench(RecordingEngine(), scorer=(rewards := Rewards()), episode=episode)
    await bench.engine.start()
    async with bench.stage.running():
        bench.launch(0)
        if episode is not samples_nothing:
            await bench.steps(20)
        bench.order(cancel(0))
    [lost] = bench.of(TrajectoryLost)
    assert lost.id == identity(0) and lost.cancelled and (lost.tokens >= 20) == (episode is not samples_nothing)
    assert rewards.lost_ones == [identity(0)]
    assert bench.engine.load().running == bench.stage.statistics().running == 0


async def test_a_trajectory_that_waits_for_its_reward_holds_no_engine() -> None:
    bench = Bench(RecordingEngine(), scorer=(rewards := Rewards()), one_at_a_time=True)
    await bench.engine.start()
    async with bench.stage.running():
        bench.launch(0, 1)
        await bench.until(lambda: len(bench.engine.pieces) == 2)  # although the first has no reward yet
        await bench.until(lambda: bench.stage.statistics().running == 0)
        assert not bench.seen
        bench.order(cancel(0), cancel(1))  # too late: what is scored has its outcome
        rewards.through.set()
    assert len(bench.of(Scored)) == len(bench.seen) == 2


async def test_cancelled_finished_trajectories_are_lost_whole() -> None:
    """A trajectory that is cancelled after its last token is lost with all of its tokens."""
    sampled, ends = anyio.Event(), anyio.Event()

    async def works_on(model: OpenTrajectory) -> None:
        await model.sample()
        sampled.set()
        await ends.wait()

    bench = Bench(RecordingEngine(), episode=works_on)
    await bench.engine.start()
    async with bench.stage.running():
        bench.launch(0)
        await sampled.wait()
        bench.order(cancel(0))
        ends.set()
    [lost] = bench.seen
    assert isinstance(lost, TrajectoryLost) and lost.cancelled and lost.tokens == bench.engine.load().generated_tokens


async def test_tokens_that_no_turn_follows_are_not_handed_on() -> None:
    async def gives_up_a_turn(model: OpenTrajectory) -> None:
        await model.sample()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await model.sample(ANSWER)

    bench = Bench(RecordingEngine(), episode=gives_up_a_turn)
    await bench.engine.start()
    async with bench.stage.running():
        bench.launch(0)
    [outcome] = bench.of(Scored)
    assert [segment.trained for segment in outcome.outcome.trajectory.segments] == [True]
