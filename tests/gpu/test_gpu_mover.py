"""Weights that a worker maps from the memory of a trainer rank on the same GPU, in another process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from builders.weights import changed

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("vllm")

from gpu_cases import ON_BOTH, PRETENDED  # noqa: E402

from streamrl.base.errors import WeightError  # noqa: E402
from streamrl.base.messages import WeightAnnouncement  # noqa: E402
from streamrl.weights.distance import Location, Mover  # noqa: E402
from tests.weights.vllm.test_device_writes import GPU, Fused, first_bits, open_shared  # noqa: E402
from tests.weights.vllm.test_weight_transaction import Receiver  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.torch]


def place_and_opener(device: str) -> tuple[Location, Callable[[bytes], Any]]:
    """As a vLLM worker on ``device`` has them."""
    if device == "cpu":
        return GPU, open_shared
    from streamrl.weights.vllm.weight_receiver import location_of, open_device

    here = torch.device("cuda", 0)
    return location_of(here), partial(open_device, here)


@pytest.mark.long
@ON_BOTH
def test_a_worker_maps_the_memory_of_a_rank(device: str, tmp_path: Path, record_property: Any) -> None:
    """Five versions through the mapped memory leave the published bits and hashes; a foreign write is found; a rank
    that is killed leaves the engine at its version."""
    if PRETENDED:
        pytest.skip("another process cannot map the memory of a GPU that is not there")
    rank_program, tests = Path(__file__).with_name("rank_on_device.py"), Path(__file__).parents[1]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pipes["env"] = os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}"}
    location, opener = place_and_opener(device)
    receiver = Receiver(None, location=location, open_device=opener)  # type: ignore[arg-type]  # another process pushes
    receiver.model = Fused(torch.bfloat16).to(device)
    bits = first_bits()
    with subprocess.Popen([sys.executable, str(rank_program), device, str(tmp_path)], **pipes) as rank:

        def publish(version: int) -> WeightAnnouncement:
            rank.stdin.write("\n")
            rank.stdin.flush()
            assert rank.stdout.readline() == f"{version}\n"
            return msgspec.msgpack.decode((tmp_path / str(version)).read_bytes(), type=WeightAnnouncement)

        try:
            for version in range(5):
                announced = publish(version)
                began = time.perf_counter()
                assert receiver.stage(announced).mover == Mover.DEVICE
                receiver.commit(announced)
                record_property(f"push_{version}_s", time.perf_counter() - began)
                assert all((receiver.model.bits(name) == expected).all() for name, expected in bits.items())
                held = receiver.transaction.live_report()
                assert (held.policy_version, held.state_hash) == (version, announced.state_hash)
                last, bits = bits, changed(bits, version)
            announced = publish(5)
            rank.kill()
            rank.wait()
            with pytest.raises(WeightError, match="publish an anchor"):
                receiver.commit(announced)
            assert all((receiver.model.bits(name) == expected).all() for name, expected in last.items())
        finally:
            rank.kill()
