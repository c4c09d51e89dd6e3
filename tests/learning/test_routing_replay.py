"""Experts that engines chose, in the trainer's routers: logprobs and gradients against transformers' own model with the
same experts by a formula, rows of siblings of which each knows a part, loads, and what is refused."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.recipe import small_recipe
from msgspec import structs
from sample_groups import VOCABULARY, make_groups

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


from streamrl.base.errors import StreamRLError  # noqa: E402
from streamrl.base.types import RoutedTokens, TrainingSample  # noqa: E402
from streamrl.learning.batches.packing import PreparedSample, pack  # noqa: E402
from streamrl.learning.model.loading import load_policy  # noqa: E402
from streamrl.learning.model.policy import PackedPolicy, empty_micro_batch  # noqa: E402
from streamrl.learning.options import TrainerOptions  # noqa: E402
from streamrl.learning.process_group import join, leave  # noqa: E402
from streamrl.learning.routing_replay import replays_routing, why_not_replayed  # noqa: E402
from streamrl.learning.step_metrics import expert_metrics  # noqa: E402
from streamrl.pretrained.model_facts import read_model_config  # noqa: E402
from streamrl.recipe.sections import EngineKind, Engines, Run, Sampling, Training  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
LAYERS, EXPERTS, TOP_K = 3, 8, 2
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "norm_topk_prob": True, "max_position_embeddings": 256, "initializer_range": 0.3,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "mlp_only_layers": [1],
}  # fmt: skip


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE whose second layer has no experts."""
    directory = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL))
    model.bfloat16().save_pretrained(directory)
    return directory


def routed(start: int, experts_TLK: Any, wide: bool = False) -> RoutedTokens:
    kind, dtype = ("H", np.uint16) if wide else ("B", np.uint8)
    return RoutedTokens(
        start=start, shape=experts_TLK.shape[1:], experts=array(kind, experts_TLK.astype(dtype).tobytes())
    )


def with_experts(samples: list[TrainingSample], wide: bool = False) -> tuple[list[TrainingSample], list[Any]]:
    """Samples of a group with random experts: all have those of the prompt, of which the first sibling lacks one."""
    rng = np.random.default_rng(0)
    shared = rng.random((60, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
    found, experts = [], []
    for number, sample in enumerate(samples):
        own = rng.random((len(sample.token_ids), LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K]
        own[: sample.loss_mask.find(b"\1")] = shared[: sample.loss_mask.find(b"\1")]
        cut = len(own) // 2
        parts = (routed(0 if number else 1, own[0 if number else 1 : cut], wide), routed(cut, own[cut:-1], wide))
        found.append(structs.replace(sample, routed=parts))
        experts.append(torch.from_numpy(own))
    return found, experts


def logprobs_of(policy: PackedPolicy, samples: list[TrainingSample]) -> Any:
    row = pack([PreparedSample(sample) for sample in samples], 0, CPU)
    return policy.head(policy(row)).log_softmax(-1).gather(1, row.targets_N[:, None])[:, 0]


def reference_logprobs(model: Any, sample: TrainingSample, experts_TLK: Any) -> Any:
    """Of the trained tokens, by transformers' model alone, with routers that have no choice."""

    def forced(router: Any, layer: int) -> Any:
        def forward(hidden_TD: Any) -> Any:
            probabilities = torch.softmax(hidden_TD @ router.weight.T, -1, dtype=torch.float)
            chosen = experts_TLK[:, layer]
            weights = probabilities.gather(1, chosen)
            return None, weights / weights.sum(-1, keepdim=True), chosen

        return forward

    for number, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.forward = forced(layer.mlp.gate, number)
    tokens = torch.tensor(list(sample.token_ids))
    logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return logprobs[torch.tensor(list(sample.loss_mask[1:])) != 0]


@pytest.mark.parametrize("wide", [False, True])
def test_given_experts_are_used_and_the_router_learns(mixture: Path, wide: bool) -> None:
    samples, experts = with_experts(list(make_groups(0, [3], seed=3)[0].samples), wide)
    policy = load_policy(str(mixture), CPU)
    model = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32)
    found = logprobs_of(policy, samples)
    expected = torch.cat([reference_logprobs(model, *pair) for pair in zip(samples, experts, strict=True)])
    assert torch.allclose(found, expected, atol=1e-5)
    assert (logprobs_of(policy, [structs.replace(one, routed=()) for one in samples]) - expected).abs().max() > 0.01
    found.sum().backward()
    expected.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in policy.trained_parameters().items():
        error = torch.linalg.vector_norm(parameter.grad - gradients[name])
        assert error < 1e-5 * torch.linalg.vector_norm(gradients[name]) + 1e-6, name
    assert any("gate.weight" in name and gradient.abs().max() > 1e-3 for name, gradient in gradients.items())


def test_missing_routes_are_counted_and_recomputed(mixture: Path) -> None:
    """Tokens whose routes no engine returned are counted, and the router chooses for them."""
    [first, second], _ = with_experts(list(make_groups(0, [2], seed=3)[0].samples))
    row = pack([PreparedSample(first), PreparedSample(second)], 0, CPU)
    assert row.routed is not None
    assert row.routed.missing == 0  # the second sibling has what the first one lacks
    alone = pack([PreparedSample(first)], 0, CPU)
    assert alone.routed is not None
    assert (alone.routed.missing, alone.routed.known_T[0].item()) == (1, False)
    policy = load_policy(str(mixture), CPU)
    assert policy.experts is not None
    policy.experts.take_loads()
    policy(alone)
    loads_LE, replayed = policy.experts.take_loads()
    trained = first.trained_tokens
    assert (loads_LE.sum(1).tolist(), replayed) == ([TOP_K * trained, 0, TOP_K * trained], alone.tokens_T.numel() - 1)
    told = alone.routed.experts_TLK[alone.predictors_N, 2]
    assert torch.equal(loads_LE[2], torch.bincount(told.flatten().long(), minlength=EXPERTS).double())


def test_the_load_of_experts_does_not_depend_on_the_rows(mixture: Path) -> None:
    """A prompt that siblings share, and that each rank or row has a copy of, adds nothing; nor does an empty row."""
    samples, _ = with_experts(list(make_groups(0, [4], seed=5, prompts=30)[0].samples))
    policy = load_policy(str(mixture), CPU)
    assert policy.experts is not None
    policy.experts.take_loads()
    loads = []
    for rows in ([samples], [samples[:1], samples[1:]], [[sample] for sample in samples]):
        for row in rows:
            policy(pack([PreparedSample(sample) for sample in row], 0, CPU))
        policy(empty_micro_batch(CPU))
        loads.append(policy.experts.take_loads()[0])
    assert torch.equal(loads[0], loads[1]) and torch.equal(loads[0], loads[2])


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe", "Olmoe", "DeepseekV3", "GptOss", "Glm4Moe", "Qwen3Next"])
def test_the_choice_of_each_family_is_found(kind: str) -> None:
    sizes = SMALL | {"num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "mlp_only_layers": []}  # noqa: E501  # fmt: skip
    sizes |= {"layer_types": ["full_attention"] * LAYERS} if kind in ("GptOss", "Qwen3Next") else {}
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    from streamrl.learning.model.routers import RoutedRow, routers_of

    routers = routers_of(model)
    assert routers is not None
    tokens, experts_TLK = torch.arange(3, 13), torch.zeros(10, LAYERS, TOP_K, dtype=torch.uint8)
    experts_TLK[..., 1] = 5
    routers.begin(RoutedRow(experts_TLK, torch.ones(10, dtype=torch.bool), 0), torch.arange(10))
    model(tokens[None])
    loads_LE, _ = routers.take_loads()
    assert loads_LE[-1].tolist() == [10, 0, 0, 0, 0, 10, 0, 0]


def test_a_family_without_topk_trains_by_its_own_choice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Phi-MoE takes the largest score twice. Only a replay that the recipe demands is refused."""
    sizes = SMALL | {"num_local_experts": EXPERTS, "hidden_size": 64, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**sizes)).bfloat16()
    model.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), CPU)
    assert policy.experts is not None and not policy.experts.replayable
    [sample] = make_groups(0, [1], seed=3)[0].samples
    logprobs = logprobs_of(policy, [sample])
    experts_TLK = np.zeros((len(sample.token_ids) - 1, LAYERS, TOP_K))
    told = structs.replace(sample, routed=(routed(0, experts_TLK),))
    for _ in range(2):
        assert torch.equal(logprobs_of(policy, [told]), logprobs)
    assert caplog.text.count("without torch.topk") == 1
    tokens = torch.tensor(list(sample.token_ids))
    exact = model.float().eval()(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    assert torch.allclose(logprobs, exact[-len(logprobs) :], atol=1e-5)
    with pytest.raises(StreamRLError, match=r"cannot be replayed: set training.advanced.routing_replay = .auto. or"):
        policy.experts.demand_replay()


def test_experts_of_another_model_are_refused(mixture: Path) -> None:
    policy, sample = load_policy(str(mixture), CPU), make_groups(0, [1], seed=3)[0].samples[0]
    other = routed(0, np.zeros((len(sample.token_ids), 2, TOP_K)))
    with pytest.raises(StreamRLError, match=r"2 experts in each of 2 layers.*routing_replay = false"):
        logprobs_of(policy, [structs.replace(sample, routed=(other,))])


def test_a_run_that_cannot_replay_is_told_why(mixture: Path) -> None:
    path, config = str(mixture), read_model_config(mixture)
    assert replays_routing(small_recipe(path))
    assert not replays_routing(small_recipe(path, training=Training(routing_replay=False)))
    assert not replays_routing(small_recipe("none"))
    assert "no experts" in why_not_replayed(small_recipe(path), {})
    for words, sections in {
        'engines.kind = "simulated"': {"engines": Engines(kind=EngineKind.SIMULATED)},
        "run.deterministic": {"run": Run(deterministic=True)},
        "training.compile": {"training": Training(compile=True)},
        "engines.args.decode_context": {"engines": Engines(args={"decode_context_parallel_size": 2})},
        "engines.args.pipeline": {"engines": Engines(args={"pipeline_parallel_size": 2})},
        "6 bytes a token": {"sampling": Sampling(max_tokens=1 << 24)},
    }.items():
        recipe = small_recipe(path, **sections)
        assert words in why_not_replayed(recipe, config)
        assert not replays_routing(recipe)


def test_expert_load_is_measured_and_empty_replay_warned_of(mixture: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The load of experts is measured, and replay without experts leads to a warning."""
    options = TrainerOptions(model_path="", run_id="", weights_endpoint="", routing_replay=True)
    join(options, CPU)
    policy, sample = load_policy(str(mixture), CPU), make_groups(0, [1], seed=3)[0].samples[0]
    tokens, trained = len(sample.token_ids) - 1, sample.trained_tokens
    two, four = np.zeros((tokens, LAYERS, TOP_K)), np.zeros((tokens, LAYERS, TOP_K))
    two[:], four[:] = [3, 4], [3, 4]
    four[: tokens - trained // 2] = [5, 6]

    def measured(routed_samples: TrainingSample, unreplayed: float, **changes: Any) -> dict[str, float]:
        logprobs_of(policy, [routed_samples])
        return expert_metrics(policy, unreplayed, structs.replace(options, **changes))

    try:
        assert measured(structs.replace(sample, routed=(routed(0, two),)), 0) == {
            "experts/unreplayed_tokens": 0,
            "experts/busiest_share": 1.0,  # every token goes to it
            "experts/load_entropy": pytest.approx(np.log(2) / np.log(EXPERTS)),
        }
        half, left = trained // 2 / trained, 1 - trained // 2 / trained
        entropy = -half * np.log(half / 2) - left * np.log(left / 2)
        assert measured(structs.replace(sample, routed=(routed(0, four),)), 1, routing_replay=False) == {
            "experts/busiest_share": pytest.approx(left),
            "experts/load_entropy": pytest.approx(entropy / np.log(EXPERTS)),
        }
        assert expert_metrics(policy, 0, options) == {"experts/unreplayed_tokens": 0}  # nothing was trained
        of_one = structs.replace(sample, routed=(routed(0, two[:1]),))
        assert measured(of_one, tokens - 1)["experts/unreplayed_tokens"] == tokens - 1
        assert "no token of a batch" not in caplog.text
        for _ in range(2):
            measured(sample, tokens)
        assert caplog.text.count("engines returned the experts of no token of a batch") == 1
    finally:
        leave()
