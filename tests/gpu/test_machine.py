"""What is there, and that nobody else uses it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_cases import GPU, PRETENDED  # noqa: E402

from streamrl.engines.vllm.visible_gpus import visible_gpus  # noqa: E402
from streamrl.prepare.machine_check import State, check_machine  # noqa: E402


@pytest.mark.parametrize("device", [GPU])
def test_driver_and_builds_fit_and_the_card_is_free(device: str, record_property: Any) -> None:
    """Torch sees the card, the driver is new enough, and nobody else has much of its memory."""
    free, total = torch.cuda.mem_get_info()
    found = {finding.name: finding for finding in check_machine()}
    record_property("device", torch.cuda.get_device_name())
    record_property("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    record_property("free_gib", round(free / 2**30, 1))
    record_property("capability", ".".join(map(str, torch.cuda.get_device_capability())))
    record_property("devices", torch.cuda.device_count())
    assert PRETENDED or found["cuda"].state is State.OK, found["cuda"]
    taken = total - free  # by CUDA's own context, a desktop, and whatever else is there
    record_property("taken_gib", round(taken / 2**30, 1))
    assert taken < max(3 << 30, 0.1 * total), f"{taken / 2**30:.1f} GiB are taken: end what uses the card"
    if installed := visible_gpus():  # NVML comes with vLLM
        assert abs(installed[0].memory - total) < 0.05 * total
