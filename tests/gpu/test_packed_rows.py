"""The trainer alone: a packed row in bfloat16 is its single sequences, and goes through the flash kernel."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from gpu_cases import ON_BOTH, large, needs_bfloat16, prepared, samples_of, write_model  # noqa: E402
from reference_policy import relative_error  # noqa: E402
from torch.nn.attention import varlen  # noqa: E402

from streamrl.learning.batches.packing import pack  # noqa: E402
from streamrl.learning.model.loading import load_policy  # noqa: E402
from streamrl.learning.objective.logprobs import token_logprobs  # noqa: E402

pytestmark = pytest.mark.torch
LAYERS = 4
SIZES = {
    "cpu": {"num_hidden_layers": LAYERS},
    "cuda": {"num_hidden_layers": LAYERS, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64},
}
LENGTHS = [30, 7, 90, 41, 64]


def direction(count: int, device: Any) -> Any:
    """In which logprobs are differentiated."""
    return torch.linspace(-1.0, 1.0, count, device=device)


def packed(path: str, samples: list[Any], device: str) -> tuple[Any, dict[str, Any]]:
    """Logprobs of the row, and the gradient of their mixture."""
    policy = load_policy(path, torch.device(device))
    batch = pack(prepared(samples), 0, torch.device(device))
    with torch.autocast(device, torch.bfloat16):
        logprobs = token_logprobs(policy.head(policy(batch)), batch.targets_N)[0].float()
    (logprobs @ direction(len(logprobs), device)).backward()
    named = policy.hugging_face.named_parameters()
    return logprobs.detach().cpu(), {name: p.grad.double().cpu() for name, p in named if p.grad is not None}


def eager(path: str, samples: list[Any], device: str, dtype: Any) -> tuple[Any, dict[str, Any]]:
    """The same through transformers' eager attention, one sequence at a time; bfloat16 is by autocast."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    stored = torch.float32 if dtype is torch.bfloat16 else dtype
    model = load(path, dtype=stored, attn_implementation="eager").eval().to(device)
    found = []
    with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16):
        for sample in samples:
            tokens = torch.tensor(list(sample.token_ids), device=device)
            logits = model(tokens[None]).logits[0, :-1].to(stored)
            logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            found.append(logprobs[torch.tensor(list(sample.loss_mask[1:]), device=device) != 0])
    together = torch.cat(found)
    (together @ direction(len(together), device).to(together.dtype)).backward()
    return together.detach().cpu(), {name: p.grad.double().cpu() for name, p in model.named_parameters()}


@pytest.mark.long
@ON_BOTH
def test_a_packed_row_is_its_single_sequences(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Logprobs and gradients of a packed row in bfloat16 are those of its sequences alone in float64, within what
    bfloat16 costs eager attention, too; on CUDA each layer goes through the flash kernel once."""
    needs_bfloat16(device, "the flash kernel")
    path = write_model(tmp_path, **SIZES["cuda" if large(device) else "cpu"])
    samples, calls = samples_of(LENGTHS), []
    kernel = varlen.varlen_attn
    counted = wraps(kernel)(lambda *a, **o: calls.append(1) or kernel(*a, **o))  # its signature is looked at
    monkeypatch.setattr(varlen, "varlen_attn", counted)
    logprobs, gradient = packed(path, samples, device)
    assert len(calls) == (LAYERS if device == "cuda" else 0), "calls of the flash kernel"
    exact, exact_gradient = eager(path, samples, "cpu", torch.float64)
    alone, alone_gradient = eager(path, samples, device, torch.bfloat16)
    error = float((logprobs - exact).norm() / exact.norm())
    errors = [relative_error(found, exact_gradient) for found in (gradient, alone_gradient)]
    record_property("flash_calls", len(calls))
    record_property("logprob_error", error)
    record_property("logprob_error_of_eager", float((alone - exact).norm() / exact.norm()))
    record_property("gradient_error", errors[0])
    record_property("gradient_error_of_eager", errors[1])
    assert error < 2e-2
    assert errors[0] < max(2e-2, 1.5 * errors[1]), "the packed gradient is worse than bfloat16 makes any"
