"""The observers of a run, in the order in which the controller calls them. ``run_controller`` makes them, in the
controller's process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from streamrl.base.run_events import RunDecided
from streamrl.contracts import Observer
from streamrl.control.actions import Decision
from streamrl.engines.elastic.elastic_engines import ElasticEngines, set_chooser
from streamrl.engines.elastic.freeing import Freeing
from streamrl.engines.push.verify import WeightAudit
from streamrl.engines.vllm.options import cpu_block_tokens, dtype_of_engines, expected_room
from streamrl.engines.vllm.statistics import DraftFigures
from streamrl.engines.vllm.visible_gpus import installed_device
from streamrl.launch.processes import Emit, Processes
from streamrl.launch.run_record import JournalledRun
from streamrl.launch.sampling import capacity
from streamrl.learning.canary import canary_bounds
from streamrl.observe.report.alarms import Alarms, alarm_rules
from streamrl.observe.report.missing_samples import MissingSamples
from streamrl.observe.report.run_report import FigureSources, RunReport
from streamrl.observe.report.trace_events import TraceEvents
from streamrl.observe.report.trajectory_trace import TRACE_SCHEMA, TraceHeader, TrajectoryTrace
from streamrl.observe.run_files.file_sizes import most_bytes
from streamrl.observe.top.live_figures import LiveFigures, Publish
from streamrl.observe.user_calls import UserObserver, observer_figures
from streamrl.processes.watchdog import Watchdog
from streamrl.recipe.sections import Recipe, ReleaseKind
from streamrl.run.evaluate.evaluation import HeldOutEvaluations
from streamrl.run.evaluate.sample_files import PromptWords, TrainingSamples
from streamrl.run.journal.recover import Resumption
from streamrl.stages.episodes import Episodes


def run_observers(
    recipe: Recipe,
    run_directory: Path,
    processes: Processes,
    record: JournalledRun,
    episodes: Episodes,
    evaluations: HeldOutEvaluations,
    users: Sequence[UserObserver],
    watch: Watchdog,
    events: TraceEvents,
    emit: Emit,
    publish: Publish,
) -> tuple[RunReport, list[Observer]]:
    """Return the report, and all observers: elastic engines, the audit of weights, the report, the trace, missing
    samples, live figures, the resumption of a resumed run, and ``users``."""
    recovered = record.recovered
    resumption = None
    if recovered is not None:
        resumption = Resumption(recovered, processes.trainer, watch.waits, processes.turns)
    elastic = _elastic_engines(recipe, processes, record, emit)
    audits = run_directory / "audits.jsonl"
    interval = recipe.weights.audit_interval
    mismatch = recipe.off_policy.alarm if recipe.compares_logprobs else 0.0  # simulated engines need not agree
    device = installed_device()
    canary = canary_bounds(recipe.training, recipe.engines, device, dtype_of_engines(recipe, device)).alarm
    pool = processes.pool
    header = _trace_header(recipe, run_directory.name, processes)
    drafts = DraftFigures(pool.load)
    size = partial(most_bytes, recipe.metrics.most_mib)
    trace = TrajectoryTrace(
        run_directory / "trace.jsonl", header, goes_on=resumption is not None, most_bytes=size("trace")
    )
    sources = FigureSources(
        rollout=episodes.statistics,
        load=pool.load,
        serving=lambda: len(pool.serving),
        rewards_in_flight=processes.reward.in_flight,
        loop_lag=watch.take_loop_lag,
        contexts=episodes.contexts,
        more_metrics=lambda: (
            elastic.figures
            | processes.turns.figures
            | drafts.take()
            | pool.prefix_hits.take()
            | observer_figures(users)
        ),
    )
    report = RunReport(
        emit,
        record.control,
        record.store,
        sources,
        capacity(recipe, processes),
        alarms=Alarms(alarm_rules(mismatch, canary)),
        evaluations=evaluations,
        resumption=resumption,
        trace=trace,
        samples=TrainingSamples(run_directory / "samples.jsonl", processes.tokenizer, most_bytes=size("samples")),
        words=PromptWords(run_directory / "prompts.jsonl", processes.tokenizer, most_bytes=size("prompts")),
        length_limit=recipe.max_tokens,
    )
    record.journal.elapsed = report.elapsed
    state = record.control.state
    events.open(trace, report, state.live_version, paused=state.steering.paused)
    pool.on_routed = events.routed
    observers: list[Observer] = [
        elastic,
        WeightAudit(processes.pool.serving_engines, audits, interval),
        report,
        events,
        MissingSamples(record.control, emit, train_truncated=recipe.objective_settings.train_truncated),
        LiveFigures(publish, lambda: record.control.state, report.waits, pool, budget=recipe.max_tokens),
    ]
    if resumption is not None:
        observers.append(resumption)
    return report, [*observers, *users]


def _trace_header(recipe: Recipe, run_id: str, processes: Processes) -> TraceHeader:
    return TraceHeader(
        schema=TRACE_SCHEMA,
        run_id=run_id,
        seed=recipe.run.seed,
        max_tokens=recipe.max_tokens,
        max_model_len=processes.ready.max_model_len,
        temperature=recipe.sampling.temperature,
        prompts_per_batch=recipe.rollout.prompts_per_batch,
        group_size=recipe.rollout.group_size,
        rounds=str(recipe.rollout.rounds),
        max_staleness=recipe.rollout.max_staleness,
        engines=recipe.engines.count,
        capacity=capacity(recipe, processes),
        kv_tokens=processes.ready.kv_tokens,
        ranks=recipe.training.ranks,
        parameters=processes.rank.parameters,
        engine_kind=recipe.engines.kind.value,
    )


def _elastic_engines(recipe: Recipe, processes: Processes, record: JournalledRun, emit: Emit) -> ElasticEngines:
    async def decided(decision: Decision, step: int, is_shown: bool) -> None:
        record.journal.decided(decision)
        if is_shown:
            subject = decision.subject
            figures = decision.figures
            await emit(RunDecided(step=step, subject=subject, reason=decision.reason, figures=figures))

    rooms = expected_room(recipe, processes.ready.kv_tokens // recipe.engines.count)
    for engine, order in record.control.state.steering.engines_away.items():
        if engine in processes.pool.names:  # the recipe may have had more when it was ordered
            processes.engine_processes.set_availability(engine, order)
    return ElasticEngines(
        processes.pool,
        processes.engine_processes,
        set_chooser(recipe, rooms, processes.start_s),
        record.store,
        on_decision=decided,
        freeing=None if recipe.engines.release is ReleaseKind.NEVER else Freeing(recipe.max_tokens),
        # vLLM's blocks are smaller on a GPU: this figure is then the more careful one.
        block_tokens=cpu_block_tokens(recipe),
        share_cores=processes.trainer.engines_freed,
    )
