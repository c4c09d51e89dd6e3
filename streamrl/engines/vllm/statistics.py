"""Counters of a vLLM engine in shared memory: its core writes them after each step, the engine process reads them.

vLLM's own statistics are off: their messages would wake the event loop of the engine process on every step. The
controller computes the metrics of speculative decoding from the reported counters (``DraftFigures``)."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

from streamrl.base.messages import EngineLoad
from streamrl.base.types import Metrics


class EngineCounters:
    """Counters of one engine, in memory that is shared with forks of this process."""

    def __init__(self) -> None:
        self._values = memoryview(mmap.mmap(-1, 11 * 8)).cast("d")
        self._decode_s = 0.0  # of the last step without a prefill

    def count_step(
        self,
        tokens: int,
        seconds: float,
        preempted: int,
        *,
        prefilled: int = 0,
        running: int,
        kv_usage: float,
        drafted: int = 0,
        accepted: int = 0,
    ) -> None:
        """Count one step of the core.

        ``tokens``: number of sampled tokens, accepted drafts included
        ``seconds``: duration of the step
        ``preempted``: number of preempted requests
        ``prefilled``: number of tokens whose KV was computed beside one of each request
        ``running``: number of running requests after the step
        ``drafted``, ``accepted``: number of drafted tokens, and how many of them were accepted"""
        values = self._values
        values[0] = running
        values[1] = kv_usage
        values[2] += tokens
        values[3] += preempted
        if prefilled:
            # Running requests decode in the same step.
            values[9] += prefilled
            values[10] += max(seconds - self._decode_s, 0.0)
        elif tokens:
            self._decode_s = seconds
            values[4] += 1
            values[5] += seconds
            values[6] += tokens - accepted
            values[7] += drafted
            values[8] += accepted

    def load(self, *, open_requests: int, paused: bool) -> EngineLoad:
        """Return the load of the engine now. ``open_requests``: number of requests that vLLM has not answered yet. An
        aborted request is answered, but runs until vLLM drops it, so the core's own count of running requests is
        used."""
        running, kv_usage, tokens, preemptions, *decoding, prefilled, prefill_s = self._values
        steps, decode_s, decoded, drafted, accepted = decoding
        running = 0 if paused else int(running)
        return EngineLoad(
            running=running,
            waiting=max(open_requests - running, 0),
            kv_cache_usage=kv_usage,
            generated_tokens=int(tokens),
            preemptions=int(preemptions),
            decode_steps=int(steps),
            decode_s=decode_s,
            decode_tokens=int(decoded),
            drafted_tokens=int(drafted),
            accepted_tokens=int(accepted),
            prefilled_tokens=int(prefilled),
            prefill_s=prefill_s,
        )


class DraftFigures:
    """Metrics of speculative decoding, from the counters that ``load`` returns."""

    def __init__(self, load: Callable[[], EngineLoad]) -> None:
        self._load = load
        self._before = EngineLoad()

    def take(self) -> Metrics:
        """Return ``perf/draft_*`` since the last call; empty when no token was drafted."""
        before = self._before
        now = self._load()
        self._before = now
        sampled = max(now.decode_tokens - before.decode_tokens, 1)
        drafted = now.drafted_tokens - before.drafted_tokens
        accepted = now.accepted_tokens - before.accepted_tokens
        if drafted <= 0:
            return {}
        return {"perf/draft_accepted_ratio": accepted / drafted, "perf/draft_accepted_per_step": accepted / sampled}


def kv_tokens(llm: Any) -> int:
    """Return the capacity of the KV cache of an ``AsyncLLM`` in tokens, which its core has reported."""
    cache = llm.vllm_config.cache_config
    # Newer versions of vLLM report the tokens, which is exact for models with several kinds of blocks.
    reported_tokens = getattr(cache, "kv_cache_size_tokens", None)
    return int(reported_tokens or (cache.num_gpu_blocks or 0) * cache.block_size)
