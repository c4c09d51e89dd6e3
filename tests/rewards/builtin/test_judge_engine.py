"""The run's own judge, in the process that a run starts for it: a real vLLM engine that is awake for batches only."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from builders.files import SORT

from streamrl.comm.stream import ReceiveStream, SendStream
from streamrl.comm.zmq_stream import zmq_receiver, zmq_sender
from streamrl.recipe.rewards import Reward
from streamrl.recipe.rules.load_recipe import dump_recipe
from streamrl.recipe.sections import Model, Prompts, Recipe
from streamrl.recipe.served_models import JUDGE_MODEL, JUDGE_SOCKET, Judge
from streamrl.recipe.topology import Role, Topology, model_socket, plan_topology
from streamrl.rewards.served.gate import ActorLoad, ModelEvent, ModelOrder, ModelReady, ModelReport

pytest.importorskip("torch")
pytest.importorskip("vllm")
httpx = pytest.importorskip("httpx")
pytestmark = [pytest.mark.vllm, pytest.mark.torch]

LISTS = ["5801", "8607", "97", "420", "5801"]  # none is sorted, so that it has something to say
# The model sorts digits: its last digit is its score of a completion that is a list.
OPTIONS = {"chat": False, "question": "{completion}:", "score": r"(\d)\D*$", "highest": 9.0, "max_tokens": 64}
RECIPE = Recipe(
    model=Model(path=str(SORT / "model")),
    prompts=Prompts(train=str(SORT / "train.jsonl")),
    rewards=(Reward(function="judge", options=OPTIONS, timeout_s=9000.0),),
    judge=Judge(model=str(SORT / "model"), batch=4, batch_wait_s=3600.0, max_wait_s=7200.0, actor_share=0.5),
)


@pytest.mark.started
@pytest.mark.long
async def test_a_real_engine_judges_in_batches(make, tmp_path: Path, socket_directory: Path, monkeypatch) -> None:
    """A real engine judges in batches when the actor leaves it room."""
    topology = plan_topology(RECIPE, socket_directory)
    path = model_socket(topology, Role.JUDGE)
    monkeypatch.setenv(JUDGE_SOCKET, str(path))
    monkeypatch.setenv(JUDGE_MODEL, RECIPE.judge.model)
    reward = make("judge", cache=str(tmp_path / "answers.sqlite"), **OPTIONS)
    async with (
        asyncio.TaskGroup() as tasks,
        judge_process(tmp_path, topology, socket_directory) as process,
        httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), timeout=900) as http,
    ):
        async with controller(topology) as (orders, reports):
            await orders.send(ActorLoad(share=1.0))
            assert await reports.receive() == ModelReady(max_model_len=1024)
            assert path.stat().st_mode & 0o777 == 0o600
            assert (await http.get("http://judge/is_paused")).status_code == 404  # what steers it is not for askers
            asked = [tasks.create_task(reward.call(text)) for text in LISTS]
            await reported(reports, waiting=4)  # a batch (the fifth equals the first), but the actor is busy
            await orders.send(ActorLoad(share=0.5))
            first = [await task for task in asked]
            report = await reported(reports, inside=0, questions=4)
            assert (report.batches, report.waiting) == (1, 0)
            # Asked directly, as a batch of the same questions: what the reward read is what the engine says.
            async with asyncio.TaskGroup() as direct:
                said = [direct.create_task(score(http, text)) for text in LISTS[:4]]
            assert first == [*(task.result() for task in said), first[0]]
            assert [await reward.call(text) for text in LISTS] == first  # from the cache: the engine is not even woken
            await reward.call.aclose()
            await orders.aclose()
            last = [event async for event in reports][-1]  # those before it were due while the answers came
            assert isinstance(last, ModelReport) and (last.questions, last.batches) == (8, 2)
        assert await asyncio.to_thread(process.wait, 30) == 0
    assert not path.exists()


@asynccontextmanager
async def controller(topology: Topology) -> AsyncIterator[tuple[SendStream[ModelOrder], ReceiveStream[ModelEvent]]]:
    async with (
        zmq_sender(ModelOrder, topology.endpoint("judge-0", "orders"), bind=True, name="orders") as orders,
        zmq_receiver(ModelEvent, topology.endpoint("judge-0", "reports"), bind=True, name="reports") as reports,
    ):
        yield orders, reports


@asynccontextmanager
async def judge_process(directory: Path, topology: Topology, sockets: Path) -> AsyncIterator[subprocess.Popen[bytes]]:
    """The process that a run starts: it finds recipe and topology in the directory of the run."""
    (directory / "recipe.toml").write_text(dump_recipe(RECIPE))
    (directory / "topology.json").write_bytes(msgspec.json.encode(topology))
    folders = ["--run-directory", str(directory), "--socket-directory", str(sockets)]
    command = [sys.executable, "-m", "streamrl.launch", "judge", "--index", "0", *folders]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # it must not get that far
    with (directory / "judge.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - it only forks
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    children: list[psutil.Process] = []
    try:
        yield process
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        psutil.wait_procs(children, timeout=900)


async def reported(reports: ReceiveStream[ModelEvent], **wanted: int) -> ModelReport:
    """The first report that says so."""
    while True:
        report = await reports.receive()
        if all(getattr(report, name) == value for name, value in wanted.items()):
            assert isinstance(report, ModelReport)
            return report


async def score(http: Any, text: str) -> float:
    body = {"model": RECIPE.judge.model, "prompt": f"{text}:", "max_tokens": 64, "temperature": 0}
    answer = await http.post("http://judge/v1/completions", json=body)
    said = answer.json()["choices"][0]["text"]
    return float([letter for letter in said if letter.isdigit()][-1]) / 9
