"""Programs of agents: the reward, limits, and what is left of them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from streamrl.pretrained.tokenizer import Tokenizer
from streamrl.recipe.environment import Environment
from streamrl.run.environments import agent_process
from streamrl.run.environments.agent_process import AgentFailedError, Agents
from streamrl.run.environments.agents import printed_reward
from streamrl.run.environments.agents.printed_reward import PrintedReward
from streamrl.run.environments.chat_tokens import ChatModel
from streamrl.run.environments.endpoint_session import EndpointSession
from tests.run.environments.test_endpoint import Scripted

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


ROW = {"question": "What is 2 + 3?", "answer": "It is 5."}


async def run(session: EndpointSession, *command: str, **more: Any) -> float | None:
    async with (agents := Agents(Environment(agent=command, **more))).serving():
        printed = PrintedReward()
        try:
            await agents.run(session, ROW, printed)
            return printed.value
        except AgentFailedError as error:
            failed = error
    raise failed


def left() -> list[int]:
    """Processes that have the key in their variables or in their command."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            pids += [int(path.name)] * (KEY.encode() in words)
    return pids


SEES = """
import os
seen = set(os.environ)
assert seen >= {"PATH", "SEARCH_KEY", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"}, seen
print(float("HF_TOKEN" in seen))
"""


@pytest.mark.long
@pytest.mark.parametrize(("code", "reward", "turns"), [(ASKS, 1.0, 2), ("print('no')", None, 0), (SEES, 0.0, 0)])
async def test_an_agents_last_line_is_the_reward(
    code: str, reward: float | None, turns: int, session: EndpointSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent knows the endpoint, and its last line is the reward."""
    for name in ("HF_TOKEN", "SEARCH_KEY"):
        monkeypatch.setenv(name, "secret")
    assert await run(session, "python", "-c", code, variables=("SEARCH_KEY",)) == reward
    assert session.figures["turns"] == turns


LEAVES = f"""
import os, pathlib, signal, subprocess, sys, tempfile
signal.signal(signal.SIGTERM, signal.SIG_IGN)
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "file").write_text("x")
folder.chmod(0o500)
below = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', '{KEY}'])"
for own in (False, True):
    subprocess.Popen([sys.executable, "-c", below + "; time.sleep(99)", "{KEY}"], start_new_session=own, env={{}})
    subprocess.Popen([sys.executable, "-c", below, "{KEY}"], start_new_session=own, env={{}}).wait()
print(0.5)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("while True: print('y' * 99_999)", "wrote more than 2097152 bytes$"),
        ("import os; os.kill(os.getpid(), 9)", "ended with -9$"),
        ("print(1); raise SystemExit('no answer')", "ended with 1: no answer"),
        ("", "no-program cannot be started: .*No such file"),
    ],
)
async def test_an_agent_that_fails_says_why(
    code: str, said: str, session: EndpointSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "MOST_OUTPUT", 2 << 20)
    with pytest.raises(AgentFailedError, match=said):
        await run(session, *(("python", "-c", code) if code else ("no-program",)))
    assert not left()


async def test_nothing_that_an_agent_started_is_left(
    session: EndpointSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes in other sessions, without variables and without parents, and temporary files end with the program."""
    monkeypatch.setattr(agent_process, "_GRACE_S", 0.2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert await run(session, "python", "-c", LEAVES) == 0.5
    assert not left()
    stays = f"{LEAVES}\nopen({str(tmp_path / 'started')!r}, 'w').close()\nimport time; time.sleep(999)"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, session, "python", "-c", stays)
        while not (tmp_path / "started").exists():
            await anyio.sleep(0.02)
        with anyio.fail_after(60):
            while len(left()) != 8:  # the program and its reaper; two with one below, and two orphans
                await anyio.sleep(0.02)
        assert list((tmp_path / "temporary").glob("agent-*/*/file"))
        tasks.cancel_scope.cancel()
    assert not left()
    assert not list((tmp_path / "temporary").iterdir())


MANY = """
import json, os, sys, threading, time, openai
client = openai.OpenAI()
def say(**said): sys.stdout.write(json.dumps(said) + "\\n"); sys.stdout.flush()
def play(key, row):
    if row["do"] == "hang": time.sleep(999)
    if row["do"] == "exit": os._exit(3)
    if row["do"] == "fail": return say(key=key, error="no such row")
    if row["do"] == "long": return say(key=key, transcript="x" * 300_000, reward=1.0)
    chat = [{"role": "user", "content": row["do"]}]
    client.with_options(api_key=key).chat.completions.create(model="m", messages=chat)
    say(key=key, reward=os.getpid())
print("it has begun")
say(key="other")
for line in sys.stdin:
    threading.Thread(target=play, daemon=True, kwargs=json.loads(line)).start()
"""


@pytest.mark.long
async def test_a_process_takes_many_trajectories(
    of_family: Callable[[str], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_process, "_GRACE_S", 0.2)
    for module in (agent_process, printed_reward):
        monkeypatch.setattr(module, "LARGEST_LINE", 200_000)
    tokenizer, pids = of_family("qwen2.5"), []
    environment = Environment(agent=("python", "-c", MANY), agent_tasks=2)
    with anyio.fail_after(120):
        async with (agents := Agents(environment)).serving(), anyio.create_task_group() as tasks:

            async def play(do: str, said: str = "") -> None:
                session = EndpointSession(f"key of {do}", Scripted(tokenizer, f"Yes to {do}."), ChatModel(tokenizer))
                printed = PrintedReward()
                if said:
                    with pytest.raises(AgentFailedError, match=said):
                        await agents.run(session, {"do": do}, printed)
                else:
                    await agents.run(session, {"do": do}, printed)
                    pids.append(printed.value)

            async with anyio.create_task_group() as first:
                for name in "abc":
                    first.start_soon(play, name)
            assert len(pids) == 3 and len(set(pids)) == 2  # two at once
            await play("fail", "no such row")
            await play("long", "line of more than 200000 bytes: shorten it")
            await play("d")
            assert pids[3] in pids[:3]
            with anyio.move_on_after(0.2):
                await play("hang")  # it is late: the process has no other, and ends
            tasks.start_soon(play, "exit", "the agent ended with 3")  # fails with what is beside it
            await play("hang", "the agent ended with 3")
            await play("e")
            assert pids[4] not in pids[:4]
    assert not [pid for pid in map(int, pids) if os.path.exists(f"/proc/{pid}")]  # noqa: ASYNC240


WORKER = """
import anyio, sys
from streamrl.recipe.environment import Environment
from streamrl.run.environments.agent_process import Agents
from streamrl.run.environments.agents.printed_reward import PrintedReward
from streamrl.run.environments.endpoint_session import EndpointSession
async def work():
    agents = Agents(Environment(agent=("python", "-c", "import time; time.sleep(999)")))
    async with agents.serving():
        await agents.run(EndpointSession(sys.argv[1], None, None), {}, PrintedReward())
anyio.run(work)
"""


async def test_an_agent_ends_with_its_worker() -> None:
    async with await anyio.open_process([sys.executable, "-c", WORKER, KEY]) as worker:
        with anyio.fail_after(120):
            while not left():
                await anyio.sleep(0.02)
            worker.kill()
            while left():
                await anyio.sleep(0.02)


async def in_parts(output: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(output), 7):
        yield output[start : start + 7]


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        (b'x\n{"reward": 1, "more": []}\n\n', 1.0),
        (b"-0.5", -0.5),
        (b"0\r\n", 0.0),
        (b"True\n", 1.0),
        (b'"1.0"', 1.0),
        (b'{"reward": "0.25"}', 0.25),
        (b'{"reward": false}\nINFO flushed 3 spans', 0.0),
        (b"1\nno", 1.0),
        (b"1\n0.5\n", 0.5),
        (b'1\n{\n "steps": [\n  1,\n  2\n ],\n "reward": 0.5\n}\n', 0.5),
        (b'1\n{\n "steps": [\n  2\n ]\n}\ndone', 1.0),
        (b"{\n 7\n0.5", 0.5),
        (b"1\n" + b"x" * 3000 + b"\n", 1.0),
        (b"50%\r\r\n1", 1.0),
        (b"1\n" + b'{"x": "' + b"x" * 3000 + b'", "reward": 1}\n', ": 1}.: print .* at most 2000 bytes"),
        (b"1\n" + b'{"reward": NaN}', "no finite number; its last line is"),
        (b"{'reward': 1.0}", 'last line is "{.reward.: 1.0}": print a number, or'),
        (b"1e999", "no finite number"),
        (b"1\nnan", "no finite number"),
        (b"1" * 9999, "printed no reward"),
        (b'{"reward": [1]}', "no finite number"),
        (b'1\n{"reward": null}', "printed no reward"),
        (b'1\n{"message": "the reward is known"}', 1.0),
        (b'["reward"]', "printed no reward"),
        (b"it \x1b[31m failed\xff\n\n", r"last line is .it \\x1b\[31m failed"),
        (b" \n", 'printed no reward; its last line is "": print'),
    ],
)
async def test_the_last_reward_that_is_printed_counts(
    output: bytes, reward: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward in the forms in which programs print one; without one it is said what was read."""
    for module in (agent_process, printed_reward):
        monkeypatch.setattr(module, "LARGEST_LINE", 2_000)
    printed = PrintedReward()
    process = agent_process._Process(printed=printed)
    await process.read(in_parts(output))
    process.end_line()
    if isinstance(reward, str):
        assert printed.value is None and re.search(reward, printed.remark)
    else:
        assert (printed.value, printed.remark) == (reward, "")
