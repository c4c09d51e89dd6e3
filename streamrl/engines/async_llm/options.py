"""Options, process variables and vLLM configuration of an ``AsyncLLM`` engine.

``async_llm.engine`` reads them when it starts vLLM. ``engines.vllm.options`` and ``rewards.served.options`` build the
options of a run's engines and judge on them, in the processes that start or check these."""

from __future__ import annotations

from os import environ
from pathlib import Path
from typing import Any

from msgspec import Struct

CPU_CACHE_BYTES = 1 << 30
"""Memory for the KV cache on a CPU. ``VLLM_CPU_KVCACHE_SPACE`` counts full GiB, and vLLM touches all of it unless the
number of blocks is set."""
CPU_BATCH_TOKENS = 8192


class VllmOptions(Struct, frozen=True, kw_only=True):
    """Options of one vLLM engine.

    ``variables``: variables that must be set before vllm is imported; vllm hands them on to its own processes
    ``workers``: number of processes that compute (the tensor parallel size, unless ``vllm_config`` gets another one)
    ``prefix_caching``: False where the last bits of a completion must not depend on earlier requests
    ``kept_tokens``: largest kept set that is returned with a sampled token (0: none is returned)
    ``text_only``: whether the model has towers for images or sound, which are not loaded"""

    name: str
    model_path: str
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    variables: dict[str, str]
    workers: int = 1
    prefix_caching: bool = True
    kept_tokens: int = 0
    text_only: bool = False

    @property
    def on_cpu(self) -> bool:
        """Return whether vLLM's CPU build runs the engine."""
        return self.device == "cpu"


def shared_variables(socket_directory: str | Path) -> dict[str, str]:
    """Return the variables of every engine."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(socket_directory),
        "VLLM_LOGGING_LEVEL": environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # None of vLLM's own sockets leaves this host, and no pickle comes over them.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_SERVER_DEV_MODE": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def unset_service_address() -> None:
    """Unset VLLM_PORT where Kubernetes set it to the address of a service named vllm: vLLM takes a number only."""
    if "://" in environ.get("VLLM_PORT", ""):
        del environ["VLLM_PORT"]


def cpu_variables(linear: str = "plain") -> dict[str, str]:
    """Return the variables of every engine on a CPU. ``linear``: "plain" or "packed" linear layers; see
    ``worker.keep_linear_weights``."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_BYTES >> 30),
        # The sampler compiles one small function with g++ in the first batch: 17 s on two cores and files in /tmp.
        "TORCHDYNAMO_DISABLE": "1",
        "STREAMRL_CPU_LINEAR": linear,
    }


def inspect_models_here() -> None:
    """Let vLLM inspect a model's class in this process. By default vLLM inspects an architecture that is not in its
    cache in a subprocess, which imports all of vLLM again: more than half of the processor time of a first start. The
    subprocess keeps CUDA uninitialised, so this patch is for engines on a CPU only."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def vllm_config(options: VllmOptions, **further: Any) -> Any:
    """Return vLLM's configuration of the engine. ``further``: further arguments of ``AsyncEngineArgs``, which replace
    ours. Raises ``ValueError`` when vLLM rejects the arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments: dict[str, Any] = {"tensor_parallel_size": options.workers}
    if options.on_cpu:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        inspect_models_here()
        arguments |= {
            # One process computes and schedules. With vLLM's default two processes spin for each other on every token,
            # which on two cores costs a quarter of the step and 430 MB. vLLM replaces "uni" on a CPU, but not a class.
            "distributed_executor_backend": UniProcExecutor if options.workers == 1 else "mp",
            "enforce_eager": True,
            # A partial prefill rewinds the request's generator, which a CPU generator cannot do: the engine dies.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCH_TOKENS, options.max_model_len),
        }
    return AsyncEngineArgs(
        model=options.model_path,
        load_format="safetensors",  # "auto" prefers consolidated*.safetensors, whose tensors have other names
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=options.prefix_caching,
        language_model_only=options.text_only,
        logprobs_mode="processed_logprobs",
        **(arguments | further),
    ).create_engine_config()
