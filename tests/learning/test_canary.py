"""What the trainer tells of the canary's tokens is what its published weights find, before the step that tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from reference_policy import reference_model  # noqa: E402
from sample_groups import VOCABULARY, make_groups, train_batch  # noqa: E402

from streamrl.learning.canary import PROBE_TOKENS, probe_tokens  # noqa: E402

pytestmark = pytest.mark.torch


def test_a_step_tells_what_the_weights_before_it_find(start_trainer: Callable[..., Any], tiny_model: str) -> None:
    tokens = torch.tensor(probe_tokens(VOCABULARY))
    with torch.no_grad():
        logprobs = reference_model(tiny_model)(tokens[None]).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].tolist()
    trainer, told = start_trainer(canary=True), []
    for version in range(2):
        report = train_batch(trainer, make_groups(version, [4, 3]), version + 1)
        trainer.acknowledge(version + 1)
        told.append(report.probe_logprobs)
    assert told[0] == pytest.approx(expected, abs=1e-5)
    assert max(abs(a - b) for a, b in zip(*told, strict=True)) > 1e-3, (
        "the second is of the weights after the first step"
    )


def test_the_first_answer_has_what_the_weights_find(start_trainer: Callable[..., Any], tiny_model: str) -> None:
    """The first published version comes with the logprobs of its weights, and with what bfloat16 costs; later anchors
    and runs without a canary have none."""
    tokens = torch.tensor(probe_tokens(VOCABULARY))
    with torch.no_grad():
        logprobs = reference_model(tiny_model)(tokens[None]).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].tolist()
    trainer = start_trainer(canary=True)
    probe = trainer.publish_anchor(0).first_probe
    assert probe.logprobs == pytest.approx(expected, abs=1e-5)
    assert 1e-4 < probe.rounding < 0.1
    assert trainer.publish_anchor(0).first_probe is None
    assert start_trainer().publish_anchor(0).first_probe is None


def test_nothing_is_reported_where_nobody_asks(start_trainer: Callable[..., Any]) -> None:
    assert train_batch(start_trainer(), make_groups(0, [4]), 1).probe_logprobs == ()


def test_the_tokens_are_spread_over_the_vocabulary() -> None:
    for vocabulary in (VOCABULARY, 48, 150_000):
        tokens = probe_tokens(vocabulary)
        assert len(tokens) == PROBE_TOKENS
        assert len(set(tokens)) > PROBE_TOKENS // 3
        assert 0 <= min(tokens) <= max(tokens) < vocabulary
