"""Start of a plain vLLM engine: options, environment, vLLM's own configuration."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

CPU_CACHE_BYTES = 1 << 30
"""``VLLM_CPU_KVCACHE_SPACE`` counts whole GiB, and vLLM touches all of it unless the number of blocks is given."""
CPU_BATCH_TOKENS = 8192


class PlainOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM engine of ``workers`` processes that compute (its tensor parallel size, unless ``vllm_config`` gets
    another). ``environment`` must be set before vllm is imported: vllm reads it at import, and hands it to its own
    processes. ``prefix_caching`` False: what a request samples does not depend, in its last bits, on what was sampled
    before it."""

    name: str
    model_path: str
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    environment: dict[str, str]
    workers: int = 1
    prefix_caching: bool = True

    @property
    def on_cpu(self) -> bool:
        """Return whether vLLM's CPU build runs it."""
        return self.device == "cpu"


def plain_environment(socket_directory: str | Path, device: str) -> dict[str, str]:
    """Variables of an engine that no plugin is loaded for; vLLM's own sockets go into ``socket_directory`` (a short
    path)."""
    of_device = cpu_environment() if device == "cpu" else {}
    # A process that trains has threads: the core cannot be a fork of it.
    alone = {"VLLM_PLUGINS": "", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    return shared_environment(socket_directory) | of_device | alone


def shared_environment(socket_directory: str | Path) -> dict[str, str]:
    """Variables of every engine."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(socket_directory),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # None of vLLM's own sockets leaves this host, and no pickle comes over them.
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_SERVER_DEV_MODE": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def cpu_environment(linear: str = "plain") -> dict[str, str]:
    """Variables of every engine on a CPU. ``linear``: see ``worker.keep_linear_weights``."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_BYTES >> 30),
        # The sampler compiles one small function with g++ in the first batch: 17 s on two cores and files in /tmp.
        "TORCHDYNAMO_DISABLE": "1",
        "STREAMRL_CPU_LINEAR": linear,
    }


def inspect_models_here() -> None:
    """Let vLLM inspect a model's class in this process. By default vLLM inspects an architecture that it has not cached
    in a subprocess, which imports all of vLLM again: more than half of the processor time of a host's first start. The
    subprocess keeps CUDA uninitialised, so on GPUs it is left as it is."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()


def vllm_config(options: PlainOptions, **more: Any) -> Any:
    """vLLM's configuration of the engine; ``more``: further arguments of vLLM. Raises ``ValueError`` where vLLM rejects
    them."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments: dict[str, Any] = {"tensor_parallel_size": options.workers}
    if options.on_cpu:
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        inspect_models_here()
        arguments |= {
            # One process computes and schedules. With vLLM's default two of them spin for each other on every token,
            # which on two cores costs a quarter of the step and 430 MB. A class is taken as it is; "uni" is not.
            "distributed_executor_backend": UniProcExecutor if options.workers == 1 else "mp",
            "enforce_eager": True,
            # A partial prefill rewinds the request's generator, which CPU generators cannot do: the engine dies.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(CPU_BATCH_TOKENS, options.max_model_len),
        }
    return AsyncEngineArgs(
        model=options.model_path,
        load_format="safetensors",  # vLLM's "auto" takes consolidated*.safetensors, of other names, where they are
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=options.prefix_caching,
        logprobs_mode="processed_logprobs",
        **(arguments | more),
    ).create_engine_config()
