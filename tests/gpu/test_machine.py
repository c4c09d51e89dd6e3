"""What is there, and that nobody else uses it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_cases import GPU  # noqa: E402

from streamrl.engines.vllm.visible_gpus import visible_gpus  # noqa: E402
from streamrl.prepare.machine_check import DRIVER_VERSION, State, check_machine  # noqa: E402


@pytest.mark.parametrize("device", [GPU])
def test_driver_and_builds_fit_and_the_card_is_free(device: str, record_property: Any) -> None:
    free, total = torch.cuda.mem_get_info()
    found = {finding.name: finding for finding in check_machine()}
    record_property("device", torch.cuda.get_device_name())
    record_property("torch", f"{torch.__version__}, CUDA {torch.version.cuda}")
    record_property("driver", DRIVER_VERSION.read_text().splitlines()[0] if DRIVER_VERSION.exists() else "unknown")
    record_property("free_gib", round(free / 2**30, 1))
    assert found["cuda"].state is State.OK, found["cuda"]
    assert free > 0.95 * total, f"{(total - free) / 2**30:.1f} GiB are taken: end what uses the card"
    if installed := visible_gpus():  # NVML comes with vLLM
        assert abs(installed[0].memory - total) < 0.05 * total
