"""Weights on the device: the encoder gives the frames of the CPU codec, and live weights are written, checked, undone
and audited there. Figures: each part of a push, beside a copy of all weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from builders.weights import changed, state_hash

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_cases import ON_BOTH, large  # noqa: E402
from synthetic_updates import adam_step, draw_weights  # noqa: E402

from streamrl.base.errors import WeightError  # noqa: E402
from streamrl.base.messages import WeightAnnouncement  # noqa: E402
from streamrl.weights.codec.codec import WeightPatch, decode_patch, encode_patch  # noqa: E402
from streamrl.weights.manifest import ShardSpec  # noqa: E402
from streamrl.weights.publish.torch_tensors import encode_on_device  # noqa: E402
from streamrl.weights.pull.replica import CheckpointReplica, FetchedVersion, ShardPatch, StagedVersion, TensorSpec  # noqa: E402
from streamrl.weights.vllm.live_weights import LiveWeights, count_routes  # noqa: E402
from streamrl.weights.vllm.load_plan import record_load_plan  # noqa: E402

pytestmark = pytest.mark.torch
ELEMENTS = {False: 100_001, True: (1 << 24) + 1}
ROWS = {False: 64, True: 4096}
Bits = dict[str, np.ndarray]


def on(device: str, bits: np.ndarray) -> Any:
    return torch.from_numpy(bits.view(np.int16)).to(device)


def timed(device: str, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, with what the device still had to do."""
    for _ in range(2):  # the first compiles
        if device == "cuda":
            torch.cuda.synchronize()
        began, result = time.perf_counter(), work()
        if device == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - began, result


@ON_BOTH
@pytest.mark.parametrize("rate", [3e-6, 1e-4], ids=["few changes", "many"])
def test_frames_are_those_of_the_cpu_codec(device: str, rate: float, record_property: Any) -> None:
    """The encoder on the device makes the bytes of the CPU codec."""
    base, new = adam_step(draw_weights(ELEMENTS[large(device)], seed=3, place=0), rate, seed=1, place=0)
    there = on(device, new), on(device, base)
    seconds, found = timed(device, lambda: encode_on_device(*there, "bfloat16"))
    expected = encode_patch(new, base, "bfloat16")
    assert found is not None and expected is not None
    assert found.encoded == expected.encoded
    reading, patch = timed("cpu", lambda: decode_patch(found.encoded, "bfloat16", new.size, "t", base))
    assert np.array_equal(patch.values, new[base != new])
    record_property("changed", float((base != new).mean()))
    record_property("diff_and_encode_gb_s", 2e-9 * new.size / seconds)
    record_property("decode_gb_s", 2e-9 * new.size / reading)


class Fused(torch.nn.Module):  # type: ignore[misc]
    """As an engine has them: two tensors in one parameter, one alone."""

    def __init__(self, rows: int, device: str) -> None:
        super().__init__()
        self.joined = torch.nn.Parameter(torch.zeros(2 * rows, rows, dtype=torch.bfloat16, device=device))
        self.alone = torch.nn.Parameter(torch.zeros(rows, dtype=torch.bfloat16, device=device))
        self.rows = rows

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            place = {"a": self.joined[: self.rows], "b": self.joined[self.rows :], "c": self.alone}[name]
            place.data.copy_(tensor)

    def bits(self) -> Bits:
        joined, alone = (p.detach().view(torch.int16).cpu().numpy().view(np.uint16) for p in (self.joined, self.alone))
        return {"a": joined[: self.rows].reshape(-1), "b": joined[self.rows :].reshape(-1), "c": alone}


class Receiver:
    """Live weights on the device and the replica of the host; ``commit`` as a worker makes it."""

    def __init__(self, rows: int, device: str) -> None:
        self.model, self.version, self.held = Fused(rows, device), -1, dict[str, np.ndarray]()
        shapes = {"a": (rows, rows), "b": (rows, rows), "c": (rows,)}
        self.specs = {name: TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()}
        plan = record_load_plan(self.model, self.specs)
        rectangles = {name: [route.checkpoint for route in routes] for name, routes in plan.routes.items()}
        self.live = LiveWeights(plan, count_routes([rectangles], 0, self.specs))
        self.live._in_cpu_memory.clear()  # on a CPU, too, what a device does
        self.replica = CheckpointReplica()

    def staged(self, new: Bits, *, anchor: bool = False) -> StagedVersion:
        base = None if anchor else self.version
        patches = []
        for name, spec in self.specs.items():
            positions = None if anchor else np.flatnonzero(self.held[name] != new[name])
            values = new[name] if positions is None else new[name][positions]
            shard = ShardSpec(name, spec.dtype, spec.shape, 0, spec.elements)
            patches.append(ShardPatch(shard, WeightPatch(positions, values)))
        announced = WeightAnnouncement(
            policy_version=self.version + 1, base_version=base, state_hash=state_hash(new), sources=()
        )
        return self.replica.stage(FetchedVersion(announced, base, 0 if anchor else state_hash(self.held), patches, 0))

    def commit(self, new: Bits, *, anchor: bool = False) -> tuple[float, float]:
        """Seconds before the pause, and in it."""
        staged, began = self.staged(new, anchor=anchor), time.perf_counter()
        writes = self.live.prepare(staged, self.replica)
        ready = time.perf_counter()
        self.live.state_hash = self.live.apply(writes, anchor=anchor)
        ended = time.perf_counter()
        assert self.live.state_hash == staged.state_hash
        self.replica.advance(staged)
        self.version, self.held = self.version + 1, new
        return ready - began, ended - ready

    def assert_holds(self, bits: Bits) -> None:
        assert all(np.array_equal(found, bits[name]) for name, found in self.model.bits().items())


@ON_BOTH
def test_live_weights_on_the_device_can_be_undone(device: str, record_property: Any) -> None:
    """Live weights on the device are written, checked, undone and audited."""
    receiver, random = Receiver(ROWS[large(device)], device), np.random.default_rng(0)
    specs = receiver.specs.items()
    bits = {name: (random.integers(0, 65_536, spec.elements) & 0xBFFF).astype(np.uint16) for name, spec in specs}
    record_property("anchor_pause_s", receiver.commit(bits, anchor=True)[1])
    receiver.assert_holds(bits)
    for version in range(1, 4):
        bits = changed(bits, version)
        prepared_s, pause_s = receiver.commit(bits)
        receiver.assert_holds(bits)
    began = time.perf_counter()
    assert receiver.live.audit(receiver.replica) == state_hash(bits)
    elements = sum(one.size for one in bits.values())
    record_property("audit_ns_an_element", 1e9 * (time.perf_counter() - began) / elements)

    writes = receiver.live.prepare(receiver.staged(changed(bits, 9)), receiver.replica)
    receiver.live.apply(writes, anchor=False)
    receiver.live.undo(writes, receiver.replica)
    receiver.assert_holds(bits)

    place = int(np.flatnonzero(changed(bits, 10)["a"] != bits["a"])[0])
    writes = receiver.live.prepare(receiver.staged(changed(bits, 10)), receiver.replica)
    with torch.no_grad():
        receiver.model.joined.view(-1)[place] += 1
    with pytest.raises(WeightError, match="before the commit"):
        receiver.live.apply(writes, anchor=False)
    with pytest.raises(WeightError, match="in an audit"):
        receiver.live.undo(writes[1:], receiver.replica)
        receiver.live.audit(receiver.replica)

    source = torch.zeros_like(receiver.model.joined)
    copying, _ = timed(device, lambda: receiver.model.joined.data.copy_(source))
    changes = 0.01 * elements
    record_property("prepare_ns_a_change", 1e9 * prepared_s / changes)
    record_property("commit_ns_a_change", 1e9 * pause_s / changes)
    record_property("pause_s", pause_s)
    record_property("copy_of_all_weights_s", copying)
