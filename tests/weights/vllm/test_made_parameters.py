"""Parameters that are no copies of published tensors: computed while loading, derived afterwards, or rounded. After
each commit they are those of a fresh load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from builders.weights import fetched, state_hash

from streamrl.base.errors import WeightError
from streamrl.weights.pull.replica import CheckpointReplica, StagedVersion, TensorSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from streamrl.weights.vllm import rebuilt_layers  # noqa: E402
from streamrl.weights.vllm.latent_attention import derive_again, derived_parameters  # noqa: E402
from streamrl.weights.vllm.live_weights import LiveWeights, count_routes  # noqa: E402
from streamrl.weights.vllm.load_plan import record_load_plan  # noqa: E402
from streamrl.weights.vllm.post_load_changes import record_post_load_changes  # noqa: E402

HEADS, RANK = 4, 8
TENSORS = {
    "mixer.A_log": TensorSpec("mixer.A_log", "bfloat16", (HEADS,)),
    "mixer.D": TensorSpec("mixer.D", "bfloat16", (HEADS,)),
    "attention.kv_b": TensorSpec("attention.kv_b", "bfloat16", (2 * RANK, RANK)),
    "norm": TensorSpec("norm", "float32", (RANK,)),
}
Bits = Mapping[str, np.ndarray]


def computing(loader: Callable[..., None], fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """As vLLM's ``composed_weight_loader``."""

    def composed_loader(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
        loader(parameter, loaded)
        parameter.data.copy_(fn(parameter))

    return composed_loader


def copying(parameter: torch.Tensor, loaded: torch.Tensor) -> None:
    parameter.data.copy_(loaded)


class Mixer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.A = torch.nn.Parameter(torch.zeros(HEADS, dtype=torch.float32))
        self.A.weight_loader = computing(copying, lambda values: -torch.exp(values.float()))
        self.D = torch.nn.Parameter(torch.zeros(HEADS, dtype=torch.bfloat16))
        self.D.weight_loader = copying


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Latent attention: two matrices are made of the weight of ``kv_b_proj``, into the same memory each time."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Linear(RANK, 2 * RANK, bias=False, dtype=torch.bfloat16)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        for attribute, part in zip(
            ("W_UK_T", "W_UV"), self.kv_b_proj.weight.detach().to(dtype).split(RANK), strict=True
        ):
            if attribute not in self._parameters:
                setattr(self, attribute, torch.nn.Parameter(torch.empty_like(part.t()), requires_grad=False))
            getattr(self, attribute).data.copy_(part.t())


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.attention = Mixer(), Attention()
        self.norm = torch.nn.Parameter(torch.zeros(RANK, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.data.copy_(tensor)
            elif name == "attention.kv_b":
                self.attention.kv_b_proj.weight.data.copy_(tensor)
            else:
                parameter = self.mixer.A if name.endswith("A_log") else self.mixer.D
                parameter.weight_loader(parameter, tensor)


def loaded_model(bits: Bits) -> Model:
    model = Model()
    with torch.no_grad():
        model.load_weights((name, as_tensor(name, values)) for name, values in bits.items())
    record_post_load_changes(model, lambda: model.attention.process_weights_after_loading(torch.bfloat16))
    return model


def as_tensor(name: str, bits: np.ndarray) -> torch.Tensor:
    spec = TENSORS[name]
    dtype = torch.float32 if spec.dtype == "float32" else torch.bfloat16
    return torch.from_numpy(bits.view(f"i{bits.itemsize}")).view(dtype).view(spec.shape)


def random_bits(seed: int) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    bits = {}
    for name, spec in TENSORS.items():
        values = torch.randn(spec.elements, generator=generator)
        floats = values if spec.dtype == "float32" else values.to(torch.bfloat16)
        integers = floats.view(torch.int32 if spec.dtype == "float32" else torch.int16).numpy()
        bits[name] = integers.view(f"u{integers.itemsize}").copy()
    return bits


def staged(replica: CheckpointReplica, version: int, old: Bits | None, new: Bits) -> StagedVersion:
    return replica.stage(fetched(TENSORS, version, old, new))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM notes of parameters before loading."""

    def loading_parameters(module: Any) -> dict[str, torch.Tensor]:
        if not isinstance(module, Mixer):
            return {}
        parameters = {}
        for attribute, parameter in module._parameters.items():
            meta = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            meta.weight_loader = parameter.weight_loader
            rebuilt_layers._unwrap_loader(meta)
            parameters[attribute] = meta
        return parameters

    monkeypatch.setattr(rebuilt_layers, "loading_parameters", loading_parameters)


def planned(model: Model) -> LiveWeights:
    plan = record_load_plan(model, TENSORS)
    counted = count_routes([{n: [r.checkpoint for r in rs] for n, rs in plan.routes.items()}], 0, TENSORS)
    return LiveWeights(plan, counted)


def assert_as_fresh(model: Model, bits: Bits) -> None:
    fresh = dict(loaded_model(bits).named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, fresh[name]), name


@pytest.mark.usefixtures("notes")
def test_made_parameters_follow_each_commit() -> None:
    """A computed, a derived and a rounded parameter are those of a fresh load after an anchor, deltas, and a delta
    that is undone; the state hash counts the published bits."""
    bits = random_bits(0)
    model = loaded_model(bits)
    assert derived_parameters(model) == {"attention.W_UK_T", "attention.W_UV"}
    places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    live, replica = planned(model), CheckpointReplica()
    anchor = staged(replica, 0, None, bits)
    live.state_hash = live.apply(live.prepare(anchor, replica), anchor=True)
    replica.advance(anchor)
    for version in range(1, 4):
        new = {name: values.copy() for name, values in bits.items()}
        for name, values in new.items():
            values[version % values.size] ^= 3 if name != "norm" else 0x1FFFF
        delta = staged(replica, version, bits, new)
        writes = live.prepare(delta, replica)
        live.state_hash = live.apply(writes, anchor=False)
        assert derive_again(model, live.storages_of(writes), torch.bfloat16) == 1
        assert_as_fresh(model, new)
        live.undo(writes, replica)
        derive_again(model, live.storages_of(writes), torch.bfloat16)
        assert_as_fresh(model, bits)
        live.apply(writes, anchor=False)
        derive_again(model, live.storages_of(writes), torch.bfloat16)
        replica.advance(delta)
        assert live.state_hash == state_hash(new) == live.audit(replica)
        bits = new
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == places, "pointers must stay"
    untouched = {name: values.copy() for name, values in bits.items()}
    untouched["mixer.D"][0] ^= 1
    writes = live.prepare(staged(replica, 4, bits, untouched), replica)
    live.apply(writes, anchor=False)
    assert derive_again(model, live.storages_of(writes), torch.bfloat16) == 0, "the weight of kv_b_proj is the same"


@pytest.mark.usefixtures("notes")
def test_foreign_writes_to_made_parameters_are_noticed() -> None:
    bits = random_bits(0)
    model = loaded_model(bits)
    live, replica = planned(model), CheckpointReplica()
    anchor = staged(replica, 0, None, bits)
    live.state_hash = live.apply(live.prepare(anchor, replica), anchor=True)
    replica.advance(anchor)
    model.mixer.A.data[0] += 1
    with pytest.raises(WeightError, match="layer 'mixer': 'A' has other bits in an audit"):
        live.audit(replica)
    model.mixer.A.data[0] -= 1
    model.norm.data[3] += 1
    with pytest.raises(WeightError, match="'norm': 1 of 8 elements differ in an audit"):
        live.audit(replica)


def test_computed_parameters_without_a_note_are_refused() -> None:
    with pytest.raises(WeightError, match=r"'mixer\.A' is loaded with a value computed from published tensors"):
        record_load_plan(loaded_model(random_bits(0)), TENSORS)
