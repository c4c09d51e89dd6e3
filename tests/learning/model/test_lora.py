"""Adapters: exact gradients through the merged bits, nothing else moves, and peft reads what is saved."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import adapter_process
import torch
import transformers
from transformers import AutoModelForCausalLM

from streamrl.base.errors import StreamRLError
from streamrl.learning.model.policy import PackedPolicy
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.lora import AdapterWeights, peft_adapters
from streamrl.learning.state.optimizer import MasterOptimizer
from streamrl.learning.state.published_weights import PEFT_PREFIX
from streamrl.learning.updates import make_weights
from streamrl.pretrained.trainable_models import unknown_modules
from streamrl.recipe.sections import Gathered, Lora, LoraSync, OptimizerKind

pytestmark = pytest.mark.torch
ALPHA, RANK = 10.0, 4


def adapters_of(tiny_model: str, **lora: Any) -> tuple[Any, AdapterWeights, TrainerOptions]:
    options = TrainerOptions(
        model_path=tiny_model, run_id="", weights_endpoint="", lora=Lora(rank=RANK, alpha=ALPHA, **lora)
    )
    policy = PackedPolicy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval())
    weights = make_weights(options, policy)
    assert isinstance(weights, AdapterWeights)
    return policy.hugging_face, weights, options


def test_the_elements_that_are_trained_are_counted(tiny_model: str) -> None:
    model, weights, options = adapters_of(tiny_model)
    q_proj = model.model.layers[0].self_attn.q_proj.weight.shape
    v_proj = model.model.layers[0].self_attn.v_proj.weight.shape
    a_layer = RANK * (sum(q_proj) + sum(v_proj))
    assert weights.adapter_elements == len(model.model.layers) * a_layer == weights.masters.full().numel()
    whole = PackedPolicy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval())
    assert make_weights(msgspec.structs.replace(options, lora=Lora()), whole).adapter_elements == 0


def some_tokens(seed: int) -> Any:
    return torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, tokens_BT: Any, parameters: dict[str, Any] | None = None) -> Any:
    arguments = {"input_ids": tokens_BT, "use_cache": False}
    output = torch.func.functional_call(model, parameters or {}, kwargs=arguments, tie_weights=True)
    return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


def move_adapters(weights: AdapterWeights) -> None:
    """B starts at 0, where A has no gradient: move both."""
    weights.masters.full().normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    weights.refresh_forward()


def base_of(tiny_model: str) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}


def through(published: Any, exact: Any) -> Any:
    """Straight through the rounding."""
    return exact + (published.double() - exact).detach()


@pytest.mark.parametrize("lora", [{}, {"dora": True}, {"rslora": True}, {"sync": LoraSync.ADAPTER}], ids=str)
def test_gradients_are_those_of_an_explicit_product_in_float64(tiny_model: str, lora: dict[str, Any]) -> None:
    model, weights, _ = adapters_of(tiny_model, targets=("all-linear",), **lora)
    scale = ALPHA / (RANK**0.5 if lora.get("rslora") else RANK)
    move_adapters(weights)
    for seed in (0, 1):  # two rows: gradients add up
        loss_of(model, some_tokens(seed)).backward()
    mine = weights.as_tensors(weights.collect_gradient())

    adapters = {n: t.double().requires_grad_() for n, t in weights.as_tensors(weights.masters.full()).items()}
    merged = {}
    for name, base in base_of(tiny_model).items():
        merged[name] = base.double()
        module = name.removesuffix(".weight")
        if f"{module}.lora_A.weight" in adapters:
            a, b = (adapters[f"{module}.lora_{part}.weight"] for part in "AB")
            if "sync" in lora:
                bits = weights.values()
                pairs = {"A": a, "B": scale * b}
                name_of = f"{PEFT_PREFIX}{module}.lora_{{}}.weight".format
                a, b = (through(bits[name_of(n)].view(t.shape), t) for n, t in pairs.items())
                merged[name] = base.double() + b @ a
                continue
            exact = base.double() + scale * b @ a
            if "dora" in lora:
                exact = exact * (adapters[f"{module}.lora_magnitude_vector"] / exact.norm(dim=1).detach())[:, None]
            merged[name] = through(dict(model.named_parameters())[name].detach(), exact)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    sum(loss_of(plain, some_tokens(seed), merged) for seed in (0, 1)).backward()
    assert len(mine) == (42 if "dora" in lora else 28)
    for name, tensor in adapters.items():
        assert tensor.grad is not None
        assert (mine[name] - tensor.grad).norm() < 1e-5 * tensor.grad.norm(), name


def test_steps_lower_the_loss_and_move_the_adapted_weights_only(tiny_model: str) -> None:
    model, weights, options = adapters_of(tiny_model)
    base = base_of(tiny_model)
    before = {name: bits.copy() for name, bits in weights.bits().items()}
    for name, tensor in base.items():  # B is 0 at the start: the first version is the base
        assert (before[name] == tensor.view(torch.int16).numpy().view(np.uint16).ravel()).all(), name
    optimizer = MasterOptimizer(options, weights.masters, weights.decayed_places)
    losses = []
    for _ in range(8):
        loss = loss_of(model, some_tokens(0))
        losses.append(loss.item())
        loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())  # no dense gradient stays
        optimizer.step(weights.collect_gradient(), 2e-2)
        weights.refresh_forward()
        weights.clear_gradient()
    assert losses[-1] < losses[0] - 0.2

    after, full = weights.bits(), weights.full_published()
    adapters = weights.as_tensors(weights.masters.full())
    assert [shard.name for shard in weights.shards] == list(after) == list(base)
    assert weights.total_elements == sum(tensor.numel() for tensor in base.values())
    adapted = {name for name in base if name.endswith(("q_proj.weight", "v_proj.weight"))}
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == adapted
    for name, tensor in base.items():
        value = dict(model.named_parameters())[name].detach()
        assert (after[name] == value.bfloat16().view(torch.int16).numpy().view(np.uint16).ravel()).all(), name
        assert torch.equal(value.bfloat16().float(), value), name  # the forward runs on published bits
        assert torch.equal(full[name].float(), value), name
        assert (after[name] != before[name]).any() == (name in adapted), name
        if name in adapted:
            module = name.removesuffix(".weight")
            product = adapters[f"{module}.lora_B.weight"].double() @ adapters[f"{module}.lora_A.weight"].double()
            exact = tensor.double() + ALPHA / RANK * product
            assert ((value - exact).abs() <= exact.abs() * 2**-8 * 1.001).all(), name


@pytest.mark.parametrize("lora", [{}, {"dora": True}, {"rslora": True, "sync": LoraSync.ADAPTER}], ids=str)
def test_peft_loads_the_saved_adapter(tiny_model: str, tmp_path: Path, lora: dict[str, Any]) -> None:
    from peft import PeftModel

    model, weights, _ = adapters_of(tiny_model, targets=(r".*\.(q|up)_proj",), **lora)
    move_adapters(weights)
    weights.save_adapter(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).bfloat16().float()
    with torch.no_grad():
        untrained = base(some_tokens(0)).logits
        loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()(some_tokens(0)).logits
        mine = model(some_tokens(0)).logits
    distance, moved = (loaded - mine).norm(), (untrained - mine).norm()
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    base.load_state_dict(weights.full_published(), strict=False)
    assert (base(some_tokens(0)).logits - mine).norm() <= 0.01 * mine.norm(), "what is exported is merged"
    # The merged weights are rounded to 8 bits of mantissa; the adapter on its own is not.
    assert distance < 0.01 * mine.norm()
    assert distance < 0.02 * moved


def test_the_seed_decides_the_start(tiny_model: str) -> None:
    def start(seed: int) -> Any:
        options = TrainerOptions(model_path="", run_id="", weights_endpoint="", seed=seed, lora=Lora(rank=RANK))
        policy = PackedPolicy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
        return make_weights(options, policy).masters.full()

    torch.manual_seed(5)
    first = start(1)
    torch.manual_seed(6)
    assert torch.equal(first, start(1))
    assert not torch.equal(first, start(2))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("nothing_like_it",), "nothing_like_it.*name modules"),
        (("q_proj", "v_porj"), "'v_porj' is no module of this model: name modules among down_proj, "),
        (("lm_head",), "shares its weight"),
        (("embed_tokens",), "only linear"),
        ((r".*\.(x|y)_proj",), "is no module of this model"),
    ],
)
def test_wrong_targets_are_refused(tiny_model: str, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(StreamRLError, match=message):
        adapters_of(tiny_model, targets=targets)
    assert unknown_modules(Path(tiny_model), targets).keys() == set(targets) - {"q_proj"}  # the dry run, without torch


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("Qwen3Moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("Glm4Moe", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("Qwen3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_all_linear_leaves_experts_routers_and_heads_out(family: str, names: set[str]) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if "Moe" in family:
        sizes |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
        sizes |= {"num_experts": 4} if family == "Qwen3Moe" else {"n_routed_experts": 4, "first_k_dense_replace": 1}
    config = getattr(transformers, f"{family}Config")(**sizes, tie_word_embeddings=False)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    adapters, _ = peft_adapters(Lora(rank=2, targets=("all-linear",)), model, "model", 0)
    assert {name.rpartition(".")[2] for name in adapters} == names
    assert len(adapters) == 2 * len(names)


def test_a_model_without_linear_modules_is_refused_by_name() -> None:
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    for targets in (("all-linear",), ("c_attn",)):
        with pytest.raises(StreamRLError, match=r"'gpt2' has no linear modules .*remove lora.rank"):
            peft_adapters(Lora(rank=2, targets=targets), model, "model", 0)


def test_adapters_are_not_offloaded(tiny_model: str) -> None:
    options = TrainerOptions(
        model_path=tiny_model,
        run_id="",
        weights_endpoint="",
        lora=Lora(rank=RANK),
        optimizer=OptimizerKind.ADAMW_OFFLOADED,
    )
    policy = PackedPolicy(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))
    with pytest.raises(StreamRLError, match=r'adamw_offloaded.*lora\.rank 4.*"adamw"'):
        make_weights(options, policy)


@pytest.fixture(scope="module")
def trained(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank wrote, and what two did for each way of gathering."""
    directory = tmp_path_factory.mktemp("adapters")
    for sync in LoraSync:
        adapter_process.main(tiny_model, 0, 1, "", str(directory / f"{sync}.alone.npz"), sync=sync)
    command = [sys.executable, adapter_process.__file__, tiny_model, str(directory)]
    subprocess.run(command, timeout=900, check=True)
    return directory


@pytest.mark.parametrize("sync", LoraSync)
@pytest.mark.parametrize("gathered", adapter_process.WAYS)
def test_two_ranks_train_what_one_does(trained: Path, gathered: Gathered, sync: LoraSync) -> None:
    alone, first, second = (
        dict(np.load(trained / f"{sync}.{name}.npz")) for name in ("alone", f"{gathered}.0", f"{gathered}.1")
    )
    for name, expected in alone.items():
        if name.startswith("bits."):
            continue
        scale = np.abs(expected).max()
        tolerance = 2**-8 if name.startswith("published.") else 1e-4  # a rounding may fall to the other side
        for output in (first,) if name.startswith("published.") else (first, second):
            assert output[name].shape == expected.shape
            assert np.abs(output[name] - expected).max() <= tolerance * scale, name
    for name in (name for name in alone if name.startswith("bits.")):
        joined = np.concatenate([first[name], second[name]])
        if sync is LoraSync.ADAPTER:
            assert np.mean(joined != alone[name]) < 1e-2, name
            continue
        published = first["published." + name.removeprefix("bits.")]
        assert (joined.astype(np.uint32) << 16).view(np.float32).tolist() == published.ravel().tolist()
    assert (trained / f"{sync}.{gathered}.0.adapter" / "adapter_model.safetensors").exists()
    assert not (trained / f"{sync}.{gathered}.1.adapter").exists()
