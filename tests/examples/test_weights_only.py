"""examples/weights_only: a plain torch loop trains and pushes into a real ``vllm serve``, over HTTP."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import pytest
from builders.files import EXAMPLES

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("default")]

EXAMPLE = EXAMPLES / "weights_only"


@pytest.mark.long
def test_the_server_samples_what_the_loop_has_trained(socket_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    loop = importlib.import_module("train_loop")
    trainer = loop.Trainer(loop.SORT / "model", learning_rate=1e-2)  # a few steps must be seen in what it samples

    async def reports(address: str) -> list[object]:
        found = loop.train_and_push(trainer, address, f"ipc://{socket_directory}/weights", pushes=2)
        return [report async for report in found]

    with loop.own_server(loop.SORT / "model", socket_directory) as address:
        first, *pushed = asyncio.run(reports(address))
    for report in (first, *pushed):
        assert report.sampled == report.expected, loop.told(report)
    assert all(report.changed_elements > 0 for report in pushed)
    assert pushed[-1].sampled != first.sampled, "the steps are too small to be seen in the output"
