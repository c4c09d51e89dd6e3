"""Programs of agents: the reward, limits, and what is left of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from turns.test_endpoint import Scripted, served

from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.run.environments import agent_process
from streamrl.run.environments.agent_process import AgentFailedError, reward_of, run_agent
from streamrl.run.environments.chat_tokens import ChatModel
from streamrl.run.environments.endpoint_session import EndpointSession

ASKS = """
import anthropic, json, openai, sys
row = json.loads(sys.stdin.readline())
chat = [{"role": "user", "content": row["question"]}]
with openai.OpenAI() as client:
    said = client.chat.completions.create(model="m", messages=chat).choices[0].message.content
chat += [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
with anthropic.Anthropic() as client:
    said = client.messages.create(model="m", max_tokens=99, messages=chat).content[0].text
print(f"thinking\\n{json.dumps({'reward': float(said == row['answer'])})}")
"""
KEY = "key-of-a-trajectory"


@pytest.fixture
def session(of_family: Callable[[str], Tokenizer]) -> EndpointSession:
    tokenizer = of_family("qwen2.5")
    return EndpointSession(KEY, Scripted(tokenizer, "Hello.", "It is 5."), ChatModel(tokenizer))


async def run(session: EndpointSession, code: str, seconds: float = 60.0, **more: Any) -> float | None:
    row = {"question": "What is 2 + 3?", "answer": "It is 5."}
    url = more.pop("base_url", "http://127.0.0.1:1")
    return await run_agent([sys.executable, "-c", code], session, row, seconds, base_url=url, **more)


def left() -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            pids += [int(path.parent.name)] * (f"OPENAI_API_KEY={KEY}".encode() in path.read_bytes())
    return pids


@pytest.mark.parametrize(("code", "reward", "turns"), [(ASKS, 1.0, 2), ("print('no')", None, 0)])
async def test_an_agent_knows_the_endpoint_and_its_last_line_is_the_reward(
    code: str, reward: float | None, turns: int, session: EndpointSession
) -> None:
    async with served(session) as server:
        assert await run(session, code, base_url=server.base_url) == reward
    assert session.figures["turns"] == turns


HANGS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(999)
"""
LEAVES = """
import os, subprocess, sys
for own in (False, True):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)"], start_new_session=own)
print(0.5)
"""


@pytest.mark.parametrize(
    ("code", "seconds", "said"),
    [
        (HANGS, 2.0, "took more than 2 s"),
        ("while True: print('y' * 99_999)", 60.0, "wrote more than 2097152 bytes$"),
        ("import os; os.kill(os.getpid(), 9)", 60.0, "ended with -9$"),
        ("print(1); raise SystemExit('no answer')", 60.0, "ended with 1: no answer"),
    ],
)
async def test_an_agent_that_fails_says_why(
    code: str, seconds: float, said: str, session: EndpointSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "MOST_OUTPUT", 2 << 20)
    with pytest.raises(AgentFailedError, match=said):
        await run(session, code, seconds, grace_s=0.2)
    assert not left()


async def test_nothing_that_an_agent_started_is_left(session: EndpointSession, tmp_path: Path) -> None:
    assert await run(session, LEAVES) == 0.5
    assert not left()
    stays = f"{LEAVES}\nopen('started', 'w').close()\nimport time; time.sleep(999)"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(run, session, stays, directory=tmp_path))
        while not (tmp_path / "started").exists():
            await anyio.sleep(0.02)
        assert len(left()) == 3
        tasks.cancel_scope.cancel()
    assert not left()
    with pytest.raises(AgentFailedError, match=r"no-program cannot be started: .*No such file"):
        await run_agent(["no-program"], session, {}, 60.0, base_url="http://127.0.0.1:1")


WORKER = """
import anyio, functools, sys
from streamrl.run.environments.agent_process import run_agent
from streamrl.run.environments.endpoint_session import EndpointSession
session = EndpointSession(sys.argv[1], None, None)
agent = [sys.executable, "-c", "import time; time.sleep(999)"]
anyio.run(functools.partial(run_agent, agent, session, {}, 999.0, base_url="http://127.0.0.1:1"))
"""


async def test_an_agent_ends_with_its_worker() -> None:
    async with await anyio.open_process([sys.executable, "-c", WORKER, KEY]) as worker:
        with anyio.fail_after(120):
            while not left():
                await anyio.sleep(0.02)
            worker.kill()
            while left():
                await anyio.sleep(0.02)


def test_a_reward_is_a_finite_number() -> None:
    outputs = [b'x\n{"reward": 1, "more": []}\n\n', b"-0.5", b'{"reward": true}', b'{"reward": NaN}', b"1e999"]
    outputs += [b"1" * 999, b"1\nno", b'["reward"]', b"\xff", b""]
    assert [reward_of(output) for output in outputs] == [1.0, -0.5, *[None] * 8]
