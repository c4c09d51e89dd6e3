"""Layers that are quantised after loading are rebuilt from checkpoint bits, in place, and only those that changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from builders.weights import state_hash

from streamrl.base.errors import WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights.codec.codec import WeightPatch
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion, ShardPatch, StagedVersion, TensorSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from streamrl.weights.vllm import rebuilt_layers  # noqa: E402
from streamrl.weights.vllm.live_weights import LiveWeights, count_routes  # noqa: E402
from streamrl.weights.vllm.live_weights_layers import LiveLayers  # noqa: E402
from streamrl.weights.vllm.load_plan import record_load_plan  # noqa: E402
from streamrl.weights.vllm.post_load_changes import record_post_load_changes  # noqa: E402

ROWS, COLUMNS = 4, 8
TENSORS = {
    name: TensorSpec(name, "bfloat16", shape)
    for name, shape in {
        "first.up": (ROWS, COLUMNS),
        "first.gate": (ROWS, COLUMNS),
        "first.bias": (2 * ROWS,),
        "second.weight": (2 * ROWS, COLUMNS),
        "norm": (COLUMNS,),
    }.items()
}


class Int8Rows:
    """As vLLM's methods do: another parameter, turned, with scales; a tensor beside it; a kernel without tensors."""

    def __init__(self) -> None:
        self.calls = 0

    def process_weights_after_loading(self, layer: Layer) -> None:
        self.calls += 1
        weight = layer.weight.data.float()
        scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / 127
        del layer.weight
        quantised = (weight / scale).round().to(torch.int8).t().contiguous()
        layer.weight = torch.nn.Parameter(quantised, requires_grad=False)
        layer.scale = torch.nn.Parameter(scale, requires_grad=False)
        layer.row_sums = quantised.sum(0, dtype=torch.int32)
        layer.kernel = lambda: quantised.clone()


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2 * ROWS, COLUMNS, dtype=torch.bfloat16))
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(2 * ROWS, dtype=torch.bfloat16))
        self.quant_method = Int8Rows()


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(bias=True), Layer(bias=False)
        self.norm = torch.nn.Parameter(torch.zeros(COLUMNS, dtype=torch.bfloat16))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            part = {"first.up": slice(ROWS), "first.gate": slice(ROWS, None)}.get(name)
            target = self.first.weight.data[part] if part is not None else self.get_parameter(name).data
            target.copy_(tensor)


def loaded_model(bits: Mapping[str, np.ndarray], monkeypatch: pytest.MonkeyPatch | None = None) -> Model:
    """What vLLM notes of parameters before loading is noted here."""
    model = Model()
    if monkeypatch is not None:
        notes = {
            layer: {"weight": torch.nn.Parameter(torch.empty_like(layer.weight, device="meta"), requires_grad=False)}
            for layer in (model.first, model.second)
        }
        monkeypatch.setattr(rebuilt_layers, "loading_parameters", lambda module: notes.get(module, {}))
    model.load_weights((name, as_tensor(name, b)) for name, b in bits.items())

    def finish() -> None:
        for layer in (model.first, model.second):
            layer.quant_method.process_weights_after_loading(layer)
            layer.quant_method.calls = 0

    record_post_load_changes(model, finish)
    return model


def as_tensor(name: str, bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(TENSORS[name].shape)


def random_bits(seed: int) -> dict[str, np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(t.elements, generator=generator).to(torch.bfloat16) for n, t in TENSORS.items()}
    return {name: v.view(torch.int16).numpy().view(np.uint16).copy() for name, v in values.items()}


def staged(
    replica: CheckpointReplica, version: int, old: Mapping[str, np.ndarray] | None, new: Mapping[str, np.ndarray]
) -> StagedVersion:
    patches = []
    for name, spec in TENSORS.items():
        positions = None if old is None else np.flatnonzero(old[name] != new[name])
        values = new[name] if positions is None else new[name][positions]
        patches.append(
            ShardPatch(ShardSpec(name, spec.dtype, spec.shape, 0, spec.elements), WeightPatch(positions, values))
        )
    base = None if old is None else version - 1
    announcement = WeightAnnouncement(policy_version=version, base_version=base, state_hash=state_hash(new), sources=())
    return replica.stage(FetchedVersion(announcement, base, 0 if old is None else state_hash(old), patches, 0))


def tensors_of(model: Model) -> dict[str, torch.Tensor]:
    """All that the model serves with, what its kernels hold among it."""
    found = dict(model.named_parameters())
    for name in ("first", "second"):
        layer = getattr(model, name)
        found |= {f"{name}.row_sums": layer.row_sums, f"{name}.kernel": layer.kernel()}
    return found


def assert_as_fresh(model: Model, bits: Mapping[str, np.ndarray]) -> None:
    fresh = tensors_of(loaded_model(bits))
    for name, tensor in tensors_of(model).items():
        assert torch.equal(tensor, fresh[name]), name


def anchored(
    monkeypatch: pytest.MonkeyPatch, bits: Mapping[str, np.ndarray], **options: object
) -> tuple[Model, LiveWeights, CheckpointReplica]:
    model = loaded_model(random_bits(99), monkeypatch)
    plan = record_load_plan(model, TENSORS)
    counted = count_routes([{n: [r.checkpoint for r in rs] for n, rs in plan.routes.items()}], 0, TENSORS)
    live, replica = LiveWeights(plan, counted, layers=LiveLayers(plan, counted, **options)), CheckpointReplica()  # type: ignore[arg-type]
    first = staged(replica, 0, None, bits)
    live.state_hash = live.apply(live.prepare(first, replica), anchor=True)
    replica.advance(first)
    return model, live, replica


def some_changed(bits: Mapping[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    new = {name: b.copy() for name, b in bits.items()}
    for name in names:
        new[name][:: max(new[name].size // 3, 1)] ^= 3
    return new


def test_commits_equal_a_fresh_load_and_rebuild_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = random_bits(0)
    model, live, replica = anchored(monkeypatch, bits)
    assert_as_fresh(model, bits)
    places = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    touched = [("first.gate", "norm"), ("second.weight",), ("norm",), ("first.bias",), tuple(TENSORS)]
    for version, names in enumerate(touched, 1):
        new = some_changed(bits, *names)
        model.first.quant_method.calls = model.second.quant_method.calls = 0
        delta = staged(replica, version, bits, new)
        live.state_hash = live.apply(live.prepare(delta, replica), anchor=False)
        replica.advance(delta)
        assert live.state_hash == state_hash(new) == live.audit(replica)
        assert_as_fresh(model, new)
        calls = [layer.quant_method.calls for layer in (model.first, model.second)]
        assert calls == [int(any(name.startswith(part) for name in names)) for part in ("first", "second")]
        bits = new
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == places, "pointers must stay"


def test_a_rebuild_that_fails_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = random_bits(0)
    model, live, replica = anchored(monkeypatch, bits)
    delta = staged(replica, 1, bits, some_changed(bits, "first.up", "second.weight", "norm"))
    writes = live.prepare(delta, replica)
    with monkeypatch.context() as broken:
        broken.setattr(model.second, "quant_method", FailingMethod())
        failure = r"layer 'second': FailingMethod fails when it is run again \(RuntimeError: no room\): updates of this"
        with pytest.raises(WeightError, match=failure):
            live.apply(writes, anchor=False)
    live.undo(writes, replica)
    assert_as_fresh(model, bits)
    assert live.apply(writes, anchor=False) == delta.state_hash, "the same version once more"


class FailingMethod:
    def process_weights_after_loading(self, layer: Layer) -> None:
        layer.weight.data.zero_()
        raise RuntimeError("no room")


def test_foreign_writes_to_quantised_tensors_are_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign write to a quantised tensor is noticed, and an anchor repairs it."""
    bits = random_bits(0)
    model, live, replica = anchored(monkeypatch, bits)
    model.second.weight.data[0, 0] += 1
    with pytest.raises(WeightError, match=r"layer 'second': 'weight' has other bits in an audit"):
        live.audit(replica)
    delta = staged(replica, 1, bits, new := some_changed(bits, "second.weight"))
    with pytest.raises(WeightError, match=r"layer 'second': 'weight' has other bits before the commit"):
        live.apply(live.prepare(delta, replica), anchor=False)
    anchor = staged(replica, 1, None, new)
    live.state_hash = live.apply(live.prepare(anchor, replica), anchor=True)
    replica.advance(anchor)
    assert_as_fresh(model, new)
    assert live.audit(replica) == state_hash(new)


def test_what_was_loaded_is_compared_with_what_a_rebuild_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first commit: the checkpoint's bits are known, and so is what the layers must be."""
    bits = random_bits(0)
    model = loaded_model(bits, monkeypatch)
    plan = record_load_plan(model, TENSORS)
    counted = count_routes([{n: [r.checkpoint for r in rs] for n, rs in plan.routes.items()}], 0, TENSORS)
    replica = CheckpointReplica()
    replica.advance(staged(replica, 0, None, bits))
    assert LiveWeights(plan, counted).audit(replica) == state_hash(bits)
    model.first.scale.data[2] *= 2
    with pytest.raises(WeightError, match=r"layer 'first': 1 bytes of 'scale' are not what comes of its published"):
        LiveWeights(record_load_plan(model, TENSORS), counted).audit(replica)


def test_no_worker_rebuilds_when_another_one_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def agree(failure: str) -> None:
        told.append(failure)
        if others or failure:
            raise WeightError(failure or others)

    told: list[str] = []
    others = ""
    bits = random_bits(0)
    model, live, replica = anchored(monkeypatch, bits, agree=agree)
    delta = staged(replica, 1, bits, some_changed(bits, "first.up", "norm"))
    writes = live.prepare(delta, replica)
    others = "worker 1: it failed"
    model.first.quant_method.calls = 0
    with pytest.raises(WeightError, match="worker 1: it failed"):
        live.apply(writes, anchor=False)
    model.norm.data[0] += 1
    with pytest.raises(WeightError, match="'norm'"):
        live.apply(writes, anchor=False)
    assert model.first.quant_method.calls == 0
    assert told[:2] == ["", ""]
    assert "'norm'" in told[2], "the others hear, so that they do not wait"


def test_refuses_by_name_what_a_reload_makes_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = random_bits(0)
    model, live, replica = anchored(monkeypatch, bits)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}

    def in_another_form(layer: Layer) -> None:
        Int8Rows().process_weights_after_loading(layer)
        layer.scale = torch.nn.Parameter(layer.scale.data.view(-1))

    monkeypatch.setattr(model.first.quant_method, "process_weights_after_loading", in_another_form)
    writes = live.prepare(staged(replica, 1, bits, some_changed(bits, "first.up")), replica)
    with pytest.raises(
        WeightError, match=r"layer 'first': 'scale' is \(8,\) of torch.float32 after a reload.*in place"
    ):
        live.apply(writes, anchor=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
