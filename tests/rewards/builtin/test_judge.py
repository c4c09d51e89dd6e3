"""The model judge against a server that answers as told: scores, retries, cache, and every way in which it fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from builders.base import trajectory
from builders.files import SORT_MODEL as SORT

from streamrl.base.errors import RecipeError
from streamrl.base.types import RewardFailure, RewardFailureKind
from streamrl.pretrained.tokenizer import load_tokenizer
from streamrl.recipe.rewards import FailurePolicy, Reward, RewardLimits
from streamrl.recipe.served_models import JUDGE_MODEL, JUDGE_SOCKET
from streamrl.rewards.calls.reward_set import RewardSet
from streamrl.rewards.served.client import ModelError, proxy_of
from streamrl.rewards.signature import RewardFunction

httpx = pytest.importorskip("httpx")


ELSEWHERE = "http://judge.example"


class Server(ThreadingHTTPServer):
    """``answers``: (status, text) of the next questions, then of all others the last; bytes are the body as it is.
    ``opinion``: answers a question by its text, in place of ``answers``. ``calls``: routes and bodies, in order of
    arrival. ``gate``: questions are answered while it is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Judging)
        self.answers: list[tuple[int, str | bytes | None]] = [(200, "Score: 7")]
        self.opinion: Callable[[str], str] | None = None
        self.calls: list[tuple[str, Any]] = []
        self.headers: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
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
        if not self.path.removeprefix(ELSEWHERE).startswith("/v1/"):
            self.answer(200, {})
            return
        with server.counting:
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        server.gate.wait(10)
        server.headers.append(self.headers)
        status, text = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
        if server.opinion is not None:
            text = server.opinion(body["messages"][-1]["content"])
        with server.counting:
            server.at_once -= 1
        if isinstance(text, bytes):
            self.answer(status, text)
            return
        choice = {"text": text} if self.path.endswith("/v1/completions") else {"message": {"content": text}}
        self.answer(status, {"choices": [choice]} if status == 200 else {"error": text})

    def answer(self, status: int, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who asked has given up
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


def test_the_judge_gets_prompt_and_completion(judge, server: Server) -> None:
    """The judge gets prompt and completion, and its score is scaled."""
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


# ---- forms of questions --------------------------------------------------------------------------


def better_of(question: str) -> str:
    """A judge that can judge: the larger number is the better answer."""
    numbers = re.findall(r"<(?:first|second|answer \d+)>\n(\d+)\n", question)
    if "<first>" in question:
        return "first" if int(numbers[0]) > int(numbers[1]) else "They say second, I say SECOND."
    order = sorted(range(len(numbers)), key=lambda place: -int(numbers[place]))
    return "Ranking: " + " > ".join(str(place + 1) for place in order)


def siblings(reward: RewardFunction, *completions: str, **columns: Any) -> Any:
    """The judge's values of one group, or its exception."""
    given = {"prompts": "2+2"} | columns

    async def ask() -> Any:
        try:
            return await reward.call(list(completions), **given)
        except Exception as error:  # noqa: BLE001 - it is the answer
            return error
        finally:
            await reward.call.aclose()  # type: ignore[attr-defined]

    return asyncio.run(ask())


@pytest.mark.parametrize(("options", "questions"), [({"compare": "pairs"}, 6), ({"compare": "ranking"}, 2)])
def test_siblings_have_the_order_of_the_judge(judge, server: Server, options: Any, questions: int) -> None:
    """Each pair is asked about once in each order; equal completions are a tie about which nobody is asked."""
    server.opinion = better_of
    reward = judge(**options)
    assert (reward.signature.per_group, reward.signature.as_text) == (True, True)
    values = siblings(reward, "4", "9", "2", "4")
    assert values[1] == max(values) and values[2] == min(values) and values[0] == values[3]
    assert {0.0, 1.0} <= set(values) <= {0.0, 0.5, 1.0}
    assert len(server.calls) == questions
    assert siblings(reward, "4") == [None] and siblings(reward, "4", "4") == [0.5, 0.5]
    assert len(server.calls) == questions


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"compare": "pairs"}, "first"),
        ({"compare": "pairs"}, "second"),
        ({"compare": "pairs", "opponents": 2, "choices": {"A": 1.0, "B": 0.0}}, "A"),
        ({"compare": "ranking"}, "1 > 2 > 3 > 4 > 5"),
        ({"compare": "ranking", "orders": 6}, "5 > 4 > 3 > 2 > 1"),
    ],
)
def test_a_judge_that_prefers_a_place_prefers_nobody(judge, server: Server, options: Any, answer: str) -> None:
    """All siblings have the same value, so that the group has no advantages."""
    server.answers = [(200, answer)]
    assert siblings(judge(**options), *"13579") == pytest.approx([0.5] * 5)


def test_a_preference_for_the_first_place_is_averaged_out(judge, server: Server) -> None:
    """A judge that takes the first place in doubt, and is right where the difference is large."""

    def opinion(question: str) -> str:
        first, second = map(int, re.findall(r"<(?:first|second)>\n(\d+)\n", question))
        return better_of(question) if abs(first - second) > 3 else "first"

    server.opinion = opinion
    assert siblings(judge(compare="pairs"), "1", "2", "7", "8") == pytest.approx([1 / 6, 1 / 6, 5 / 6, 5 / 6])


def test_an_answer_that_compares_nothing_is_a_failure(judge, server: Server) -> None:
    server.answers = [(200, "Both are fine.")]
    assert "holds no score" in str(siblings(judge(compare="pairs"), "4", "5"))
    assert "each number from 1 to 2 once" in str(siblings(judge(compare="ranking"), "4", "5"))


def test_comparisons_see_prompt_columns_and_rubric(judge, server: Server) -> None:
    server.answers = [(200, "first")]
    chat = [{"role": "user", "content": "How much is 2+2?"}]
    reward = judge(compare="pairs", rubric="criteria")
    assert (reward.signature.columns, reward.signature.provided) == (("criteria",), ("prompts",))
    siblings(reward, "4", "5", prompts=chat, criteria="- It is right.\n- It is short.")
    question = server.calls[0][1]["messages"][-1]["content"]
    assert "user: How much is 2+2?" in question and "- It is right. (weight 1)\n- It is short. (weight 1)" in question
    siblings(judge(compare="pairs"), "4", "6")
    assert "{rubric}" not in server.calls[-1][1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    ("rubric", "value"),
    [
        ("It is even.\nIt is above 5.", 0.5),
        ([{"criterion": "It is even.", "weight": 3}, {"criterion": "It is above 5.", "weight": 1}], 0.75),
        ([{"description": "It is even.", "points": 2}, {"criterion": "It is a number.", "weight": -1}], 0.5),
        ([{"criterion": "It is above 5.", "weight": 2}, {"criterion": "It is even.", "weight": -1}], 0.0),
        ("  ", "is no list of criteria"),
        ([{"criterion": "It is even.", "weight": -1}], "one weight above 0 at least"),
        ([{"text": "It is even."}], "is no list of criteria"),
        (7, "is no list of criteria"),
    ],
)
def test_a_rubric_is_asked_about_criterion_by_criterion(judge, server: Server, rubric: Any, value: Any) -> None:
    server.opinion = lambda question: "Hm, yes or no? " + ("no" if "It is above 5." in question else "YES")
    (found,) = run(judge(rubric="criteria"), "4", criteria=rubric)
    assert found == value if isinstance(value, float) else value in str(found)


def test_each_step_is_judged_behind_those_before_it(judge, server: Server) -> None:
    server.opinion = lambda question: "yes" if "<step>\n3+3" in question else "no"
    ((first, second),) = run(judge(steps=r"\n+"), "2+2=5\n\n3+3=6\n")
    assert (first, second) == ((0, 7, 0.0), (7, 13, 1.0))
    assert any("<before>\n2+2=5\n\n\n</before>" in body["messages"][-1]["content"] for _, body in server.calls)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compare": "pairs", "orders": 4}, '"orders" has no effect without compare = "ranking"'),
        ({"opponents": 2}, '"opponents" has no effect without compare = "pairs"'),
        ({"compare": "ranking", "orders": 3}, '"orders" = 3 is odd'),
        ({"compare": "pairs", "question": "{first} or {other}?"}, "has no {second}"),
        ({"compare": "pairs", "choices": {"A": 2.0}}, '"choices" has a value outside of 0 to 1'),
        ({"compare": "pairs", "question": "{first}{second}{finish_reason}"}, "which siblings do not share"),
        ({"rubric": "r", "question": "{completion}"}, "has no {criterion}"),
        ({"rubric": "r", "steps": "x"}, "beside compare or rubric"),
        ({"steps": "("}, "is no regular expression"),
        (
            {"compare": "pairs", "question": "{first}{second}{completion}"},
            "names {completion}, and compare shows {first}",
        ),
        ({"compare": "ranking", "question": "{completions}{completion}"}, "compare shows {completions}"),
        ({"compare": "ranking", "choices": {"A": 1.0}}, '"choices" has no effect, because compare = "ranking" reads'),
        ({"compare": "ranking", "highest": 5.0}, '"highest" has no effect, because compare = "ranking" reads ranks'),
        ({"rubric": "r", "score": "(1)"}, '"score" has no effect, because an answer is one of yes, no'),
        ({"choices": {"good": 1.0}, "lowest": -1.0}, '"lowest" has no effect, because an answer is one of good'),
    ],
)
def test_options_that_no_question_uses_are_refused(judge, options: Any, message: str) -> None:
    with pytest.raises(RecipeError) as refused:
        judge(**options)
    assert message in str(refused.value)


def test_equal_questions_are_asked_once_and_kept(judge, server: Server, tmp_path: Path) -> None:
    cache = str(tmp_path / "answers.sqlite")
    assert run(judge(cache=cache), "4", "4", "5", "4") == [0.7] * 4
    assert len(server.calls) == 2
    # Another worker, later: the file knows; another model is another judge.
    assert run(judge(cache=cache), "4") == [0.7]
    assert len(server.calls) == 2
    run(judge(cache=cache, model="n"), "4")
    assert len(server.calls) == 3


def test_an_answer_without_a_score_is_not_kept(judge, server: Server, tmp_path: Path) -> None:
    cache = str(tmp_path / "answers.sqlite")
    server.answers = [(200, "I cannot say"), (200, "Score: 11"), (200, "Score: 8")]
    reward = judge(cache=cache)
    failures = [run(reward, "4")[0] for _ in range(2)]
    assert ["holds no score" in str(failures[0]), "is not in 0 to 10" in str(failures[1])] == [True, True]
    with contextlib.closing(sqlite3.connect(cache)) as kept:
        assert kept.execute("SELECT answer FROM answers").fetchall() == []
    assert run(reward, "4", "4") == [0.8] * 2
    assert len(server.calls) == 3


def test_a_busy_server_is_asked_again(judge, server: Server, monkeypatch) -> None:
    monkeypatch.setattr("streamrl.rewards.served.client._FIRST_WAIT_S", 0.001)
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
    monkeypatch.setattr("streamrl.rewards.served.client._FIRST_WAIT_S", 0.001)
    server.answers = [(status, "because")]
    (error,) = run(judge(retries=2), "4")
    assert isinstance(error, ModelError)
    assert "because" in str(error) and message in str(error)
    assert len(server.calls) == asked


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
                    await other.post(f"{server.root}/idle")
            assert server.at_once == 3
            server.gate.set()
        await reward.call.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())
    assert server.most_at_once == 3


def test_the_key_comes_from_the_environment(judge, server: Server, monkeypatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    run(judge(api_key_variable="JUDGE_KEY"), "4")
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_remote_judges_use_the_proxy_and_local_ones_do_not(judge, server: Server, monkeypatch) -> None:
    """A judge elsewhere is asked through the proxy of the process variables, and one on this host never."""
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", server.root)
    assert run(judge(endpoint=f"{ELSEWHERE}/v1"), "4") == [0.7]
    assert server.routes == [f"{ELSEWHERE}/v1/chat/completions"]
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("http_proxy", f"http://me:secret@{place}")
        assert run(judge(), "4") == [0.7]
        (error,) = run(judge(endpoint=f"{ELSEWHERE}/v1", retries=0), "4")
    assert f"through the proxy {place} (no_proxy" in str(error) and "secret" not in str(error)
    monkeypatch.setenv("no_proxy", "judge.example")
    assert proxy_of(f"{ELSEWHERE}/v1") == ""


# ---- failures ------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[list[tuple[int, str | bytes | None]], str]] = {
    "no JSON": ([(200, b"<html>Bad gateway</html>")], "gave no answer of the OpenAI form: '<html>"),
    "cut JSON": ([(200, b'{"choices": [{"mess')], "gave no answer of the OpenAI form"),
    "no text at all": ([(200, b"\xff\xfe\x00")], "gave no answer of the OpenAI form"),
    "an error with status 200": ([(200, b'{"error": {"message": "overloaded"}}')], "gave no answer of the OpenAI form"),
    "no choices": ([(200, b'{"choices": []}')], "gave no answer of the OpenAI form"),
    "null": ([(200, None)], "wrote no text"),
}


def scored(samples: int, *, trusted: bool = True, limit_s: float = 30.0, **options: Any) -> list[Any]:
    """Outcomes of a group of ``samples`` in the reward runtime, with different policies for failed and for late."""
    reward = Reward(
        function="judge",
        options={"model": "m", "retries": 1, **options},
        trusted=trusted,
        timeout_s=limit_s,
        on_failure=FailurePolicy.DROP_GROUP,
        on_timeout=FailurePolicy.STOP,
    )

    async def score() -> list[Any]:
        async with asyncio.TaskGroup() as tasks:
            rewards = RewardSet([reward], RewardLimits(), load_tokenizer(str(SORT)), tasks)
            await rewards.open()
            try:
                return list(await rewards.score([trajectory(n, tokens=(4 + n, 2)) for n in range(samples)]))
            finally:
                await rewards.aclose()

    return asyncio.run(score())


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.rewards.served.client._FIRST_WAIT_S", 0.001)


def assert_failed(outcome: Any, kind: RewardFailureKind, policy: FailurePolicy, message: str) -> None:
    assert isinstance(outcome, RewardFailure), outcome
    assert (outcome.kind, outcome.policy, outcome.function) == (kind, policy.value, "judge")
    assert message in outcome.message


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("soon")
def test_a_fault_of_the_server_is_a_failure_and_never_a_value(server: Server, fault: str) -> None:
    answers, message = FAULTS[fault]
    server.answers = list(answers)
    for outcome in scored(2, endpoint=f"{server.root}/v1"):
        assert_failed(outcome, RewardFailureKind.RAISED, FailurePolicy.DROP_GROUP, message)


@pytest.mark.usefixtures("soon")
def test_a_server_that_hangs_up_refuses_or_says_nothing(server: Server) -> None:
    server.gate.clear()
    (silent,) = scored(1, endpoint=f"{server.root}/v1", timeout_s=0.05)
    assert_failed(silent, RewardFailureKind.RAISED, FailurePolicy.DROP_GROUP, "cannot be reached after 2 attempts")
    assert "ReadTimeout" in silent.message
    (late,) = scored(1, endpoint=f"{server.root}/v1", limit_s=0.1)
    assert_failed(late, RewardFailureKind.TIMED_OUT, FailurePolicy.STOP, "0.1 s")
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        (refused,) = scored(1, endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
    assert_failed(refused, RewardFailureKind.RAISED, FailurePolicy.DROP_GROUP, "cannot be reached after 2 attempts")
    with hanging_up() as address:
        (broken,) = scored(1, endpoint=f"{address}/v1")
    assert_failed(broken, RewardFailureKind.RAISED, FailurePolicy.DROP_GROUP, "cannot be reached after 2 attempts")


@contextlib.contextmanager
def hanging_up() -> Iterator[str]:
    """A server that closes every connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    listening.accept()[0].close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        over.set()
        thread.join()


def test_a_fault_in_a_process_of_its_own(server: Server) -> None:
    """As every judge is that the recipe does not trust."""
    server.answers = [(200, b"<html>")]
    (outcome,) = scored(1, trusted=False, endpoint=f"{server.root}/v1")
    assert_failed(outcome, RewardFailureKind.RAISED, FailurePolicy.DROP_GROUP, "gave no answer of the OpenAI form")


# ---- the run's own judge -------------------------------------------------------------------------


class OwnServer(Server):
    """At a socket file, as the run's own judge is."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.socket.close()
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(path))
        self.socket.listen()

    def get_request(self) -> tuple[socket.socket, Any]:
        return self.socket.accept()[0], ("judge", 0)


@contextlib.contextmanager
def serving(listening: Server) -> Iterator[Server]:
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield listening
    finally:
        listening.gate.set()
        listening.shutdown()
        thread.join()
        listening.server_close()


@pytest.mark.usefixtures("soon")
def test_without_endpoint_the_runs_own_judge_is_asked(make, monkeypatch, tmp_path: Path) -> None:
    """Without an endpoint the run's own judge is asked, and waited for."""
    path = tmp_path / "http"
    monkeypatch.setenv(JUDGE_SOCKET, str(path))
    monkeypatch.setenv(JUDGE_MODEL, "/models/judge")
    reward = make("judge", retries=0)

    async def scenario() -> float:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(reward.call("4", prompt=""))
            await asyncio.sleep(0)  # it has died, and is being started again
            with serving(OwnServer(path)) as server:
                value = await asked
                await reward.call.aclose()  # type: ignore[attr-defined]
        ((route, body),) = server.calls
        assert (route, body["model"]) == ("/v1/chat/completions", "/models/judge")
        return value

    assert asyncio.run(scenario()) == 0.7


def test_an_unreachable_judge_is_refused_at_its_making(make, monkeypatch, tmp_path: Path) -> None:
    """A judge that cannot be asked is refused when it is made."""

    def refused(**options: Any) -> str:
        with pytest.raises(RecipeError) as caught:
            make("judge", **options)
        return str(caught.value)

    assert '"model" is empty: give the name' in refused(endpoint="http://h:1/v1")
    assert 'option "model" = "m" has no endpoint: set it, or name the model in [judge]' in refused(model="m")
    assert "is no address: write it as http://host:8000/v1" in refused(endpoint="h:1", model="m")
    assert '"http://h:99999/v1" is no address' in refused(endpoint="http://h:99999/v1", model="m")
    assert '"...@h/v1" has a name or password' in refused(endpoint="http://me:secret@h/v1", model="m")
    assert "nothing can be made in" in refused(cache=str(tmp_path / "missing" / "answers.sqlite"))
    reward = make("judge")  # a recipe is looked at: where the judge will be is not known yet
    (error,) = run(reward, "4")
    assert "there is nobody to ask: set endpoint" in str(error)
    monkeypatch.setenv(JUDGE_SOCKET, "")
    assert "this run has no judge of its own" in refused()
