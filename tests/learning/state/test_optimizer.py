"""AdamW on a flat vector, in three kinds: float32, 8-bit moments, and stepped in CPU memory."""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from streamrl.base.errors import StreamRLError
from streamrl.learning.options import TrainerOptions
from streamrl.learning.state.masters import WholeMasters
from streamrl.learning.state.optimizer import QUANTIZED_BLOCK, MasterOptimizer, quantize_again
from streamrl.learning.state.published_weights import FullWeights
from streamrl.recipe.sections import OptimizerKind

pytestmark = pytest.mark.torch
ELEMENTS = 5 * QUANTIZED_BLOCK + 37
BETAS = (0.9, 0.95)


def options_of(kind: OptimizerKind, **changes: Any) -> TrainerOptions:
    return TrainerOptions(model_path="", run_id="", weights_endpoint="", optimizer=kind, **changes)


def optimizer_on(start_L: Any, kind: OptimizerKind, decayed: Any = (), **changes: Any) -> tuple[Any, MasterOptimizer]:
    masters_L = start_L.clone()
    return masters_L, MasterOptimizer(options_of(kind, **changes), WholeMasters(masters_L), decayed)


def some_gradients(steps: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    scales_L = 10 ** torch.empty(ELEMENTS).uniform_(-1, 0, generator=generator)
    return [torch.randn(ELEMENTS, generator=generator) * scales_L for _ in range(steps)]


def start_vector() -> Any:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(7)) * 0.02


def adamw_in_float64(start_L: Any, gradients: list[Any], rate: float, decay: float, decayed: list[slice]) -> Any:
    """Algorithm 2 of Loshchilov and Hutter, line by line."""
    weights, mean, square = start_L.double(), torch.zeros(ELEMENTS).double(), torch.zeros(ELEMENTS).double()
    mask = torch.zeros(ELEMENTS).double()
    for place in decayed:
        mask[place] = decay
    for step, gradient in enumerate(gradients, start=1):
        mean = BETAS[0] * mean + (1 - BETAS[0]) * gradient.double()
        square = BETAS[1] * square + (1 - BETAS[1]) * gradient.double() ** 2
        corrected = (mean / (1 - BETAS[0] ** step)) / ((square / (1 - BETAS[1] ** step)).sqrt() + 1e-8)
        weights = weights - rate * (corrected + mask * weights)
    return weights


@pytest.mark.parametrize("kind", [OptimizerKind.ADAMW, OptimizerKind.ADAMW_8BIT])
def test_steps_equal_the_papers_adamw(kind: OptimizerKind) -> None:
    """Optimizer steps equal those of the paper, with decay on matrices only."""
    start_L, gradients, decayed = start_vector(), some_gradients(8), [slice(0, 300), slice(700, 1200)]
    masters_L, optimizer = optimizer_on(start_L, kind, decayed, weight_decay=0.5)
    for gradient in gradients:
        optimizer.step(gradient.clone(), 1e-2)
    expected = adamw_in_float64(start_L, gradients, 1e-2, 0.5, decayed)
    moved = (expected - start_L).abs().mean()
    error = (masters_L - expected).abs().mean() / moved
    assert optimizer.steps == 8
    # Eight bits lose a few percent of small moments; the float32 steps only rounding.
    assert error < (1e-5 if kind is OptimizerKind.ADAMW else 0.05)
    assert kind is OptimizerKind.ADAMW or error > 1e-4


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_a_loaded_state_continues_bit_for_bit(kind: OptimizerKind) -> None:
    start_L, gradients = start_vector(), some_gradients(6)
    masters_L, optimizer = optimizer_on(start_L, kind)
    assert optimizer.steps == 0
    assert all(not moment.any() for moment in optimizer.moments().values())
    for gradient in gradients[:3]:
        optimizer.step(gradient.clone(), 1e-2)
    saved = {name: moment.clone() for name, moment in optimizer.moments().items()}
    assert saved.keys() == {"exp_avg", "exp_avg_sq"}
    assert all(m.dtype == torch.float32 and m.shape == (ELEMENTS,) for m in saved.values())
    other_L, other = optimizer_on(masters_L, kind)
    other.load_moments({name: moment.clone() for name, moment in saved.items()}, optimizer.steps)
    assert other.steps == 3
    assert all(torch.equal(moment, saved[name]) for name, moment in other.moments().items())
    for gradient in gradients[3:]:
        optimizer.step(gradient.clone(), 1e-2)
        other.step(gradient.clone(), 1e-2)
    assert torch.equal(masters_L, other_L)


def test_requantized_moments_have_the_same_codes() -> None:
    masters_L, optimizer = optimizer_on(start_vector(), OptimizerKind.ADAMW_8BIT)
    for gradient in some_gradients(5):
        # A block whose largest mean is negative: the signed levels reach 1 but not -1.
        gradient[QUANTIZED_BLOCK] = -5.0
        optimizer.step(gradient, 1e-2)
    _, again = optimizer_on(masters_L, OptimizerKind.ADAMW_8BIT)
    again.load_moments(optimizer.moments(), optimizer.steps)
    for inner, outer in zip(*(list(o._moments._adamw.state.values()) for o in (optimizer, again)), strict=True):
        assert all(torch.equal(inner[name], outer[name]) for name in ("state1", "state2"))
        assert inner["state1"].dtype == torch.uint8
        assert (inner["state1"] == 0).any()  # the level next to -1 was in use


def test_other_moments_get_the_nearest_levels() -> None:
    levels = torch.tensor([-0.5, 0.0, 0.5, 1.0])
    scales, codes = quantize_again(torch.tensor([[4.0, -1.5, 0.9, 1.1], [0.0] * 4]), levels)
    assert scales.tolist() == [4.0, 0.0]
    assert codes[0].tolist() == [3, 0, 1, 2]


def test_host_masters_step_as_device_masters_do() -> None:
    """On a CPU both are the same memory: weights, published bits and gradient path must agree bit for bit."""
    outcomes = []
    for kind in (OptimizerKind.ADAMW, OptimizerKind.ADAMW_OFFLOADED):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
        on_host = kind is OptimizerKind.ADAMW_OFFLOADED
        weights = FullWeights(dict(model.named_parameters()), masters_on_cpu=on_host)
        optimizer = MasterOptimizer(options_of(kind, weight_decay=0.1), weights.masters, weights.decayed_places)
        for step in range(3):
            weights.clear_gradient()
            model(torch.randn(5, 8, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step(weights.collect_gradient(), 1e-2)
            weights.refresh_forward()
        assert weights.decayed_places == [slice(0, 128), slice(176, 240)]  # not the bias, not the norm between them
        outcomes.append((weights.masters.full(), weights.bits()))
    (masters_L, bits), (host_masters_L, host_bits) = outcomes
    assert torch.equal(masters_L, host_masters_L)
    assert all((bits[name] == host_bits[name]).all() for name in bits)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(StreamRLError, match=r"adamw_8bit.*bitsandbytes"):
        optimizer_on(start_vector(), OptimizerKind.ADAMW_8BIT)
