"""Small models that are made out of examples: they learn them, stop in time, and are the same each time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from transformers import AutoModelForCausalLM  # noqa: E402

from streamrl.learning.small_model import warm_up  # noqa: E402
from streamrl.pretrained.tokenizer import load_tokenizer  # noqa: E402


@pytest.mark.long
def test_a_small_model_learns_until_enough_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{n % 10}é{n // 10}?", "completion": f"{n % 10}ü"} for n in range(100)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    threads = torch.get_num_threads()
    monkeypatch.setattr(warm_up, "BATCH_TOKENS", 512)
    for name in ("one", "other"):
        flags = [str(corpus), str(tmp_path / name), "--steps", "400", "--until", "0.6"]
        monkeypatch.setattr(sys, "argv", ["warm_up", *flags])
        warm_up.main()
    torch.set_num_threads(threads)
    captured = capsys.readouterr()
    made = json.loads(captured.out.splitlines()[-1])
    assert made["right"] >= 0.6 and made["steps"] < 400 and 250_000 < made["parameters"] < 1_000_000
    assert f"step {made['steps']} of at most 400" in captured.err
    folder = tmp_path / "one"
    assert (folder / "model.safetensors").read_bytes() == (tmp_path / "other" / "model.safetensors").read_bytes()

    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("7é3?")
    assert len(ids) == 5 and tokenizer.decode(ids) == "7é3?"
    policy = AutoModelForCausalLM.from_pretrained(folder)
    written = policy.generate(torch.tensor([list(ids)]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    assert written[-1] in tokenizer.eos_token_ids and policy.config.max_position_embeddings >= 2 * len(rows[0])
