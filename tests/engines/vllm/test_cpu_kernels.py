"""vLLM's C kernels on a CPU, and random numbers drawn ahead, give what its plain way gives, or step aside."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from streamrl.base.messages import Generate, PauseMode
from streamrl.base.types import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("default")]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Classes of vLLM, whose patches are taken back."""
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.parameter import BasevLLMParameter as Base

    monkeypatch.setattr(Base, "__torch_function__", Base.__dict__["__torch_function__"])
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        yield SimpleNamespace(norm=RMSNorm, gate=SiluAndMul, parameter=Base)


@pytest.mark.parametrize("type_name", ["float32", "bfloat16"])
def test_kernels_give_what_vllm_gives(vllm: Any, type_name: str, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    from streamrl.engines.vllm.cpu_kernels import use_cpu_kernels

    dtype, other = getattr(torch, type_name), torch.float16
    norm, gate = model = torch.nn.ModuleList([vllm.norm(64, dtype=dtype), vllm.gate()])
    x, residual, wide = (torch.randn(7, width).to(dtype) for width in (64, 64, 160))
    gaps, bound = torch.randn(7, 3, 64).to(dtype)[:, 1], max(1e-6, 2 * torch.finfo(dtype).eps)
    use_cpu_kernels(model, dtype)
    for weight in (norm.weight, torch.nn.Parameter(torch.randn(64).to(dtype))):
        norm.weight = weight  # as a reload may do it
        for given in ((x,), (gaps,), (x, residual), (x, gaps), (gaps, residual)):
            found = norm(*(one.clone() if one.is_contiguous() else one for one in given))
            torch.testing.assert_close(found, norm.forward_native(*given), rtol=bound, atol=bound)
        written = residual.clone()
        assert norm(x.clone(), written)[1] is written, "it was not the kernel"
        assert torch.equal(norm(x)[3], norm(x[3:4])[0]), "a row depends on others"
        for plain in ((x.to(other),), (x, residual.to(other)), (x, x[:1])):
            assert all(map(torch.equal, norm(*plain), norm.forward_native(*plain)))
    for rows in (wide, wide[:, :96], wide[:, :20]):
        torch.testing.assert_close(gate(rows), gate.forward_native(rows), rtol=bound, atol=bound)
    assert not torch.overrides.has_torch_function((torch.Tensor._make_subclass(vllm.parameter, x),))
    assert not [record for record in caplog.records if record.name.startswith("streamrl")]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"has_weight": False}, "compute 1 norms and gates of this model (1 RMSNorm: a variant)"),
        ({"var_hidden_size": 32}, "compute 1 norms and gates of this model (1 RMSNorm: a variant)"),
        ({"hidden_size": 20}, "compute 1 norms and gates of this model (1 RMSNorm: Expected hidden_size"),
        ({"of its own": 1}, "compute 0 norms and gates of this model (1 Own: a variant; 1 SiluAndMul: Tensor-likes"),
        ({"missing": 1}, "'rms_norm'; 1 SiluAndMul: 'types.SimpleNamespace' object has no attribute 'silu_and_mul')"),
        ({"no norm": 1}, "compute 0 norms and gates of this model (there are no others)"),
    ],
)
def test_what_stays_as_it_is_is_said_in_one_line(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: dict[str, Any], said: str
) -> None:
    import torch

    from streamrl.engines.vllm.cpu_kernels import use_cpu_kernels

    given = {name: value for name, value in kind.items() if "_" in name}
    norm = (type("Own", (vllm.norm,), {}) if "of its own" in kind else vllm.norm)(**({"hidden_size": 64} | given))
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2)] if "no norm" in kind else [norm, vllm.gate()])
    wrong = SimpleNamespace(default=lambda out, x: out.copy_(x[..., : out.shape[-1]]))
    if not given:
        monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(**{"silu_and_mul": wrong} if "of its own" in kind else {}))
    use_cpu_kernels(model, torch.float32)
    assert [said in record.message for record in caplog.records if "streamrl" in record.name] == [True], caplog.text
    x = torch.randn(3, norm.hidden_size)
    assert torch.equal(norm(x), norm.forward_native(x))


@pytest.mark.long
def test_numbers_drawn_ahead_are_those_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests run, wait, and come back in other rows; one began in the middle, one has no seed."""
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("vllm")
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from streamrl.engines.vllm import sampler_patches

    for owner, name in ((CachedRequestState, "__post_init__"), (GPUModelRunner, "_get_prompt_logprobs_dict")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", TopKTopPSampler.forward_cpu)
    sampler_patches.add_continuation()
    sampler = TopKTopPSampler("processed_logprobs")
    assert "drawn_ahead" in sampler.forward.__qualname__
    plain, ahead = ([torch.Generator().manual_seed(seed) for seed in range(4)] for _ in range(2))
    for generators in (plain, ahead):
        sampler_patches._draw(generators[3], 70)
    plan = random.Random(0)
    for step in range(300):
        running = plan.sample(range(5), plan.randint(1, 5))
        seeded = [(row, request) for row, request in enumerate(running) if request < 4]
        logits = torch.randn(len(running), 32)
        torch.manual_seed(step)
        seeds = torch.randint(0, 2**31, (len(running),), dtype=torch.long)
        for row, request in seeded:
            seeds[row] = torch.randint(0, 2**31, (1,), generator=plain[request], dtype=torch.long).item()
        torch.manual_seed(step)
        found, logprobs = sampler(logits, {row: ahead[request] for row, request in seeded}, None, None)
        assert torch.equal(found, torch.ops._C.fused_gumbel_argmax(logits, seeds)), f"step {step}"
        assert torch.equal(logprobs, logits.log_softmax(-1))


@pytest.mark.long
async def test_a_real_engine_samples_the_same_with_each_and_without(
    tiny_options: Any, hosted: Any, make_request: Callable[..., Generate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are preempted on the way. One is alone first: kernels round otherwise, which shows that they are on."""
    pytest.importorskip("vllm")
    alone, *requests = [make_request(max_tokens=150, top_p=1.0 - index % 2 / 10) for index in range(24)]
    done: list[dict[str, Completion]] = []

    async def sample(engine: Any, request: Generate) -> None:
        done[-1][request.request_id] = await engine.generate(request)

    for stock in ("NEITHER", "STREAMRL_CPU_KERNELS", "STREAMRL_CPU_NUMBERS"):
        done.append({})
        with monkeypatch.context() as patch, tempfile.TemporaryDirectory(prefix="srl") as directory:
            patch.setenv(stock, "stock")
            options = tiny_options(Path(directory))
            async with hosted(options, Path(directory)) as (engine, _), anyio.create_task_group() as group:
                await sample(engine, alone)
                for request in requests:
                    group.start_soon(sample, engine, request)
                while len(done[-1]) <= len(requests):
                    await engine.pause(PauseMode.KEEP, clear_cache=True)
                    await engine.resume()
                    await anyio.sleep(0.05)
    fast, kernels, numbers = done
    for name, completion in fast.items():
        for other in (kernels[name], numbers[name]):
            assert other.token_ids == completion.token_ids
            assert other.behavior_logprobs.tolist() == pytest.approx(completion.behavior_logprobs.tolist(), abs=1e-5)
    bits = [here[alone.request_id].behavior_logprobs for here in done]
    assert bits[0] == bits[2] and bits[0] != bits[1]


@pytest.mark.parametrize("neox", [True, False])
def test_separate_heads_are_rotated_as_joined_ones(vllm: Any, neox: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys whose heads are a dimension of their own, or slices of wider heads, get the angles of their
    tokens: vLLM's kernel takes the stride of heads for that of tokens."""
    import torch
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from streamrl.engines.async_llm.worker import rotate_separate_heads

    tokens, heads, size = 7, 3, 64
    rope = RotaryEmbedding(size, size, 128, 10000.0, neox, torch.float32)
    positions = torch.arange(tokens) + 5
    query, key = torch.randn(tokens, heads, size), torch.randn(tokens, 1, size)
    joined = rope.forward_cpu(positions, query.flatten(1).clone(), key.flatten(1).clone())
    wide = torch.cat([torch.randn(tokens, heads, 32), query], dim=-1)[..., 32:]
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    stock = rope.forward_cpu(positions, query.clone(), key.clone())
    assert not torch.allclose(stock[0].flatten(1), joined[0], atol=1e-3), "vLLM is right: drop rotate_separate_heads"
    rotate_separate_heads()
    for separate in (query, wide):
        rotated = rope.forward_cpu(positions, separate.clone() if separate is query else separate, key.clone())
        for found, expected in zip(rotated, joined, strict=True):
            torch.testing.assert_close(found.flatten(1), expected, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, rope.forward_cpu(positions, query.flatten(1).clone(), key.flatten(1).clone()), joined))
