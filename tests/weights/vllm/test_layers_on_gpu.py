"""Layers that are rebuilt on a GPU: their weights come from host memory. The GPU is pretended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from builders.files import ROOT
from builders.weights import state_hash

from streamrl.weights.pull.replica import CheckpointReplica

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
from campaigns.pretended_gpu.devices import pretended_gpus  # noqa: E402
from streamrl.weights.vllm.live_weights import LiveWeights, count_routes  # noqa: E402
from streamrl.weights.vllm.load_plan import record_load_plan  # noqa: E402
from tests.weights.vllm.test_layer_reload import (  # noqa: E402
    TENSORS,
    Int8Rows,
    Layer,
    Model,
    loaded_model,
    random_bits,
    some_changed,
    staged,
)


class CudaKernel(Int8Rows):
    """As a kernel of CUDA: takes no tensor in host memory."""

    def process_weights_after_loading(self, layer: Layer) -> None:
        if layer.weight.device.type != "cuda":
            raise NotImplementedError("Could not run '_C::scaled_fp8_quant' with arguments from the 'CPU' backend")
        super().process_weights_after_loading(layer)


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with pretended_gpus():
        yield


@pytest.fixture(params=[Int8Rows, CudaKernel])
def method(request: pytest.FixtureRequest) -> type[Int8Rows]:
    chosen: type[Int8Rows] = request.param
    return chosen


def on_gpu(bits: Mapping[str, np.ndarray], method: type[Int8Rows], monkeypatch: pytest.MonkeyPatch) -> Model:
    model = loaded_model(bits, monkeypatch)
    for layer in (model.first, model.second):
        for name, parameter in layer._parameters.items():
            layer._parameters[name] = torch.nn.Parameter(parameter.data.to("cuda"), requires_grad=False)
        layer.row_sums = layer.row_sums.to("cuda")
        layer.quant_method = method()
    model.norm = torch.nn.Parameter(model.norm.data.to("cuda"), requires_grad=False)
    return model


def parts(model: Model) -> tuple[LiveWeights, CheckpointReplica]:
    plan = record_load_plan(model, TENSORS)
    counted = count_routes([{n: [r.checkpoint for r in rs] for n, rs in plan.routes.items()}], 0, TENSORS)
    return LiveWeights(plan, counted), CheckpointReplica()


def test_a_loaded_layer_is_compared_on_its_gpu(method: type[Int8Rows], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first delta; then the delta rebuilds what changed."""
    bits = random_bits(0)
    model = on_gpu(bits, method, monkeypatch)
    live, replica = parts(model)
    replica.advance(staged(replica, 0, None, bits))
    live.state_hash = live.audit(replica)
    assert live.state_hash == state_hash(bits)
    new = some_changed(bits, "first.gate", "second.weight", "norm")
    delta = staged(replica, 1, bits, new)
    assert live.apply(live.prepare(delta, replica), anchor=False) == state_hash(new)
    replica.advance(delta)
    assert live.audit(replica) == state_hash(new)
    assert {tensor.device.type for tensor in (model.first.weight, model.first.scale, model.first.row_sums)} == {"cuda"}
    fresh = loaded_model(new)
    for ours, expected in ((model.first, fresh.first), (model.second, fresh.second)):
        assert torch.equal(ours.weight.cpu(), expected.weight) and torch.equal(ours.scale.cpu(), expected.scale)


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.started
def test_layers_of_vllms_methods_are_rebuilt() -> None:
    """vLLM's own Python, for the kernels that it chooses on an H100."""
    command = [sys.executable, "-m", "campaigns", "quantised_layers", "--card", "H100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    answers = [line for line in done.stdout.splitlines() if line.startswith(("fp8_", "mx"))]
    assert answers == [
        "fp8_per_tensor: CutlassFP8ScaledMMLinearKernel: rebuilt",
        "fp8_per_block: CutlassFp8BlockScaledMMKernel: rebuilt",
        "fp8_per_channel: CutlassFP8ScaledMMLinearKernel: rebuilt",
        "mxfp8: MarlinMxfp8LinearKernel: rebuilt",
        "mxfp4: MarlinMxFp4LinearKernel: rebuilt",
    ], done.stderr
