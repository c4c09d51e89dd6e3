"""The parts that the controller process connects: engines that may come and go, the publisher, the report."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from streamrl.base.messages import EngineReady
from streamrl.base.run_events import RunEvent, RunWarning
from streamrl.base.types import Prompt, token_array
from streamrl.elastic.engine_release import EngineRelease, engine_sizes
from streamrl.elastic.engine_switch import SWITCH
from streamrl.engines.engine_pool import EnginePool
from streamrl.engines.engine_recovery import EngineRecovery, engine_recovery
from streamrl.engines.engine_seat import EngineSeat, SeatedEngines
from streamrl.engines.pool_service import PoolService
from streamrl.evaluate.evaluation import HeldOut
from streamrl.evaluate.sample_files import TrainingSamples
from streamrl.journal.recovered_run import RecoveredRun
from streamrl.observe.report.run_report import RunReport
from streamrl.observe.report.trajectory_trace import TrajectoryTrace, trace_header
from streamrl.plan.topology import prepared_sets
from streamrl.prompts.prompts import open_prompts
from streamrl.prompts.tokenizer import Tokenizer
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.remote.reward_changes import RewardReply
from streamrl.run.trainer_ranks import TrainerRanks
from streamrl.stages.attached_rewards import AttachedRewards
from streamrl.stages.reward import RewardStage
from streamrl.stages.rollout import RolloutStage
from streamrl.supervise.supervisor_orders import ParentMessage
from streamrl.supervise.watchdog import Watchdog
from streamrl.sync.publisher import PushedEngine, WeightPublisher
from streamrl.sync.weight_canary import canary_of
from streamrl.vllm.batch_invariance import PROBES, batch_invariant
from streamrl.vllm.options import CPU_BLOCK_TOKENS, installed_device

MOST_HELD_OUT = 10_000
START_PATIENCE_S = 2.0
"""How long a controller that goes on waits for an engine after the first one: what comes later joins while it runs."""

Emit = Callable[[RunEvent | RewardReply], Awaitable[None]]


class Parts(msgspec.Struct, frozen=True):
    """What is connected: the stages work on it."""

    tokenizer: Tokenizer
    rewards: tuple[RewardStage, AttachedRewards]
    pool: EnginePool
    hosts: SeatedEngines
    trainer: TrainerRanks
    ready: EngineReady
    start_s: float
    rooms: dict[str, int]
    parameters: int
    emit: Emit
    watch: Watchdog
    recovery: EngineRecovery | None

    def lost_engines(self) -> dict[str, float]:
        """Figures of engines that were lost, for the record of a step."""
        return dict(self.recovery.figures) if self.recovery else {}


async def open_engines(
    recipe: Recipe,
    seats: Mapping[str, EngineSeat],
    tell: Callable[[ParentMessage], Awaitable[None]],
    emit: Emit,
    nursery: anyio.abc.TaskGroup,
    *,
    resumes: bool,
) -> tuple[EnginePool, EngineReady, EngineRecovery | None]:
    """Wait for the engines of the first set. ``resumes``: some may be dead, or serve already."""
    first, *others = (one.engines for one in prepared_sets(recipe))
    recovery = engine_recovery(recipe, seats, tell=tell, emit=emit)
    if recovery is None:
        absent = [name for engines in others for name in engines]
        pool = EnginePool([await seats[name].open() for name in first], absent=absent, by=SWITCH)
        return pool, await pool.start(), None
    await nursery.start(recovery.run)
    pool, ready = await recovery.start(first, patience_s=START_PATIENCE_S if resumes else math.inf)
    return pool, ready, recovery


async def open_rollout(recipe: Recipe, parts: Parts, held_out: HeldOut) -> RolloutStage:
    """The rollout stage. In a deterministic run an engine that samples other bits in company gets one request at a
    time, which is said."""
    alone = False
    if recipe.run.deterministic and recipe.compares_logprobs:
        probes = [prompt.token_ids for prompt in held_out.prompts[:PROBES]] or [token_array((1, 2, 3))]
        sampling = recipe.sampling
        alone = not await batch_invariant(parts.pool, probes, temperature=sampling.temperature, top_p=sampling.top_p)
    if alone:
        message = "engines sample other bits in company than alone: run.deterministic gives them one request at a time"
        await parts.emit(RunWarning(step=0, message=message))
    return RolloutStage(
        parts.pool,
        max_tokens=recipe.sampling.max_tokens,
        temperature=recipe.sampling.temperature,
        top_p=recipe.sampling.top_p,
        verifies_losers=recipe.tail_batching.verifies,
        one_at_a_time=alone,
        capacity=_capacity(recipe, parts),
    )


def _capacity(recipe: Recipe, parts: Parts) -> int:
    """What bubble ratios count as full, whatever the rounds."""
    return min(parts.ready.max_num_seqs, recipe.rollout.batch_trajectories)


async def open_publisher(
    recipe: Recipe, parts: Parts, service: EngineRecovery | PoolService | None, rollout: RolloutStage
) -> WeightPublisher:
    """Who makes versions live on the engines."""

    def name_of(engine: PushedEngine) -> str:
        return next((name for name, one in parts.pool.attached.items() if one is engine), "an engine")

    publisher = WeightPublisher(
        list(parts.pool.attached.values()),
        parts.trainer.publish_anchor,
        in_flight=recipe.rollout.in_flight,
        timeout_s=recipe.weights.push_timeout_s,
        on_hold=rollout.stand_still,
        service=service,
        patience_s=recipe.weights.engine_timeout_s,
        canary=await anyio.to_thread.run_sync(canary_of, recipe, installed_device()),
        waits=parts.watch.waits,
        name_of=name_of,
    )
    if parts.recovery is not None:
        parts.recovery.attend(publisher)
    return publisher


def run_report(
    recipe: Recipe,
    run_directory: Path,
    parts: Parts,
    rollout: RolloutStage,
    reward: RewardStage,
    recovered: RecoveredRun | None,
) -> RunReport:
    """What the run tells observers and the trace."""
    capacity = _capacity(recipe, parts)
    header = trace_header(
        recipe,
        run_id=run_directory.name,
        started_at=time.time(),
        max_model_len=parts.ready.max_model_len,
        capacity=capacity,
        kv_tokens=parts.ready.kv_tokens,
        parameters=parts.parameters,
    )
    trace = TrajectoryTrace(run_directory / "trace.jsonl", header, goes_on=recovered is not None)
    siblings_race = recipe.rollout.rounds is RoundKind.TAIL_BATCHING and recipe.tail_batching.response_oversampling > 1
    return RunReport(
        parts.emit,
        rollout.statistics,
        capacity,
        engines=recipe.engines.count,
        serving=lambda: len(parts.pool.serving),
        rewards_in_flight=reward.in_flight,
        loop_lag=parts.watch.take_loop_lag,
        trace=trace,
        samples=TrainingSamples(run_directory / "samples.jsonl", parts.tokenizer.decode),
        lived_s=recovered.elapsed_s if recovered else 0.0,
        recovering=recovered is not None,
        length_limit=0 if siblings_race else recipe.sampling.max_tokens,
    )


def pool_service(recipe: Recipe, parts: Parts) -> EngineRecovery | PoolService | None:
    """Who takes engines out of service and back. Whoever frees or changes engines readmits them itself: those runs end
    with a tainted engine, as ever."""
    if parts.recovery is not None:
        return parts.recovery
    stay = recipe.engines.release is ReleaseKind.NEVER and not recipe.engines.sets
    return PoolService(parts.pool) if stay else None


def engine_release(recipe: Recipe, parts: Parts, publisher: WeightPublisher) -> EngineRelease | None:
    """Who frees engines late in a round, where the recipe wants it."""
    engines = recipe.engines
    if engines.release is ReleaseKind.NEVER:
        return None
    return EngineRelease(
        parts.pool,
        # vLLM's blocks are smaller on a GPU: there these are the more careful figure.
        engine_sizes(recipe, parts.ready.kv_tokens // engines.count, CPU_BLOCK_TOKENS),
        publisher=publisher,
        share_cores=parts.trainer.engines_freed,
        hosts=parts.hosts if engines.release is ReleaseKind.STOP else None,
        start_timeout_s=engines.start_timeout_s,
    )


async def read_held_out(recipe: Recipe, parts: Parts) -> HeldOut:
    """All held-out prompts, in file order; of an iterator at most ``MOST_HELD_OUT``."""
    evaluation = recipe.evaluation
    prompts: list[Prompt] = []
    if evaluation.prompts:
        source = open_prompts(evaluation.prompts, parts.tokenizer, seed=0, shuffle=False, max_tokens=None)
        try:
            prompts = await source.draw(source.size or MOST_HELD_OUT)
        finally:
            await source.aclose()
    return HeldOut(
        prompts=prompts,
        samples=evaluation.samples,
        temperature=evaluation.temperature,
        success_reward=evaluation.success_reward,
        reward=recipe.score,
        in_flight=parts.ready.max_num_seqs,
    )
