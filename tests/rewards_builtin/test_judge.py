"""The model judge against a server that answers as told: scores, retries, cache, and an engine that yields."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from streamrl.rewards.builtin import judge_engine
from streamrl.rewards.builtin.judge_client import JudgeError
from streamrl.rewards.builtin.judge_engine import SharedLock, YieldingError, _lock_path
from streamrl.rewards.signature import RewardFunction

httpx = pytest.importorskip("httpx")


class Server(ThreadingHTTPServer):
    """``answers``: (status, text) of the next questions, then of all others the last. ``calls``: routes and bodies, in
    order of arrival. ``gate``: questions are answered while it is set. ``awake``: what a real engine would be."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Judging)
        self.answers: list[tuple[int, str]] = [(200, "Score: 7")]
        self.calls: list[tuple[str, Any]] = []
        self.headers: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.awake = True
        self.asked_asleep = 0
        self.most_at_once = 0
        self.at_once = 0
        self.counting = threading.Lock()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def routes(self) -> list[str]:
        return [route for route, _ in self.calls]


class Judging(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null")
        server = self.server
        server.calls.append((self.path, body))
        if not self.path.startswith("/v1/"):
            server.awake = self.path in ("/wake_up", "/resume")
            self.answer(200, {})
            return
        with server.counting:
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        server.asked_asleep += not server.awake
        server.gate.wait(10)
        server.headers.append(self.headers)
        status, text = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        with server.counting:
            server.at_once -= 1
        choice = {"text": text} if self.path.endswith("/v1/completions") else {"message": {"content": text}}
        self.answer(status, {"choices": [choice]} if status == 200 else {"error": text})

    def answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def server() -> Iterator[Server]:
    listening = Server()
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    yield listening
    listening.gate.set()
    listening.shutdown()
    thread.join()
    listening.server_close()


@pytest.fixture
def judge(make, server):
    def build(**options: Any) -> RewardFunction:
        return make("judge", **{"endpoint": f"{server.root}/v1", "model": "m", **options})

    return build


def run(reward: RewardFunction, *completions: str, **columns: Any) -> list[Any]:
    """The judge's values or exceptions, all asked at once."""

    async def ask(completion: str) -> Any:
        try:
            return await reward.call(completion, **{"prompt": "2+2", **columns})
        except Exception as error:  # noqa: BLE001 - it is the answer
            return error

    async def all_of_them() -> list[Any]:
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ask(completion)) for completion in completions]
            return [task.result() for task in asked]
        finally:
            await reward.call.aclose()  # type: ignore[attr-defined]

    return asyncio.run(all_of_them())


def test_the_judge_sees_prompt_and_completion_and_its_score_is_scaled(judge, server: Server) -> None:
    assert run(judge(system="Be strict."), "4 {not a field}") == [0.7]
    ((route, body),) = server.calls
    assert route == "/v1/chat/completions"
    assert body["model"] == "m" and body["temperature"] == 0
    system, user = body["messages"]
    assert system == {"role": "system", "content": "Be strict."}
    assert "2+2" in user["content"] and "4 {not a field}" in user["content"]


def test_columns_of_the_dataset_and_plain_completions(judge, server: Server) -> None:
    reward = judge(question="{completion} =? {answer}", chat=False, request={"min_tokens": 1})
    assert (reward.signature.columns, reward.signature.provided) == (("answer",), ())
    assert run(reward, "4", prompt="", answer="5") == [0.7]
    ((route, body),) = server.calls
    assert (route, body["prompt"], body["min_tokens"]) == ("/v1/completions", "4 =? 5", 1)


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("Score: 0", 0.0),
        ("He says Score: 10 but it is wrong.\nScore: 2.5", 0.25),  # the last word is the judge's
        ("**Score**: 10", 1.0),
        ("Score: 11", "the judge's score 11 is not in 0 to 10"),
        ("Score: -1", "the judge's score -1 is not in 0 to 10"),
        ("It is good.", "the judge's answer holds no score: 'It is good.'"),
    ],
)
def test_scores(judge, server: Server, answer: str, value: float | str) -> None:
    server.answers = [(200, answer)]
    (found,) = run(judge(), "4")
    assert found == value if isinstance(value, float) else value in str(found)


def test_choices(judge, server: Server) -> None:
    server.answers = [(200, "Yes... no, wait: eyesight says YES")]
    assert run(judge(choices={"yes": 1.0, "no": -1.0}), "4") == [1.0]
    server.answers = [(200, "noyes")]
    assert "holds no score" in str(run(judge(choices={"yes": 1.0, "no": -1.0}), "5")[0])


def test_equal_questions_are_asked_once_and_kept(judge, server: Server, tmp_path: Path) -> None:
    cache = str(tmp_path / "answers.sqlite")
    assert run(judge(cache=cache), "4", "4", "5", "4") == [0.7] * 4
    assert len(server.calls) == 2
    # Another worker, later: the file knows; another model is another judge.
    assert run(judge(cache=cache), "4") == [0.7]
    assert len(server.calls) == 2
    run(judge(cache=cache, model="n"), "4")
    assert len(server.calls) == 3


def test_a_failure_is_not_kept(judge, server: Server) -> None:
    server.answers = [(400, "no"), (200, "Score: 5")]
    reward = judge()
    assert isinstance(run(reward, "4")[0], JudgeError)
    assert run(reward, "4") == [0.5]


def test_the_cache_forgets_the_oldest(tmp_path: Path) -> None:
    from streamrl.rewards.builtin.judge_cache import AnswerCache

    cache = AnswerCache("", 100)
    for number in range(512):
        cache.keep(str(number), "a")
    assert cache.find("411") is None
    assert cache.find("412") == "a"
    cache.close()


def test_a_busy_server_is_asked_again(judge, server: Server, monkeypatch) -> None:
    monkeypatch.setattr("streamrl.rewards.builtin.judge_client._FIRST_WAIT_S", 0.001)
    server.answers = [(429, "busy"), (503, "starting"), (200, "Score: 9")]
    assert run(judge(), "4") == [0.9]
    assert len(server.calls) == 3


@pytest.mark.parametrize(
    ("status", "asked", "message"),
    [
        (503, 3, "answered 503: "),
        (401, 1, "set api_key_variable to the variable that holds the key"),
        (404, 1, "correct endpoint, or model"),
    ],
)
def test_a_server_that_refuses_is_a_failure_with_its_reason(
    judge, server: Server, monkeypatch, status: int, asked: int, message: str
) -> None:
    monkeypatch.setattr("streamrl.rewards.builtin.judge_client._FIRST_WAIT_S", 0.001)
    server.answers = [(status, "because")]
    (error,) = run(judge(retries=2), "4")
    assert isinstance(error, JudgeError)
    assert "because" in str(error) and message in str(error)
    assert len(server.calls) == asked


def test_nobody_there(make, monkeypatch) -> None:
    monkeypatch.setattr("streamrl.rewards.builtin.judge_client._FIRST_WAIT_S", 0.001)
    reward = make("judge", endpoint="http://127.0.0.1:9/v1", model="m", retries=1)
    (error,) = run(reward, "4")
    assert "cannot be reached after 2 attempts" in str(error) and "is it up?" in str(error)


def test_at_most_so_many_at_once(judge, server: Server) -> None:
    server.gate.clear()
    reward = judge(concurrency=3)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(reward.call(str(number), prompt=""))
            while server.at_once < 3:
                await asyncio.sleep(0.005)
            async with httpx.AsyncClient() as other:  # as many round trips as a fourth one would need, and more
                for _ in range(10):
                    await other.post(f"{server.root}/resume")
            assert server.at_once == 3
            server.gate.set()
        await reward.call.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())
    assert server.most_at_once == 3


def test_the_key_comes_from_the_environment(judge, server: Server, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    run(judge(api_key_variable="JUDGE_KEY"), "4")
    assert server.headers[0]["Authorization"] == "Bearer secret"


# ---- an engine beside the actor ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yields", "wake", "rest"),
    [("sleep", "/wake_up", "/sleep?level=1&mode=wait"), ("pause", "/resume", "/pause?mode=keep")],
)
def test_the_engine_is_awake_for_a_batch_only(judge, server: Server, yields: str, wake: str, rest: str) -> None:
    server.awake = False
    reward = judge(yields=yields, batch=4, patience_s=3600.0)

    async def scenario() -> list[float]:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(reward.call(str(number), prompt="")) for number in range(3)]
            async with httpx.AsyncClient() as other:  # as many round trips as waking it would need, and more
                for _ in range(10):
                    await other.post(f"{server.root}/idle")
            assert server.routes == ["/idle"] * 10
            server.calls.clear()
            asked.append(tasks.create_task(reward.call("3", prompt="")))
        await reward.call.aclose()  # type: ignore[attr-defined]
        return [task.result() for task in asked]

    assert asyncio.run(scenario()) == [0.7] * 4
    assert server.routes[0] == wake
    assert server.routes[-1] == rest
    assert server.routes.count(wake) == server.routes.count(rest) == 1
    assert server.asked_asleep == 0 and not server.awake


def test_fewer_than_a_batch_wait_for_their_patience_only(judge, server: Server) -> None:
    server.awake = False
    assert run(judge(yields="sleep", batch=64, patience_s=0.01), "1") == [0.7]
    assert server.asked_asleep == 0


def test_a_call_past_its_time_limit_leaves_the_others_an_engine_that_wakes(judge, server: Server) -> None:
    """The one that waits to wake the engine is cancelled; then the last one that asks is."""
    server.awake = False
    server.gate.clear()

    async def scenario(reward: RewardFunction) -> list[float]:
        async def ask(completion: str) -> float:
            return await reward.call(completion, prompt="")

        async def wait_for(calls: int) -> None:
            while len(server.calls) < calls:
                await asyncio.sleep(0.005)

        async with asyncio.TaskGroup() as tasks:
            first, second = tasks.create_task(ask("1")), tasks.create_task(ask("2"))
            await asyncio.sleep(0)
            first.cancel()
            await wait_for(2)  # the second woke the engine and asked
            late = tasks.create_task(ask("3"))
            await wait_for(3)
            late.cancel()
            server.gate.set()
        await reward.call.aclose()  # type: ignore[attr-defined]
        return [second.result()]

    assert asyncio.run(scenario(judge(yields="sleep", batch=2, patience_s=0.05))) == [0.7]
    assert server.routes[0] == "/wake_up" and server.routes[-1] == "/sleep?level=1&mode=wait"
    assert server.asked_asleep == 0


def test_workers_share_an_engine_and_the_last_one_puts_it_to_sleep(judge, server: Server) -> None:
    """Two rewards of the same endpoint stand for two worker processes: file locks do not know the difference."""
    server.awake = False
    server.gate.clear()
    one, other = judge(yields="sleep", patience_s=0.0), judge(yields="sleep", patience_s=0.0)

    async def scenario() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.call("1", prompt=""))
            tasks.create_task(other.call("2", prompt=""))
            while sum(route.startswith("/v1/") for route in server.routes) < 2:
                await asyncio.sleep(0.005)
            server.gate.set()
        await one.call.aclose()  # type: ignore[attr-defined]
        await other.call.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())
    assert not _lock_path(server.root).exists()
    assert server.routes.count("/sleep?level=1&mode=wait") == 1
    assert server.routes[-1] == "/sleep?level=1&mode=wait"
    assert server.asked_asleep == 0


@pytest.mark.asyncio
async def test_a_lock_on_a_file_that_was_just_removed_is_none(tmp_path: Path, monkeypatch) -> None:
    """Between opening the file and locking it another process may have been the last one."""
    path = tmp_path / "lock"
    last = await SharedLock.take(path)
    assert last.is_last()
    real, calls = judge_engine.fcntl.flock, []

    def removed_meanwhile(descriptor: int, operation: int) -> None:
        if not calls:
            last.remove()
            last.close()
        calls.append(operation)
        real(descriptor, operation)

    monkeypatch.setattr(judge_engine.fcntl, "flock", removed_meanwhile)
    ours = await SharedLock.take(path)
    assert path.exists()
    other = await SharedLock.take(path)
    assert not ours.is_last()
    assert other.is_last()
    other.remove()
    ours.close()
    other.close()


@pytest.mark.asyncio
async def test_the_lock_file_is_there_only_while_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = await SharedLock.take(path), await SharedLock.take(path)
    assert not first.is_last()
    first.close()
    assert second.is_last()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(SharedLock.take(path))
        await asyncio.sleep(0)
        second.remove()
        second.close()
    third = waiting.result()
    assert path.exists()  # the one who waited made it anew, and holds that
    assert third.is_last()
    third.remove()
    third.close()
    assert not path.exists()


def test_an_engine_that_cannot_sleep_says_what_it_needs(make, server: Server, monkeypatch) -> None:
    monkeypatch.setattr(Judging, "do_POST", lambda self: self.answer(404, {}))
    reward = make("judge", endpoint=f"{server.root}/v1", model="m", yields="sleep", patience_s=0.0)
    (error,) = run(reward, "4")
    assert isinstance(error, YieldingError)
    assert not _lock_path(server.root).exists()
    assert "VLLM_SERVER_DEV_MODE=1" in str(error)
