"""Shared prompts, checkpointed and compiled layers give the gradients of single sequences through the plain model."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from reference_policy import reference_logprobs, reference_model, relative_error  # noqa: E402

from streamrl.base.errors import StreamRLError  # noqa: E402
from streamrl.base.types import TrainingSample, TrajectoryId, float_array, token_array  # noqa: E402
from streamrl.learning.batches.packing import PreparedSample, pack  # noqa: E402
from streamrl.learning.model import attention, packing_check  # noqa: E402
from streamrl.learning.model.attention import PackedSequence, packed_layout  # noqa: E402
from streamrl.learning.model.loading import checkpoint_activations, compile_policy, load_policy  # noqa: E402
from streamrl.learning.model.policy import PackedPolicy, computes_in_sixteen_bits  # noqa: E402
from streamrl.learning.objective.logprobs import token_logprobs  # noqa: E402
from streamrl.learning.options import TrainerOptions  # noqa: E402
from streamrl.recipe.sections import ComputeDtype  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
SHAPES = ((6, (3, 30, 1, 11)), (45, (2, 20, 5, 1)), (45, (18,)), (40, (50, 3)), (2, (1, 1)))
"""(prompt, completions): short and long prompts, one alone, one with nothing after it but the targets."""


def groups_of(shapes: tuple[tuple[int, tuple[int, ...]], ...], seed: int = 0) -> list[PreparedSample]:
    """Random samples of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    prepared = []
    for group, (prompt, completions) in enumerate(shapes):
        start = torch.randint(3, 32, (prompt,), generator=generator).tolist()
        for index, length in enumerate(completions):
            own = torch.randint(3, 32, (length,), generator=generator).tolist()
            sample = TrainingSample(
                id=TrajectoryId(prompt_id=f"p{group}", group_id=group, sample=index),
                token_ids=token_array([*start, *own]),
                loss_mask=b"\0" * prompt + b"\1" * length,
                behavior_logprobs=float_array([0.0] * (prompt + length)),
                reward=0.0,
                oldest_version=0,
                newest_version=0,
            )
            prepared.append(PreparedSample(sample))
    return prepared


def mixture(count: int) -> Any:
    """A fixed direction in which the logprobs are differentiated."""
    return torch.linspace(-1.0, 1.0, count)


def packed_gradients(policy: PackedPolicy, row: list[PreparedSample]) -> tuple[Any, dict[str, Any]]:
    """Logprobs of a row, and the gradient of their mixture."""
    policy.zero_grad()
    batch = pack(row, 0, CPU)
    logprobs = token_logprobs(policy.head(policy(batch)), batch.targets_N)[0]
    (logprobs @ mixture(len(logprobs))).backward()
    gradients = {name: p.grad.clone() for name, p in policy.hugging_face.named_parameters() if p.grad is not None}
    return logprobs.detach(), gradients


@pytest.mark.parametrize("long_prefix", [0, 32, 1000], ids=["attended once", "as shipped", "repeated"])
def test_shared_prompts_equal_single_sequences(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, long_prefix: int
) -> None:
    """Shared prompts give the logprobs and gradients of single sequences."""
    monkeypatch.setattr(attention, "LONG_PREFIX", long_prefix)
    row = groups_of(SHAPES)
    assert {bucket.queries == bucket.keys for bucket in pack(row, 0, CPU).layout.buckets} == (
        {True} if long_prefix == 1000 else {True, False}
    )
    logprobs, gradients = packed_gradients(load_policy(tiny_model, CPU), row)
    model = reference_model(tiny_model, rounded=False)
    expected = torch.cat([reference_logprobs(model, item.sample) for item in row])
    (expected @ mixture(len(expected))).backward()
    torch.testing.assert_close(logprobs, expected.detach(), atol=2e-5, rtol=0)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert relative_error(gradients, wanted) < 3e-6


def test_buckets_hold_nearly_equal_lengths_and_one_prefix_length() -> None:
    lengths = [5, 90, 12, 13, 70, 100]
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    plain = packed_layout([PackedSequence(s, n) for s, n in zip(starts, lengths, strict=True)], CPU)
    assert plain.buckets == ((3, 13, 13), (1, 70, 70), (2, 100, 100))
    assert plain.keys is plain.queries
    shared = packed_layout([PackedSequence(0, 64), PackedSequence(64, 4, 0), PackedSequence(68, 6, 0)], CPU)
    assert shared.buckets == ((1, 64, 64), (2, 6, 70))


class FlashKernel:
    """The kernel of CUDA by its definition: causal from the bottom right of each pair of boundaries."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
        scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        self.calls += 1
        assert {x.dtype for x in (query, key, value)} == {value.dtype}
        assert enable_gqa == (query.shape[1] != key.shape[1])
        assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max()) and window_size == (-1, 0)
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        parts = []
        for index in range(len(cu_seq_q) - 1):
            rows, seen = (slice(int(s[index]), int(s[index + 1])) for s in (cu_seq_q, cu_seq_k))
            scores = torch.einsum("qhd,khd->hqk", query[rows].float(), key[seen].float()) * scale
            hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, value[seen].float()))
        return torch.cat(parts).to(value.dtype)


class FlashKernelWithoutGroups(FlashKernel):
    """As torch 2.11 has it: as many heads of keys as of queries, and no ``enable_gqa``."""

    def __call__(  # type: ignore[override]
        self, query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
        scale: float, window_size: tuple[int, int],
    ) -> Any:  # fmt: skip
        bounds = (cu_seq_q, cu_seq_k, max_q, max_k)
        return super().__call__(query, key, value, *bounds, scale=scale, window_size=window_size)


SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Granite", "SmolLM3", "Olmo2")


@pytest.mark.long
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bit_attention_is_one_flash_call_a_layer(
    family: str, compute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rope and norms of queries and keys multiply by float32 tables, also under autocast."""
    torch.manual_seed(0)
    sizes = SMALL | ({"head_dim": 8} if family == "Qwen3" else {})
    config = getattr(transformers, f"{family}Config")(**sizes)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    policy, row = load_policy(str(tmp_path), CPU), groups_of(SHAPES[:2])
    kernel = FlashKernel()
    monkeypatch.setattr(attention, "has_bfloat16", lambda device: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    with torch.autocast("cpu", torch.bfloat16, enabled=compute == "bfloat16"):
        logprobs, gradients = packed_gradients(policy, row)
    assert kernel.calls == (SMALL["num_hidden_layers"] if compute == "bfloat16" else 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = torch.cat([reference_logprobs(model, item.sample) for item in row])
    (expected @ mixture(len(expected))).backward()
    torch.testing.assert_close(logprobs, expected.detach(), atol=2e-5 if compute == "float32" else 0.15, rtol=0)
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert relative_error(gradients, wanted) < (3e-6 if compute == "float32" else 0.1)


class LeakyKernel(FlashKernel):
    """Lets each sequence attend to all tokens before it in the row."""

    def __call__(
        self, query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, *rest: Any, **options: Any
    ) -> Any:
        end = torch.tensor([0, len(query)], dtype=torch.int32)
        keys = torch.tensor([0, len(key)], dtype=torch.int32)
        return super().__call__(query, key, value, end, keys, len(query), len(key), **options)


@pytest.mark.parametrize("kernel", [FlashKernel(), LeakyKernel()], ids=["right", "leaky"])
def test_the_load_checks_the_kernel_that_trains(
    kernel: FlashKernel, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flash kernel that is wrong about a row is found, where rows go through it."""
    for module in (attention, packing_check):
        monkeypatch.setattr(module, "has_bfloat16", lambda device: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    load_policy(tiny_model, CPU)
    assert kernel.calls == 0, "a float32 row takes no flash kernel"
    if isinstance(kernel, LeakyKernel):
        with pytest.raises(StreamRLError, match=r"flash attention gives other outputs on packed rows than in float32"):
            load_policy(tiny_model, CPU, sixteen_bit=True)
    else:
        load_policy(tiny_model, CPU, sixteen_bit=True)
    assert kernel.calls > 0


@pytest.mark.parametrize("kernel", [FlashKernel(), FlashKernelWithoutGroups()], ids=["grouped", "torch 2.11"])
def test_the_flash_kernel_is_given_the_same_attention(monkeypatch: pytest.MonkeyPatch, kernel: FlashKernel) -> None:
    """Shared prompts, and two heads of keys for four of queries, by each of torch's signatures."""
    sequences = [PackedSequence(0, 40), PackedSequence(40, 3, 0), PackedSequence(43, 9, 0), PackedSequence(52, 7)]
    torch.manual_seed(0)
    query, (key, value) = torch.randn(1, 4, 59, 8).bfloat16(), torch.randn(2, 1, 2, 59, 8).bfloat16()

    def attend(layout: Any) -> Any:
        return attention.packed_attention(torch.nn.Identity(), query, key, value, None, packed=layout, scaling=0.4)[0]

    expected = attend(packed_layout(sequences, CPU))
    monkeypatch.setattr(attention, "has_bfloat16", lambda device: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    torch.testing.assert_close(attend(packed_layout(sequences, CPU)), expected, atol=8e-3, rtol=0)
    assert kernel.calls == 1


def test_grouped_heads_are_repeated_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where queries share keys, a GPU's kernels for float32 are given keys for each query."""
    calls: list[tuple[int, bool]] = []

    def kernel(query: Any, key: Any, value: Any, *, enable_gqa: bool, **_: Any) -> Any:
        calls.append((key.shape[1], enable_gqa))
        return query

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    for device in ("cpu", "meta"):
        query, key = (torch.zeros(6, heads, 8, device=device) for heads in (4, 2))
        attention._bucket_attention(query, key, key, attention.Bucket(1, 6, 6), 1.0, attention.Reach(6, 6, None))
    assert calls == [(2, True), (4, False)]


def test_a_sink_takes_its_share_of_the_flash_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and its backward by their definitions, which know no sink: outputs and gradients are those of
    attention with one more score and no value."""
    sequences = [PackedSequence(0, 40), PackedSequence(40, 3, 0), PackedSequence(43, 9, 0), PackedSequence(52, 7)]
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 59, 8).bfloat16().requires_grad_() for heads in (4, 2, 2)]
    sinks = torch.randn(4, requires_grad=True)

    def scores_of(query: Any, key: Any, starts_q: Any, starts_k: Any, scale: float, window: list[int]) -> Any:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).float()
        scores = torch.einsum("qhd,khd->hqk", query.float(), key) * scale
        places_q, places_k = (torch.arange(len(x)) for x in (query, key))
        owner_q, owner_k = (
            torch.bucketize(p, s[1:], right=True) for p, s in ((places_q, starts_q), (places_k, starts_k))
        )
        back = (starts_k[owner_q + 1] - starts_q[owner_q + 1] + places_q)[:, None] - places_k
        seen = (owner_q[:, None] == owner_k) & (back >= 0) & ((back <= window[0]) | (window[0] < 0))
        return scores.masked_fill(~seen, -torch.inf)

    def forward(query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *rest: Any) -> Any:
        scores = scores_of(query, key, starts_q, starts_k, rest[3], rest[4])
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).float()
        output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(query.dtype)
        return output, scores.logsumexp(-1), torch.zeros(2, dtype=torch.uint64)

    def backward(gradient: Any, query: Any, key: Any, value: Any, output: Any, log_sums: Any, *rest: Any) -> Any:
        weights = (scores_of(query, key, rest[0], rest[1], rest[6], rest[7]) - log_sums[..., None]).exp()
        groups = query.shape[1] // key.shape[1]
        wide_key, wide_value = (x.repeat_interleave(groups, dim=1).float() for x in (key, value))
        of_weights = torch.einsum("qhd,khd->hqk", gradient.float(), wide_value)
        of_scores = weights * (of_weights - (gradient.float() * output.float()).sum(-1).T[..., None]) * rest[6]
        of_query = torch.einsum("hqk,khd->qhd", of_scores, wide_key)
        of_key = torch.einsum("hqk,qhd->khd", of_scores, query.float())
        of_value = torch.einsum("hqk,qhd->khd", weights, gradient.float())
        narrow = [x.unflatten(1, (-1, groups)).sum(2).to(key.dtype) for x in (of_key, of_value)]
        return of_query.to(query.dtype), *narrow

    def attend(window: int | None) -> list[Any]:
        output = attention.packed_attention(
            torch.nn.Identity(), *inputs, None, packed=packed_layout(sequences, CPU), scaling=0.4, s_aux=sinks,
            sliding_window=window,
        )[0]  # fmt: skip
        mix = torch.linspace(-1, 1, output.numel()).view(output.shape)
        return [output, *torch.autograd.grad((output.float() * mix).sum(), [*inputs, sinks])]

    expected = {window: attend(window) for window in (None, 16)}
    varlen = importlib.import_module("torch.nn.attention.varlen")
    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)
    monkeypatch.setattr(attention, "has_bfloat16", lambda device: True)
    for window, outcomes in expected.items():
        for outcome, other in zip(attend(window), outcomes, strict=True):
            torch.testing.assert_close(outcome.float(), other.float(), atol=0.03, rtol=0.03)
    monkeypatch.setattr(attention, "flash_with_sink", lambda *_: pytest.fail("the flash kernel is called"))
    with pytest.raises(pytest.fail.Exception):
        attend(None)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), False), ((8, 0), True), ((8, 9), True)])
def test_forwards_compute_in_sixteen_bits_where_a_card_can(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    """A T4 (7.5) has neither bfloat16 nor torch's flash kernel."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    on_card = torch.device("cuda", 0)
    options = TrainerOptions(model_path="", run_id="", weights_endpoint="")
    assert computes_in_sixteen_bits(options, on_card) == expected == attention.has_bfloat16(on_card)
    assert not computes_in_sixteen_bits(options, torch.device("cpu"))
    explicit = msgspec.structs.replace(options, compute_dtype=ComputeDtype.BFLOAT16)
    assert computes_in_sixteen_bits(explicit, torch.device("cpu"))


@pytest.mark.long
def test_checkpointed_layers_keep_less_and_give_the_same_bits(tiny_model: str) -> None:
    row = groups_of(SHAPES)

    def measured(policy: PackedPolicy) -> tuple[int, dict[str, Any]]:
        kept: dict[int, int] = {}

        def keep(tensor: Any) -> Any:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs = policy(pack(row, 0, CPU))
        outputs.square().sum().backward()
        # Parameters are kept in any case.
        bytes_kept = sum(kept.values()) - sum(p.numel() * 4 for p in policy.parameters())
        return bytes_kept, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}

    plain_bytes, plain = measured(load_policy(tiny_model, CPU))
    policy = load_policy(tiny_model, CPU)
    checkpoint_activations(policy)
    fewer_bytes, same = measured(policy)
    assert fewer_bytes < plain_bytes / 3
    assert all(torch.equal(same[name], gradient) for name, gradient in plain.items())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_compiled_layers_give_equal_gradients(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers give the same gradients, and are compiled once. Three rows of different shapes, checkpointed as
    well: one compilation. Traced as for inductor, which is slow."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))

    rows = [groups_of(SHAPES), groups_of(SHAPES[1:3], seed=1), groups_of(SHAPES[:2], seed=2)]
    plain = load_policy(tiny_model, CPU)
    expected = [packed_gradients(plain, row)[1] for row in rows]
    policy = load_policy(tiny_model, CPU)
    compile_policy(policy)
    checkpoint_activations(policy)
    assert relative_error(packed_gradients(policy, rows[0])[1], expected[0]) < 1e-5
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    for row, wanted in zip(rows[1:], expected[1:], strict=True):
        assert relative_error(packed_gradients(policy, row)[1], wanted) < 1e-5
    assert counters["stats"]["unique_graphs"] == compiled
