"""Two ranks as real processes against one: equal weights, whoever got which groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from streamrl.learning.options import TrainerOptions

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parent / "rank_process.py"
STEPS = 4


def run_ranks(
    tiny_model: str, directory: Path, shares: list[str], steps: int = STEPS, resume_from: str = ""
) -> list[dict[str, np.ndarray]]:
    """Run one process a rank; the saved arrays of each."""
    directory.mkdir()
    processes = []
    for rank, share in enumerate(shares):
        options = TrainerOptions(
            model_path=tiny_model,
            run_id="ranks",
            weights_endpoint=f"ipc://{directory}/w{rank}",
            rank=rank,
            ranks=len(shares),
            rendezvous=f"file://{directory}/rendezvous",
            device="cpu",
            threads=1,
            learning_rate=1e-3,
            micro_batch_tokens=64,
            collective_timeout_s=60.0,
            resume_from=resume_from,
        )
        path = directory / f"options.{rank}.json"
        path.write_bytes(msgspec.json.encode(options))
        command = [sys.executable, str(SCRIPT), str(path), share, str(steps), str(directory / f"out.{rank}.npz")]
        with (directory / f"log.{rank}").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = [(directory / f"log.{rank}").read_text() for rank in range(len(shares))]
    assert codes == [0] * len(shares), "\n".join(logs)
    return [dict(np.load(directory / f"out.{rank}.npz")) for rank in range(len(shares))]


def joined_masters(outputs: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Full flat masters from the shards of all ranks, placed by their published offsets."""
    names = [key.removeprefix("master/") for key in outputs[0] if key.startswith("master/")]
    joined = {}
    for name in names:
        parts = sorted(
            (int(output[f"offset/{name}"]), rank)
            for rank, output in enumerate(outputs)
            if output[f"master/{name}"].size
        )
        assert [start for start, _ in parts] == list(
            np.cumsum([0] + [outputs[rank][f"master/{name}"].size for _, rank in parts])[:-1]
        )
        joined[name] = np.concatenate([outputs[rank][f"master/{name}"] for _, rank in parts])
    return joined


def distance(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """Relative distance of two sets of weights."""
    assert left.keys() == right.keys()
    difference = sum(float(np.square(left[n].astype(np.float64) - right[n]).sum()) for n in left)
    return float(np.sqrt(difference / sum(float(np.square(left[n].astype(np.float64)).sum()) for n in left)))


@pytest.mark.timeout(300)
def test_two_ranks_equal_one(tiny_model: str, tmp_path: Path) -> None:
    [one] = run_ranks(tiny_model, tmp_path / "one", ["0,1,2,3,4"])
    expected = joined_masters([one])
    # uneven: rank 0 gets one group in even steps and all in odd ones, when rank 1 gets none
    two = run_ranks(tiny_model, tmp_path / "two", ["0/0,1,2,3,4", "1,2,3,4/-"])
    assert distance(joined_masters(two), expected) < 1e-5
    assert all(output["metric/version"] == STEPS for output in [one, *two])
    for name, value in one.items():
        if name.startswith(("metric/optim", "metric/policy")):
            assert float(two[0][name]) == pytest.approx(float(value), rel=2e-4, abs=1e-6), name
            assert float(two[0][name]) == float(two[1][name]), name

    # A checkpoint of two ranks goes on with one, to where three more steps of one lead.
    [resumed] = run_ranks(tiny_model, tmp_path / "resumed", ["0,1,2,3,4"], 3, str(tmp_path / "two" / "out.ckpt"))
    [through] = run_ranks(tiny_model, tmp_path / "through", ["0,1,2,3,4"], STEPS + 3)
    assert resumed["metric/version"] == STEPS + 3
    assert distance(joined_masters([resumed]), joined_masters([through])) < 1e-5
