"""Real engines on tiny random models: every runtime parameter is bit-equal to what was published, at every version.

The expected checksums are computed here, from the checkpoint tensors, without the code under test.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.comm.weights.manifest import ShardSpec
from streamrl.comm.weights.publisher import WeightPublisher
from streamrl.comm.weights.serving import ServedPart
from streamrl.errors import WeightError
from streamrl.messages import OrderDone, WeightAnnouncement

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.torch,
    pytest.mark.timeout(170),
    pytest.mark.filterwarnings("default"),
]

Bits = dict[str, np.ndarray]
VOCABULARY = 48  # vLLM pads it to 64 rows
EMPTY = hashlib.sha256(b"").hexdigest()
PROMPT = [5, 9, 13, 17]
_request_numbers = itertools.count()


def write_model(directory: Path, architecture: str, tied: bool) -> Bits:
    """A random model of 2 layers with grouped heads (and biases, where it has them), saved in bfloat16.

    Returns the bits of its checkpoint tensors, a tied one once.
    """
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "eos_token_id": 1,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")(**shape)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(torch.bfloat16).save_pretrained(directory)
    return {n: p.detach().reshape(-1).view(torch.int16).numpy().view(np.uint16) for n, p in model.named_parameters()}


def shapes_of(directory: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(directory / "model.safetensors", framework="pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def changed(bits: Bits, seed: int, density: float = 0.02) -> Bits:
    """Some elements one or two units in the last place away; at least one in every tensor."""
    random = np.random.default_rng(seed)
    result = {}
    for name, old in bits.items():
        touched = random.random(old.size) < density
        touched[random.integers(old.size)] = True
        result[name] = old ^ (touched * random.integers(1, 4, old.size)).astype(np.uint16)
    return result


def expected_checksums(bits: Bits, shapes: dict[str, tuple[int, ...]], runtime: str, tied: bool) -> dict[str, str]:
    """SHA-256 of every runtime parameter as vLLM lays it out: q, k, v and gate, up joined by rows, the vocabulary
    padded with zeros, upcast where the engine runs in float32."""
    tensors = {n: torch.from_numpy(b.view(np.int16)).view(torch.bfloat16).view(shapes[n]) for n, b in bits.items()}
    joined: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if "embed_tokens" in name or "lm_head" in name:
            joined[name] = torch.cat([tensor, torch.zeros(64 - VOCABULARY, tensor.shape[1], dtype=torch.bfloat16)])
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


@asynccontextmanager
async def running_engine(directory: Path, dtype: str) -> AsyncIterator[Any]:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from streamrl.engines.vllm_weights import WEIGHT_BACKEND

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
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=WEIGHT_BACKEND),
    )
    llm = AsyncLLM.from_engine_args(arguments)
    try:
        yield llm
    finally:
        llm.shutdown()


class Push:
    """One publisher and one engine, used as the pipeline uses them."""

    def __init__(self, llm: Any, publisher: WeightPublisher) -> None:
        self.llm = llm
        self.publisher = publisher

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
        from streamrl.engines import vllm_weights

        staged = await vllm_weights.stage(self.llm, announcement)
        assert staged.payload_bytes == announcement.sources[0].payload_bytes
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        try:
            done = await vllm_weights.commit(self.llm, announcement.policy_version)
        finally:
            await self.llm.resume_generation()
        self.publisher.acknowledge(announcement.policy_version)
        return done

    async def checksums(self) -> dict[str, str]:
        (worker,) = await self.llm.compute_weight_checksums()
        return {name.rpartition(":")[2]: digest for name, digest in worker.items()}


async def sample(llm: Any, tokens: int, seed: int | None = None) -> Any:
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


@pytest.fixture
def engine_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    from streamrl.engines.vllm_weights import engine_environment

    def set_variables(**more: str) -> None:
        core = str(min(os.sched_getaffinity(0)))
        variables = {
            **engine_environment(),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": core,
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": str(tmp_path),
            "HF_HUB_OFFLINE": "1",
            **more,
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def publisher_of(directory: Path, bits: Bits, socket_directory: Path) -> WeightPublisher:
    shapes = shapes_of(directory)
    shards = [ShardSpec(name, "bfloat16", shapes[name], 0, b.size) for name, b in bits.items()]
    return WeightPublisher(f"ipc://{socket_directory}/weights", run_id="run", rank=0, shards=shards)


@pytest.mark.asyncio
async def test_pushes_into_a_running_engine(tmp_path: Path, engine_variables: Callable[..., None]) -> None:
    """Tied Qwen2 in float32: anchor and deltas with requests in flight, then everything that must be refused."""
    engine_variables()
    directory = tmp_path / "model"
    bits = write_model(directory, "Qwen2", tied=True)
    shapes = shapes_of(directory)
    publisher = publisher_of(directory, bits, tmp_path)
    publisher.start()
    try:
        async with running_engine(directory, "float32") as llm, asyncio.TaskGroup() as tasks:
            push = Push(llm, publisher)
            bits = await push_while_sampling(push, tasks, bits, shapes)
            bits = await refuse_what_does_not_fit(push, bits, shapes)
            greedy = list((await sample(llm, 40)).token_ids)
    finally:
        publisher.close()
    save_bits(directory, bits, shapes)
    async with running_engine(directory, "float32") as fresh:
        assert list((await sample(fresh, 40)).token_ids) == greedy


async def push_while_sampling(
    push: Push, tasks: asyncio.TaskGroup, bits: Bits, shapes: dict[str, tuple[int, ...]]
) -> Bits:
    loaded = await push.checksums()
    assert EMPTY not in loaded.values(), "a parameter is empty: the engine packed its weights"
    assert loaded == expected_checksums(bits, shapes, "float32", tied=True)
    requests = [tasks.create_task(sample(push.llm, 400, seed)) for seed in range(8)]
    for version in range(5):
        bits = changed(bits, version) if version else changed(bits, 99, density=0.5)
        announcement = push.publish(version, bits)
        assert announcement.base_version == (version - 1 if version else None)
        done = await push.commit(announcement)
        assert done.state_hash == announcement.state_hash
        assert await push.checksums() == expected_checksums(bits, shapes, "float32", tied=True)
    assert not any(request.done() for request in requests), "requests ended before the last push: sample longer"
    for request in requests:
        completion = await request
        assert len(completion.token_ids) == 400
        assert [span.version for span in completion.weight_versions][-1] == "4"
        assert len(completion.weight_versions) >= 3
    return bits


async def refuse_what_does_not_fit(push: Push, bits: Bits, shapes: dict[str, tuple[int, ...]]) -> Bits:
    from streamrl.engines import vllm_weights

    before = await push.checksums()
    with pytest.raises(WeightError, match="version 5 cannot be committed: staged is None"):
        await vllm_weights.commit(push.llm, 5)

    skipped = push.publish(5, changed(bits, 5))
    wrong_base = WeightAnnouncement(
        policy_version=5, base_version=3, state_hash=skipped.state_hash, sources=skipped.sources
    )
    with pytest.raises(WeightError, match="announced was"):
        await push.commit(wrong_base)

    bits = changed(bits, 6)
    announcement = push.publish(6, bits)
    corrupt_last_chunk(push.publisher)
    with pytest.raises(WeightError, match="came 3 times with digest"):
        await push.commit(announcement)
    assert await push.checksums() == before

    too_early = push.publish(7, changed(bits, 7))
    await push.commit(announcement)
    assert await push.checksums() == expected_checksums(bits, shapes, "float32", tied=True)
    with pytest.raises(WeightError, match=r"is a delta on version 4.*this engine holds version 6"):
        await push.commit(too_early)

    # Something else wrote to the live weights: the next delta must notice, and an anchor repairs it.
    await push.llm.collective_rpc("reset_weights")
    bits = changed(bits, 8)
    announcement = push.publish(8, bits)
    with pytest.raises(WeightError, match="differ before the commit"):
        await push.commit(announcement)
    await push.commit(push.publish_anchor(8))
    assert await push.checksums() == expected_checksums(bits, shapes, "float32", tied=True)
    return bits


def corrupt_last_chunk(publisher: WeightPublisher) -> None:
    part = publisher._served[-1]
    flipped = bytearray(part.chunks[-1])
    flipped[-1] ^= 1
    chunks = [*part.chunks[:-1], memoryview(flipped)]
    publisher._thread.serve([ServedPart(part.policy_version, part.manifest_digest, part.manifest, chunks)])


def save_bits(directory: Path, bits: Bits, shapes: dict[str, tuple[int, ...]]) -> None:
    from safetensors.torch import save_file

    tensors = {n: torch.from_numpy(b.view(np.int16)).view(torch.bfloat16).view(shapes[n]) for n, b in bits.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("architecture", "tied", "runtime", "linear"),
    [
        ("Qwen2", False, "bfloat16", "plain"),
        ("Qwen3", False, "bfloat16", "packed"),
    ],
)
async def test_other_models_and_types(
    tmp_path: Path,
    engine_variables: Callable[..., None],
    architecture: str,
    tied: bool,
    runtime: str,
    linear: str,
) -> None:
    """Untied head, query and key norms, a bfloat16 engine, packed kernels beside the parameters."""
    engine_variables(STREAMRL_CPU_LINEAR=linear)
    directory = tmp_path / "model"
    bits = write_model(directory, architecture, tied)
    shapes = shapes_of(directory)
    publisher = publisher_of(directory, bits, tmp_path)
    publisher.start()
    try:
        async with running_engine(directory, runtime) as llm:
            push = Push(llm, publisher)
            outputs = []
            for version, density in enumerate((0.9, 0.9, 0.02)):
                bits = changed(bits, version, density)
                announcement = push.publish(version, bits)
                assert (await push.commit(announcement)).state_hash == announcement.state_hash
                checksums = await push.checksums()
                assert EMPTY not in checksums.values()
                assert checksums == expected_checksums(bits, shapes, runtime, tied)
                await llm.reset_prefix_cache()
                outputs.append(list((await sample(llm, 40)).token_ids))
            assert outputs[0] != outputs[1], "the change is too small to be seen in the output"
    finally:
        publisher.close()
    if linear == "plain":
        return  # the parameters are what is computed with; a packed copy is only seen in the output
    save_bits(directory, bits, shapes)
    async with running_engine(directory, runtime) as fresh:
        assert list((await sample(fresh, 40)).token_ids) == outputs[-1]
