"""S1, S4, S5, S6: what a real run with keys opens, tells and leaves, looked at from outside while it goes on.

Real controller, reward worker, trainer and sockets; the engine is the simulated one, so that it takes seconds."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
from builders.files import SORT_RECIPE as EXAMPLE
from builders.files import json_lines

from streamrl.comm.transport_keys import KEY_ROLE, KEYS_DIRECTORY, KeyRole, make_keys
from streamrl.recipe.toml_text import toml_value

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.long]

STREAMRL = str(Path(sys.executable).with_name("streamrl"))
RECORDER = """
import os, sys

def of_numba():  # its cache of compiled code, beside that code: a process that can write there can change the code
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("numba/core/caching.py"):
            return True
        frame = frame.f_back
    return False

def note(event, arguments):
    if event == "pickle.find_class" and not of_numba():
        with open(os.environ["PICKLES_SEEN"], "a") as seen:
            seen.write(f"{sys.argv[:3]} {arguments}\\n")

sys.addaudithook(note)
"""


class Watched:
    """Everything that was seen of the processes of a run."""

    def __init__(self) -> None:
        self.listening: set[tuple[str, int]] = set()
        self.arguments: set[str] = set()
        self.environments: dict[str, dict[str, str]] = {}

    def look(self, root: psutil.Process) -> None:
        for process in (root, *root.children(recursive=True)):
            try:
                arguments = " ".join(process.cmdline())
                self.arguments.add(arguments)
                self.environments[arguments] = process.environ()
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        self.listening.add((connection.laddr.ip, connection.laddr.port))
            except psutil.Error:
                continue  # it ended meanwhile


class Finished:
    def __init__(self, directory: Path, keys: Path, output: str, watched: Watched, pickles: Path, port: int) -> None:
        self.directory, self.keys, self.output, self.port = directory, keys, output, port
        self.watched, self.pickles = watched, pickles

    @property
    def secrets(self) -> list[str]:
        return [(self.keys / f"{role}.secret").read_text().strip() for role in KeyRole]

    def files(self) -> Iterator[Path]:
        yield from (path for path in self.directory.rglob("*") if path.is_file() and not path.is_symlink())


def recorder(directory: Path) -> dict[str, str]:
    """An environment in which every Python process notes what it unpickles."""
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(RECORDER)
    found = os.environ.get("PYTHONPATH", "")
    path = f"{directory}{os.pathsep}{found}" if found else str(directory)
    return os.environ | {"PYTHONPATH": path, "PICKLES_SEEN": str(directory / "seen")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Finished:
    """Two steps, with a checkpoint, over tcp with keys."""
    base = tmp_path_factory.mktemp("run")
    keys, port = base / "keys", free_ports(10)
    make_keys(keys)
    settings = {
        "engines.kind": "simulated",
        "run.steps": 2,
        "run.directory": str(base / "runs"),
        "rollout.prompts_per_batch": 4,
        "rollout.group_size": 4,
        "sampling.max_tokens": 32,
        "evaluation.prompts": "",
        "training.advanced.threads": 1,
        "transport.kind": "tcp",
        "transport.port": port,
        "transport.keys": str(keys),
        "metrics.endpoint": f"tcp://127.0.0.1:{port + 9}",
    }
    flags = [part for name, value in settings.items() for part in ("--set", f"{name}={toml_value(value)}")]
    environment = recorder(base / "site")
    watched = Watched()
    with (base / "output").open("wb") as output:
        process = subprocess.Popen(
            [STREAMRL, "train", str(EXAMPLE), *flags], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        root = psutil.Process(process.pid)
        while process.poll() is None:
            watched.look(root)
            time.sleep(0.05)
    text = (base / "output").read_text()
    assert process.returncode == 0, text
    return Finished((base / "runs" / "latest").resolve(), keys, text, watched, base / "site" / "seen", port)


def test_every_listening_socket_is_for_this_host_alone(run: Finished) -> None:
    assert all(ip_address(address).is_loopback for address, _ in run.watched.listening), run.watched.listening
    ports = {port for _, port in run.watched.listening}
    # After three that never leave the host: orders, completions; batches, reports, weights; where ranks meet; metrics.
    assert {run.port + offset for offset in range(3, 10)} <= ports


def test_only_this_user_may_enter_the_run_directory(run: Finished) -> None:
    assert stat.S_IMODE(run.directory.stat().st_mode) == 0o700


def test_no_secret_is_in_any_output_argument_or_environment(run: Finished) -> None:
    roles = {role for role in ("controller", "engine", "trainer", "reward") for a in run.watched.arguments if role in a}
    assert roles == {"controller", "engine", "trainer", "reward"}, "every process was seen"
    told = [run.output, *run.watched.arguments]
    told += [
        f"{name}={value}" for environment in run.watched.environments.values() for name, value in environment.items()
    ]
    written = list(run.files())
    assert len(written) > 10
    for secret in run.secrets:
        assert len(secret) == 40
        assert not [text for text in told if secret in text]
        assert not [path for path in written if secret.encode() in path.read_bytes()]


def test_reward_workers_are_told_of_no_keys(run: Finished) -> None:
    found = {a: e for a, e in run.watched.environments.items() if "processes reward" in a or "streamrl.rewards" in a}
    assert found
    for arguments, environment in found.items():
        assert not environment.get(KEYS_DIRECTORY) and not environment.get(KEY_ROLE), arguments


def test_nothing_is_unpickled_in_any_process(run: Finished) -> None:
    seen = run.pickles.read_text() if run.pickles.exists() else ""
    assert not seen


def test_the_recorder_of_pickles_records(tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    environment = recorder(tmp_path / "site")
    load = "import pickle, fractions; pickle.loads(pickle.dumps(fractions.Fraction(1, 2)))"
    subprocess.run([sys.executable, "-c", load], env=environment, check=True)
    assert "fractions" in (tmp_path / "site" / "seen").read_text()


def test_metrics_hold_numbers_and_no_text(run: Finished) -> None:
    """S18: no prompt and no completion."""
    for line in (run.directory / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record.pop("kind") in ("step", "evaluation")
        assert {type(value) for value in record.values()} <= {int, float, type(None)}


def test_a_run_with_keys_is_not_called_insecure(run: Finished) -> None:
    steps = json_lines(run.directory / "metrics.jsonl")
    assert [step["health/insecure_transport"] for step in steps if step["kind"] == "step"] == [0, 0]
    assert "INSECURE" not in run.output
