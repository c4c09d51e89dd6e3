"""Counters of a vLLM engine from its own statistics: one call of ``StatLoggerBase.record`` each iteration.

vLLM offers no other way to see KV use, preemptions or the time of a decode step. A custom stat logger turns its
statistics on; the Prometheus logger that comes with them would cost more than all else together, so ours stands in for
it. vLLM calls the two structs unstable: every field that we read is named in this file and nowhere else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from streamrl.base.messages import EngineLoad

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class EngineStatistics:
    """Counters of one engine. Everything runs on the event loop that vLLM's output loop runs on."""

    def __init__(self) -> None:
        self._running = 0
        self._kv_usage = 0.0
        self._preemptions = 0
        self._cleared = 0  # requests that a pause preempted, not yet reported by vLLM: not for want of memory
        self._generated_tokens = 0
        self._decode_steps = 0
        self._decode_s = 0.0
        self._decode_tokens = 0
        self._last_at: float | None = None

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats | None, now: float) -> None:
        """One iteration ended at ``now`` (seconds). Where nothing was prefilled, the time since the one before is that
        of a decode step: work that an idle engine gets begins with a prefill."""
        decoded = 0
        if iteration is not None:
            decoded = iteration.num_generation_tokens
            self._generated_tokens += decoded
            self._count_preemptions(iteration.num_preempted_reqs, scheduler)
            if decoded and self._last_at is not None and iteration.num_prompt_tokens == 0:
                self._decode_steps += 1
                self._decode_s += now - self._last_at
                self._decode_tokens += decoded
        if scheduler is not None:
            self._running = scheduler.num_running_reqs
            self._kv_usage = scheduler.kv_cache_usage
        self._last_at = now

    def paused(self, *, clear_cache: bool) -> None:
        """The engine is paused. ``clear_cache``: it preempted what ran, which says nothing about memory."""
        self._last_at = None
        if clear_cache:
            self._cleared += self._running

    def load(self, *, open_requests: int, paused: bool) -> EngineLoad:
        """Load of the engine now. ``open_requests``: those that were given to vLLM and have no answer yet. One that was
        aborted has its answer and still runs until vLLM dropped it: ``running`` is what the engine itself says."""
        running = 0 if paused else self._running
        return EngineLoad(
            running=running,
            waiting=max(open_requests - running, 0),
            kv_cache_usage=self._kv_usage,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            decode_steps=self._decode_steps,
            decode_s=self._decode_s,
            decode_tokens=self._decode_tokens,
        )

    def _count_preemptions(self, count: int, scheduler: SchedulerStats | None) -> None:
        of_the_pause = min(count, self._cleared)
        self._cleared -= of_the_pause
        self._preemptions += count - of_the_pause
        if not count and scheduler is not None and not scheduler.num_waiting_reqs:
            self._cleared = 0  # the rest of them was aborted


def stat_loggers(statistics: EngineStatistics) -> list[Any]:
    """The value for ``AsyncLLM.from_engine_args(stat_loggers=...)`` that feeds ``statistics``."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Recorder(PrometheusStatLogger):  # type: ignore[misc]
        """A subclass of it, because vLLM leaves out its own only where one is given."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            pass  # makes none of its 60 metrics

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            statistics.record(scheduler_stats, iteration_stats, time.monotonic())

        def log(self) -> None:
            pass  # nothing is printed

        def log_engine_initialized(self) -> None:
            pass  # no gauge to set

        def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:
            pass  # the engine is paused by us

        def record_admission_rejection(self, reason: str) -> None:
            pass  # no queue limit is set

    return [Recorder]


def kv_tokens(llm: Any) -> int:
    """Tokens that the KV cache of an ``AsyncLLM`` has room for, as its engine process said when it was ready."""
    cache = llm.vllm_config.cache_config
    # Newer versions know better where requests take blocks of several kinds.
    known = getattr(cache, "kv_cache_size_tokens", None)
    return int(known or (cache.num_gpu_blocks or 0) * cache.block_size)
