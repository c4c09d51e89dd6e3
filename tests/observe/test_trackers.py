"""Trackers that follow a run's files: what the real stores have afterwards, whatever was killed, full or stuck."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import psutil
import pytest
from builders.files import EXAMPLES

from campaigns.followers import READERS
from lint.metrics_page import METRICS
from streamrl.base.atomic_files import remove_oldest
from streamrl.base.errors import StreamRLError
from streamrl.base.line_file import LineFile
from streamrl.observe.run_files.file_sizes import SHARES, most_bytes
from streamrl.observe.trackers import follower
from streamrl.observe.trackers.available_trackers import make_tracker, tracker_problems
from streamrl.observe.trackers.prometheus import Prometheus, name_and_labels
from streamrl.observe.trackers.tracker import RunInfo, Tracker
from streamrl.observe.trackers.tracker_check import check_tracker
from streamrl.observe.trackers.trackio import _hashes
from streamrl.observe.trackers.wandb import Rows
from streamrl.processes import restart_policy
from streamrl.processes import tracker_processes as tracker_processes_module
from streamrl.processes.log_files import LogFiles
from streamrl.processes.tracker_processes import Followers

FOLLOWER = [sys.executable, "-P", "-m", "streamrl.observe.trackers"]
GRAFANA = EXAMPLES / "grafana" / "streamrl.json"
WITHOUT_KEY = {"WANDB_API_KEY": "", "NETRC": "/nonexistent"}


class WrittenRun:
    """Files of a run of 30 steps that are written here, as the run would."""

    def __init__(self, directory: Path, most_bytes: int = 0) -> None:
        self.directory = directory
        (directory / "evaluations").mkdir(parents=True)
        recipe = '[run]\nname = "x"\nsteps = 30\nproject = "p"\n[model]\npath = "m"\n'
        (directory / "recipe.toml").write_text(recipe)
        names = ("metrics", "samples", "trace")
        self.files = [LineFile(directory / f"{name}.jsonl", most_bytes=most_bytes) for name in names]

    def write(self, step: int) -> None:
        """The evaluation of a tenth step ends two steps later."""
        metrics, samples, trace = self.files
        rewards = {"f": 0.5} if step < 30 else {"g": 0.5}  # one that was attached later
        one = {"prompt_id": "p", "prompt": "<b>|", "text": "2\n3", "reward": 0.5, "rewards": rewards, "tokens": 2}
        samples.append(*({"step": step, "chosen": kind, "finish_reason": "stop"} | one for kind in "abc"))
        trajectory = {"type": "trajectory", "outcome": "trained", "reward": 0.5, "oldest_version": step - 2}
        trace.append(*(trajectory | {"tokens": n} for n in range(8)), {"type": "step", "policy_version": step})
        metrics.append({"kind": "step", "time": 1e9 + step, "step": step, "reward/mean": step / 30, "nan": None})
        if step % 10 == 2 and step > 10:
            line = one | {"step": step - 2, "text": "<img src=x>", "finish_reason": "stop"}
            path = self.directory / "evaluations" / f"step-{step - 2:06d}.jsonl"
            path.write_text("".join(json.dumps(line | {"sample": n}) + "\n" for n in range(80)))
            metrics.append({"kind": "evaluation", "time": 1e9, "step": step - 2, "eval/held_out/avg@1": 0.5})
            trace.append({"type": "event", "kind": "checkpoint", "text": "saved", "step": step})

    def close(self) -> None:
        for file in self.files:
            file.close()


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Callable[..., WrittenRun]]:
    runs: list[WrittenRun] = []

    def make(**options: int) -> WrittenRun:
        runs.append(WrittenRun(tmp_path / "x-20261126-101500", **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def sync(
    run: Path, tracker: str, *, before: str = "", variables: Mapping[str, str] = WITHOUT_KEY
) -> subprocess.CompletedProcess[str]:
    code = f"{before}\nfrom streamrl.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", f"import sys\n{code}", "sync", str(run), "--to", tracker]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=os.environ | variables)


def is_whole(found: dict[str, list[int]], last: int = 30) -> None:
    steps = [*range(1, last + 1)]
    assert found["reward/mean"] == steps and found["eval/held_out/avg@1"] == [10, 20], found
    assert found["samples/training"] == [1, 10, 20, 30][: 1 + last // 10] and found["samples/evaluation"] == [10, 20]
    assert all(found[f"histogram/{name}"] == steps for name in ("reward", "completion/length", "async/staleness"))
    assert found["event/checkpoint"] == [12, 22] and "nan" not in found


@pytest.mark.long
@pytest.mark.parametrize("tracker", READERS)
def test_a_finished_run_is_sent_once(tracker: str, written: Callable[..., WrittenRun]) -> None:
    """Then a kill between what the tracker wrote and the move of the cursor, which wandb's files do not show."""
    run = written()
    for step in range(1, 11):
        run.write(step)
    first = sync(run.directory, tracker)
    assert (first.returncode, first.stdout) == (0, f"{tracker}: 130 lines were sent\n"), first.stderr
    cursor = run.directory / "trackers" / f"{tracker}.cursor"
    early = cursor.read_bytes()
    for step in range(11, 31):
        run.write(step)
    second = sync(run.directory, tracker)
    assert (second.returncode, "torch" in second.stderr) == (0, False), second.stderr
    is_whole(READERS[tracker](run.directory))
    assert sync(run.directory, tracker).stdout == f"{tracker}: 0 lines were sent\n"
    if tracker == "wandb":
        tables = [json.loads(path.read_bytes()) for path in run.directory.glob("wandb/*/files/media/table/samples/tr*")]
        assert sorted((table["columns"][-1], len(table["data"])) for table in tables) == [("f", 3)] * 3 + [("g", 3)]
    else:
        cursor.write_bytes(early)
        assert sync(run.directory, tracker).returncode == 0
        is_whole(READERS[tracker](run.directory))


class _NeverReady(BaseHTTPRequestHandler):
    """A server of wandb behind a proxy that has lost it."""

    def do_GET(self) -> None:
        self.send_error(503)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.long
@pytest.mark.parametrize("behind", ["a closed port", "a proxy that answers 503"])
def test_wandb_without_its_server_writes_files(behind: str, written: Callable[..., WrittenRun]) -> None:
    """Hosts of a cluster have a key and no way to the server: the files of ``wandb sync`` are written at once."""
    run = written()
    for step in range(1, 4):
        run.write(step)
    with ThreadingHTTPServer(("127.0.0.1", 0), _NeverReady) as server:
        thread = threading.Thread(target=server.serve_forever)
        address = f"http://127.0.0.1:{server.server_address[1]}"
        if behind == "a closed port":
            address = "http://127.0.0.1:9"
        thread.start()
        variables = {"WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": address, "WANDB_INIT_TIMEOUT": "3"}
        sent = sync(run.directory, "wandb", variables=variables)
        server.shutdown()
        thread.join()
    assert (sent.returncode, sent.stdout) == (0, "wandb: 39 lines were sent\n"), sent.stderr
    assert "files are written, which wandb sync sends later" in sent.stderr
    assert READERS["wandb"](run.directory)["reward/mean"] == [1, 2, 3]


@pytest.mark.long
@pytest.mark.parametrize(("tracker", "kills"), [("tensorboard", 20), ("trackio", 4)])
def test_a_follower_that_is_killed_misses_and_repeats_no_step(
    tracker: str, kills: int, written: Callable[..., WrittenRun]
) -> None:
    """While the files it follows grow and rotate."""
    run, chance = written(most_bytes=6000), random.Random(kills)
    steps = iter(range(1, 31))
    for n in range(kills + 1):
        with subprocess.Popen([*FOLLOWER, tracker, str(run.directory)], stdin=subprocess.PIPE) as follower:
            assert follower.stdin is not None
            for step in steps:
                run.write(step)
                if step >= (n + 1) * 30 // kills:
                    break
            if n < kills:
                time.sleep(chance.uniform(0.2, 1.5))
                follower.kill()
            else:
                follower.stdin.close()
                assert follower.wait() == 0
    found = READERS[tracker](run.directory)
    assert found["reward/mean"] == [*range(1, 31)] and found["eval/held_out/avg@1"] == [10, 20]


@pytest.mark.long
@pytest.mark.parametrize(
    ("tracker", "most_bytes", "said"),
    [
        ("tensorboard", 3000, "File too large"),
        ("trackio", 100_000, "this batch could not be persisted"),
        ("wandb", 40_000, ".wandb for 2 s: is its disk full?"),
    ],
)
def test_a_full_disk_ends_the_follower_without_gaps(
    tracker: str, most_bytes: int, said: str, written: Callable[..., WrittenRun]
) -> None:
    """A full disk ends the follower, and no tracker has a gap."""
    run = written()
    for step in range(1, 31):
        run.write(step)
    full = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, resource.RLIM_INFINITY))"
    if tracker == "wandb":
        full += "; import streamrl.observe.trackers.wandb as tried; tried._WRITTEN_S = 2.0"
    refused = sync(run.directory, tracker, before=full)
    assert refused.returncode == 1 and said in refused.stderr, refused.stderr
    torn = [*run.directory.glob("wandb/offline-run-*/*.wandb")]
    for path in torn:  # and one of a process that was killed at its start
        (empty := path.parent.with_name("offline-run-0-x")).mkdir()
        (empty / path.name).write_bytes(path.read_bytes()[:7])
    assert sync(run.directory, tracker).returncode == 0
    is_whole(READERS[tracker](run.directory))
    if tracker == "wandb":  # wandb sync ends at a file that has nothing, or half a record
        files = [Rows(path) for path in run.directory.glob("wandb/offline-run-*/*.wandb")]
        assert all([*file.read()] and file.end == file.path.stat().st_size for file in files) and len(files) == 2


def test_completions_of_an_evaluation_wait_for_their_file(
    written: Callable[..., WrittenRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completions of an evaluation are sent when their file is there. The run writes it after the line. One of an
    earlier evaluation of that step is none, and the cursor waits."""
    run, sent = written(), []
    path, cursor = run.directory / "evaluations" / "step-000010.jsonl", run.directory / "trackers" / "notes.cursor"
    line = {"step": 10, "prompt_id": "p", "prompt": "q", "reward": 1.0, "rewards": {}, "tokens": 1, "finish_reason": ""}

    class Notes(Tracker):
        def samples(self, step: int, kind: str, rows: Any) -> None:
            sent.append((step, kind, rows[0].text))

    def begin() -> None:
        path.write_text(json.dumps(line | {"text": "old"}))
        os.utime(path, (1e9, 1e9))
        run.files[0].append({"kind": "evaluation", "time": time.time(), "step": 10})

    def go_on() -> None:
        assert sent == [] and not cursor.exists()
        run.files[0].append({"kind": "step", "time": time.time(), "step": 11})

    def store() -> None:
        assert sent == [] and not cursor.exists()
        path.write_text(json.dumps(line | {"text": "new"}))

    def end() -> bool:
        assert sent == [(10, "evaluation", "new")] and cursor.exists()
        return True

    monkeypatch.setattr(follower, "make_tracker", lambda name: Notes())
    monkeypatch.setattr(follower, "_POLL_S", 0.0)
    moves = iter([begin, go_on, store, end])
    assert follower.follow_run(run.directory, "notes", lambda: bool(next(moves)())) == 2 and len(sent) == 1
    run.files[0].append({"kind": "evaluation", "time": time.time(), "step": 20})
    assert [follower.follow_run(run.directory, "notes", lambda: True) for _ in range(2)] == [1, 1], "its file may come"
    run.files[0].append({"kind": "evaluation", "time": 1e9, "step": 20})  # of a run that was killed before it came
    assert [follower.follow_run(run.directory, "notes", lambda: True) for _ in range(2)] == [2, 0]


def test_other_databases_in_the_folder_of_trackio_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database" * 100)
    for name, columns in (("a", "other"), ("p", "step, metrics, run_name")):
        with closing(sqlite3.connect(tmp_path / f"{name}.db")) as database, database:
            database.execute(f"CREATE TABLE {'metrics' if name == 'p' else 'other'} ({columns})")
            if name == "p":
                database.execute("""INSERT INTO metrics VALUES (3, '{"loss": 1}', 'r')""")
    assert _hashes(tmp_path, "r") == {hash((3, frozenset({"loss"})))} and _hashes(tmp_path, "s") == set()


# ---- plug-ins, and processes that hang, die, or cannot be started -----------------------------------

PLUG_IN = """
import threading
import time
from streamrl.observe.trackers.tracker import Tracker

class Sleeps(Tracker):
    def metrics(self, step, time_s, values):
        while True:
            time.sleep(1)

class Dies(Tracker):
    def open(self, run):
        raise SystemExit(3)

class Notes(Tracker):
    def open(self, run):
        self._file = (run.directory / "notes").open("a")
    def metrics(self, step, time_s, values):
        print(step, file=self._file)
    def close(self):
        self._file.close()
"""


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with three trackers, and one that is too old, on the path of this process and its children."""
    site = tmp_path / "site"
    for name, version in (("notes-for-streamrl", "1.0"), ("tensorboardX", "2.6.1")):
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        if name != "tensorboardX":
            points = "".join(f"{one.lower()} = notes:{one}\n" for one in ("Sleeps", "Dies", "Notes"))
            (folder / "entry_points.txt").write_text(f"[streamrl.trackers]\n{points}")
    (site / "notes.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.long
@pytest.mark.usefixtures("plug_ins")
async def test_followers_that_hang_or_die_are_given_up(
    written: Callable[..., WrittenRun], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restart_policy, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(tracker_processes_module, "RESTARTS", 2)
    run = written()
    (run.directory / "logs").mkdir()
    followers, stuck = (Followers(names, run.directory) for names in (["dies", "notes"], ["sleeps"]))
    given_up = "tracker dies ended 3 times and is not started again; the run goes on"
    pids: dict[str, int] = {}
    with anyio.fail_after(120):
        while given_up not in caplog.text or not await anyio.Path(run.directory / "notes").exists():
            for one in (followers, stuck):
                one.poll()
                pids |= {each.name: each.process.pid for each in one._followers if each.process is not None}
            await anyio.sleep(0.02)
    run.write(1)
    assert os.getpriority(os.PRIO_PROCESS, pids["notes"]) == min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)
    assert os.getsid(pids["notes"]) == pids["notes"]
    os.kill(pids["sleeps"], signal.SIGSTOP)
    await stuck.finish(0.2)
    await followers.finish(120.0)
    assert (run.directory / "notes").read_text() == "1\n"
    assert [pid for pid in pids.values() if psutil.pid_exists(pid)] == []
    late = "tracker sleeps has not sent all within 0.2 s: streamrl sync"
    assert late in caplog.text and caplog.text.count(given_up) == 1 and "tracker notes has" not in caplog.text


@pytest.mark.usefixtures("plug_ins")
async def test_a_paused_follower_restarts_once_at_the_end(
    written: Callable[..., WrittenRun], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A follower in its pause is started once more when the run ends."""
    run = written()
    run.write(1)
    (run.directory / "logs").mkdir()
    followers = Followers(["notes", "dies"], run.directory)
    monkeypatch.setattr(restart_policy.Restarts, "next_pause", lambda *_: 600.0)
    with anyio.fail_after(120):
        followers.poll()
        for one in followers._followers:
            assert one.process is not None
            one.process.kill()
        while any(one.process is not None for one in followers._followers):
            followers.poll()
            await anyio.sleep(0.02)
        await followers.finish(60.0)
    assert (run.directory / "notes").read_text() == "1\n" and "tracker notes has" not in caplog.text
    assert "tracker dies has not sent all within 60 s: streamrl sync" in caplog.text


@pytest.mark.usefixtures("plug_ins")
def test_what_is_not_installed_is_named_with_its_remedy(written: Callable[..., WrittenRun]) -> None:
    assert list(tracker_problems(["notes", "wandb", "tensorboard", "aim", "prometheus?port=1", "prometheus"])) == [
        'tensorboard needs tensorboardX 2.6.5 or later, 2.6.1 is installed: pip install -U "streamrl[tensorboard]"',
        'there is no tracker "aim": take one of tensorboard, wandb, trackio, prometheus, notes, sleeps, dies, or '
        "install a plug-in (entry point group streamrl.trackers)".replace("notes, sleeps, dies", "sleeps, dies, notes"),
        "prometheus is there twice: remove one",
    ]
    refused = list(tracker_problems(["wandb", "prometheus?port=99999"], "team/sums", ["", "x" * 65, "x" * 64]))
    assert [problem[:40] for problem in refused] == [
        'prometheus?port="99999" is no port: writ',
        "wandb takes no project 'team/sums' (run.",
        "wandb takes no tag '' of 0 characters (r",
        f"wandb takes no tag '{'x' * 20}",
    ]
    assert not list(tracker_problems(["wandb"], "x" * 128, ["y" * 64]))
    run = written()
    (run.directory / "trackers").mkdir()
    with pytest.raises(StreamRLError, match="tensorboardX"):
        make_tracker("tensorboard")


# ---- Prometheus ----------------------------------------------------------------------------------


FILLED = {re.sub(r"<(\w+)>", lambda m: "8" if m[1] in ("k", "size") else "some", one.name) for one in METRICS}


def ask(port: int, path: str) -> Any:
    """The answer of Prometheus; None while it does not listen, or reads its files."""
    with suppress(OSError):
        return json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}"))["data"]


@pytest.mark.skipif(not shutil.which("prometheus"), reason="Prometheus (Debian: apt-get install prometheus) is missing")
def test_prometheus_answers_every_query_of_the_grafana_file(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """It scrapes a follower that is killed, and the next, which has the figures of the one before it at once."""
    own, port = free_ports(2), free_ports(1)
    with closing(LineFile(tmp_path / "metrics.jsonl")) as metrics:
        metrics.append({"kind": "step", "time": 1e9, "step": 7, **dict.fromkeys(FILLED, 1.0)})
    (tmp_path / "recipe.toml").touch()
    target = {"job_name": "x", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
    (tmp_path / "p.yml").write_text(json.dumps({"global": {"scrape_interval": "100ms"}, "scrape_configs": [target]}))
    board = json.loads(GRAFANA.read_text())
    asked = [target["expr"].replace("$run", ".*") for panel in board["panels"] for target in panel["targets"]]
    options = ["--config.file=p.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{own}"]
    follower = [*FOLLOWER, f"prometheus?port={port}", str(tmp_path)]

    def found(query: str) -> list[Any]:
        answer = ask(own, f"query?query={quote(query)}")
        return answer["result"] if answer else []

    with ExitStack() as processes:
        server = processes.enter_context(subprocess.Popen(["prometheus", *options], cwd=tmp_path, stderr=-3))
        processes.callback(server.kill)
        for life, awaited in enumerate(("streamrl_step == 7", "resets(up[1h]) > 0 and up == 1")):
            process = processes.enter_context(subprocess.Popen(follower, stdin=subprocess.PIPE))
            processes.callback(process.kill)
            while not (found(awaited) and (tmp_path / "trackers" / "prometheus.cursor").exists()):
                assert process.poll() is None and server.poll() is None
                time.sleep(0.05)
            if life == 0:
                process.kill()
                while not found("up == 0"):
                    time.sleep(0.05)
        assert found("streamrl_step == 7") and asked and not [query for query in asked if not found(query)]
        assert ask(own, "label/run/values?match[]=streamrl_step") == [tmp_path.name]


def test_every_metric_is_scraped_and_in_the_grafana_file(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    """Every metric is scraped, and the Grafana file asks for metrics that exist."""
    tracker, free_port = Prometheus(), free_ports(1)
    info = RunInfo(directory=tmp_path, run_id="r", project="p", tags=(), recipe={}, options={"port": str(free_port)})
    tracker.open(info)
    try:
        tracker.metrics(7, 0.0, dict.fromkeys(FILLED, 1.0))
        tracker.event(7, "checkpoint", "saved")
        with pytest.raises(StreamRLError, match=rf"port {free_port} of 127.0.0.1 .*prometheus\?port=N"):
            Prometheus().open(info)
        text = urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics").read().decode()
    finally:
        tracker.close()
    assert 'streamrl_step{run="r"} 7.0\n' in text and 'streamrl_eval_avg{k="8",run="r",set="some"} 1.0' in text
    assert "vllm" not in text and len(re.findall(r"^streamrl_", text, re.M)) == len(FILLED) + 2
    names = set(re.findall(r"^(streamrl_\w+)\{", text, re.M))
    board = json.loads(GRAFANA.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert {name for expr in asked for name in re.findall(r"streamrl_\w+", expr)} <= names
    assert {one["type"] for one in board["templating"]["list"]} == {"datasource", "query"} and board["schemaVersion"]
    sources = [one["datasource"]["uid"] for panel in board["panels"] for one in (panel, *panel["targets"])]
    assert {*sources} == {"${datasource}"}
    if promtool := shutil.which("promtool"):
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr


def test_names_have_units_and_labels() -> None:
    assert name_and_labels("reward/func/a.b/latency_p50_s") == ("reward_func_latency_p50_seconds", {"function": "a.b"})
    assert name_and_labels("perf/wasted_tok_stale_total") == ("perf_wasted_tokens_total", {"reason": "stale"})
    assert name_and_labels("judge/awake_s_total") == ("judge_awake_seconds_total", {})
    assert name_and_labels("perf/train_tok_s") == ("perf_train_tokens_per_second", {})


# ---- the kit, and sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("tracker", ["tensorboard", "prometheus", "broken", "base"])
def test_the_kit_tells_a_tracker_that_takes_everything(
    tracker: str, tmp_path: Path, free_ports: Callable[[int], int]
) -> None:
    class Broken(Tracker):
        def histograms(self, step: int, values: Any) -> None:
            raise ZeroDivisionError

    options = {"port": str(free_ports(1))} if tracker == "prometheus" else {}
    kinds: dict[str, Callable[[], Tracker]] = {"broken": Broken, "base": Tracker}
    make = kinds.get(tracker, lambda: make_tracker(tracker))
    if tracker == "broken":
        with pytest.raises(StreamRLError, match="raised ZeroDivisionError in histograms"):
            check_tracker(make, tmp_path)
    else:
        check_tracker(make, tmp_path, **options)


def test_files_of_a_long_run_stay_within_their_bound(tmp_path: Path) -> None:
    """A process writes its log into the file that it has open."""
    most_mib = 0.25
    names = sorted({*SHARES} - {"logs", "evaluations"})
    files = {name: LineFile(tmp_path / f"{name}.jsonl", most_bytes=most_bytes(most_mib, name)) for name in names}
    logs = LogFiles(tmp_path, most_bytes(most_mib, "logs"))
    with (tmp_path / "a.log").open("ab") as a, (tmp_path / "b.log").open("ab") as b:
        for n in range(2000):
            for file in files.values():
                file.append({"n": n, "filler": "x" * 200})
            for log in (a, b):
                log.write(b"%d %s\n" % (n, b"x" * 90))
                log.flush()
            logs.shorten()
            (tmp_path / f"step-{n:06d}.jsonl").write_text("x" * 900)
            remove_oldest(tmp_path.glob("step-*.jsonl"), most_bytes(most_mib, "evaluations"))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= most_mib * (1 << 20) + 4 * 250
        assert a.tell() < 2000 * 90
    assert (tmp_path / "step-001999.jsonl").exists()
    assert not (tmp_path / "step-001000.jsonl").exists()
    for file in files.values():
        file.close()
    for name in ("a", "b"):
        last = [line for part in ("older-", "") for line in (tmp_path / f"{part}{name}.log").read_text().splitlines()]
        assert [int(line.split()[0]) for line in last] == [*range(2000)][-len(last) :]
