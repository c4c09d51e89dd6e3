"""The vLLM engine of a run and of its judge.

It extends ``VllmEngine`` (``engines.async_llm``): it takes pushed deltas, verifies unverified tokens, sleeps, counts
its steps, and reports which of its processes died. ``launch.roles`` makes one in each engine process and in the judge's
process; ``engine_config`` also serves the model probe (``load_plan_probe``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from logging import getLogger
from os import environ
from typing import Any

from anyio import CancelScope, to_thread
from msgspec.structs import replace
from psutil import Process

from streamrl.base.errors import ModelRefused
from streamrl.base.messages import EngineLoad, EngineReady, Generate, PauseMode
from streamrl.base.types import Completion, FinishReason, TokenArray, routed_within
from streamrl.base.waits import note_phase
from streamrl.engines.async_llm.engine import VllmEngine, completion_of, routed_of
from streamrl.engines.async_llm.options import vllm_config
from streamrl.engines.resumption import (
    accepted_part,
    accepted_prefix,
    empty_completion,
    join_completions,
    remaining_tokens,
    resumed_request,
    without_unverified_tokens,
)
from streamrl.engines.vllm.arguments import checked_arguments
from streamrl.engines.vllm.held_outputs import ABORT, hold_outputs
from streamrl.engines.vllm.options import EngineOptions, batched_tokens
from streamrl.engines.vllm.processes import ProcessWatch, core_is_forked, fork_engine_core
from streamrl.engines.vllm.routing_capture import allow_capture_on_cpu
from streamrl.engines.vllm.statistics import EngineCounters, kv_tokens
from streamrl.engines.vllm.visible_gpus import visible_gpus
from streamrl.pretrained.tokenizer import tokenizer_digest
from streamrl.recipe.sections import PIPELINE_PARALLEL
from streamrl.recipe.toml_text import toml_value
from streamrl.weights import engine_variables

log = getLogger(__name__)


class RunEngine(VllmEngine):
    """One ``AsyncLLM`` and its processes. ``watch`` must run beside it, to notice the death of an idle engine."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._options = options
        self._processes: ProcessWatch | None = None
        self._counters = EngineCounters()
        self._holds_outputs = False
        self._without_cache = False  # from ``sleep`` to ``resume``
        self._verifying: set[str] = set()  # ids of requests whose unverified tokens are being verified
        self._aborted: set[str] = set()  # those of them that were aborted meanwhile

    @property
    def front_end(self) -> Any:
        """vLLM's ``AsyncLLM``, for the routes of the judge. Raises ``EngineError`` before ``start``."""
        self._require_alive()
        return self._llm

    async def start(self) -> EngineReady:
        environ.update(engine_variables())
        ready = await super().start()
        if self._options.adapter.syncs_adapter:
            from streamrl.weights.vllm.adapter import adapter_request

            await self._llm.collective_rpc("streamrl_open_adapter")
            self._adapter = adapter_request()
        digest = await to_thread.run_sync(tokenizer_digest, self._options.model_path)
        return replace(ready, tokenizer_digest=digest, kv_tokens=kv_tokens(self._llm))

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.update(self._verifying.intersection(request_ids))
        if not self._holds_outputs:
            await super().abort(request_ids)
            return
        self._require_alive()
        by_our_id = self._llm.output_processor.external_req_ids  # vLLM's own ids of a request, by ours
        vllm_ids = [vllm_id for request_id in request_ids for vllm_id in by_our_id.get(request_id, ())]
        if vllm_ids:
            await self._unless_dead(lambda: self._llm.engine_core.call_utility_async(ABORT, vllm_ids))

    async def sleep(self) -> None:
        """Abort the requests and free the device's memory. The weights move to CPU memory, unless the engine
        ``keeps_weights``. On a CPU nothing is freed. Until ``resume`` after ``wake`` no request runs."""
        if self._options.keeps_weights:
            await self.pause(PauseMode.ABORT, clear_cache=True)
            await self._unless_dead(self._llm.release_kv_cache_memory)
        else:
            self._pauses += 1
            await self._unless_dead(lambda: self._llm.sleep(level=1))
        self._paused = True
        self._without_cache = True

    async def wake(self) -> None:
        """Take the memory of the weights again. The live version must be committed before ``resume``."""
        if not self._options.keeps_weights:
            await self._unless_dead(lambda: self._llm.wake_up(["weights"]))

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        if not self._without_cache:  # otherwise its sleep has paused it
            await super().pause(mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Continue sampling after ``pause``. After ``wake``, the KV cache first takes its memory."""
        if self._without_cache:
            await self._unless_dead(lambda: self._llm.wake_up(["kv_cache"]))  # vLLM resumes by itself
            self._without_cache = False
            self._paused = False
        else:
            await super().resume()

    def load(self) -> EngineLoad:
        """Return the load after the last decode step of vLLM's core. During a pause all requests wait."""
        if not self._holds_outputs:
            return super().load()
        return self._counters.load(open_requests=self._open_requests, paused=self._paused)

    async def aclose(self) -> None:
        """Stop vLLM and wait for its processes."""
        await super().aclose()
        if self._processes is not None:
            with CancelScope(shield=True):
                await to_thread.run_sync(self._processes.end_all)

    def _build(self) -> Any:
        note_phase("imports vLLM")
        from vllm.v1.engine.async_llm import AsyncLLM

        other_children = {child.pid for child in Process().children()}
        config = engine_config(self._options)
        note_phase("vLLM loads the model and warms up")
        fork_engine_core(spawn_workers=self._options.on_cpu)
        holds = hold_outputs(self._counters)
        llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        self._holds_outputs = holds and core_is_forked()
        if holds and not self._holds_outputs:
            log.warning(
                "outputs leave vLLM's core token by token: vLLM spawned it, without the patches of this process"
            )
        self._processes = ProcessWatch(other_children)
        return llm

    def _cause_of_death(self) -> str | None:
        return self._processes.first_death() if self._processes else None

    async def _answer(self, request: Generate) -> Completion:
        """Sample ``request``. Of its unverified tokens, one prefill first accepts those that the weights choose, too;
        then the engine samples the following tokens, with the random numbers of their positions. A request that is
        aborted before this prefill ends has sampled no token."""
        from streamrl.engines.vllm import sampler_patches

        prompt = without_unverified_tokens(request)
        longest = self._options.max_model_len - 1 - len(prompt.token_ids)
        count = min(request.unverified_tokens, longest, remaining_tokens(request))
        if count <= 0 or not sampler_patches.verifies():
            return await self._sample(prompt)
        unverified = request.token_ids[len(prompt.token_ids) :][:count]
        self._verifying.add(request.request_id)
        try:
            accepted = await self._verify(prompt, unverified)
            if request.request_id in self._aborted:
                return accepted
        finally:
            self._verifying.discard(request.request_id)
            self._aborted.discard(request.request_id)
        resumed = resumed_request(prompt, accepted, seed=request.seed)
        if remaining_tokens(resumed) == 0:
            return replace(accepted, finish_reason=FinishReason.LENGTH)
        arguments: dict[str, int] = {}
        if accepted.token_ids:
            arguments[sampler_patches.SKIP] = len(accepted.token_ids)
        return join_completions(accepted, await self._sample(resumed, extra_args=arguments))

    async def _verify(self, prompt: Generate, tokens: TokenArray) -> Completion:
        """Return the first of ``tokens`` that these weights choose, too, as the completion so far of ``prompt``."""
        from streamrl.engines.vllm import sampler_patches

        prefill = replace(prompt, token_ids=prompt.token_ids + tokens, min_tokens=0, stop=())
        arguments = {
            sampler_patches.COMPARE: len(tokens),
            sampler_patches.FEWEST: prompt.min_tokens - prompt.prefix_length,
        }
        changes: dict[str, Any] = {"extra_args": arguments, "prompt_logprobs": 0}
        pauses = -1
        # A pause may have changed the weights since the prefill: then repeat it.
        while pauses != self._pauses:
            pauses = self._pauses
            output = await self._output(prefill, max_tokens=1, **changes)
            if output.outputs[0].finish_reason == "abort":
                self._aborted.add(prompt.request_id)
                return empty_completion(FinishReason.ABORT)
            if prompt.request_id in self._aborted:
                break
        flat = output.prompt_logprobs
        count = accepted_prefix(tokens, flat.ranks[-len(tokens) :])
        version = completion_of(output.outputs[0]).version_spans[0].policy_version
        routed = routed_within(routed_of(prefill, output.outputs[0]), 0, len(prompt.token_ids) + count, moved=0)
        return accepted_part(tokens, flat.logprobs[-len(tokens) :], count, version, routed)


def engine_config(options: EngineOptions) -> Any:
    """Return vLLM's configuration of the engine. Raises ``ModelRefused`` when vLLM rejects it, or could not serve the
    model."""
    from vllm.config import WeightTransferConfig

    memory = min((gpu.memory for gpu in visible_gpus()), default=0)
    arguments: dict[str, Any] = {
        "max_num_batched_tokens": batched_tokens(options, memory) or None,
        "enable_sleep_mode": options.sleeps,
        "scheduling_policy": "priority" if options.by_priority else "fcfs",
        "weight_transfer_config": WeightTransferConfig(backend="streamrl") if options.pushed else None,
        "enable_return_routed_experts": options.routed,
    }
    if options.routed and options.on_cpu:
        allow_capture_on_cpu()
    if not options.on_cpu:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    if options.adapter.syncs_adapter:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1}
        arguments |= {"max_lora_rank": options.adapter_rank, "lora_target_modules": list(options.adapted_modules)}
    if options.cache_blocks:
        arguments |= {"block_size": options.block_tokens, "num_gpu_blocks_override": options.cache_blocks}
    recipe_arguments = checked_arguments(options.args, on_cpu=options.on_cpu)
    if options.kept_tokens and recipe_arguments.get("max_logprobs") != -1:
        most_logprobs = max(recipe_arguments.get("max_logprobs", 0), options.kept_tokens + 1)
        recipe_arguments["max_logprobs"] = most_logprobs
    arguments["tensor_parallel_size"] = options.workers // max(1, recipe_arguments.get(PIPELINE_PARALLEL, 1))
    try:
        config = vllm_config(options, **arguments | recipe_arguments)
    except (ValueError, ImportError) as error:  # ImportError: the package of a method of speculation is missing
        raise ModelRefused(f"{options.name}: {_why_refused(options, str(error))}") from error
    if options.cache_blocks and config.cache_config.block_size < options.block_tokens:
        # vLLM's kernel of latent attention on a CPU has smaller blocks: as many tokens need more of them.
        smaller = options.block_tokens // config.cache_config.block_size
        config.cache_config.num_gpu_blocks_override = options.cache_blocks * smaller
    if options.on_cpu and not config.model_config.use_mla:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size = config.model_config.get_head_size()
        sizes = CPUAttentionBackend.get_supported_head_sizes()
        if size not in sizes:  # vLLM would otherwise crash on the first request
            raise ModelRefused(f"the model has attention heads of {size}, and vLLM on a CPU serves only {sizes}")
    return config


def _why_refused(options: EngineOptions, message: str) -> str:
    """Explain vLLM's error ``message`` in one sentence, with the key to set if it is known."""
    match = re.search(r"derived max_model_len \(\w+=(\d+)", message)
    if match:
        key = "engines.max_model_len" if options.pushed else "judge.advanced.max_model_len"
        return f"the model has {match[1]} positions, and {options.max_model_len} are asked for: set {key} = {match[1]}"
    engine = options.model_path
    if options.args:
        engine += f" with engines.args = {toml_value(options.args)}"
    return f"vLLM cannot serve {engine}: {message}"
