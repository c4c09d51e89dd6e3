"""How fast the trainer is, in rows of several lengths, plain and compiled. Only that it works is asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpu_cases import HALF_B, ON_BOTH, PEAK_FLOPS, TINY, large, needs_gib, samples_of, shared_model  # noqa: E402
from training_steps import train_steps  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
STEPS = 3  # the last is the figure
LEAST_GIB = {2048: 14, 8192: 36, 16_384: 70, 32_768: 36}
"""Of a card for a row; the longest is trained with checkpointing."""


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
    """Tokens a second of the third step, with the share of the card's arithmetic that they use."""
    needs_gib(device, LEAST_GIB[row], f"a row of {row:,} tokens")
    tokens = row if large(device) else row // 64
    length = min(tokens // 2, 4096)
    batches = [samples_of([length] * (4 * tokens // length), batch=batch) for batch in range(STEPS)]
    path = shared_model(tmp_path_factory, HALF_B if large(device) else TINY)
    options = {"compile": compiled and large(device), "activation_checkpointing": row > 16_384}
    done = train_steps(path, device, socket_directory, batches, micro_batch_tokens=tokens, streaming=False, **options)
    rate = 4 * tokens / done.seconds[-1]
    record_property("parameters", done.parameters)
    record_property("tokens_of_a_row", tokens)
    record_property("compiled", compiled)
    record_property("steps_s", [round(seconds, 3) for seconds in done.seconds])
    record_property("tokens_a_second", rate)
    name = torch.cuda.get_device_name() if large(device) else ""
    for peak in [flops for part, flops in PEAK_FLOPS.items() if part in name][:1]:
        record_property("model_flops_utilisation", 6 * done.parameters * rate / peak)
    record_property("peak_gib", done.peak / 2**30)
    record_property("publish_s", done.metrics[-1]["time/publish_s"])
    assert done.steps == STEPS
