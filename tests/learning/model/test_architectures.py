"""Every family that users train: packed rows against transformers' own forward, and weights under the file's names."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import quick_only

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from sample_groups import make_groups  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from streamrl.base.errors import StreamRLError  # noqa: E402
from streamrl.learning.batches.packing import PreparedSample, pack  # noqa: E402
from streamrl.learning.model import loading, packing_check  # noqa: E402
from streamrl.learning.model.architecture import decoder_layers, linear_modules  # noqa: E402
from streamrl.learning.model.loading import load_policy, published_shapes  # noqa: E402
from streamrl.learning.model.local_shards import LocalShard, local_part, local_shards, published_shards  # noqa: E402
from streamrl.learning.model.parallel import Split  # noqa: E402
from streamrl.learning.model.policy import PackedPolicy, shard  # noqa: E402
from streamrl.learning.objective.logprobs import token_logprobs  # noqa: E402
from streamrl.learning.state.checkpoint import save_hugging_face  # noqa: E402
from streamrl.learning.state.published_weights import FullWeights  # noqa: E402
from streamrl.pretrained.trainable_models import unknown_modules  # noqa: E402
from streamrl.recipe.sections import Gathered  # noqa: E402
from streamrl.weights.publish.torch_tensors import TorchOnCpu, shard_specs  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
TOLERANCE = 2e-5
SHAPE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
SMALL_HEADS = {"head_dim": 8}
GEMMA: dict[str, Any] = {
    "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GROUPED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
GPT2_SHAPE = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2,
              "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

SUPPORTED: dict[str, Callable[[], Any]] = {
    "llama with scaled rope": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen2 tied": lambda: transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE, **SMALL_HEADS),
    "mistral, long window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=64),
    "mistral, short window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=4),
    "gemma 2 without attention caps": lambda: transformers.Gemma2Config(
        **SHAPE, **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=2.0
    ),
    "gemma 3": lambda: transformers.Gemma3TextConfig(**SHAPE, **GEMMA),
    "phi 3": lambda: transformers.Phi3Config(**SHAPE),
    "gpt 2": lambda: transformers.GPT2Config(**GPT2_SHAPE),
    "gpt neox": lambda: transformers.GPTNeoXConfig(**{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}),
    "qwen2 moe": lambda: transformers.Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **SMALL_HEADS, **EXPERTS),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=4),
    "granite": lambda: transformers.GraniteConfig(**SHAPE, logits_scaling=3.0, residual_multiplier=0.7),
    "hyperclova x": lambda: transformers.HyperCLOVAXConfig(**SHAPE, logits_scaling=3.0),
    "phi 2, a bias of the head": lambda: transformers.PhiConfig(**SHAPE),
    "cohere": lambda: transformers.CohereConfig(**SHAPE, logit_scale=0.25, use_qk_norm=True),
    "cohere 2": lambda: transformers.Cohere2Config(**SHAPE, logit_scale=0.25, sliding_window=4),
    "olmo 2": lambda: transformers.Olmo2Config(**SHAPE),
    "apertus, constants of an activation": lambda: transformers.ApertusConfig(**SHAPE),
    "deepseek v3, an expert bias": lambda: transformers.DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        **GROUPED,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    "glm 4 moe": lambda: transformers.Glm4MoeConfig(**SHAPE, **GROUPED),
    "dots 1": lambda: transformers.Dots1Config(**SHAPE, **GROUPED),
    "ernie 4.5 moe": lambda: transformers.Ernie4_5_MoeConfig(
        **SHAPE, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1, moe_num_shared_experts=1
    ),
    "minimax m2, an expert bias under another name": lambda: transformers.MiniMaxM2Config(
        **SHAPE, **SMALL_HEADS, num_local_experts=4, num_experts_per_tok=2
    ),
}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
COMPOSITE: dict[str, Callable[[], Any]] = {
    "qwen 3 vl": lambda: transformers.Qwen3VLConfig(
        text_config={**SHAPE, **SMALL_HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                                 "mrope_section": [2, 1, 1]}},
        vision_config={**VISION, "depth": 3, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16,
                       "deepstack_visual_indexes": [1]},
        image_token_id=20, video_token_id=21, vision_start_token_id=22, vision_end_token_id=23,
    ),
    "gemma 3 with a tower": lambda: transformers.Gemma3Config(
        text_config={**SHAPE, **GEMMA}, vision_config={**VISION, "num_hidden_layers": 3, "num_attention_heads": 2,
                                                      "image_size": 16, "vision_use_head": False},
        image_token_index=20, mm_tokens_per_image=4, tie_word_embeddings=True,
    ),
}  # fmt: skip
"""Language models beside a tower of three layers, which is not trained."""
HYBRID: dict[str, Callable[[], Any]] = {
    "lfm 2, short convolutions": lambda: transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    "qwen 3 next, gated delta net": lambda: transformers.Qwen3NextConfig(
        **SHAPE, **SMALL_HEADS, **EXPERTS, shared_expert_intermediate_size=16, linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"], mlp_only_layers=[0, 1],
    ),
    "granite 4, mamba 2": lambda: transformers.GraniteMoeHybridConfig(
        **SHAPE, layer_types=["mamba", "attention"], num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=8,
        shared_intermediate_size=48, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16,
    ),
    "minimax, lightning attention": lambda: transformers.MiniMaxConfig(
        **SHAPE, **SMALL_HEADS, num_local_experts=4, layer_types=["linear_attention", "full_attention"], block_size=16
    ),
}  # fmt: skip
"""The first of their two layers carries a state."""
SUPPORTED |= COMPOSITE | HYBRID
SUPPORTED |= {
    "gpt oss, attention sinks": lambda: transformers.GptOssConfig(
        **SHAPE, **SMALL_HEADS, num_local_experts=4, rope_parameters=LLAMA3_ROPE, sliding_window=4
    ),
    "llama 4, chunks and places": lambda: transformers.Llama4TextConfig(
        **SHAPE, **SMALL_HEADS, num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=16, floor_scale=8,
        no_rope_layers=[1, 0],
    ),
}  # fmt: skip
QUICK = ("qwen 3 vl", "lfm 2, short convolutions", "qwen2 tied", "qwen3", "mistral, short window", "gemma 3", "gpt 2")
QUICK += ("qwen3 moe", "cohere 2", "gpt oss, attention sinks", "llama 4, chunks and places")
"""Families of quick tests: each has something that no other one of them has."""
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "capped attention": (
        lambda: transformers.Gemma2Config(**SHAPE, **GEMMA, attn_logit_softcapping=50.0),
        r"its attention caps scores at 50\.0",
    ),
    "keywords that do not reach the attention": (
        lambda: transformers.NemotronConfig(**SHAPE),
        r"its layers do not hand keyword arguments on to their attention",
    ),
    "alibi": (
        lambda: transformers.BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4),
        r"'bloom' does not use transformers' attention interface",
    ),
}  # fmt: skip


def auto_class(config: Any) -> Any:
    has_tower = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if has_tower else transformers.AutoModelForCausalLM


def save_model(config: Any, directory: Path) -> str:
    torch.manual_seed(0)
    model = auto_class(config).from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms of 1 and biases of 0 would hide that they are left out
                parameter.add_(torch.randn_like(parameter) * 0.1)
            assert parameter.isfinite().all(), name
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:  # zeros would hide that they are left out
                buffer.copy_(torch.randn_like(buffer))
    model.save_pretrained(directory)
    return str(directory)


def one_row() -> list[PreparedSample]:
    """Five sequences in two groups, 2 to 46 tokens, that share their prompts: longer than every short window."""
    groups = make_groups(0, [3, 2], seed=1)
    return [PreparedSample(sample) for group in groups for sample in group.samples]


def linear_names(policy: Any) -> list[str]:
    own = {name.removesuffix(".weight") for name in policy.trained_parameters()}
    modules = policy.hugging_face.named_modules()
    return [name for name, module in modules if name in own and isinstance(module, torch.nn.Linear)]


def packed_logprobs(policy: Any, row: list[PreparedSample]) -> Any:
    batch = pack(row, 0, CPU)
    return token_logprobs(policy.head(policy(batch)), batch.targets_N)[0]


def own_logprobs(model: Any, row: list[PreparedSample]) -> Any:
    """transformers' own eager forward of each sequence alone."""
    parts = []
    for item in row:
        tokens = torch.tensor(list(item.sample.token_ids))
        logprobs = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        trained = torch.tensor(list(item.sample.loss_mask[1:])) != 0
        parts.append(logprobs.gather(1, tokens[1:, None])[:, 0][trained])
    return torch.cat(parts)


def own_model(path: str | Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, "attn_implementation": "eager"} | options
    return auto_class(transformers.AutoConfig.from_pretrained(path)).from_pretrained(path, **options).eval()


@pytest.mark.parametrize("family", quick_only(SUPPORTED, QUICK))
def test_packed_rows_equal_the_models_own_results(family: str, tmp_path: Path) -> None:
    """Packed rows give the logprobs, the gradients and the export of the model itself."""
    path = save_model(SUPPORTED[family](), tmp_path / "model")
    policy, model, row = load_policy(path, CPU), own_model(path), one_row()
    assert len(decoder_layers(policy.hugging_face)) == 2
    assert unknown_modules(Path(path), linear_names(policy)) == {}, "each may be a target of an adapter"
    got, expected = packed_logprobs(policy, row), own_logprobs(model, row)
    assert (got - expected).abs().max() < TOLERANCE
    mix = torch.linspace(-1, 1, len(expected))
    (got @ mix).backward()
    (expected @ mix).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == {n for n, p in policy.trained_parameters().items() if p.grad is not None}
    error = sum(float((policy.trained_parameters()[n].grad - g).square().sum()) for n, g in gradients.items())
    assert error**0.5 < 1e-4 * sum(float(g.square().sum()) for g in gradients.values()) ** 0.5

    weights = FullWeights(policy.trained_parameters(), policy.entries, policy.float32_parameters())
    published = weights.full_published()
    stored = load_file(f"{path}/model.safetensors")
    constants = {name: stored.pop(name) for name in sorted(stored.keys() - published.keys())}
    towers = {name for name in constants if "vis" in name or "projector" in name}
    assert bool(towers) == (family in COMPOSITE) and constants.keys() == towers | set(policy.constants.values())
    assert {name: tuple(t.shape) for name, t in published.items()} == {n: tuple(t.shape) for n, t in stored.items()}
    assert all(torch.equal(published[name], stored[name].bfloat16()) for name in stored)
    bits = weights.bits()
    assert all((bits[name] == published[name].view(torch.int16).numpy().view("u2").ravel()).all() for name in stored)
    save_hugging_face(tmp_path / "hf", published, Path(path))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == stored.keys() | constants.keys()
    for name, constant in constants.items():
        assert exported[name].dtype == constant.dtype and torch.equal(exported[name], constant), name
    with torch.no_grad():
        difference = own_logprobs(own_model(tmp_path / "hf"), row) - packed_logprobs(policy, row)
    assert difference.abs().max() < TOLERANCE


@pytest.mark.parametrize("family", quick_only(SUPPORTED, QUICK))
def test_each_rank_reads_its_rows_of_every_tensor(family: str, tmp_path: Path) -> None:
    """Also of experts, which are many tensors of the file in one parameter. A group of three ranks that never talk."""
    path = save_model(SUPPORTED[family](), tmp_path / "model")
    whole = PackedPolicy(own_model(path))
    parameters, buffers = whole.trained_parameters(), dict(whole.named_buffers())
    for rank in range(3):
        torch.distributed.init_process_group("fake", rank=rank, world_size=3, store=FakeStore())
        try:
            policy = loading._empty_on_device(path, CPU)
            # A name of its own: torch takes equal meshes for one, also where this process was another rank then.
            mesh = init_device_mesh("cpu", (3,), mesh_dim_names=(f"of rank {rank}",))
            shard(policy, mesh, Gathered.LAYER, sixteen_bit=False)
            files = loading._check_names(policy, Path(path))
            read = loading._read_parameters(policy, files, CPU)
            loading._read_constants(policy, files)
            assert read.keys() == policy.trained_parameters().keys()
            for part in local_shards(policy.trained_parameters()):
                rows = local_part(read[part.name]).flatten()
                expected = parameters[part.name].detach().flatten()[part.offset :][: part.stop - part.start]
                assert torch.equal(rows, expected), part.name
            assert all(torch.equal(buffer, buffers[name]) for name, buffer in policy.named_buffers())
        finally:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", quick_only(HYBRID, ["lfm 2, short convolutions"]))
def test_a_state_ends_with_its_sequence(family: str, tmp_path: Path) -> None:
    """Other sequences before it in the row change no logprob of a sequence: no bit on some processors, and no more than
    the order of sums in a matrix product on others."""
    policy, row = load_policy(save_model(HYBRID[family](), tmp_path), CPU), one_row()
    assert [name.rpartition(".")[0] for name in policy.recurrent.names] == ["model.layers.0"]
    assert not policy.recurrent.in_kernels, "torch's stand-ins ignore borders"
    with torch.no_grad():
        first, second = packed_logprobs(policy, row), packed_logprobs(policy, [*row[3:], *row[:3]])
    of_first_group = sum(sum(item.sample.loss_mask) for item in row[:3])
    swapped = torch.cat([second[-of_first_group:], second[:-of_first_group]])
    assert float((first - swapped).abs().max()) < 5e-6


def test_a_convolution_is_no_expert(tmp_path: Path) -> None:
    """Its weight has three sides as those of experts have; linear modules of the MLP beside it can have adapters."""
    policy = loading.empty_policy(save_model(HYBRID["lfm 2, short convolutions"](), tmp_path))
    linear = {name.rpartition(".")[2] for name in linear_modules(policy.hugging_face)}
    assert linear == {"in_proj", "out_proj", "w1", "w2", "w3", "q_proj", "k_proj", "v_proj"}


def test_kernels_that_know_borders_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose kernels keep to the sequences of a row gets rows without padding."""
    path = save_model(HYBRID["lfm 2, short convolutions"](), tmp_path)
    rows: list[int] = []

    def convolution(hidden: Any, weight: Any, bias: Any, seq_idx: Any = None) -> Any:
        if seq_idx is None:
            seq_idx = torch.zeros(len(hidden), hidden.shape[2])
        else:
            rows.append(len(hidden))
        reach = weight.shape[1]
        padded = torch.nn.functional.pad(hidden, (reach - 1, 0))
        owners = torch.nn.functional.pad(seq_idx, (reach - 1, 0), value=-1)
        terms = [
            padded[..., k : k + hidden.shape[2]]
            * (owners[:, None, k : k + hidden.shape[2]] == seq_idx[:, None])
            * weight[:, k, None]
            for k in range(reach)
        ]
        return sum(terms)

    monkeypatch.setattr(transformers.models.lfm2.modeling_lfm2, "causal_conv1d_fn", convolution)
    policy, model, row = load_policy(path, CPU), own_model(path), one_row()
    assert policy.recurrent.in_kernels == {"model.layers.0.conv"}
    rows.clear()
    got, expected = packed_logprobs(policy, row), own_logprobs(model, row)
    assert rows == [1] and (got - expected).abs().max() < TOLERANCE
    mix = torch.linspace(-1, 1, len(expected))
    ours = torch.autograd.grad(got @ mix, policy.hugging_face.model.layers[0].conv.in_proj.weight)[0]
    own = torch.autograd.grad(expected @ mix, model.model.layers[0].conv.in_proj.weight)[0]
    assert (ours - own).norm() < 1e-4 * own.norm()


def test_float32_among_sixteen_bits_stays_float32(tmp_path: Path) -> None:
    """What a checkpoint stores in float32 beside bfloat16 is trained, published and exported as it is."""
    path = Path(save_model(HYBRID["qwen 3 next, gated delta net"](), tmp_path / "model"))
    ends = ("A_log", "linear_attn.norm.weight")
    whole = load_file(path / "model.safetensors")
    stored = {name: tensor if name.endswith(ends) else tensor.bfloat16() for name, tensor in whole.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    policy = load_policy(str(path), CPU)
    assert policy.float32 == {name for name in stored if name.endswith(ends)} and len(policy.float32) == 2
    weights = FullWeights(policy.trained_parameters(), policy.entries, policy.float32_parameters())
    save_hugging_face(tmp_path / "hf", weights.full_published(), path)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(exported[name].dtype == t.dtype and torch.equal(exported[name], t) for name, t in stored.items())
    weights.masters.load(weights.masters.full() * 1.0001)
    bits, values = weights.bits(), weights.values()
    for spec in shard_specs(weights.shards):
        in_float32 = spec.name.endswith(ends)
        assert spec.dtype == ("float32" if in_float32 else "bfloat16")
        assert bits[spec.name].dtype == ("uint32" if in_float32 else "uint16")
        expected = stored[spec.name].float() * 1.0001
        expected = expected if in_float32 else expected.bfloat16().float()
        assert torch.equal(values[spec.name], expected.flatten()), spec.name
        assert (TorchOnCpu().checked(values[spec.name], spec) == bits[spec.name]).all()


def test_the_layer_that_leaks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that mixes tokens and takes no cache cannot be found before; the measured difference finds it."""
    path = save_model(transformers.LlamaConfig(**SHAPE), tmp_path)
    forward = transformers.models.llama.modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(
        transformers.models.llama.modeling_llama.LlamaMLP,
        "forward",
        lambda self, states: forward(self, states + torch.nn.functional.pad(states, (0, 0, 1, -1))),
    )
    with pytest.raises(StreamRLError, match=r"model\.layers\.0\.mlp carries a state over the border of two sequences"):
        load_policy(path, CPU)


def test_placeholders_that_a_policy_samples_are_tokens(tmp_path: Path) -> None:
    """The whole class puts other embeddings in their place; engines, which load no tower, do not."""
    text = {**SHAPE, "head_dim": 8, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 32}
    vision = {**VISION, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, image_token_id=20, boi_token_id=21)
    path = save_model(config, tmp_path)
    policy, whole = load_policy(path, CPU), own_model(path)
    tokens = torch.tensor([[5, 20, 20, 9, 20, 4]])
    with torch.no_grad():
        packed = packing_check._packed_logprobs(policy, tokens[0], [packing_check.PackedSequence(0, 6)])
        inner = policy.head(whole.model.language_model(input_ids=tokens, use_cache=False).last_hidden_state[0])
        outer = whole(input_ids=tokens, use_cache=False).logits[0]
    assert (packed - inner.log_softmax(-1)).abs().max() < 1e-3 < (packed - outer.log_softmax(-1)).abs().max()


def test_gathered_gradients_are_float32(tmp_path: Path) -> None:
    """Gradients of gathered weights are float32, also beside tensor-parallel ones. FSDP2 reduces a layer's gradients
    together, of one type only. Four ranks of which one is real."""
    path = save_model(SUPPORTED["qwen2"](), tmp_path / "model")
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tensor"))
        policy = loading._empty_on_device(path, CPU, Split(mesh["fsdp"], mesh["tensor"]))
        shard(policy, mesh["fsdp"], Gathered.LAYER, sixteen_bit=True)
        loading._assign(policy, loading._read_parameters(policy, loading._check_names(policy, Path(path)), CPU))
        with torch.autocast("cpu", torch.bfloat16):
            policy(pack(one_row(), 0, CPU)).sum().backward()
        gradients = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
        assert {gradient.dtype for gradient in gradients} == {torch.float32} and len(gradients) > 20
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("family", REFUSED)
def test_what_packing_cannot_repeat_is_refused_at_load(family: str, tmp_path: Path) -> None:
    config, reason = REFUSED[family]
    path = save_model(config(), tmp_path)
    with pytest.raises(StreamRLError, match=reason) as refusal:
        load_policy(path, CPU)
    assert f"model {path!r} cannot be trained" in str(refusal.value)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_weight_that_is_not_finite_is_named(value: float, tmp_path: Path) -> None:
    model = own_model(save_model(transformers.LlamaConfig(**SHAPE), tmp_path))
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 1] = value  # of a token that the probe does not try
    model.save_pretrained(tmp_path)
    with pytest.raises(StreamRLError, match=r"the weight model\.embed_tokens\.weight has NaN or infinite values"):
        load_policy(str(tmp_path), CPU)


def test_what_is_published_is_known_without_weights(tmp_path: Path) -> None:
    path = save_model(transformers.PhiConfig(**SHAPE), tmp_path / "phi")
    found = published_shapes(path)
    assert found == {entry.name: entry.shape for entry in load_policy(path, CPU).entries}
    assert found["lm_head.bias"] == (32,)
    alibi = save_model(REFUSED["alibi"][0](), tmp_path / "bloom")
    with pytest.raises(StreamRLError, match="does not use transformers' attention interface"):
        published_shapes(alibi)
    (tmp_path / "phi" / "config.json").write_text('{"model_type": "phi-17"}')
    with pytest.raises(StreamRLError, match=r"cannot load the model of .*does not recognize this architecture"):
        published_shapes(path)


def test_window_that_attention_is_not_told_of_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of the probe are shorter than every window: only the model's mask says that there is one."""
    path = save_model(transformers.MistralConfig(**SHAPE, sliding_window=64), tmp_path)
    load_policy(path, CPU)
    forward = transformers.models.mistral.modeling_mistral.MistralAttention.forward

    def forgets(self: Any, *inputs: Any, **options: Any) -> Any:
        # What a model whose attention takes its window from the mask alone looks like.
        self.config.sliding_window = None
        try:
            return forward(self, *inputs, **options)
        finally:
            self.config.sliding_window = 64

    monkeypatch.setattr(transformers.models.mistral.modeling_mistral.MistralAttention, "forward", forgets)
    with pytest.raises(
        StreamRLError, match="'mistral' masks attention to 64 tokens, but tells its attention function all"
    ):
        load_policy(path, CPU)


def test_chunked_masks_are_no_windows() -> None:
    def chunked(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key // 64 == query // 64)

    assert packing_check._reach(chunked) == packing_check._IRREGULAR
    assert packing_check._reach(lambda batch, head, query, key: (key <= query) & (key > query - 64)) == 64
    assert packing_check._reach(lambda batch, head, query, key: key <= query) == packing_check._EVERYTHING


def test_sequences_that_change_others_angles_are_refused(tmp_path: Path) -> None:
    """Sequences that would change the rotary angles of others are refused."""
    config = transformers.Phi3Config(**SHAPE, original_max_position_embeddings=20, rope_parameters=LONG_ROPE)
    path = save_model(config, tmp_path)
    policy, row = load_policy(path, CPU), one_row()
    short = [item for item in row if len(item.sample.token_ids) <= 20]
    assert 0 < len(short) < len(row)
    with torch.no_grad():
        assert (packed_logprobs(policy, short) - own_logprobs(own_model(path), short)).abs().max() < TOLERANCE
        with pytest.raises(StreamRLError, match="with the rope type of this model at most 20 can be trained"):
            packed_logprobs(policy, row)


def test_pieces_of_a_sharded_parameter_are_ranges_of_it(tmp_path: Path) -> None:
    """Experts of one parameter, cut over ranks where it falls: every element is served once, at its place."""
    policy = load_policy(save_model(SUPPORTED["mixtral"](), tmp_path), CPU)
    whole = local_shards(policy.trained_parameters())
    fused = next(shard for shard in whole if "gate_up_proj" in shard.name)
    entries = [entry for entry in policy.entries if entry.parameter == fused.name]
    assert len(entries) == 8
    size, served = fused.stop - fused.start, {entry.name: 0 for entry in entries}
    width = size // fused.shape[0]
    for experts in (range(1), range(1, 3), range(3, 4)):
        first, last = experts.start * width, experts.stop * width
        indices = (np.array(experts), *fused.indices[1:])
        part = LocalShard(fused.name, fused.shape, (), first, 100, 100 + last - first, indices=indices)
        for entry, here in zip(entries, published_shards([part], entries), strict=True):
            if here.stop > here.start:
                assert here.start - 100 + first == entry.start + here.offset
                assert here.offset == served[entry.name]
                served[entry.name] += here.stop - here.start
    assert served == {entry.name: 48 * 32 for entry in entries}


def test_a_family_without_a_plan_is_refused_early(tmp_path: Path) -> None:
    """A family without a plan is refused before its weights are read."""
    for family, split, words in (
        ("gpt 2", (2, 1), r"'gpt2' has no tensor parallel plan .*: set training.advanced.tensor_parallel_size = 1"),
        ("qwen2", (2, 2), r"'qwen2' has no expert parallel plan .*: set training.advanced.expert_parallel_size = 1"),
    ):
        path = save_model(SUPPORTED[family](), tmp_path / family)
        assert published_shapes(path)
        with pytest.raises(StreamRLError, match=words):
            published_shapes(path, split=split)
    assert published_shapes(path, split=(2, 1))


def test_what_is_no_whole_plain_model_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    path = save_model(SUPPORTED["qwen2"](), directory)
    config = json.loads((directory / "config.json").read_text())
    weights = directory / "model.safetensors"
    tensors = load_file(weights)

    def refused(words: str) -> None:
        with pytest.raises(StreamRLError, match=words):
            load_policy(path, CPU)

    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    refused(r"is quantised \(awq\): training needs plain weights")
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    refused("names LlamaForCausalLM, which vLLM follows, and model_type 'qwen2', which transformers makes a Qwen2For")
    (directory / "config.json").write_text(json.dumps(config))
    save_file({n: t for n, t in tensors.items() if "layers.1.mlp" not in n}, weights, metadata={"format": "pt"})
    refused(r"has no weights for 3 parameters \(model\.layers\.1\.mlp\.down_proj\.weight")
    save_file(tensors | {"model.norm.weight": torch.zeros(5)}, weights, metadata={"format": "pt"})
    refused(r"model\.norm\.weight is \[5\] in model\.safetensors and \[\d+\] by config\.json")
    save_file(tensors | {"model.norm.weight": torch.zeros(32).to(torch.float8_e4m3fn)}, weights)
    refused(r"model\.norm\.weight is stored as F8_E4M3: training needs plain weights; give a copy in bfloat16")
    weights.write_bytes(b"\0" * 20)
    refused("has a broken model.safetensors")
    weights.unlink()
    refused(r"has no \*\.safetensors weights")
    (directory / "config.json").unlink()
    refused(r"has no config\.json")


def test_sharded_files_and_dropout(tmp_path: Path) -> None:
    """Weights in several files, in bfloat16; dropout of the checkpoint is off."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**GPT2_SHAPE, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    policy, row = load_policy(str(tmp_path), CPU), one_row()
    assert {p.dtype for p in policy.trained_parameters().values()} == {torch.float32}
    assert not any(module.training for module in policy.hugging_face.modules())
    with torch.no_grad():
        assert (packed_logprobs(policy, row) - own_logprobs(own_model(tmp_path), row)).abs().max() < TOLERANCE
    names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as tensors:
            names.update(tensors.keys())
    assert names == {entry.name for entry in policy.entries}
