"""The parts that the controller process connects: engines that may come and go, the weight sync, the report."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import msgspec

from streamrl.base.messages import EngineReady
from streamrl.base.run_events import RunEvent, RunWarning
from streamrl.base.types import Prompt, token_array
from streamrl.comm.guarded_sockets import KeyGuard
from streamrl.comm.transport_keys import KeyRole
from streamrl.control.actions import Decision
from streamrl.engines.elastic.elastic_engines import ElasticEngines, set_chooser
from streamrl.engines.elastic.freeing import Freeing
from streamrl.engines.elastic.hosts import EngineHosts
from streamrl.engines.pool import EnginePool
from streamrl.engines.push.verify import canary_of
from streamrl.engines.push.weight_sync import WeightSync
from streamrl.engines.vllm.batch_invariance import PROBES, batch_invariant
from streamrl.engines.vllm.options import CPU_BLOCK_TOKENS, installed_device
from streamrl.launch.attached_rewards import AttachedRewards
from streamrl.launch.control_protocol import ParentMessage
from streamrl.launch.run_record import JournalledRun
from streamrl.launch.supervise.watchdog import Watchdog
from streamrl.learning.canary import canary_bounds
from streamrl.observe.report.alarms import Alarms, alarm_rules
from streamrl.observe.report.run_report import RunReport
from streamrl.observe.report.trajectory_trace import TrajectoryTrace, trace_header
from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.scheduling import RoundKind
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.recipe.topology import Topology, prepared_sets
from streamrl.rewards.reward_messages import RewardReply
from streamrl.run.evaluate.evaluation import HeldOut, HeldOutEvaluations
from streamrl.run.evaluate.sample_files import TrainingSamples
from streamrl.run.journal.recover import Resumption
from streamrl.run.prompts.mixed_prompts import MixedPrompts
from streamrl.run.prompts.prompts import OpenPrompts, open_prompts
from streamrl.run.trainer_ranks import TrainerRanks
from streamrl.stages.reward import RewardStage
from streamrl.stages.rollout import RolloutStage

MOST_HELD_OUT = 10_000

Emit = Callable[[RunEvent | RewardReply], Awaitable[None]]


class Parts(msgspec.Struct, frozen=True):
    """Connected parts on which the stages work."""

    tokenizer: Tokenizer
    rewards: tuple[RewardStage, AttachedRewards]
    pool: EnginePool
    hosts: EngineHosts
    trainer: TrainerRanks
    ready: EngineReady
    start_s: float
    rooms: dict[str, int]
    parameters: int
    emit: Emit
    watch: Watchdog


async def open_engines(
    recipe: Recipe,
    topology: Topology,
    order: Callable[[ParentMessage], Awaitable[None]],
    emit: Emit,
    nursery: anyio.abc.TaskGroup,
) -> tuple[EngineHosts, EnginePool, EngineReady]:
    """Wait for the engines of the first set. On a CPU, where vLLM's sleep does nothing, engines of sets that are not in
    use end."""
    sleeps = bool(recipe.engines.sets and recipe.engines.sleep_level) and installed_device() != "cpu"
    sets, at, guard = prepared_sets(recipe), topology.endpoint, KeyGuard(KeyRole.ENGINE)
    endpoints = {name: (at(name, "orders"), at(name, "completions")) for one in sets for name in one.engines}
    hosts = EngineHosts(endpoints, recipe.engines, order=order, emit=emit, guard=guard, sleeps=sleeps)
    await nursery.start(hosts.run)
    return hosts, *await hosts.start(sets[0].engines)


async def open_rollout(recipe: Recipe, parts: Parts, held_out: HeldOut) -> RolloutStage:
    """The rollout stage. In a deterministic run an engine that samples other bits in a batch than alone gets one
    request at a time, and the run says so."""
    alone = False
    if recipe.run.deterministic and recipe.compares_logprobs:
        probes = [prompt.token_ids for prompt in held_out.prompts[:PROBES]] or [token_array((1, 2, 3))]
        sampling = recipe.sampling
        alone = not await batch_invariant(parts.pool, probes, temperature=sampling.temperature, top_p=sampling.top_p)
    if alone:
        message = "engines sample other bits in a batch than alone: run.deterministic gives them one request at a time"
        await parts.emit(RunWarning(step=0, message=message))
    return RolloutStage(
        parts.pool,
        max_tokens=recipe.sampling.max_tokens,
        temperature=recipe.sampling.temperature,
        top_p=recipe.sampling.top_p,
        verifies_deferred=recipe.tail_batching.verifies(deterministic=recipe.run.deterministic),
        one_at_a_time=alone,
        capacity=_capacity(recipe, parts),
    )


def _capacity(recipe: Recipe, parts: Parts) -> int:
    """Trajectories that bubble ratios count as full, whatever the rounds."""
    return min(parts.ready.max_num_seqs, recipe.batch_trajectories)


async def open_weight_sync(recipe: Recipe, parts: Parts, rollout: RolloutStage) -> WeightSync:
    """Return what makes versions live on the engines."""
    sync = WeightSync(
        parts.pool.attached,
        parts.trainer.publish_anchor,
        in_flight=recipe.rollout.in_flight,
        timeout_s=recipe.weights.push_timeout_s,
        on_pause=rollout.engines_paused,
        on_failure=parts.hosts.on_failure,
        canary=await anyio.to_thread.run_sync(canary_of, recipe, installed_device()),
        waits=parts.watch.waits,
    )
    parts.hosts.set_weight_sync(sync)
    return sync


def run_report(
    recipe: Recipe,
    run_directory: Path,
    parts: Parts,
    rollout: RolloutStage,
    record: JournalledRun,
    evaluations: HeldOutEvaluations,
    resumption: Resumption | None,
) -> RunReport:
    """Make the report to observers and the trace."""
    capacity = _capacity(recipe, parts)
    header = trace_header(
        recipe,
        run_id=run_directory.name,
        max_model_len=parts.ready.max_model_len,
        capacity=capacity,
        kv_tokens=parts.ready.kv_tokens,
        parameters=parts.parameters,
    )
    trace = TrajectoryTrace(run_directory / "trace.jsonl", header, goes_on=resumption is not None)
    siblings_race = recipe.rollout.rounds is RoundKind.TAIL_BATCHING and recipe.tail_batching.response_oversampling > 1
    return RunReport(
        parts.emit,
        record.control,
        record.store,
        rollout.statistics,
        capacity,
        load=parts.pool.load,
        serving=lambda: len(parts.pool.serving),
        rewards_in_flight=parts.rewards[0].in_flight,
        loop_lag=parts.watch.take_loop_lag,
        alarms=_alarms(recipe),
        evaluations=evaluations,
        resumption=resumption,
        trace=trace,
        samples=TrainingSamples(run_directory / "samples.jsonl", parts.tokenizer.decode),
        length_limit=0 if siblings_race else recipe.sampling.max_tokens,
    )


def _alarms(recipe: Recipe) -> Alarms:
    """Simulated engines need not agree with the trainer."""
    mismatch = recipe.off_policy.alarm if recipe.compares_logprobs else 0.0
    return Alarms(alarm_rules(mismatch, canary_bounds(recipe.training, recipe.engines, installed_device()).alarm))


def elastic_engines(recipe: Recipe, parts: Parts, record: JournalledRun, report: RunReport) -> ElasticEngines:
    """Return what frees engines late in a round and changes sets of them, where the recipe wants either."""

    async def decided(decision: Decision, step: int, shown: bool) -> None:
        record.journal.decided(decision)
        if shown:
            await report.decided(decision, step)

    return ElasticEngines(
        parts.pool,
        parts.hosts,
        set_chooser(recipe, parts.rooms, parts.start_s),
        record.store,
        decided=decided,
        freeing=None if recipe.engines.release is ReleaseKind.NEVER else Freeing(recipe.sampling.max_tokens),
        block_tokens=CPU_BLOCK_TOKENS,  # vLLM's are smaller on a GPU: there these are the more careful figure
        share_cores=parts.trainer.engines_freed,
    )


def training_prompts(recipe: Recipe, parts: Parts, *, start: int) -> OpenPrompts:
    """The prompts that are trained on. ``start``: so many were drawn by earlier lives of the run."""
    source, mix = recipe.prompts, recipe.tail_batching
    opened = partial(open_prompts, source.train, parts.tokenizer, seed=recipe.run.seed, shuffle=source.shuffle)
    return MixedPrompts(opened(), mix.domain_column, mix.domains, start) if mix.domains else opened(start=start)


async def read_held_out(recipe: Recipe, parts: Parts) -> HeldOut:
    """All held-out prompts, in file order; of an iterator at most ``MOST_HELD_OUT``."""
    evaluation = recipe.evaluation
    prompts: list[Prompt] = []
    if evaluation.prompts:
        source = open_prompts(evaluation.prompts, parts.tokenizer, seed=0, shuffle=False)
        try:
            prompts = await source.draw(source.size or MOST_HELD_OUT)
        finally:
            await source.aclose()
    in_flight = parts.ready.max_num_seqs
    return HeldOut(prompts=prompts, settings=evaluation, reward=recipe.score, in_flight=in_flight)
