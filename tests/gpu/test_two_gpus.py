"""Two GPUs: ranks over NCCL, an engine over both, and a run with engine and trainer apart. Skipped on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import two_ranks  # noqa: E402
from gpu_cases import HALF_B, ON_A_GPU, PRETENDED, TINY, large, needs_bfloat16, steps_of_run, write_model  # noqa: E402

from streamrl.learning.model.policy import card_of  # noqa: E402
from streamrl.learning.rank_memory import Card  # noqa: E402
from streamrl.prepare.memory import device_bytes  # noqa: E402
from streamrl.pretrained.model_facts import read_model_facts  # noqa: E402
from streamrl.recipe.sections import Engines, Model, Prompts, Recipe, Reward, Training  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.torch, pytest.mark.filterwarnings("default")]
STEPS = 5
LIMIT_S = 150


@pytest.fixture(autouse=True)
def two_cards(request: pytest.FixtureRequest) -> None:
    if PRETENDED:
        pytest.skip("processes of ranks and engines are not pretended here: campaigns pretended_gpu has two ranks")
    if request.getfixturevalue("device") == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs: there is one, {torch.cuda.get_device_name()}")


@ON_A_GPU
def test_two_ranks_sum_and_train(device: str, tmp_path: Path, record_property: Any) -> None:
    """NCCL sums over both GPUs, and two ranks under FSDP2 have one gradient and the memory that is predicted."""
    model = write_model(tmp_path / "model", **(HALF_B if large(device) else TINY))
    folder = tmp_path / "r"
    folder.mkdir()
    program = [sys.executable, two_ranks.__file__]
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(folder), model, device],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"NCCL_DEBUG": "WARN"},
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for log in logs:
        print(log.read_text()[-3000:])
    assert codes == [0, 0]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for name in ("parameters", "all_reduce_gb_s", "step_s", "peak_gib"):
        record_property(name, [one[name] for one in found])
    recipe = Recipe(
        model=Model(path=model),
        prompts=Prompts(train=""),
        rewards=(Reward(function=""),),
        engines=Engines(max_model_len=256),
        training=Training(ranks=2, micro_batch_tokens=256),
    )
    card = card_of(torch.device(device)) or Card(80 << 30)
    predicted = device_bytes(recipe, read_model_facts(Path(model)), card).total
    record_property("predicted_gib", predicted / 2**30)
    assert found[0]["gradient_norms"] == pytest.approx(found[1]["gradient_norms"], rel=1e-6)
    assert all(one["peak_gib"] * 2**30 < 1.15 * predicted + (1 << 29) for one in found)


@ON_A_GPU
def test_an_engine_over_two_gpus_takes_a_push(
    device: str, tmp_path: Path, socket_directory: Path, record_property: Any
) -> None:
    """A tensor parallel engine has the pushed weights bit for bit, and answers as a fresh one on them."""
    pytest.importorskip("vllm")
    needs_bfloat16(device, "an engine in bfloat16")
    from contextlib import ExitStack

    from tests.gpu.test_engine import Served

    with ExitStack() as stack:
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        served = Served(device, tmp_path / "model", socket_directory, stack, tensor_parallel_size=2)
        record_property("start_s", served.seconds)
        before = served.greedy()
        record_property("pause_s", [served.portal.call(served.push) for _ in range(2)])
        after = served.greedy()
        assert after == served.greedy_of_a_fresh_engine()
        record_property("changed_tokens", after != before)


@ON_A_GPU
async def test_a_run_with_engine_and_trainer_apart(device: str, tmp_path: Path, record_property: Any) -> None:
    """The engine has one GPU and the trainer the other; weights go from one to the other in each step."""
    pytest.importorskip("vllm")
    from streamrl.prepare.gpu_placement import gpu_placement

    recipe, began = apart(device, tmp_path), time.monotonic()
    record_property("placement", gpu_placement(recipe).lines())
    await steps_of_run(recipe, STEPS, record_property, began)


def apart(device: str, directory: Path) -> Recipe:
    from campaigns.chaos.kill_engine import short_demo
    from streamrl.recipe.sections import EngineKind
    from tests.gpu.test_demo import of_one_engine

    return of_one_engine(short_demo(EngineKind.VLLM, STEPS, str(directory)), device)
