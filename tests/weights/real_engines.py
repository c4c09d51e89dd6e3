"""Small random models, real vLLM engines that load them, and pushes into those engines as the pipeline makes them."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from streamrl.base.messages import OrderDone, WeightAnnouncement
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher

Bits = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]
VOCABULARY = 48  # vLLM pads it to 64 rows
LAYERS = 2
PROMPT = [5, 9, 13, 17]
_request_numbers = itertools.count()

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
GROUPED |= {"moe_intermediate_size": 64, "first_k_dense_replace": 1}
BIASED = {"scoring_func": "sigmoid", "use_routing_bias": True}
CONSTANT = "e_score_correction_bias"
"""Part of the names of tensors that are not trained: engines keep the values of the file, in float32."""


class Architecture(msgspec.Struct, frozen=True):
    """A kind of model that transformers can make and vLLM can load. ``published``: whether the trainer's names are
    those of the checkpoint's file or of the module's parameters (which hold all experts of a layer in one)."""

    kind: str
    tied: bool
    options: dict[str, Any] = {}
    published: str = "file"


ARCHITECTURES = {
    "qwen2-tied-biases": Architecture("Qwen2", tied=True),
    "qwen2-untied-biases": Architecture("Qwen2", tied=False),
    "qwen3": Architecture("Qwen3", tied=False),
    "llama-untied": Architecture("Llama", tied=False),
    "llama-tied": Architecture("Llama", tied=True),
    "phi3-fused-qkv": Architecture("Phi3", tied=False),
    "gpt2-transposed": Architecture("GPT2", tied=True, options={"n_inner": 96, "num_key_value_heads": 4}),
    "qwen2-moe": Architecture("Qwen2Moe", tied=False, options={**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3-moe-joined": Architecture("Qwen3Moe", tied=False, options=EXPERTS, published="parameters"),
    "glm4-moe-expert-bias": Architecture("Glm4Moe", tied=False, options={**GROUPED, "n_shared_experts": 1}),
    "minimax-m2-expert-bias": Architecture(
        "MiniMaxM2", tied=False, options={**BIASED, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 32}
    ),
    "mixtral": Architecture("Mixtral", tied=False, options={"num_local_experts": 4, "intermediate_size": 64}),
}


def write_model(directory: Path, architecture: Architecture) -> tuple[Bits, Shapes]:
    """A random model with grouped heads (and biases, where it has them), saved in bfloat16.

    Returns the bits and shapes of its tensors as they are published, a tied one once; constants are not among them."""
    torch.manual_seed(0)
    options = {**SMALL, "tie_word_embeddings": architecture.tied, **architecture.options}
    config = getattr(transformers, f"{architecture.kind}Config")(**options)
    suffix = "LMHeadModel" if architecture.kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{architecture.kind}{suffix}")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if CONSTANT in name:
            buffer.data = torch.randn(buffer.shape)
    model.save_pretrained(directory)
    tensors = dict(model.named_parameters()) if architecture.published == "parameters" else read_tensors(directory)
    tensors = {name: tensor for name, tensor in tensors.items() if CONSTANT not in name}
    return {n: bits_of(t) for n, t in tensors.items()}, {n: tuple(t.shape) for n, t in tensors.items()}


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    with safe_open(directory / "model.safetensors", framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    bits: np.ndarray = tensor.detach().reshape(-1).view(torch.int16).numpy().view(np.uint16)
    return bits.copy()


def tensors_of(bits: Bits, shapes: Shapes) -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(b.view(np.int16)).view(torch.bfloat16).view(shapes[n]) for n, b in bits.items()}


def runtime_checksums(tensors: dict[str, torch.Tensor], runtime: str) -> dict[str, str]:
    """SHA-256 of every runtime parameter as vLLM lays it out: q, k, v and gate, up joined by rows, the vocabulary
    padded with zeros to 64 rows, upcast where the engine runs in float32."""
    joined: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if "embed_tokens" in name or "lm_head" in name:
            joined[name] = torch.cat([tensor, torch.zeros(64 - len(tensor), tensor.shape[1], dtype=torch.bfloat16)])
        elif ".q_proj." in name:
            parts = [tensors[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            joined[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
        elif ".gate_proj." in name:
            parts = [tensor, tensors[name.replace(".gate_proj.", ".up_proj.")]]
            joined[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat(parts)
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            joined[name] = tensor
    as_integers = {"float32": torch.int32, "bfloat16": torch.int16}[runtime]
    return {
        name: hashlib.sha256(t.to(getattr(torch, runtime)).contiguous().view(as_integers).numpy().tobytes()).hexdigest()
        for name, t in joined.items()
    }


def save_bits(directory: Path, bits: Bits, shapes: Shapes) -> None:
    """Replace the weights in ``directory``, so that a fresh engine loads ``bits``."""
    constants = {name: tensor for name, tensor in read_tensors(directory).items() if CONSTANT in name}
    save_file(tensors_of(bits, shapes) | constants, directory / "model.safetensors", metadata={"format": "pt"})


def changed(bits: Bits, seed: int, density: float = 0.02) -> Bits:
    """Some elements one or two units in the last place away; at least one in every tensor."""
    random = np.random.default_rng(seed)
    result = {}
    for name, old in bits.items():
        touched = random.random(old.size) < density
        touched[random.integers(old.size)] = True
        result[name] = old ^ (touched * random.integers(1, 4, old.size)).astype(np.uint16)
    return result


def changed_at_random(bits: Bits, seed: int) -> Bits:
    """A density between none at all and half of the elements, other in every tensor; steps in the last place, other
    signs, zeros of both signs and denormals."""
    random = np.random.default_rng(seed)
    result = {}
    for name, old in bits.items():
        touched = random.random(old.size) < 10 ** random.uniform(-5, -0.3)
        new = old ^ random.integers(1, 4, old.size).astype(np.uint16)
        kind = random.random(old.size)
        new = np.where(kind < 0.02, old ^ np.uint16(0x8000), new)
        new = np.where(kind > 0.99, random.choice(np.array([0, 0x8000, 1, 0x8001], np.uint16), old.size), new)
        result[name] = np.where(touched, new, old)
    return result


@asynccontextmanager
async def running_engine(directory: Path, dtype: str, **more: Any) -> AsyncIterator[Any]:
    """An ``AsyncLLM`` with streamrl's weight backend, whose core is a fork of this process as in a run: call it where
    no operation of torch has started threads. ``more``: further engine arguments."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from streamrl.engines.vllm.processes import fork_engine_core
    from streamrl.weights import WEIGHT_BACKEND

    one_worker = more.get("tensor_parallel_size", 1) * more.get("pipeline_parallel_size", 1) == 1
    arguments = AsyncEngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=480,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        enable_chunked_prefill=False,
        num_gpu_blocks_override=100,
        distributed_executor_backend=UniProcExecutor if one_worker else "mp",
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=WEIGHT_BACKEND),
        **more,
    )
    config = arguments.create_engine_config()
    fork_engine_core(spawn_workers=True)
    llm = AsyncLLM.from_vllm_config(config)
    context = llm.engine_core.ctx
    try:
        yield llm
    finally:
        llm.shutdown()
        for socket in list(context._sockets):
            socket.close(linger=0)
        context._shadow_obj.term()  # the one under it, which vLLM never ends


@contextmanager
def publisher_of(
    shapes: Shapes, socket_directory: Path, checkpoint: Path | None = None, **options: Any
) -> Iterator[WeightPublisher]:
    """One rank that publishes all tensors. ``checkpoint``: what the engines load."""
    shards = [ShardSpec(name, "bfloat16", shape, 0, int(np.prod(shape))) for name, shape in shapes.items()]
    endpoint = f"ipc://{socket_directory}/weights"
    publisher = WeightPublisher(endpoint, run_id="run", rank=0, shards=shards, checkpoint=checkpoint, **options)
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()


class Push:
    """One publisher and one engine, used as the pipeline uses them."""

    def __init__(self, llm: Any, publisher: WeightPublisher) -> None:
        self.llm = llm
        self.publisher = publisher
        self.staged_bytes = 0
        self.mover = ""

    def publish(self, version: int, bits: Bits) -> WeightAnnouncement:
        published = self.publisher.publish(version, bits)
        return WeightAnnouncement(
            policy_version=version,
            base_version=published.base_version,
            state_hash=published.state_hash,
            sources=(published.source,),
        )

    def publish_anchor(self, version: int) -> WeightAnnouncement:
        published = self.publisher.publish_anchor(version)
        return WeightAnnouncement(
            policy_version=version, base_version=None, state_hash=published.state_hash, sources=(published.source,)
        )

    async def commit(self, announcement: WeightAnnouncement) -> OrderDone:
        from streamrl.weights import commit, stage

        staged = await stage(self.llm, announcement)
        self.staged_bytes, self.mover = staged.payload_bytes, staged.mover
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        try:
            done = await commit(self.llm, announcement.policy_version)
        finally:
            await self.llm.resume_generation()
        self.publisher.acknowledge(announcement.policy_version)
        return done

    def sent_as_announced(self, announcement: WeightAnnouncement) -> bool:
        """Whether the last commit got those bytes, and none of an earlier version."""
        return self.staged_bytes == announcement.sources[0].payload_bytes

    async def checksums(self) -> dict[str, str]:
        """vLLM's own SHA-256 of every runtime parameter of every worker, by its name with the worker's rank."""
        return {name: digest for worker in await self.llm.compute_weight_checksums() for name, digest in worker.items()}


async def sample(llm: Any, tokens: int, seed: int | None = None) -> Any:
    """One completion of exactly ``tokens`` tokens; greedy without a seed."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        temperature=0.0 if seed is None else 1.0,
        seed=seed,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    async for output in llm.generate({"prompt_token_ids": PROMPT}, parameters, f"request-{next(_request_numbers)}"):
        final = output
    return final.outputs[0]


def engine_variables(rpc_directory: Path, *, workers: int = 1, linear: str = "plain") -> dict[str, str]:
    """Variables of a process with an engine; one core for each worker."""
    from streamrl.weights import engine_variables

    cores = sorted(os.sched_getaffinity(0))
    return {
        **engine_variables(),
        "STREAMRL_CPU_LINEAR": linear,
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cores[i % len(cores)]) for i in range(workers)),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": str(rpc_directory),
        "HF_HUB_OFFLINE": "1",
    }
