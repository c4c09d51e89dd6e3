"""The engine of a run: a plain one (``engines.plain_vllm``) that takes pushed deltas, verifies kept tokens, sleeps,
counts its steps, and knows from its processes why it died."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import psutil

from streamrl.base.errors import ModelRefused
from streamrl.base.messages import EngineLoad, EngineReady, Generate
from streamrl.base.types import Completion, FinishReason, TokenArray, routed_within
from streamrl.base.waits import note_phase
from streamrl.engines.plain_vllm.engine import PlainVllmEngine, completion_of, routed_of
from streamrl.engines.plain_vllm.options import vllm_config
from streamrl.engines.resumption import (
    accepted_part,
    accepted_prefix,
    empty_completion,
    join_completions,
    remaining_tokens,
    resumed_request,
    without_kept,
)
from streamrl.engines.vllm.arguments import checked_arguments
from streamrl.engines.vllm.gpus import visible_gpus
from streamrl.engines.vllm.held_outputs import ABORT, hold_outputs
from streamrl.engines.vllm.options import EngineOptions, batched_tokens
from streamrl.engines.vllm.processes import ProcessWatch, core_is_forked, fork_engine_core
from streamrl.engines.vllm.routing_capture import allow_capture_on_cpu
from streamrl.engines.vllm.statistics import EngineCounters, kv_tokens
from streamrl.pretrained.tokenizer import tokenizer_digest
from streamrl.recipe.sections import STAGES
from streamrl.recipe.toml_text import toml_value
from streamrl.weights import engine_environment, engine_push

log = logging.getLogger(__name__)


class VllmEngine(PlainVllmEngine):
    """One ``AsyncLLM`` and its two processes. Run ``watch`` beside it: a dead idle engine says nothing by itself."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options, weights=engine_push)
        self._options = options
        self._processes: ProcessWatch | None = None
        self._counters = EngineCounters()
        self._holds = False
        self._verifying: set[str] = set()
        self._aborted: set[str] = set()

    @property
    def front_end(self) -> Any:
        """vLLM's ``AsyncLLM``, for the judge's routes. Raises ``EngineError`` before ``start``."""
        self._require_alive()
        return self._llm

    async def start(self) -> EngineReady:
        os.environ.update(engine_environment())
        ready = await super().start()
        if self._options.adapter.served:
            from streamrl.weights.vllm.adapter import adapter_request

            await self._llm.collective_rpc("streamrl_open_adapter")
            self._adapter = adapter_request()
        digest = await anyio.to_thread.run_sync(tokenizer_digest, self._options.model_path)
        return msgspec.structs.replace(ready, tokenizer_digest=digest, kv_tokens=kv_tokens(self._llm))

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.update(self._verifying.intersection(request_ids))
        if not self._holds:
            await super().abort(request_ids)
            return
        self._require_alive()
        known = self._llm.output_processor.external_req_ids  # vLLM's own names of a request, by ours
        named = [name for request_id in request_ids for name in known.get(request_id, ())]
        if named:
            await self._unless_dead(lambda: self._llm.engine_core.call_utility_async(ABORT, named))

    async def sleep(self) -> None:
        """Give the device's memory back, with the weights in host memory; nothing may be asked of it until ``wake``.
        CUDA only."""
        self._pauses += 1
        await self._unless_dead(lambda: self._llm.sleep(level=1))
        self._paused = True

    async def wake(self) -> None:
        """Take the device's memory again. Its weights must be brought to the live version before it samples."""
        await self._unless_dead(self._llm.wake_up)
        self._paused = False

    def load(self) -> EngineLoad:
        """Load after the last decode step of vLLM's core; while paused all requests wait."""
        if not self._holds:
            return super().load()
        return self._counters.load(open_requests=self._open_requests, paused=self._paused)

    async def aclose(self) -> None:
        """Stop vLLM and wait for its processes."""
        await super().aclose()
        if self._processes is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._processes.end_all)

    def _build(self) -> Any:
        note_phase("imports vLLM")
        from vllm.v1.engine.async_llm import AsyncLLM

        others = {child.pid for child in psutil.Process().children()}
        config = engine_config(self._options)
        note_phase("vLLM loads the model and warms up")
        fork_engine_core(spawn_workers=self._options.on_cpu)
        holds = hold_outputs(self._counters)
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        self._holds = holds and core_is_forked()
        if holds and not self._holds:
            log.warning(
                "outputs leave vLLM's core token by token: vLLM spawned it, and what is patched here is not there"
            )
        self._processes = ProcessWatch(others)
        return llm

    def _cause_of_death(self) -> str | None:
        return self._processes.first_death() if self._processes else None

    async def _answer(self, request: Generate) -> Completion:
        """Sample ``request``. With kept tokens, one prefill first finds which of them hold; the engine samples on from
        there, with the random numbers of that place. A request that is aborted before this prefill ends has sampled
        nothing."""
        from streamrl.engines.vllm import continuation

        whole = without_kept(request)
        longest = self._options.max_model_len - 1 - len(whole.token_ids)
        kept = min(request.kept, longest, remaining_tokens(request))
        if kept <= 0 or not continuation.verifies():
            return await self._sampled(whole)
        tokens = request.token_ids[len(whole.token_ids) :][:kept]
        self._verifying.add(request.request_id)
        try:
            accepted = await self._scored(whole, tokens)
            if request.request_id in self._aborted:
                return accepted
        finally:
            self._verifying.discard(request.request_id)
            self._aborted.discard(request.request_id)
        held = len(accepted.token_ids)
        rest = resumed_request(whole, accepted, seed=request.seed)
        if remaining_tokens(rest) == 0:
            return msgspec.structs.replace(accepted, finish_reason=FinishReason.LENGTH)
        arguments = {continuation.SKIP: held} if held else {}
        return join_completions(accepted, await self._sampled(rest, extra_args=arguments))

    async def _scored(self, whole: Generate, tokens: TokenArray) -> Completion:
        """The part of ``tokens`` that these weights choose, too, as what was sampled so far."""
        from streamrl.engines.vllm import continuation

        asked = msgspec.structs.replace(whole, token_ids=whole.token_ids + tokens, min_tokens=0, stop=())
        arguments = {continuation.COMPARE: len(tokens), continuation.FEWEST: whole.min_tokens - whole.prefix_length}
        comparing: dict[str, Any] = {"extra_args": arguments, "prompt_logprobs": 0}
        pauses = -1
        while pauses != self._pauses:  # the weights may have changed since: what is in flight now is not affected
            pauses = self._pauses
            output = await self._output(asked, max_tokens=1, **comparing)
            if output.outputs[0].finish_reason == "abort":
                self._aborted.add(whole.request_id)
                return empty_completion(FinishReason.ABORT)
            if whole.request_id in self._aborted:
                break
        flat = output.prompt_logprobs
        held = accepted_prefix(tokens, flat.ranks[-len(tokens) :])
        version = completion_of(output.outputs[0]).version_spans[0].policy_version
        routed = routed_within(routed_of(asked, output.outputs[0]), 0, len(whole.token_ids) + held, moved=0)
        return accepted_part(tokens, flat.logprobs[-len(tokens) :], held, version, routed)


def engine_config(options: EngineOptions) -> Any:
    """vLLM's configuration of the engine. Raises ``ModelRefused`` if vLLM rejects the configuration."""
    from vllm.config import WeightTransferConfig

    memory = max((gpu.memory for gpu in visible_gpus()), default=0)
    more: dict[str, Any] = {
        "max_num_batched_tokens": batched_tokens(options, memory) or None,
        "enable_sleep_mode": options.sleeps,
        "scheduling_policy": "priority" if options.by_priority else "fcfs",
        "weight_transfer_config": WeightTransferConfig(backend="streamrl") if options.pushed else None,
        "enable_return_routed_experts": options.routed,
    }
    if options.routed and options.on_cpu:
        allow_capture_on_cpu()
    if not options.on_cpu:
        more["gpu_memory_utilization"] = options.gpu_memory_utilization
    if options.adapter.served:
        more |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
        more |= {"max_lora_rank": options.adapter_rank, "lora_target_modules": list(options.adapted_modules)}
    if options.cache_blocks:
        more |= {"block_size": options.block_tokens, "num_gpu_blocks_override": options.cache_blocks}
    given = checked_arguments(options.args, on_cpu=options.on_cpu)
    more["tensor_parallel_size"] = options.workers // max(1, given.get(STAGES, 1))
    try:
        config = vllm_config(options, **more | given)
    except (ValueError, ImportError) as error:  # a method of speculation whose package is missing
        raise ModelRefused(f"{options.name}: {_why_refused(options, str(error))}") from error
    if options.on_cpu and not config.model_config.use_mla:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size = config.model_config.get_head_size()
        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if size not in sizes:  # vLLM would otherwise crash on the first request
            raise ModelRefused(f"the model has attention heads of {size}, and vLLM on a CPU serves only {sizes}")
    return config


def _why_refused(options: EngineOptions, said: str) -> str:
    """Explain a refusal in one sentence, with the key to set where that is known."""
    if found := re.search(r"derived max_model_len \(\w+=(\d+)", said):
        key = "engines.max_model_len" if options.pushed else "judge.advanced.max_model_len"
        return f"the model has {found[1]} positions, and {options.max_model_len} are asked for: set {key} = {found[1]}"
    given = f" with engines.args = {toml_value(options.args)}" if options.args else ""
    return f"vLLM cannot serve {options.model_path}{given}: {said}"
