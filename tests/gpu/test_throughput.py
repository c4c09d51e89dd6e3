"""How fast the trainer is, in rows of several lengths, plain and compiled. Only that it works is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_cases import HALF_B, ON_BOTH, TINY, samples_of, shared_model  # noqa: E402
from training_steps import train_steps  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
PEAK_FLOPS = 989e12  # of an H100 or H200 in bfloat16, without sparsity
STEPS = 3  # the last is the figure


@ON_BOTH
@pytest.mark.parametrize(
    ("row", "compiled"), [(2048, False), (8192, False), (16_384, False), (32_768, False), (8192, True)]
)
def test_tokens_a_second_of_a_step(
    device: str,
    row: int,
    compiled: bool,
    tmp_path_factory: pytest.TempPathFactory,
    socket_directory: Path,
    record_property: Any,
) -> None:
    tokens = row if device == "cuda" else row // 64
    length = min(tokens // 2, 4096)
    batches = [samples_of([length] * (4 * tokens // length), batch=batch) for batch in range(STEPS)]
    path = shared_model(tmp_path_factory, HALF_B if device == "cuda" else TINY)
    options = {"compile": compiled and device == "cuda", "activation_checkpointing": row > 16_384}
    done = train_steps(path, device, socket_directory, batches, micro_batch_tokens=tokens, streaming=False, **options)
    rate = 4 * tokens / done.seconds[-1]
    record_property("tokens_a_second", rate)
    record_property("model_flops_utilisation", 6 * done.parameters * rate / PEAK_FLOPS)
    record_property("peak_gib", done.peak / 2**30)
    record_property("publish_s", done.metrics[-1]["time/publish_s"])
    assert done.steps == STEPS
