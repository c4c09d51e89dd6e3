"""Counters of a vLLM engine in memory that its core writes after each step and its host reads when asked. vLLM's own
statistics are off: their messages would wake the host's event loop on every step."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

from streamrl.base.messages import EngineLoad


class EngineCounters:
    """Counters of one engine, shared with the processes that are forked from this one."""

    def __init__(self) -> None:
        self._values = memoryview(mmap.mmap(-1, 9 * 8)).cast("d")

    def count_step(
        self,
        tokens: int,
        decoded_s: float | None,
        preempted: int,
        *,
        running: int,
        kv_usage: float,
        drafted: int = 0,
        accepted: int = 0,
    ) -> None:
        """Count one step of the core, which sampled ``tokens``, of them ``accepted`` ones that were ``drafted``.
        ``decoded_s``: the seconds it took, None where it contained a prefill. ``running``: requests after it."""
        values = self._values
        values[0] = running
        values[1] = kv_usage
        values[2] += tokens
        values[3] += preempted
        if tokens and decoded_s is not None:
            values[4] += 1
            values[5] += decoded_s
            values[6] += tokens - accepted
            values[7] += drafted
            values[8] += accepted

    def load(self, *, open_requests: int, paused: bool) -> EngineLoad:
        """Load of the engine now. ``open_requests``: those that were given to vLLM and have no answer yet. One that was
        aborted has its answer and still runs until vLLM dropped it: ``running`` is what the core counts."""
        running, kv_usage, tokens, preemptions, steps, decode_s, decoded, drafted, accepted = self._values
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
        )


class DraftFigures:
    """Metrics of speculative decoding by the engines whose ``load`` counts it."""

    def __init__(self, load: Callable[[], EngineLoad]) -> None:
        self._load = load
        self._before = EngineLoad()

    def take(self) -> dict[str, float]:
        """``perf/draft_*`` since the last call; nothing where no token was drafted."""
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
    """Tokens that the KV cache of an ``AsyncLLM`` has room for, as its engine process said when it was ready."""
    cache = llm.vllm_config.cache_config
    # Newer versions know better where requests take blocks of several kinds.
    known = getattr(cache, "kv_cache_size_tokens", None)
    return int(known or (cache.num_gpu_blocks or 0) * cache.block_size)
