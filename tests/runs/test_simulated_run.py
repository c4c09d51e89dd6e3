"""A whole run with simulated engines: real processes, streams, weights, trainer and rewards, and no vLLM."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from builders.files import EXAMPLES, json_lines
from safetensors import deserialize

from streamrl.base.errors import StreamRLError
from streamrl.base.waits import start_phases
from streamrl.cli.show import read_run
from streamrl.launch.control_protocol import (
    ChangeSettings,
    ControlAnswer,
    ControlOperation,
    ControlRefused,
    ReadStatus,
    SteeringStatus,
    SteerRun,
)
from streamrl.launch.control_socket import ask_run
from streamrl.observe.report.trajectory_trace import read_trace
from streamrl.processes.local_launcher import marker_of
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.toml_text import toml_value
from streamrl.recipe.topology import read_topology

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EXAMPLE = EXAMPLES / "sort" / "recipe.toml"
REWARD = "async def reward(completion):\n    return len(completion) % 7 / 6\n"
WITHOUT_VLLM = "import sys\nsys.modules['vllm'] = None  # importing it fails\n"


def _flags(root: Path, **settings: object) -> list[str]:
    (root / "reward.py").write_text(REWARD)
    common = {
        "run.directory": str(root / "runs"),
        "engines.kind": "simulated",
        "rewards.0.function": f"{root / 'reward.py'}:reward",
        "rollout.prompts_per_batch": 4,
        "rollout.group_size": 4,
        "sampling.max_tokens": 64,
        "evaluation.prompts": "",
        "training.advanced.threads": 1,
    }
    chosen = common | {key.replace("__", "."): value for key, value in settings.items()}
    return [part for key, value in chosen.items() for part in ("--set", f"{key}={toml_value(value)}")]


@pytest.mark.long
def test_training_is_real_and_no_vllm_is_needed(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_VLLM)
    flags = _flags(tmp_path, run__steps=4, engines__count=2, weights__advanced__audit_interval=1)
    command = [sys.executable, "-m", "streamrl", "train", str(EXAMPLE), *flags]
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as training:
        watched = _trajectories_on_the_page(tmp_path / "runs", training)
        out, errors = training.communicate(timeout=900)
    done = subprocess.CompletedProcess(command, training.returncode, out, errors)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engines  simulated" in done.stdout and "warning" not in done.stdout
    files = tmp_path / "runs" / "latest"
    lines = json_lines(files / "metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["optim/grad_norm"] > 0 and step["weights/payload_bytes"] > 0 for step in steps)
    audits = [json.loads(line)["checksums"] for line in (files / "audits.jsonl").read_text().splitlines()]
    held = [{json.dumps(checksums) for checksums in audit.values()} for audit in audits]
    assert [len(audit) for audit in audits] == [2] * 5 and all(len(versions) == 1 for versions in held)
    assert len(set.union(*held)) == 5, "every version has weights of its own"
    assert "sample at step 1: reward" in done.stdout and "engine-0, engine-1 ready after" in done.stdout
    shown = [sys.executable, "-m", "streamrl", "samples", str(files), "--best"]
    found = subprocess.run(shown, capture_output=True, text=True, timeout=900, check=True).stdout
    assert found.startswith("training, step 4, best: reward ") and "\n  text    " in found
    trace = read_trace(files / "trace.jsonl")
    assert trace.header.engine_kind == "simulated"
    assert watched == len(trace.trajectories) == 64, "the page got each once while the run went on"
    assert {line.engine for line in trace.trajectories} == {"engine-0", "engine-1"}
    assert all(line.launched_s + line.queued_s <= line.returned_s <= line.ended_s for line in trace.trajectories)
    events = [(event.kind, event.step) for event in trace.events if event.seconds > 0]
    assert {("push", 1), ("push", 4), ("checkpoint", 4)} <= {*events}


def _trajectories_on_the_page(runs: Path, training: subprocess.Popen[str]) -> int:
    """Watch a run from its start to its end on a dashboard's server; return how many trajectories it has sent."""
    while not list(runs.glob("sort-*/trace.jsonl")):
        assert training.poll() is None
        time.sleep(0.05)
    command = [sys.executable, "-m", "streamrl", "dashboard", str(runs), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dashboard:
        try:
            assert dashboard.stdout is not None
            address = json.loads("".join(dashboard.stdout.readline() for _ in range(3)))["address"]
            with urllib.request.urlopen(f"{address}api/runs/0/live?after=new", timeout=900) as live:
                with urllib.request.urlopen(f"{address}api/runs/0/timeline", timeout=900) as block:
                    content = block.read()
                have = int(json.loads(content[4 : 4 + int.from_bytes(content[:4], "little")])["count"])
                kind, ended = "", False
                while not ended or have < 64:
                    name, _, text = live.readline().decode().rstrip("\n").partition(": ")
                    if name == "event":
                        kind = text
                    elif name == "data" and kind == "trajectories":
                        news = json.loads(text)
                        have = max(have, news["first"] + len(news["rows"]))
                    elif name == "data" and kind == "state":
                        ended = json.loads(text)["state"] != "running"
            return have
        finally:
            dashboard.send_signal(signal.SIGINT)


@pytest.mark.long
def test_a_run_killed_before_its_start_begins_by_resume(tmp_path: Path) -> None:
    """A run that was killed before it began is begun by ``resume``."""
    command = [sys.executable, "-m", "streamrl"]
    runs = tmp_path / "runs"
    with subprocess.Popen(
        [*command, "train", str(EXAMPLE), *_flags(tmp_path, run__steps=1)], stdout=subprocess.DEVNULL
    ) as first:
        while not (found := list(runs.glob("sort-*/recipe.toml"))):
            assert first.poll() is None
            time.sleep(0.005)
        first.kill()
    run = found[0].parent
    assert not (run / "journal").exists()
    done = subprocess.run([*command, "resume", str(run)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"step"' in line]


@pytest.mark.long
def test_a_run_is_made_longer_after_its_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamrl"]
    run = tmp_path / "runs" / "latest"

    def streamrl(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=900, check=False)

    held = EXAMPLE.with_name("held_out.jsonl")
    sets = {"a": {"prompts": str(held), "limit": 2}, "b": {"prompts": f"{held}?limit=3", "every": 2}}
    settings = {"training__schedule": "linear", "training__warmup_steps": 0, "evaluation__every": 1}
    settings |= {"evaluation__prompts": sets, "evaluation__at_start": False, "evaluation__at_end": False}
    assert streamrl("train", str(EXAMPLE), *_flags(tmp_path, run__steps=2, **settings)).returncode == 0
    refused = streamrl("resume", str(run), "--set", "run.steps=3", "--set", "rollout.group_size=2")
    assert refused.returncode != 0 and "rollout.group_size was 4, now 2" in refused.stderr
    assert "run.steps" not in refused.stderr and "steps = 2\n" in (run / "recipe.toml").read_text()
    longer = streamrl("resume", str(run), "--set", "run.steps=3")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert 'training.schedule = "linear" ends with step 3 now and ended with step 2' in longer.stderr
    lines = json_lines(run / "metrics.jsonl")
    rates = {line["step"]: line["optim/lr"] for line in lines if line["kind"] == "step"}
    base = load_recipe(run / "recipe.toml").training.learning_rate
    assert rates == {1: base, 2: base / 2, 3: pytest.approx(base / 3)}, "of the longer schedule from then on"
    evaluated = {
        line["step"]: {name: line.get(f"eval/{name}/prompts") for name in sets}
        for line in lines[:]
        if line["kind"] == "evaluation"
    }
    assert evaluated == {1: {"a": 2, "b": None}, 2: {"a": 2, "b": 3}, 3: {"a": 2, "b": None}}
    again = streamrl("resume", str(run))
    assert again.returncode == 0 and "all steps done; nothing is started" in again.stdout, again.stdout + again.stderr
    assert "steps = 3\n" in (run / "recipe.toml").read_text(), "it is the recipe of the run from now on"


@pytest.mark.long
def test_a_lost_journal_names_the_way_from_a_checkpoint(tmp_path: Path) -> None:
    """A run that lost its journal names the command that begins another run from its checkpoint."""

    def streamrl(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "streamrl", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)

    flags = _flags(tmp_path, run__steps=1, checkpoint__advanced__min_free_gib=0.0)
    assert streamrl("train", str(EXAMPLE), *flags).returncode == 0
    run = (tmp_path / "runs" / "latest").resolve()
    (run / "journal").rename(run / "journal-aside")
    before = {path.name: path.read_bytes() for path in run.glob("*.jsonl")}
    refused = streamrl("resume", str(run), "--set", "run.steps=2")
    assert refused.returncode == 2 and "the run was not resumed" in refused.stderr
    assert {path.name: path.read_bytes() for path in run.glob("*.jsonl")} == before
    named = shlex.split(refused.stderr.splitlines()[-1].partition("streamrl ")[2])
    assert named[-1] == f"checkpoint.resume_from={run / 'checkpoints' / 'step-000001'}"
    another = streamrl(*named, "--set", "run.steps=2")
    assert another.returncode == 0, another.stdout + another.stderr
    lines = json_lines(tmp_path / "runs/latest/metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "step"] == [2]


CRASHES_ON_A_TENTH = """import ctypes, os, zlib

def reward(completion, *, prompt_id):
    number = zlib.crc32(prompt_id.encode())
    if number % 10 == 0:
        ctypes.string_at(0) if number % 20 == 0 else os._exit(3)
    return len(completion) % 7 / 6
"""


@pytest.mark.long
def test_crashing_rewards_do_not_end_the_run(tmp_path: Path) -> None:
    """Prompts whose reward crashes its process do not end the run."""
    flags = _flags(tmp_path, run__steps=12, rollout__group_size=8, sampling__max_tokens=8)
    (tmp_path / "reward.py").write_text(CRASHES_ON_A_TENTH)
    command = [sys.executable, "-m", "streamrl", "train", str(EXAMPLE), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = json_lines(tmp_path / "runs/latest/metrics.jsonl")
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert "reward-0 ended" not in done.stdout + done.stderr
    assert steps[-1]["reward/func/reward/raised_total"] > 0


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_a_reward_that_always_raises_ends_the_run(tmp_path: Path) -> None:
    """A reward that always raises ends the run with its message."""
    flags = _flags(tmp_path, run__steps=500, reward_limits__advanced__window=32)
    (tmp_path / "reward.py").write_text(
        "async def reward(completion, **columns):\n    raise LookupError('no such answer')\n"
    )
    command = [sys.executable, "-m", "streamrl", "train", str(EXAMPLE), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "of the last 7 trajectories failed" in done.stderr and "no such answer" in done.stderr
    accounting = read_run(tmp_path / "runs" / "latest").summary.accounting
    assert accounting.trained == 0 and accounting.dropped["reward_failed"] >= 7


STUCK_NOW_AND_THEN = """import random, time

async def reward(completion, **columns):
    if random.random() < 0.02:
        time.sleep(1000)  # not even cancellation reaches it
    return float(len(completion) % 2)
"""


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_a_reward_that_blocks_at_times_is_recorded(tmp_path: Path) -> None:
    """A reward that blocks now and then is recorded, and the run goes on."""
    limits = {"rewards__0__timeout_s": 1.0, "reward_limits__max_failed_share": 0.9}
    flags = _flags(tmp_path, run__steps=4, **limits)
    (tmp_path / "reward.py").write_text(STUCK_NOW_AND_THEN)
    command = [sys.executable, "-m", "streamrl", "train", str(EXAMPLE), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "latest"
    summary = read_run(run).summary
    assert not summary.violations and summary.accounting.in_flight == 0
    lines = json_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.usefixtures("nothing_left")
def test_the_example_follows_a_run_from_python_and_drains_it(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "pipeline_from_python.py"), str(EXAMPLE), "--until", "0"]
    command += _flags(tmp_path, run__steps=500)
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 1: reward" in done.stdout
    assert (tmp_path / "events.txt").read_text().endswith("RunFinished\n"), "of the sink"
    assert (tmp_path / "best.txt").read_text().startswith("1: "), "of the observer"
    assert read_run(tmp_path / "runs" / "latest").summary.accounting.in_flight == 0


def _processes(run: Path) -> dict[str, psutil.Process]:
    """Living processes of a run by name, such as ``engine-0``."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if "streamrl.launch" in line and str(run) in line:
                role = line[line.index("streamrl.launch") + 1]
                found[role if role == "controller" else f"{role}-{line[line.index('--index') + 1]}"] = process
    return found


def _marker(run: Path) -> str:
    """The text in the names of the shared memory of the last life of a run."""
    return marker_of(Path(read_topology(run).endpoint("controller", "steps").removeprefix("ipc://")).parent)


def _left_of(markers: Sequence[str], temporary: Path) -> list[str]:
    """Processes, shared memory and sockets of a run that has ended."""
    left = [name for name in os.listdir("/dev/shm") if any(marker in name for marker in markers)]
    left += [str(path) for path in temporary.glob("streamrl-*")]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR", "").startswith(str(temporary)) and process.pid != os.getpid():
                left.append(f"{process.pid} {process.cmdline()}")
    return left


def _weights(run: Path, step: int) -> dict[str, bytes]:
    """Digest of each tensor in the files of a checkpoint, master weights and moments too; not of the files' headers."""
    digests = {}
    for path in (run / "checkpoints" / f"step-{step:06d}").rglob("*.safetensors"):
        for name, tensor in deserialize(path.read_bytes()):
            digests[f"{path.name} {name}"] = hashlib.sha256(tensor["data"]).digest()
    return digests


EPISODE = """
from pathlib import Path
from msgspec.structs import replace
from streamrl.pretrained.turns.tool_calls import ToolCall

def note(turn: int, context) -> str:
    'Write down who calls.'
    with Path(__file__).with_name("calls").open("a") as file:
        file.write(f"{context.trajectory} {turn}\\n")
    return " 1 2 "

async def talk(model, *, prompt):
    chat = model.chat(tools=[note])
    reply = await chat.say(prompt)
    for turn in range(model.random.randint(1, 3)):  # a simulated engine calls nothing by itself
        model.reward(reply, len(reply.text) % 5 / 4)
        reply = await chat.run_tools(replace(reply, calls=(ToolCall("note", {"turn": turn}),)))
    return len(reply.text) % 7 / 6
"""


@pytest.mark.started
@pytest.mark.long
def test_processes_note_what_they_do_while_they_start(tmp_path: Path) -> None:
    (tmp_path / "episode.py").write_text(EPISODE)
    episode = {"environment__episode": f"{tmp_path / 'episode.py'}:talk", "rewards__0__function": "environment"}
    episode |= {"environment__max_tokens": 500, "sampling__max_tokens": 24}
    flags = _flags(tmp_path, run__steps=1, **episode)
    command = [sys.executable, "-m", "streamrl", "train", str(EXAMPLE), *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    folder = tmp_path / "runs" / "latest"
    phases = start_phases(folder / "logs", ["trainer-0", "environment-0"], folder / "topology.json")
    assert phases == {"trainer-0": "loads the model", "environment-0": "imports the environment"}


@pytest.mark.long
@pytest.mark.parametrize("talks", [False, True])
def test_a_run_of_kills_ends_with_the_weights_of_a_calm_one(tmp_path: Path, talks: bool) -> None:
    """A run whose processes are killed ends with the weights of an undisturbed one. Controller, rank, engine process,
    reward or environment worker, then the supervisor: real kills of a run with simulated engines. The calm run encodes
    its versions, the engine of the other one reads them from the trainer's memory."""
    steps, temporary = 14 if talks else 24, Path(tempfile.mkdtemp(prefix="srl"))
    environment = os.environ | {"TMPDIR": str(temporary)}
    common = {"run__steps": steps, "run__deterministic": True, "checkpoint__every": 4}
    common |= {"rollout__rounds": "tail_batching", "tail_batching__deferred_prompts": "verify"}
    common |= {"training__schedule": "cosine", "training__warmup_steps": 3}

    def start(folder: str, *arguments: str) -> subprocess.Popen[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, "-m", "streamrl", *(arguments or ("train", str(EXAMPLE)))]
        (tmp_path / folder / "episode.py").write_text(EPISODE)
        own = {
            "environment__episode": f"{tmp_path / folder / 'episode.py'}:talk",
            "rewards__0__function": "environment",
        }
        own |= {"environment__max_tokens": 500, "sampling__max_tokens": 24}
        own |= {"environment__advanced__credit": "return_to_go"}
        near = {"weights__advanced__shared_memory": folder == "killed"}
        flags = [] if arguments else _flags(tmp_path / folder, **common, **near, **(own if talks else {}))
        pipe = subprocess.PIPE
        return subprocess.Popen([*command, *flags], env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT)

    def made(run: Path) -> int:
        """Steps in the metrics; one that was live and not reported when the run was killed may be there twice."""
        metrics = run / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return len({json.loads(line)["step"] for line in lines if '"kind":"step"' in line and line.endswith("}")})

    def of_steps(run: Path, metric: str) -> dict[int, float]:
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line[metric] for line in lines if line["kind"] == "step"}

    def rates(run: Path) -> dict[int, float]:
        return of_steps(run, "optim/lr")

    try:
        alone, killed = start("alone"), start("killed")
        run = tmp_path / "killed" / "runs" / "latest"
        worker = "environment-0" if talks else "reward-0"
        for victim in ("controller", "trainer-0", "engine-0", worker, "supervisor"):
            before = made(run)
            while made(run) < before + 2:
                assert killed.poll() is None, killed.communicate()[0]
                time.sleep(0.01)
            if victim == "supervisor":
                markers = [_marker(run)]
                killed.kill()
                killed.communicate(timeout=900)
            else:
                _processes(run.resolve())[victim].kill()
        while _processes(run.resolve()):
            time.sleep(0.05)
        resumed = start("killed", "resume", str(run))
        output = resumed.communicate(timeout=900)[0]
        assert resumed.returncode == 0, output
        assert alone.communicate(timeout=900)[0] and alone.returncode == 0
        assert made(run) == steps
        assert rates(run) == rates(tmp_path / "alone" / "runs" / "latest") and len({*rates(run).values()}) == steps - 1
        whole, weights = _weights(tmp_path / "alone" / "runs" / "latest", steps), _weights(run, steps)
        assert whole and weights == whole
        for folder, bytes_or_not in (("alone", True), ("killed", False)):
            ended = tmp_path / folder / "runs" / "latest"
            assert any(of_steps(ended, "weights/payload_bytes").values()) is bytes_or_not
            engines = list(of_steps(ended, "weights/from_memory").values())
            # A version that was pushed while the engine was down reached it when it was started again.
            missed = engines.count(0.0)
            assert missed == steps if bytes_or_not else missed <= 5
        assert _left_of([*markers, _marker(run)], temporary) == []
        for folder, kills in (("alone", 0), ("killed", 5)) if talks else ():
            turns: dict[str, list[str]] = {}
            for trajectory, turn in map(str.split, (tmp_path / folder / "calls").read_text().splitlines()):
                turns.setdefault(trajectory, []).append(turn)
            # A kill may come between a call and its record: a trajectory makes its last call again, and no other.
            assert all(each == sorted(each) and max(Counter(each).values()) <= 1 + kills for each in turns.values())
    finally:
        for process in (alone, killed):
            process.kill()
        shutil.rmtree(temporary)


CHANGES = {
    3: (
        "training.learning_rate=2e-5",
        "sampling.temperature=0.7",
        "sampling.max_tokens=40",
        "checkpoint.every=2",
        "run.steps=7",
    ),
    4: (
        "rollout.rounds=tail_batching",
        "tail_batching.prompt_oversampling=1.5",
        "tail_batching.response_oversampling=1.25",
        "rollout.dynamic_sampling=true",
    ),
    6: ("tail_batching.prompt_oversampling=1.25", "reward_limits.max_failed_share=0.2", "reward_limits.window=50"),
}
SAME = ("reward/mean", "completion/length_mean", "optim/lr", "optim/grad_norm", "steering/changes_total")
STREAMRL = (sys.executable, "-m", "streamrl")


def ask(run: Path, operation: ControlOperation) -> ControlAnswer:
    return anyio.run(ask_run, run, operation, 60.0)


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    path = run / "metrics.jsonl"
    whole_lines = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return {line["step"]: line for line in map(json.loads, whole_lines.splitlines())}


def begun_steered(root: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A run that was paused as soon as it had begun, which then got all changes and went on."""
    root.mkdir()
    flags = _flags(root, run__steps=5, run__deterministic=True, training__advanced__streaming=False)
    process = subprocess.Popen([*STREAMRL, "train", str(EXAMPLE), *flags], stdout=subprocess.DEVNULL)
    while not (found := list((root / "runs").glob("sort-*/control.key"))):
        assert process.poll() is None
        time.sleep(0.05)
    run = found[0].parent
    status: ControlAnswer | None = None
    while not isinstance(status, SteeringStatus) or status.live_version < 0:  # it has not begun
        with suppress(StreamRLError):  # its socket is not there yet
            status = ask(run, ReadStatus())
        time.sleep(0.05)
    assert not isinstance(ask(run, SteerRun(order="pause")), ControlRefused)
    for step, changes in CHANGES.items():
        answer = ask(run, ChangeSettings(changes=changes, step=step))
        assert not isinstance(answer, ControlRefused), answer
    for command in ("train", "resume"):
        second = subprocess.run([*STREAMRL, command, run], capture_output=True, text=True, timeout=300, check=False)
        assert second.returncode == 2 and "runs already" in second.stderr
    ask(run, SteerRun(order="continue"))
    return process, run


@pytest.mark.long
def test_settings_changed_under_kills_train_equal_batches(tmp_path: Path) -> None:
    """Settings that change in a killed run train the batches of an undisturbed run."""
    process, whole = begun_steered(tmp_path / "whole")
    assert process.wait(900) == 0
    process, killed = begun_steered(tmp_path / "killed")
    while 4 not in steps_of(killed):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait(60)
    assert 7 not in steps_of(killed), "nothing is left to resume"
    done = subprocess.run([*STREAMRL, "resume", killed], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found, wanted = ([[step[name] for name in SAME] for step in steps_of(run).values()] for run in (killed, whole))
    assert found == wanted and len(wanted) == 7
    # In force with the batch that opens, which is when the version before it goes live.
    assert [step["steering/changes_total"] for step in steps_of(whole).values()] == [0, 1, 2, 2, 3, 3, 3]
    assert steps_of(whole)[3]["optim/lr"] == pytest.approx(2e-5 * 3 / 5)
    weights = [
        hashlib.sha256(next(run.glob("checkpoints/step-000007/hf/*.safetensors")).read_bytes())
        for run in (killed, whole)
    ]
    assert weights[0].digest() == weights[1].digest()


SLEEPER = """
import time
from streamrl.observe.trackers.tracker import Tracker

class Sleeper(Tracker):
    def metrics(self, step, time_s, values):
        time.sleep(1e6)
"""


@pytest.mark.long
def test_trackers_change_nothing_in_a_run(tmp_path: Path) -> None:
    """Trackers change nothing in a run, not even one that sleeps for ever. The sleeper is ended when its time at the
    end of the run is over."""
    site = tmp_path / "site"
    (site / "sleeper-1.0.dist-info").mkdir(parents=True)
    (site / "sleeper.py").write_text(SLEEPER)
    (site / "sleeper-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sleeper\nVersion: 1.0\n")
    points = "[streamrl.trackers]\nsleeper = sleeper:Sleeper\n"
    (site / "sleeper-1.0.dist-info" / "entry_points.txt").write_text(points)
    batches = []
    for report_to in ((), ("tensorboard", "sleeper")):
        root = tmp_path / f"with-{len(report_to)}"
        root.mkdir()
        flags = _flags(root, run__steps=3, run__deterministic=True, metrics__report_to=report_to)
        done = subprocess.run(
            [sys.executable, "-m", "streamrl", "train", str(EXAMPLE), *flags],
            env=os.environ | {"PYTHONPATH": f"{site}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        run = (root / "runs" / "latest").resolve()
        trained = [one for one in read_trace(run / "trace.jsonl").trajectories if one.outcome == "trained"]
        batches.append(
            sorted((one.newest_version, one.prompt_id, one.sample, one.tokens, one.reward) for one in trained)
        )
        late = "tracker sleeper has not sent all within 30 s: streamrl sync"
        assert (late in done.stderr) == bool(report_to), done.stderr
    assert batches[0] == batches[1] and len(batches[0]) == 48
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [one.step for one in events.Scalars("reward/mean")] == [1, 2, 3]
    assert _left_of([_marker(run)], tmp_path) == []
