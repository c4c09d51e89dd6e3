"""A run whose model and prompts are names of the Hub, on simulated engines: who asks, when, and what is recorded."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from builders.files import SORT
from builders.hub import TOKEN, LocalHub

pytest.importorskip("torch")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.torch

RECIPE = """
[run]
steps = 2
[model]
path = "org/tiny"
[prompts]
train = "hf:org/sums?config=main&split=train&prompt=question"
[evaluation]
prompts = "hf:org/sums?config=main&split=test&prompt=question"
[[rewards]]
function = "length"
options = { longest = 32 }
[rollout]
prompts_per_batch = 4
group_size = 4
[sampling]
max_tokens = 64
[engines]
kind = "simulated"
"""


def parquet(file: str, rows: int) -> bytes:
    import pyarrow as pa

    lines = [json.loads(line) for line in (SORT / file).read_text().splitlines()[:rows]]
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([{"question": line["prompt"]} for line in lines]), written)
    return written.getvalue()


@pytest.mark.long
def test_a_run_from_names_asks_once_and_a_resume_never(tmp_path: Path) -> None:
    recipe, runs = tmp_path / "recipe.toml", tmp_path / "runs"
    recipe.write_text(RECIPE)
    with LocalHub() as hub:
        environment = os.environ | hub.environment(tmp_path / "home", TOKEN)
        commit = hub.commit("org/tiny", SORT / "model", gated=True)
        files = {"main/train-00000-of-00001.parquet": parquet("train.jsonl", 64)}
        files |= {"main/test-00000-of-00001.parquet": parquet("held_out.jsonl", 8)}
        data = hub.commit("datasets/org/sums", files, private=True)

        def streamrl(*arguments: str | Path) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "streamrl", *map(str, arguments)]
            return subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

        output, _ = streamrl("train", recipe, "--dry-run").communicate(timeout=900)
        assert "all checks passed" in output and f'path = "hf:org/tiny@{commit}"' in output, output
        assert f"model.path: org/tiny@{commit}, 0.61 MB, of which 0.60 MB would be downloaded" in output
        hub.requests.clear()
        with streamrl("train", recipe, "--set", f"run.directory={runs}") as run:
            while not (found := list(runs.glob("run-*/recipe.toml"))) and run.poll() is None:
                time.sleep(0.01)
            before = list(hub.requests)
            output, _ = run.communicate(timeout=900)
        assert run.returncode == 0 and found, output
        assert before and hub.requests == before, "nobody asks once the run has a directory"
        assert len({request.process for request in before} - {0}) == 1 and run.pid not in {r.process for r in before}
        directory = found[0].parent
        recorded = tomllib.loads(found[0].read_text())
        assert recorded["model"]["path"].endswith(f"/models--org--tiny/snapshots/{commit}")
        folder, query = recorded["prompts"]["train"].split("?")
        assert folder.endswith(f"/datasets--org--sums/snapshots/{data}") and "prompt=question" in query
        hub.requests.clear()
        hub.commit("org/tiny", {"config.json": b"{}"})
        hub.commit("datasets/org/sums", {"main/train.parquet": b""})
        (Path(recorded["model"]["path"]) / "pytorch_model.bin").write_bytes(b"of another program")
        output, _ = streamrl("resume", directory, "--set", "run.steps=3").communicate(timeout=900)
        assert "step 3" in output and not hub.requests, output
        assert tomllib.loads(found[0].read_text())["model"] == recorded["model"]
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 20 and not [path for path in written if TOKEN.encode() in path.read_bytes()]
