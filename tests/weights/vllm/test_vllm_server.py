"""What ``VllmServer`` says to a server and makes of its answers; a real server is in tests/examples."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anyio
import pytest

from streamrl.base.errors import EngineError, WeightError
from streamrl.base.messages import WeightAnnouncement
from streamrl.weights import VllmServer, push

HASH = 2**64 - 3  # more than a float holds
HELD = {"policy_version": 7, "state_hash": HASH, "expected_hash": HASH, "error": ""}
STAGED = {"fetched": True, "error": "", "payload_bytes": 11}


class Answers(BaseHTTPRequestHandler):
    """vLLM's routes with the answers of one worker; ``server.calls`` keeps what was asked."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.calls.append((self.path, body))  # type: ignore[attr-defined]
        answers = self.server.answers  # type: ignore[attr-defined]
        name = body.get("method", self.path.strip("/").partition("?")[0])
        self.server.before.get(name, lambda: None)()  # type: ignore[attr-defined]
        status, answer = answers.get(name, (200, {"message": "done"}))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    listening.calls, listening.before = [], {}  # type: ignore[attr-defined]
    listening.answers = {  # type: ignore[attr-defined]
        "streamrl_begin_stage": (200, {"results": [None]}),
        "streamrl_stage_report": (200, {"results": [STAGED]}),
        "streamrl_finish_stage": (200, {"results": [STAGED]}),
        "streamrl_apply": (200, {"results": [HELD]}),
        "streamrl_roll_back": (200, {"results": [None]}),
    }
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    yield listening
    listening.shutdown()
    thread.join()
    listening.server_close()


def client_of(server: ThreadingHTTPServer) -> VllmServer:
    return VllmServer(f"http://127.0.0.1:{server.server_address[1]}/", timeout_s=10)


ANNOUNCED = WeightAnnouncement(policy_version=7, base_version=6, state_hash=HASH, sources=())


def test_a_push_is_staged_before_the_pause_and_committed_in_it(server: ThreadingHTTPServer) -> None:
    done = asyncio.run(push(client_of(server), ANNOUNCED))
    assert (done.state_hash, done.payload_bytes) == (HASH, 11)
    calls = [(path, body.get("method")) for path, body in server.calls]  # type: ignore[attr-defined]
    assert calls == [
        ("/collective_rpc", "streamrl_begin_stage"),
        ("/collective_rpc", "streamrl_stage_report"),
        ("/collective_rpc", "streamrl_finish_stage"),
        ("/pause?mode=keep&clear_cache=true", None),
        ("/collective_rpc", "streamrl_apply"),
        ("/finish_weight_update", None),
        ("/resume", None),
    ]
    assert server.calls[4][1]["args"] == ["7"]  # type: ignore[attr-defined]
    assert server.calls[5][1] == {"weight_version": "7"}  # type: ignore[attr-defined]


def test_an_unverified_commit_is_rolled_back(server: ThreadingHTTPServer) -> None:
    """A commit that does not verify is rolled back, and the server goes on."""
    server.answers["streamrl_apply"] = (200, {"results": [{**HELD, "state_hash": 5}]})  # type: ignore[attr-defined]
    with pytest.raises(WeightError, match="the live weights of 1 workers add up to state hash 0x0000000000000005"):
        asyncio.run(push(client_of(server), ANNOUNCED))
    paths = [body.get("method", path) for path, body in server.calls]  # type: ignore[attr-defined]
    assert paths[-2:] == ["streamrl_roll_back", "/resume"]
    assert "/finish_weight_update" not in paths


def test_a_server_in_unknown_state_stays_paused(server: ThreadingHTTPServer) -> None:
    """A server whose weights are unknown stays paused."""
    server.answers["streamrl_apply"] = (500, {"error": "lost"})  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="version 7 could not be committed"):
        asyncio.run(push(client_of(server), ANNOUNCED))
    assert server.calls[-1][1]["method"] == "streamrl_apply"  # type: ignore[attr-defined]


@pytest.mark.parametrize("slow", ["pause", "streamrl_apply"])
def test_a_push_that_is_given_up_in_its_pause_ends_it_first(server: ThreadingHTTPServer, slow: str) -> None:
    async def given_up() -> None:
        scope, loop = anyio.CancelScope(), asyncio.get_running_loop()
        server.before[slow] = lambda: loop.call_soon_threadsafe(scope.cancel)  # type: ignore[attr-defined]
        with scope:
            await push(client_of(server), ANNOUNCED)
            await anyio.sleep_forever()
        assert scope.cancelled_caught

    anyio.run(given_up)
    assert [path for path, _ in server.calls[-2:]] == ["/finish_weight_update", "/resume"]  # type: ignore[attr-defined]


def test_an_error_answer_names_route_and_remedy(server: ThreadingHTTPServer) -> None:
    """An answer that is an error names the route and the remedy."""
    server.answers["pause"] = (404, {"detail": "Not Found"})  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"/pause\?mode=keep.* answered 404: .*Not Found.*VLLM_SERVER_DEV_MODE=1"):
        asyncio.run(client_of(server).pause_generation())
    server.answers["resume"] = (500, {"error": "the engine is dead"})  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match=r"/resume answered 500: .*the engine is dead"):
        asyncio.run(client_of(server).resume_generation())


def test_a_server_is_asked_without_a_proxy(server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    asyncio.run(client_of(server).resume_generation())
    assert [path for path, _ in server.calls] == ["/resume"]  # type: ignore[attr-defined]


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1/resume cannot be reached: .*Is the server up"):
        asyncio.run(VllmServer("http://127.0.0.1:1", timeout_s=5).resume_generation())
