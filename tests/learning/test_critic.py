"""The value head."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from streamrl.learning.critic import ValueHead  # noqa: E402
from streamrl.learning.options import TrainerOptions  # noqa: E402

pytestmark = pytest.mark.torch


def test_values_are_float32_also_where_the_policy_computes_in_bfloat16() -> None:
    head = ValueHead(TrainerOptions(model_path="", run_id="", weights_endpoint=""), 8, torch.device("cpu"))
    with torch.no_grad():
        head.tensors()["critic.weight"].copy_(torch.linspace(0.9, 1.1, 8))
    hidden = torch.linspace(-1, 3, 24).reshape(3, 8)
    plain = head(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = head(hidden)
    assert values.dtype == torch.float32
    assert values.tolist() == plain.tolist()
