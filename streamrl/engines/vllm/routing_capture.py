"""Patches of vLLM that return the experts of each token from an engine on a CPU.

vLLM 0.32 captures the experts, stores those of cached prompts beside the prefix cache, and returns them, but only its
second model runner runs this part (``AuxOutputWorkerConnector``), and a CPU engine has the first one. The plugin
patches three methods of the first runner in each worker process; the patches act only if
``enable_return_routed_experts`` is set. The engine process calls ``allow_capture_on_cpu``. On CUDA vLLM needs no
patch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def allow_capture_on_cpu() -> None:
    """Let vLLM accept ``enable_return_routed_experts`` on a CPU. ``learning.routing_replay`` refuses the other recipes
    that vLLM's check would refuse."""
    from vllm.config import VllmConfig

    VllmConfig._verify_aux_output_compatibility = lambda config: None


def add_routing_capture() -> None:
    """Patch this process, of a CPU engine. The plugin calls it before a model runner is made."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if hasattr(CPUModelRunner.sample_tokens, "streamrl_original"):
        return
    vllm_prepare = CPUModelRunner.initialize_kv_cache
    vllm_execute = CPUModelRunner.execute_model
    vllm_sample = CPUModelRunner.sample_tokens

    def prepare(runner: Any, kv_cache_config: Any, is_profiling: bool = False, **options: Any) -> None:
        vllm_prepare(runner, kv_cache_config, is_profiling, **options)
        if runner.vllm_config.aux_output_config.enabled and not is_profiling:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            runner.streamrl_routing = get_aux_output_connector(runner.model, runner.vllm_config, kv_cache_config)

    def execute(runner: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        connector = getattr(runner, "streamrl_routing", None)
        if connector is not None:
            connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return vllm_execute(runner, scheduler_output, *arguments, **options)

    def sample(runner: Any, grammar_output: Any) -> Any:
        connector = getattr(runner, "streamrl_routing", None)
        state = runner.execute_model_state
        output = vllm_sample(runner, grammar_output)
        if connector is not None and state is not None:
            output.aux_output_connector_output = _routed(runner, connector, state[0], output.sampled_token_ids)
        return output

    sample.streamrl_original = vllm_sample  # type: ignore[attr-defined]
    CPUModelRunner.initialize_kv_cache = prepare
    CPUModelRunner.execute_model = execute
    CPUModelRunner.sample_tokens = sample


def _routed(runner: Any, connector: Any, scheduled: Any, tokens: list[list[int]]) -> Any:
    """Return the experts of the tokens of a step, by request; None in a worker that is not the first of its engine.
    ``scheduled``: vLLM's scheduler output; ``tokens``: token ids that were sampled for each request."""
    import numpy as np

    batch = runner.input_batch
    requests = len(tokens)
    pending = connector.prepare_output(
        SimpleNamespace(
            req_ids=batch.req_ids[:requests],
            query_start_loc_np=runner.query_start_loc.np,
            num_computed_tokens_np=batch.num_computed_tokens_cpu[:requests].copy(),
        )
    )
    if pending is None:
        return None
    counts = np.array([len(token_ids) for token_ids in tokens])
    drafted = np.array([len(scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in pending.request_ids])
    pending.enqueue_cpu_copy(counts, np.where(counts > 0, drafted + 1 - counts, 0))
    return pending.process_output()
