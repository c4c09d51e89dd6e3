"""The page's server, on directories of runs: what it answers, what it refuses, and what a live client gets."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.trace_header import trace_header
from starlette.testclient import TestClient

from streamrl.base.errors import StreamRLError
from streamrl.base.line_file import LineFile
from streamrl.observe.dashboard import live_events
from streamrl.observe.dashboard.chrome_trace import trace_run
from streamrl.observe.dashboard.live_events import LiveEvents, news, place_of, read_place
from streamrl.observe.dashboard.report_page import _inlined
from streamrl.observe.dashboard.run_view import RunView
from streamrl.observe.dashboard.server import DashboardServer, serve
from streamrl.observe.dashboard.timeline_columns import COLUMNS, TimelineColumns, block_means, most_at_once
from streamrl.observe.report.trajectory_trace import EnginesLine, EventLine, StepLine, TrajectoryLine, TrajectoryTrace
from streamrl.observe.run_files.run_reader import RunFiles

HOSTILE = "</script><img src=x onerror=alert(1)><!--"


def trajectory(launched: float, rollout: float, ended: float, **fields: Any) -> TrajectoryLine:
    values: dict[str, Any] = {"prompt_id": "p-1", "group": 1, "sample": 0, "attempt": 0, "prompt_tokens": 5}
    values |= {"tokens": 10, "finish_reason": "stop", "outcome": "trained", "round_kind": "long", "engine": "engine-0"}
    values |= {"launched_s": launched, "rollout_s": rollout, "ended_s": ended, "reward_s": 0.1, "reward": 1.0}
    return TrajectoryLine(**values | fields)


def step(version: int, time_s: float) -> StepLine:
    figures = {"step_s": 2.0, "rollout_s": 1.5, "training_s": 0.3, "push_s": 0.2, "group_size": 2.0}
    counts = {"samples": 2, "trained_tokens": 20, "generated_tokens": 30}
    return StepLine(time_s=time_s, policy_version=version, round_kind="long", **figures, **counts)  # type: ignore[arg-type]


def metrics(number: int, **values: float | None) -> dict[str, Any]:
    line = {"kind": "step", "time": 1000.0 + number, "step": number, "policy_version": number, "time/step_s": 2.0}
    return line | {"perf/train_tok_s": 10.0, "util/wait_reason/tail": 0.25} | values


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of four trajectories, an evaluation, and samples with a hostile text."""
    directory = tmp_path / "runs" / "sort-20261126-101500"
    (directory / "evaluations").mkdir(parents=True)
    (directory / "logs").mkdir()
    (directory / "logs" / "engine-0.log").write_text("a line\n")
    (directory / "recipe.toml").write_text('[run]\nname = "sort"\nsteps = 9\n[engines]\nkind = "simulated"\n')
    trace = TrajectoryTrace(directory / "trace.jsonl", trace_header(engines=2))
    trace.append(trajectory(1.0, 1.0, 4.0, sample=1, queued_s=0.25, returned_s=2.5))
    trace.append(trajectory(0.5, 3.0, 4.0, engine="engine-1", paused_s=0.5, returned_s=4.0, reward=None))
    trace.append(EnginesLine(time_s=1.5, running=2, waiting=1, kv_usage=0.5), step(1, 4.0))
    trace.append(trajectory(2.0, 1.0, 5.0, outcome="lost_race", prompt_id="p-2", tokens=40), step(2, 6.0))
    trace.append(EventLine(time_s=4.0, kind="evaluation", step=1, seconds=0.5), trajectory(4.5, 1.0, 6.0))
    trace.append(EventLine(time_s=6.0, kind="alarm", text=HOSTILE, step=2))
    others = (("resumed", ""), ("engine back", "engine-0, 2 s after it was missed"), ("drain", ""))
    trace.append(*(EventLine(time_s=6.0, kind=kind, text=text, step=2) for kind, text in others))
    trace.close()
    lines = LineFile(directory / "metrics.jsonl")
    lines.append(metrics(1, **{"reward/mean": 0.5}), metrics(2, **{"reward/mean": None, "mine/part": 3.0}))
    lines.append({"kind": "evaluation", "time": 1003.0, "step": 1, "policy_version": 1, "eval/held_out/avg@1": 0.5})
    lines.close()
    samples = LineFile(directory / "samples.jsonl")
    fields = {"chosen": "best", "rewards": {"f": 1.0}, "tokens": 3, "finish_reason": "stop"}
    samples.append({"step": 1, "prompt_id": "p-1", "prompt": "one", "text": HOSTILE, "reward": 1.0} | fields)
    samples.append({"step": 2, "prompt_id": "p-2", "prompt": "two", "text": "b", "reward": 0.0} | fields)
    samples.close()
    whose = {"step": 1, "number": 0, "prompt_id": "h", "sample": 0, "tokens": 2, "token_ids": [1, 2]}
    scored = {"reward": 0.5, "rewards": {"f": 0.5}, "prompt": "two held", "text": "c", "finish_reason": "stop"}
    answers = [whose | scored, whose | {"reward": None, "failure": "f raised: no"}]
    content = b"".join(msgspec.json.encode(line) + b"\n" for line in answers)
    (directory / "evaluations" / "step-000001.jsonl").write_bytes(content)
    return directory


def client(*places: Path) -> TestClient:
    return TestClient(DashboardServer(places).app(), base_url="http://127.0.0.1:7788", raise_server_exceptions=False)


def read_block(content: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Head and columns of a block, as the page reads them."""
    start = 4 + int.from_bytes(content[:4], "little")
    head, columns = json.loads(content[4:start]), {}
    for column in head["columns"]:
        start = -(-start // 8) * 8
        size = int(column["type"][1]) * head["count"]
        columns[column["name"]] = np.frombuffer(content[start : start + size], dtype=column["type"])
        start += size
    start = -(-start // 8) * 8
    columns["moments"] = np.frombuffer(content[start : start + 4 * head["moments"]], dtype="f4")
    start += 4 * head["moments"]
    assert -(-start // 8) * 8 == len(content)
    return head, columns


def test_the_block_has_every_trajectory_in_the_order_of_launches(run: Path) -> None:
    head, columns = read_block(client(run).get("/api/runs/0/timeline").content)
    assert list(columns) == [*COLUMNS, "moments"] and head["count"] == 4
    assert columns["launched"].tolist() == [0.5, 1.0, 2.0, 4.5]
    assert columns["begun"].tolist() == [0.5, 1.25, 2.0, 4.5]
    assert columns["rollout_end"].tolist() == [4.0, 2.0, 3.0, 5.5], "a pause is between launch and last token"
    assert columns["reward_end"][:3] == pytest.approx([4.0, 2.5, 3.1]), "of an old trace it is worked out"
    assert [head["outcomes"][number] for number in columns["outcome"]] == ["trained", "trained", "lost_race", "trained"]
    assert [head["prompts"][number] for number in columns["prompt"]] == ["p-1", "p-1", "p-2", "p-1"]
    assert np.isnan(columns["reward"][0]) and columns["reward"][1] == 1.0
    engine = [slot["engine"] for slot in head["slots"] for _ in range(slot["lanes"])]
    assert [engine[slot] for slot in columns["slot"]] == ["engine-1", "engine-0", "engine-0", "engine-0"]
    assert [(line["step"], line["round_kind"]) for line in head["steps"]] == [(1, "long"), (2, "long")]
    assert head["engines"] == {"time_s": [1.5], "running": [2], "waiting": [1], "kv_usage": [0.5]}
    assert [(one["kind"], one.get("end_s")) for one in head["events"]][:2] == [("evaluation", 4.5), ("alarm", None)]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.booleans()), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(SPANS, st.integers(1, 4))
def test_no_two_trajectories_are_on_a_slot_at_once(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int, bool]], parts: int
) -> None:
    directory = tmp_path_factory.mktemp("run")
    trace = TrajectoryTrace(directory / "trace.jsonl", trace_header(capacity=0))
    columns, known = TimelineColumns(RunFiles(directory)), np.array([], dtype="u2")
    for part in range(parts):
        for since, length, other in spans[part::parts]:
            trace.append(trajectory(since, length, since + length, engine=f"engine-{int(other)}", returned_s=99.0))
        columns.refresh()
        slots = columns.column("slot")
        assert (slots[: len(known)] == known).all(), "a slot is for ever"
        known = slots
    trace.close()
    engines = [slot["engine"] for slot in columns.names()["slots"] for _ in range(slot["lanes"])]
    launched, left = columns.column("launched"), columns.column("rollout_end")
    for slot in set(known.tolist()):
        order = np.argsort(launched[known == slot])
        assert (left[known == slot][order][:-1] <= launched[known == slot][order][1:]).all()
    if parts == 1:
        assert len(engines) == sum(
            most_at_once(launched[here], left[here])
            for name in set(engines)
            for here in [np.array([engines[slot] == name for slot in known])]
        ), "no more slots than ran at once"


def test_lines_of_another_version_and_half_a_line_are_left_out(run: Path) -> None:
    with (run / "trace.jsonl").open("ab") as file:
        line = msgspec.json.encode(trajectory(9.0, 0.5, 9.5))
        file.write(line[:-1] + b',"of_tomorrow":1}\n{"type":"new"}\n{"type":"tra')
    assert client(run).get("/api/runs/0/timeline").content[4:].startswith(b'{"count":5')
    (note,) = client(run).get("/api/runs/0/details").json()["notes"]
    assert note.startswith("1 lines of ")


def test_metrics_waits_lengths_and_details(run: Path) -> None:
    page = client(run)
    found = page.get("/api/runs/0/metrics").json()
    assert found["step"] == [1, 2] and found["trained_tokens"] == [20.0, 40.0]
    assert found["values"]["reward/mean"] == [0.5, None] and found["values"]["mine/part"] == [None, 3.0]
    assert found["evaluations"]["values"] == {"eval/held_out/avg@1": [0.5]}
    assert found["help"]["reward/mean"] == "Total reward over the samples that were trained. (reward, mean)"
    assert "mine/part" not in found["help"]
    assert page.get("/api/runs/0/metrics?after=1").json()["step"] == [2]
    waits = page.get("/api/runs/0/waits").json()
    assert waits["reasons"] == {"tail": [0.5, 0.5]} and waits["bubble_step"] == [None, None]
    lengths = page.get("/api/runs/0/lengths").json()
    assert [list(map(sum, lengths[name])) for name in ("sampled", "trained")] == [[3, 1], [2, 1]]
    assert lengths["step"] == [1, 2] and lengths["edges"][-1] == 40
    details = page.get("/api/runs/0/details").json()
    assert details["alarms"] == [{"step": 2, "time_s": 6.0, "text": HOSTILE}]
    assert details["log_tail"] == {"engine-0": "a line\n"} and "[run]" in details["recipe"]
    assert details["processes"] == [{"name": "engine-0", "restarts": 1, "state": "stopped"}] and details["drained"]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(metrics(2, **{"reward/mean": 0.75})) + b"\n")
    assert client(run).get("/api/runs/0/metrics").json()["values"]["reward/mean"] == [0.5, 0.75], "it made step 2 again"
    trace = TrajectoryTrace(run / "trace.jsonl", trace_header(), goes_on=True)
    trace.append(step(2, 9.0))
    trace.close()
    steps = read_block(client(run).get("/api/runs/0/timeline").content)[0]["steps"]
    assert [(one["step"], one["time_s"]) for one in steps] == [(1, 4.0), (2, 9.0)]


@pytest.mark.parametrize(
    ("asked", "total", "texts"),
    [
        ("", 4, ["b", HOSTILE, "c", ""]),
        ("step=1", 3, [HOSTILE, "c", ""]),
        ("least=0.5", 2, [HOSTILE, "c"]),
        ("most=0.4", 1, ["b"]),
        ("prompt=two", 2, ["b", "c"]),
        ("prompt=p-1", 1, [HOSTILE]),
        ("offset=1&limit=2", 4, [HOSTILE, "c"]),
        ("step=7", 0, []),
    ],
)
def test_samples_are_filtered(run: Path, asked: str, total: int, texts: list[str]) -> None:
    found = client(run).get(f"/api/runs/0/samples?{asked}").json()
    assert found["total"] == total and [row.get("text", "") for row in found["rows"]] == texts


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs/1/waits", 404, "there is no run 1"),
        ("/api/runs/0/metrics?after=x", 400, "after must be a whole number"),
        ("/api/runs/0/samples?least=x", 400, "Expected `float`"),
        ("/api/compare?runs=0,x", 400, "numbers with commas"),
        ("/api/runs/-1/waits", 404, ""),
        ("/assets/../server.py", 404, ""),
        ("/assets/..%2fserver.py", 404, ""),
        ("/assets/%2e%2e%2f%2e%2e%2fsinks.py", 404, ""),
        ("/assets/metrics.txt", 404, "no such file"),
    ],
)
def test_other_paths_are_refused_in_a_sentence(run: Path, path: str, status: int, text: str) -> None:
    answer = client(run).get(path)
    assert answer.status_code == status and text in answer.text and "import" not in answer.text


def test_only_this_host_is_answered(run: Path) -> None:
    """Only requests of this host are answered, and no script in a text can run."""
    page = client(run)
    assert page.get("/api/runs", headers={"Host": "evil.example:7788"}).status_code == 400
    assert page.get("/api/runs", headers={"Host": "localhost:7000"}).status_code == 200
    assert page.post("/api/runs").status_code == 405
    policy = page.get("/api/runs").headers["content-security-policy"]
    assert "script-src 'self';" in policy and "unsafe" not in policy and policy.startswith("default-src 'none'")


def test_unfinished_runs_are_shown(run: Path) -> None:
    """Runs whose files are incomplete are shown, and a folder that is no run is refused."""
    (run / "recipe.toml").unlink()
    (run / "trace.jsonl").unlink()
    (listed,) = client(run).get("/api/runs").json()
    assert (listed["name"], listed["step"], listed["steps"], listed["state"]) == (run.name, 2, None, "stopped")
    assert read_block(client(run).get("/api/runs/0/timeline").content)[0]["count"] == 0
    assert client(run).get("/api/runs/0/lengths").json()["sampled"] == []
    with pytest.raises(StreamRLError, match="is not the directory of a run"):
        DashboardServer([run.parent / "none"]).views()


def test_a_run_has_the_steps_that_it_was_given_last(run: Path) -> None:
    lines = LineFile(run / "metrics.jsonl")
    for steps, state in ((3.0, "finished"), (7.0, "stopped")):
        lines.append(metrics(3, **{"run/steps": steps}))
        (listed,) = client(run).get("/api/runs").json()
        assert (listed["step"], listed["steps"], listed["state"]) == (3, steps, state)
    lines.close()


def test_a_run_that_begins_later_gets_the_next_number(run: Path) -> None:
    page = client(run.parent)
    assert [one["run_id"] for one in page.get("/api/runs").json()] == [run.name]
    (run.parent / "a-20261125-101500").mkdir()
    (run.parent / "a-20261125-101500" / "recipe.toml").write_text("[run]\nsteps = 9\nname = 'a'\n")
    assert [(one["run"], one["name"]) for one in page.get("/api/runs").json()] == [(0, "sort"), (1, "a")]
    differences = page.get("/api/compare?runs=0,1").json()["recipe_differences"]
    assert {"key": "run.name", "values": ["sort", "a"]} in differences
    assert {"key": "engines.kind", "values": ["simulated", None]} in differences


def test_a_port_in_use_is_one_sentence(run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(StreamRLError, match="give another one with"):
        serve([run], other.getsockname()[1], print)


def test_a_client_gets_each_trajectory_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gets each trajectory once, and continues from its last event."""
    rows: list[int] = []
    made = live_events.step_row
    monkeypatch.setattr(live_events, "step_row", lambda step: rows.append(step.policy_version) or made(step))
    view = RunView(0, RunFiles(run))
    view.refresh()
    place = read_place(msgspec.json.encode(place_of(view)).decode())
    assert place is not None and list(news(view, place)) == []
    trace = TrajectoryTrace(run / "trace.jsonl", trace_header(), goes_on=True)
    trace.append(trajectory(7.0, 1.0, 9.0, prompt_id="p-3"), step(3, 9.0), EventLine(time_s=9.0, kind="push"))
    view.timeline.refresh()
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(metrics(3)) + b"\n")
    view.metrics.refresh()
    found = dict(news(view, place))
    assert found["step"]["step"] == 3 and found["step"]["time_s"] == 9.0 and found["event"]["kind"] == "push"
    assert found["trajectories"]["first"] == 4 and found["trajectories"]["prompts"] == ["p-3"]
    ((*_, newest),) = found["trajectories"]["rows"]
    assert len(found["trajectories"]["rows"][0]) == len(COLUMNS) and newest == []
    assert list(news(view, place)) == [] and rows == [3], "no row of a step is made again"
    trace.close()
    assert read_place("[0,1,1,1,1,1,1,1]") is None and read_place("x") is None, "of another server"


async def test_a_client_that_takes_nothing_is_left(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_events, "SLOW_S", 0.05)
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if len(sent) > 1:
            await anyio.sleep_forever()

    async def receive() -> Any:
        await anyio.sleep_forever()

    view = RunView(0, RunFiles(run))
    with anyio.fail_after(20):
        await LiveEvents(view, None, {})({"type": "http"}, receive, send)
    assert sent == ["http.response.start", "http.response.body"]


def test_a_report_runs_its_own_scripts_alone(run: Path) -> None:
    """A report holds texts as data and runs its own scripts alone."""
    files = {
        "index.html": b'<head></head><link rel="stylesheet" href="/assets/a.css"><script src="/assets/a.js"></script>',
        "a.css": b"p{}",
        "a.js": b'"</script>"',
    }
    page = _inlined(files, {"/api/runs": [{"name": HOSTILE}]}).decode()
    assert HOSTILE not in page and "<img" not in page and "/assets/" not in page and "<style>p{}</style>" in page
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in page
    data = scripts[0].removeprefix("window.STREAMRL_REPORT = ").removesuffix(";")
    assert json.loads(data) == {"/api/runs": [{"name": HOSTILE}]}


def test_a_chrome_trace_has_trajectories_steps_and_events(run: Path) -> None:
    """A Chrome trace has trajectories on their engines, steps and events."""
    timeline = TimelineColumns(RunFiles(run))
    timeline.refresh()
    trace, left_out = trace_run("sort", timeline)
    events = json.loads(trace.encoded())["traceEvents"]
    assert left_out == 0 and [one["args"]["name"] for one in events if one["ph"] == "M"] == [
        "sort: steps", "sort: engine-0", "sort: engine-1",
    ]  # fmt: skip
    spans = {one["name"]: one for one in _spans(events)}
    assert spans["1.1"]["pid"] == 2 and spans["1.1"]["dur"] == pytest.approx(1e6)
    assert spans["long rollout"]["args"]["samples"] == 2 and spans["alarm"]["args"]["text"] == HOSTILE
    assert sum(name in spans for name in ("training", "push", "evaluation")) == 3


def test_turns_and_environment_times_are_shown(run: Path) -> None:
    """Turns and the times in the environment between them are in columns, live rows and the Chrome trace."""
    trace, turns = TrajectoryTrace(run / "trace.jsonl", trace_header(), goes_on=True), (0.5, 1.0, 2.0, 2.25, 2.5)
    times = ((3, 0.5, 7, 0.5), (4, 1.0, 3, 0.25), (0, 0.25, 0, 0.0))
    trace.append(trajectory(0.25, 2.5, 6.0, group=7, turns=times, returned_s=3.0, queued_s=0.5))
    trace.close()
    columns = read_block(client(run).get("/api/runs/0/timeline").content)[1]
    assert columns["moments"].tolist() == [0.0, 5.0, *turns]
    assert columns["turns"].tolist() == [1, 0, 0, 0, 0], "in the order of launches; 0: one completion"
    timeline = TimelineColumns(RunFiles(run))
    timeline.refresh()
    assert [row[-1] for row in timeline.rows(3, 5)] == [[], list(turns)]
    slices = [
        (one["name"], round(one["ts"] / 1e6, 3), round(one["dur"] / 1e6, 3))
        for one in _spans(json.loads(trace_run("sort", timeline)[0].encoded())["traceEvents"])
        if one["name"] == "environment" or one["name"].startswith("turn ")
    ]
    assert slices == [
        ("environment", 0.25, 0.5), ("turn 0", 0.75, 0.5), ("environment", 1.25, 1.0), ("turn 1", 2.25, 0.25),
        ("environment", 2.5, 0.25),
    ]  # fmt: skip


def _spans(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (one for one in events if one["ph"] == "X")


def test_gauges_of_a_long_run_are_means() -> None:
    """One value of so many would show a rhythm of its own: a gauge that is 1 in every second line is 0.5."""
    assert block_means(array("f", [1, 0, 1, 0, 1]), 2) == [0.5, 0.5, 1.0]
    assert block_means(array("f"), 2) == []
