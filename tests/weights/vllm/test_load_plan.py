"""The load plan maps what a loader copies, and refuses by name what it does otherwise. No engine: small modules."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from builders.weights import fetched, state_hash

from streamrl.base.errors import WeightError
from streamrl.base.messages import HASH_MODULUS
from streamrl.weights.pull.replica import CheckpointReplica, TensorSpec

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from streamrl.weights.vllm.live_weights import LiveWeights, count_routes  # noqa: E402
from streamrl.weights.vllm.load_plan import LoadPlan, Rectangle, fit_rectangles, record_load_plan  # noqa: E402
from streamrl.weights.vllm.post_load_changes import record_post_load_changes  # noqa: E402

ROWS, COLUMNS = 6, 8
TENSORS = {
    "column": TensorSpec("column", "bfloat16", (ROWS, COLUMNS)),
    "row": TensorSpec("row", "bfloat16", (ROWS, COLUMNS)),
    "turned": TensorSpec("turned", "bfloat16", (ROWS, COLUMNS)),
    "norm": TensorSpec("norm", "bfloat16", (COLUMNS,)),
}


class Worker(torch.nn.Module):  # type: ignore[misc]
    """One of ``ranks`` tensor-parallel workers: a fused parameter with padding, a row-parallel one (strided in the
    checkpoint), one stored transposed, and a replicated one."""

    def __init__(self, rank: int = 0, ranks: int = 1, dtype: object = None) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        make = lambda *shape: torch.nn.Parameter(torch.zeros(shape, dtype=dtype or torch.float32))  # noqa: E731
        self.fused = make(ROWS // ranks + 3, COLUMNS)
        self.row_parallel = make(ROWS, COLUMNS // ranks)
        self.turned = make(COLUMNS, ROWS)
        self.norm = make(COLUMNS)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "column":
            rows = ROWS // self.ranks
            self.fused.data[:rows].copy_(tensor.narrow(0, self.rank * rows, rows))
            self.fused.data[rows:].fill_(0)
        elif name == "row":
            columns = COLUMNS // self.ranks
            self.row_parallel.data.copy_(tensor.narrow(1, self.rank * columns, columns))
        elif name == "turned":
            self.turned.data.copy_(tensor.t())
        else:
            self.norm.data.copy_(tensor)


def as_tensor(name: str, bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(TENSORS[name].shape)


def random_bits(seed: int) -> dict[str, np.ndarray]:
    """Finite values only: the reference below copies them as numbers."""
    random = np.random.default_rng(seed)
    return {n: (random.integers(0, 65536, t.elements) & 0xBFFF).astype(np.uint16) for n, t in TENSORS.items()}


def rectangles(plan: LoadPlan) -> dict[str, list[object]]:
    return {name: [route.checkpoint for route in routes] for name, routes in plan.routes.items()}


def anchored(worker: Worker, bits: dict[str, np.ndarray]) -> tuple[LiveWeights, CheckpointReplica]:
    """A worker, and a replica, that hold ``bits`` as version 0."""
    live = LiveWeights(plan := record_load_plan(worker, TENSORS), count_routes([rectangles(plan)], 0, TENSORS))
    replica = CheckpointReplica()
    staged = replica.stage(fetched(TENSORS, 0, None, bits))
    live.state_hash = live.apply(live.prepare(staged, replica), anchor=True)
    replica.advance(staged)
    return live, replica


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commits_equal_the_loader_on_every_worker(ranks: int, dtype: object) -> None:
    workers = [Worker(rank, ranks, dtype) for rank in range(ranks)]
    plans = [record_load_plan(worker, TENSORS) for worker in workers]
    assert all(not p.count_nonzero() for w in workers for p in w.parameters()), "recording wrote to the model"
    gathered = [rectangles(plan) for plan in plans]
    live = [LiveWeights(plan, count_routes(gathered, rank, TENSORS)) for rank, plan in enumerate(plans)]
    replica, old = CheckpointReplica(), None
    for version in range(4):
        new = random_bits(version)
        if old is not None:
            keep = {name: np.random.default_rng(version).random(b.size) < 0.7 for name, b in new.items()}
            new = {name: np.where(keep[name], old[name], b) for name, b in new.items()}
        staged = replica.stage(fetched(TENSORS, version, old, new))
        for one in live:
            one.state_hash = one.apply(one.prepare(staged, replica), anchor=staged.is_anchor)
        replica.advance(staged)
        assert sum(one.state_hash for one in live) % HASH_MODULUS == state_hash(new)
        for rank, worker in enumerate(workers):
            reference = Worker(rank, ranks, dtype)
            reference.load_weights((name, as_tensor(name, bits)) for name, bits in new.items())
            for name, parameter in worker.named_parameters():
                assert torch.equal(parameter, reference.get_parameter(name)), (version, rank, name)
        old = new


def test_nan_payloads_and_signed_zero_reach_a_float32_engine() -> None:
    worker = Worker()
    live = LiveWeights(plan := record_load_plan(worker, TENSORS), count_routes([rectangles(plan)], 0, TENSORS))
    replica, new = CheckpointReplica(), random_bits(0)
    new["norm"][:] = [0x8000, 0x7F81, 0xFFC1, 0x7F80, 0xFF80, 0x0001, 0x8001, 0x0000]
    staged = replica.stage(fetched(TENSORS, 0, None, new))
    assert live.apply(live.prepare(staged, replica), anchor=True) == state_hash(new)
    stored = worker.norm.detach().view(torch.int32).numpy().view(np.uint32)
    assert np.array_equal(stored, new["norm"].astype(np.uint32) << 16)


def test_a_foreign_write_is_noticed_and_undone() -> None:
    """A foreign write is noticed, and undo restores the elements that were touched."""
    worker = Worker()
    old = random_bits(0)
    live, replica = anchored(worker, old)
    before = {name: p.detach().clone() for name, p in worker.named_parameters()}
    new = random_bits(1)
    writes = live.prepare(replica.stage(fetched(TENSORS, 1, old, new)), replica)
    worker.turned.data[0, 0] += 1
    with pytest.raises(WeightError, match=r"'turned': 1 of \d+ elements differ before the commit"):
        live.apply(writes, anchor=False)
    live.undo(writes, replica)
    for name, parameter in worker.named_parameters():
        assert torch.equal(parameter, before[name]), name
    worker.norm.data[3] = 1.0 + 2**-20
    with pytest.raises(WeightError, match=r"'norm': 1 of \d+ elements differ before the commit"):
        live.apply(writes, anchor=False)


def refusing(load: object) -> Worker:
    worker = Worker()
    worker.load = load.__get__(worker)  # type: ignore[attr-defined]
    return worker


def copies_first(self: Worker, name: str, tensor: torch.Tensor) -> None:
    """What loaders do that rearrange a fused projection before they copy its parts."""
    if name == "turned":
        self.turned.data.copy_(tensor.t().contiguous())
    elif name == "column":
        by_head = tensor.view(3, 2, COLUMNS).transpose(0, 1).reshape(ROWS, COLUMNS)  # a copy: no longer strided
        for part, rows in enumerate(by_head.split(3)):
            self.fused.data[3 * part : 3 * part + 3].copy_(rows)
        self.fused.data[ROWS:].fill_(0)
    else:
        self.norm.data.copy_(tensor.clone().to(tensor.dtype))


def test_follows_copies_that_a_loader_makes_on_the_way() -> None:
    def in_two_halves(self: Worker, name: str, tensor: torch.Tensor) -> None:
        if name != "row":
            return copies_first(self, name, tensor)
        joined = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
        self.row_parallel.data[:, COLUMNS // 2 :].copy_(joined[:, : COLUMNS // 2])
        return self.row_parallel.data[:, : COLUMNS // 2].copy_(joined[:, COLUMNS // 2 :])

    worker, reference = refusing(in_two_halves), refusing(in_two_halves)
    plan = record_load_plan(worker, TENSORS)
    live = LiveWeights(plan, count_routes([rectangles(plan)], 0, TENSORS))
    replica, old = CheckpointReplica(), None
    for version, new in enumerate((random_bits(0), random_bits(1))):
        staged = replica.stage(fetched(TENSORS, version, old, new))
        live.state_hash = live.apply(live.prepare(staged, replica), anchor=staged.is_anchor)
        replica.advance(staged)
        assert live.state_hash == state_hash(new)
        reference.load_weights((name, as_tensor(name, bits)) for name, bits in new.items())
        for name, parameter in worker.named_parameters():
            assert torch.equal(parameter, reference.get_parameter(name)), (version, name)
        old = new


def scales(self: Worker, name: str, tensor: torch.Tensor) -> None:
    Worker.load(self, name, tensor * 2 if name == "norm" else tensor)


def adds(self: Worker, name: str, tensor: torch.Tensor) -> None:
    Worker.load(self, name, tensor)
    if name == "norm":
        self.norm.data.add_(1)


def mixes_two(self: Worker, name: str, tensor: torch.Tensor) -> None:
    """A value that is part of no single published tensor."""
    self.seen = [*getattr(self, "seen", []), tensor]
    if name == "norm":
        first = next(seen for seen in self.seen if seen.ndim == 2)
        self.norm.data.copy_(torch.cat([tensor[:4], first[0, :4]]))
    else:
        Worker.load(self, name, tensor)


def scales_in_place(self: Worker, name: str, tensor: torch.Tensor) -> None:
    Worker.load(self, name, tensor.mul_(2) if name == "norm" else tensor)


def scales_a_copy(self: Worker, name: str, tensor: torch.Tensor) -> None:
    Worker.load(self, name, tensor.clone().mul_(2) if name == "norm" else tensor)


def writes_out(self: Worker, name: str, tensor: torch.Tensor) -> None:
    Worker.load(self, name, tensor)
    if name == "norm":
        torch.add(torch.ones(COLUMNS), 1, out=self.norm.data)


def replaces(self: Worker, name: str, tensor: torch.Tensor) -> None:
    Worker.load(self, name, tensor)
    if name == "norm":
        self.norm = torch.nn.Parameter(tensor)


def shuffles(self: Worker, name: str, tensor: torch.Tensor) -> None:
    if name == "norm":
        tensor = torch.cat([tensor[2:3], tensor[0:1], tensor[5:], tensor[1:2], tensor[3:5]])
    Worker.load(self, name, tensor)


def broadcasts(self: Worker, name: str, tensor: torch.Tensor) -> None:
    Worker.load(self, name, tensor[:1].expand(COLUMNS) if name == "norm" else tensor)


def forgets(self: Worker, name: str, tensor: torch.Tensor) -> None:
    if name != "norm":
        Worker.load(self, name, tensor)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (scales, "'norm' is loaded with a value computed"),
        (mixes_two, "'norm' is loaded with a value computed"),
        (scales_in_place, "'norm' is loaded with a value computed"),
        (scales_a_copy, "'norm' is loaded with a value computed"),
        (writes_out, "'norm' calls aten.add.out"),
        (replaces, "replaces runtime parameter 'norm'"),
        (shuffles, "'norm' lies in runtime parameter 'norm' in a way that is no rectangle"),
        (adds, "'norm' calls aten.add_"),
        (broadcasts, "'norm' is broadcast"),
        (forgets, "covers 8 of 8 elements of runtime parameter 'norm'"),
    ],
)
def test_refuses_what_is_not_a_copy(load: object, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        record_load_plan(refusing(load), TENSORS)


def test_refuses_an_emptied_parameter_with_the_remedy() -> None:
    worker = Worker()
    worker.packed = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(WeightError, match=r"'packed' is empty: the engine packed its weights.*VLLM_PLUGINS=streamrl"):
        record_load_plan(worker, TENSORS)


def test_refuses_a_runtime_type_that_loses_bits() -> None:
    tensors = {name: TensorSpec(name, "float32", spec.shape) for name, spec in TENSORS.items()}
    with pytest.raises(WeightError, match="cannot hold it bit for bit"):
        record_load_plan(Worker(dtype=torch.bfloat16), tensors)


def test_refuses_a_published_tensor_that_the_model_does_not_load() -> None:
    class Tied(Worker):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            if name != "head":
                super().load(name, tensor)

    tensors = {**TENSORS, "head": TensorSpec("head", "bfloat16", (4,))}
    plan = record_load_plan(Tied(), tensors)
    with pytest.raises(WeightError, match="0 of 4 elements of published tensor 'head'"):
        count_routes([rectangles(plan)], 0, tensors)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """As vLLM's layers look from outside: they have a quantisation method."""

    def __init__(self) -> None:
        super().__init__()
        self.quant_method = object()
        self.weight = torch.nn.Parameter(torch.zeros(COLUMNS, ROWS))
        self.norm = torch.nn.Parameter(torch.zeros(COLUMNS))
        self.scales = torch.ones(4)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            getattr(self, "weight" if name == "turned" else name).data.copy_(tensor.t())


def loaded_layer(finish: object = None) -> Layer:
    layer = Layer()
    tensors = {name: as_tensor(name, bits) for name, bits in random_bits(0).items() if name in ("turned", "norm")}
    layer.load_weights(tensors.items())
    record_post_load_changes(layer, lambda: finish(layer) if finish else None)  # type: ignore[operator]
    return layer


LAYER_TENSORS = {name: TENSORS[name] for name in ("turned", "norm")}


def swaps_two(layer: Layer) -> None:
    flat = layer.weight.data.view(-1)
    flat[[7, 30]] = flat[[30, 7]]


def repoints(layer: Layer) -> None:
    layer.weight.data = layer.weight.data.t().contiguous().t()


def derives(layer: Layer) -> None:
    layer.absorbed = layer.weight.data @ layer.weight.data.t()


def changes_a_scale(layer: Layer) -> None:
    layer.scales[1] = 2


def test_accepts_a_layer_that_was_left_as_it_was_loaded() -> None:
    plan = record_load_plan(loaded_layer(), LAYER_TENSORS)
    assert {name: len(routes) for name, routes in plan.routes.items()} == {"turned": 1, "norm": 1}


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        (swaps_two, "'weight' is rearranged after loading by object"),
        (repoints, "'weight' is rearranged after loading"),
        (derives, r"'\.absorbed' .* was computed from weights"),
        (changes_a_scale, r"'\.scales' .* was computed from weights"),
    ],
)
def test_refuses_what_the_engine_did_after_loading(finish: object, message: str) -> None:
    with pytest.raises(WeightError, match=message):
        record_load_plan(loaded_layer(finish), LAYER_TENSORS)


class LateBias(Worker):
    """Its loader makes a parameter anew before it copies into it, as vLLM's does with the bias of an output head."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "norm":
            self.norm = torch.nn.Parameter(torch.empty(COLUMNS))
            self.norm.loader = self.norm.data.copy_
            self.norm.loader(tensor)
        else:
            super().load(name, tensor)


def test_a_parameter_made_by_the_loader_keeps_its_memory() -> None:
    """A parameter that the loader makes again keeps its memory and its values."""
    worker, bits = LateBias(), random_bits(3)
    with torch.no_grad():
        for name, values in bits.items():
            worker.load(name, as_tensor(name, values))
    held = worker.norm.detach().clone()
    assert len(record_load_plan(worker, TENSORS).routes["norm"]) == 1
    assert torch.equal(worker.norm, held)
    new = random_bits(4)
    anchored(worker, new)
    assert torch.equal(worker.norm.detach(), as_tensor("norm", new["norm"]).float())


def test_loaders_that_depend_on_values_are_refused() -> None:
    """A loader that needs values, and one that makes a parameter from them, is refused."""

    def asks(self: Worker, name: str, tensor: torch.Tensor) -> None:
        self.norm.data.copy_(tensor) if float(tensor.sum()) else None

    def replaces(self: Worker, name: str, tensor: torch.Tensor) -> None:
        Worker.load(self, name, tensor)
        if name == "norm":
            made = torch.empty(COLUMNS)
            made.fill_(2)
            self.norm = torch.nn.Parameter(made)

    with pytest.raises(WeightError, match=r"load_weights of Worker needs more than names and shapes, .*meta"):
        record_load_plan(refusing(asks), TENSORS)
    with pytest.raises(WeightError, match="replaces runtime parameter 'norm'"):
        record_load_plan(refusing(replaces), TENSORS)


def test_refuses_layers_that_were_loaded_unwatched() -> None:
    with pytest.raises(WeightError, match=r"nobody watched how layer '<root>' was rearranged.*VLLM_PLUGINS=streamrl"):
        record_load_plan(Layer(), LAYER_TENSORS)


def test_refuses_two_published_tensors_in_one_place() -> None:
    def both(self: Worker, name: str, tensor: torch.Tensor) -> None:
        Worker.load(self, "norm" if name == "head" else name, tensor)

    tensors = {**TENSORS, "head": TensorSpec("head", "bfloat16", (COLUMNS,))}
    with pytest.raises(WeightError, match="'norm' more than once: publish one name"):
        record_load_plan(refusing(both), tensors)


@pytest.mark.parametrize("shape", [(1,), (24,), (2, 3, 4), (4, 1, 5), (3, 5)])
def test_a_lattice_is_found_again_and_nothing_else_is(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(len(shape))
    first = np.arange(np.prod(shape), dtype=np.int64)
    order = random.permutation(len(shape))
    second = first.reshape(shape).transpose(order).reshape(-1)  # another order of the same dimensions
    fitted = fit_rectangles(second, np.argsort(second))
    if fitted is not None:
        sizes, *strides = fitted
        for walk, steps in zip((second, np.argsort(second)), strides, strict=True):
            assert np.array_equal(Rectangle(int(walk[0]), sizes, steps).positions(), walk)
    assert fit_rectangles(first, second) is not None
    if first.size > 4:
        assert fit_rectangles(first, random.permutation(first)) is None


def test_an_audit_finds_one_wrong_bit() -> None:
    worker = Worker()
    new = random_bits(0)
    live, replica = anchored(worker, new)
    assert live.audit(replica) == live.state_hash == state_hash(new)
    worker.fused.data[2, 5] *= -1
    with pytest.raises(WeightError, match="'fused': 1 of 48 elements differ in an audit; element 21 of 'column'"):
        live.audit(replica)
