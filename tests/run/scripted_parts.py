"""The controller's surroundings for tests without torch: prompts from memory, a counting trainer, a quick scorer.

Engines are the product's ``SimulatedEngine``; control, stages, publisher and streams are the real ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec
from builders.base import InstantClock
from oracle.control_world import control_settings

from streamrl.base.messages import (
    AnchorPublished,
    CheckpointSaved,
    CloseBatch,
    EngineLoad,
    EnginesFreed,
    PublishAnchor,
    SaveCheckpoint,
    StepReport,
    TrainerReady,
    TrainGroup,
    TrainingEvent,
    TrainingOrder,
    WeightSource,
)
from streamrl.base.run_events import EvaluationFinished, RunEvent, StepFinished
from streamrl.base.types import Prompt, RewardFailureKind, TrainingSample, Trajectory, token_array
from streamrl.base.waits import Waits
from streamrl.buffers.trajectory_store import TrajectoryStore
from streamrl.comm.memory_stream import memory_stream
from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.control.actions import Decision
from streamrl.control.check import violations
from streamrl.control.events import ControlEvent
from streamrl.control.machine import Control
from streamrl.control.policies.round_policies import make_control
from streamrl.control.settings import ControlSettings
from streamrl.engines.elastic.elastic_engines import ElasticEngines
from streamrl.engines.elastic.engine_sets import SetChooser
from streamrl.engines.elastic.freeing import Freeing
from streamrl.engines.pool import UNAVAILABLE, EnginePool
from streamrl.engines.push.verify import WeightAudit
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.simulated.engine import LengthMixture, SimulatedEngine, SimulationOptions
from streamrl.observe.report.alarms import Alarms, alarm_rules
from streamrl.observe.report.run_report import FigureSources, RunReport
from streamrl.recipe.scheduling import InFlight
from streamrl.recipe.sections import Evaluation as EvaluationSettings
from streamrl.recipe.sections import ReleaseKind, Sampling
from streamrl.recipe.topology import PreparedSet
from streamrl.rewards.reward_messages import (
    CompletionToScore,
    GroupScored,
    GroupsScored,
    RewardOrder,
    RewardResult,
    RewardWorkerReady,
    SampleReward,
    ScoreGroups,
)
from streamrl.run.controller import Controller, RunRecord
from streamrl.run.evaluate.evaluation import HeldOut, HeldOutEvaluations
from streamrl.run.evaluate.sample_files import write_evaluation
from streamrl.run.journal.journal_file import JournalFile, read_journal
from streamrl.run.journal.recover import RecoveredRun, Resumption, recovered_run
from streamrl.run.journal.run_journal import RunJournal
from streamrl.run.journal.summary import RunSummary, summarize
from streamrl.run.trainer_ranks import RankStreams, TrainerRanks
from streamrl.stages.episodes import Episodes
from streamrl.stages.reward import RewardSettings, RewardStage

RUN = {"steps": 6, "batch_groups": 4, "group_size": 4, "max_failed_share": 0.5, "failure_window": 64}


def run_settings(**changes: object) -> ControlSettings:
    return control_settings(**RUN | changes)


class Killed(Exception):
    """The controller is gone, as after SIGKILL."""


def _let_die(journal: RunJournal, events: int, sampled: int, held_out: list[Trajectory]) -> None:
    """Let the controller die when it journals one event more than ``events``, or once ``sampled`` trajectories left the
    engines (0: never). Those that are held out are noted."""
    on_event, record, count, left = journal.on_event, journal.on_sampled, itertools.count(), itertools.count(1)

    def on_event_or_die(event: ControlEvent, control: Control) -> None:
        on_event(event, control)
        if next(count) >= events:
            raise Killed

    async def record_or_die(trajectory: Trajectory) -> None:
        await record(trajectory)
        if trajectory.evaluation:
            held_out.append(trajectory)
        if next(left) == sampled:
            raise Killed

    journal.on_event, journal.on_sampled = on_event_or_die, record_or_die  # type: ignore[method-assign]


class CountedPrompts:
    """``p0``, ``p1``, ...; at most ``limit`` of them."""

    def __init__(self, limit: int = 10**9) -> None:
        self._next, self._limit = 0, limit

    def go_on(self, drawn: int) -> None:
        self._next = drawn

    async def draw(self, count: int, sets: Sequence[str] = ()) -> list[Prompt]:
        numbers = range(self._next, min(self._next + count, self._limit))
        self._next = numbers.stop
        names = sets or [""] * len(numbers)
        return [
            Prompt(prompt_id=f"p{n}", token_ids=token_array([2, 3, 4]), set=name)
            for n, name in zip(numbers, names, strict=False)
        ]


class CountingRank:
    """One trainer rank: answers orders as the real one does, and keeps what it was given.

    ``happened`` is called with ``("group", batch id)`` and ``("close", version)``."""

    def __init__(self, rank: int, ranks: int, version: int, happened: Callable[[str, int], None]) -> None:
        self.rank, self.ranks, self.version, self.happened = rank, ranks, version, happened
        self.samples: list[TrainingSample] = []
        self.batches: list[list[TrainingSample]] = []
        self.acknowledged = -1
        self.mismatch = 0.0
        self.saved: list[str] = []
        self.freed: list[int] = []

    async def run(self, orders: ReceiveStream[TrainingOrder], reports: SendStream[TrainingEvent]) -> None:
        self.samples = []
        await reports.send(TrainerReady(rank=self.rank, ranks=self.ranks, policy_version=self.version, parameters=1))
        async for order in orders:
            match order:
                case TrainGroup():
                    self.happened("group", order.group.batch_id)
                    self.samples += order.group.samples
                case CloseBatch():
                    self.happened("close", order.policy_version)
                    self.version = order.policy_version
                    self.batches.append(self.samples)
                    self.samples = []
                    base = self.acknowledged
                    await reports.send(
                        StepReport(
                            rank=self.rank,
                            batch_id=order.batch_id,
                            policy_version=order.policy_version,
                            base_version=base,
                            state_hash=order.policy_version,
                            source=self._source(),
                            metrics={"optim/loss": 0.5, "policy/mismatch_abs_mean": self.mismatch},
                        )
                    )
                case PublishAnchor():
                    version = order.policy_version
                    assert version == self.version
                    await reports.send(
                        AnchorPublished(
                            rank=self.rank, policy_version=version, state_hash=version, source=self._source()
                        )
                    )
                case SaveCheckpoint():
                    assert order.policy_version == self.version
                    self.saved.append(order.directory)
                    await reports.send(
                        CheckpointSaved(
                            rank=self.rank, directory=order.directory, policy_version=order.policy_version, seconds=0.0
                        )
                    )
                case EnginesFreed():
                    self.freed.append(order.count)
                case _:
                    self.acknowledged = order.policy_version
        self.happened("ended", self.rank)
        await reports.aclose()

    def _source(self) -> WeightSource:
        return WeightSource(
            rank=self.rank, endpoint="", manifest_digest="", payload_bytes=10, changed_elements=1, total_elements=4
        )


class ParityScorer:
    """A reward worker in this process: reward 1 for an odd number of tokens; every ``failing``-th trajectory fails."""

    def __init__(self, failing: int = 0) -> None:
        self.failing = failing
        self.mute = False
        self.seen = 0
        self.returned: dict[str, float] = {}
        self.held_out: list[Trajectory] = []

    async def run(self, orders: ReceiveStream[RewardOrder], results: SendStream[RewardResult]) -> None:
        await results.send(RewardWorkerReady(worker=0))
        async for order in orders:
            assert isinstance(order, ScoreGroups)
            if self.mute:
                continue
            for group in order.groups:
                rewards = tuple(map(self._score, group.completions))
                await results.send(GroupsScored(groups=(GroupScored(order_id=group.order_id, rewards=rewards),)))
        await results.aclose()

    def _score(self, completion: CompletionToScore) -> SampleReward:
        self.seen += 1
        if self.failing and self.seen % self.failing == 0:
            return SampleReward(kind=RewardFailureKind.RAISED, function="parity", message="planted")
        reward = float(len(completion.token_ids) // 4 % 2)
        self.returned[f"{completion.group_id}.{completion.sample}.{completion.attempt}"] = reward
        return SampleReward(reward=reward)


class PacedEngine(SimulatedEngine):
    """Says that a token takes a second, of the real clock: what runs has no token yet, as far as is known."""

    def load(self) -> EngineLoad:
        load = super().load()
        return msgspec.structs.replace(load, decode_s=float(load.decode_steps))


class MemoryHosts:
    """Stops and makes engines of ``run``; calls ``happened`` with ``("stop", engine)``, ``("start", engine)``."""

    figures: dict[str, float] = {}
    kv_tokens = 0

    def __init__(self, run: SimulatedRun, pool: EnginePool) -> None:
        self.run, self.pool = run, pool

    async def use(self, names: Sequence[str]) -> None:
        pool, sync = self.pool, self.run.sync
        for name in list(pool.attached):
            await pool.drain(name, UNAVAILABLE)
            engine = pool.detach(name)
            assert not engine.load().running, "it was not drained"
            sync.remove(engine)
            self.run.happened("stop", int(name[-1]))
            await anyio.lowlevel.checkpoint()
        for name in names:
            index = int(name[-1])
            self.run.happened("start", index)
            await anyio.lowlevel.checkpoint()
            engine = self.run.make_engine(index)
            self.run.engines[index:] = [engine, *self.run.engines[index + 1 :]]
            await pool.attach(name, engine)
            await sync.admit(name, engine)
        for name in names:
            pool.readmit(name, UNAVAILABLE)


class SimulatedRun:
    """One run of the real control and stages on simulated engines. ``run`` once; then look at the attributes."""

    def __init__(
        self,
        settings: ControlSettings,
        directory: Path,
        *,
        engines: int = 1,
        ranks: int = 1,
        failing: int = 0,
        prompts: int = 10**9,
        held_out: int = 0,
        samples: int = 1,
        evaluation_in_flight: int = 256,
        start: int = 0,
        in_flight: InFlight = InFlight.KEEP,
        lengths: LengthMixture | None = None,
        release: ReleaseKind = ReleaseKind.NEVER,
        sets: Sequence[PreparedSet] = (),
        kept: bool = True,  # without a journal virtual time does not pass while the disk is waited for
    ) -> None:
        self._kept, self.events_to_live, self.outcomes_to_live = kept, 10**9, 0
        self.clock = clock = InstantClock()
        mixture = lengths or LengthMixture(median=8, long_median=40)
        kind = SimulatedEngine if release is ReleaseKind.NEVER else PacedEngine

        def make_engine(index: int) -> SimulatedEngine:
            options = SimulationOptions(name=f"engine-{index}", lengths=mixture)
            return kind(options, clock=clock.now, sleep=clock.sleep)

        self.make_engine = make_engine
        self.engines = [make_engine(index) for index in range(engines)]
        self._release, self._sets = release, sets
        self.settings = settings
        self.history: list[tuple[str, int]] = []
        self._stop_at: tuple[str, int] | None = None
        self.ranks = [CountingRank(i, ranks, start, self.happened) for i in range(ranks)]
        self.scorer = ParityScorer(failing)
        self.events: list[RunEvent] = []
        self.directory = directory
        self._prompts = CountedPrompts(prompts)
        self.scores: dict[int, float] = {}
        self.scored_on: dict[int, int] = {}
        self._held_out, self._samples, self._evaluation_in_flight = held_out, samples, evaluation_in_flight
        self._start = start
        self._in_flight = in_flight

    async def run(self, *, stop_at: tuple[str, int] | None = None) -> str:
        """Until the run ends; when ``stop_at`` is in ``history`` a drain is asked for. Returns the reason."""
        self._stop_at = stop_at
        unavailable = [name for one in self._sets[1:] for name in one.engines]
        pool = EnginePool(
            {f"engine-{index}": engine for index, engine in enumerate(self.engines)}, unavailable=unavailable
        )
        await pool.start()
        async with anyio.create_task_group() as parts:
            streams: list[RankStreams] = []
            for rank in self.ranks:
                batches_in, batches_out = memory_stream(64)
                reports_in, reports_out = memory_stream(64)
                parts.start_soon(rank.run, batches_out, reports_in)
                streams.append((batches_in, reports_out))
            trainer = TrainerRanks(streams)
            await trainer.ready()
            parts.start_soon(trainer.run)
            file, recovered = self._open_journal()
            contents = TrajectoryStore() if recovered is None else recovered.store
            writer = anyio.CancelScope()
            if file is not None:
                parts.start_soon(written_until, writer, file)
            journal = RunJournal(file, contents, recovered)
            if recovered is not None:
                self._prompts.go_on(recovered.state.prompts.drawn)
            _let_die(journal, self.events_to_live, self.outcomes_to_live, self.scorer.held_out)
            reward = RewardStage(
                RewardSettings(functions="parity", per_group=False, timeout_s=300, concurrency=8),
                [scorer_streams(self.scorer, parts)],
            )
            episodes = Episodes(pool, Sampling(max_tokens=64), reward, journal, on_end=pool.forget_trajectory)

            async def emit(event: RunEvent) -> None:
                self.events.append(event)
                if isinstance(event, StepFinished | EvaluationFinished):
                    kind = "live" if isinstance(event, StepFinished) else "evaluated"
                    self.happened(kind, event.policy_version)

            sync = self.sync = WeightSync(
                pool.attached, trainer.publish_anchor, in_flight=self._in_flight, timeout_s=300
            )
            control = make_control(self.settings) if recovered is None else recovered.control
            held = HeldOut(
                prompts=await CountedPrompts().draw(self._held_out),
                settings=EvaluationSettings(samples=self._samples),
                in_flight=self._evaluation_in_flight,
            )
            evaluations = HeldOutEvaluations(
                held,
                0,
                emit=emit,
                on_scored=self._scored,
                store=partial(write_evaluation, self.directory / "evaluations", None),
            )
            waits = Waits()
            resumption = Resumption(recovered, trainer, waits) if recovered is not None else None
            report = RunReport(
                emit,
                control,
                contents,
                FigureSources(rollout=episodes.statistics, load=pool.load, more_metrics=lambda: elastic.figures),
                64,
                alarms=Alarms(alarm_rules(0.05)),
                evaluations=evaluations,
                resumption=resumption,
                clock=self.clock.now,
            )
            journal.elapsed = report.elapsed
            elastic = self._make_elastic(pool, trainer, journal, report, contents)
            audit = WeightAudit(pool.serving_engines, self.directory / "audits.jsonl", 0)
            self.controller = Controller(
                RunRecord(control, contents, journal, recovered is not None),
                prompts=self._prompts,
                trainer=trainer,
                sync=sync,
                evaluations=evaluations,
                save=self._save(trainer),
                observers=[elastic, audit, report, *([resumption] if resumption else [])],
                waits=waits,
            )
            try:
                async with reward.running():
                    reason = await self.controller.run(episodes)
                assert not (found := violations(control.state, control.rules)), found
                return reason
            except BaseException:
                parts.cancel_scope.cancel()
                raise
            finally:
                if file is not None:
                    await file.close()
                    writer.cancel()

    def _open_journal(self) -> tuple[JournalFile | None, RecoveredRun | None]:
        if not self._kept:
            return None, None
        file = JournalFile(self.directory / "journal", fsync=False)
        return file, recovered_run(file.initial_content, partial(make_control, self.settings), self.ranks[0].version)

    def summary(self) -> RunSummary:
        """What its journal says."""
        summary = summarize(read_journal(self.directory / "journal").records(0), partial(make_control, self.settings))
        assert summary is not None
        return summary

    def trained(self) -> Counter[str]:
        """How often each trajectory was given to a rank in a batch that was closed."""
        return Counter(str(s.id) for rank in self.ranks for batch in rank.batches for s in batch)

    def _make_elastic(
        self, pool: EnginePool, trainer: TrainerRanks, journal: RunJournal, report: RunReport, store: TrajectoryStore
    ) -> ElasticEngines:
        async def decided(decision: Decision, step: int, shown: bool) -> None:
            journal.decided(decision)
            if shown:
                await report.decided(decision, step)

        alone = PreparedSet(count=len(self.engines), tensor_parallel_size=1, kv_tokens=4000)
        return ElasticEngines(
            pool,
            MemoryHosts(self, pool),  # type: ignore[arg-type]
            SetChooser(self._sets or [alone], steps=self.settings.steps, switch_s=1.0),
            store,
            on_decision=decided,
            freeing=None if self._release is ReleaseKind.NEVER else Freeing(64),
            share_cores=trainer.engines_freed,
            clock=self.clock.now,
        )

    def happened(self, kind: str, number: int) -> None:
        self.history.append((kind, number))
        if self.history[-1] == self._stop_at:
            self.controller.stop("drained")

    async def _scored(self, policy_version: int, figures: dict[str, float], limit: int) -> None:
        self.scores[policy_version] = figures[f"eval/held_out/avg@{self._samples}"]
        self.scored_on[policy_version] = limit

    @staticmethod
    def _save(trainer: TrainerRanks) -> object:
        async def save(policy_version: int, beside: Mapping[str, bytes]) -> None:
            directory = f"step-{policy_version}"
            order = SaveCheckpoint(directory=directory, policy_version=policy_version, sidecar_digests=dict(beside))
            await trainer.save_checkpoint(order)

        return save


async def written_until(end: anyio.CancelScope, journal: JournalFile) -> None:
    with end:
        await journal.run()


def scorer_streams(scorer: ParityScorer, parts: anyio.abc.TaskGroup) -> object:
    """What ``RewardStage`` opens for one worker, on memory streams."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def open_worker():  # type: ignore[no-untyped-def]
        orders_in, orders_out = memory_stream(64)
        results_in, results_out = memory_stream(64)
        parts.start_soon(scorer.run, orders_out, results_in)
        yield orders_in, results_out

    return open_worker
