"""The judge against a real vLLM engine on this machine, which it wakes and pauses."""

from __future__ import annotations

import asyncio
import importlib
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("httpx")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.torch,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
LISTS = ["5801", "8607", "97", "420", "5801"]  # none is sorted, so that it has something to say


def test_a_real_engine_judges_in_batches_and_is_paused_in_between(make, tmp_path: Path, monkeypatch) -> None:
    """The demo model sorts digits: its last digit is its score of a completion that is a list."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "weights_only"))
    server = importlib.import_module("train_loop").own_server(EXAMPLES / "sort" / "model", tmp_path)
    with server as address:
        reward = make(
            "judge",
            endpoint=f"{address}/v1",
            model="policy",
            chat=False,
            question="{completion}:",
            score=r"(\d)\D*$",
            highest=9,
            max_tokens=64,
            yields="pause",
            batch=4,
            patience_s=5.0,
            cache=str(tmp_path / "answers.sqlite"),
        )

        async def judged() -> list[float]:
            try:
                async with asyncio.TaskGroup() as tasks:
                    asked = [tasks.create_task(reward.call(text)) for text in LISTS]
                return [task.result() for task in asked]
            finally:
                await reward.call.aclose()

        first = asyncio.run(judged())
        assert get(f"{address}/is_paused") == {"is_paused": True}
        # Asked directly, one by one: what the judge read is what the engine says, and an engine at rest is awake first.
        urllib.request.urlopen(urllib.request.Request(f"{address}/resume", data=b"")).close()
        assert first == [score(address, text) for text in LISTS]
        assert first[0] == first[4]
        assert asyncio.run(judged()) == first  # from the cache: the engine is not even woken
        assert get(f"{address}/is_paused") == {"is_paused": False}


def get(url: str) -> Any:
    with urllib.request.urlopen(url) as answer:
        return json.loads(answer.read())


def score(address: str, text: str) -> float:
    body = {"model": "policy", "prompt": f"{text}:", "max_tokens": 64, "temperature": 0}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        said = json.loads(answer.read())["choices"][0]["text"]
    return float([letter for letter in said if letter.isdigit()][-1]) / 9
