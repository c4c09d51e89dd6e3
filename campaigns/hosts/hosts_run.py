"""A run over the hosts of a laboratory, and what its processes did, by witnesses that the product does not know."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from campaigns.hosts.lab import Host, command_of, end
from campaigns.hosts.ray_nodes import RayNodes

ROOT = Path(__file__).parents[2]
PATIENCE_S = 150.0
"""For a run to start, or to work again, on a loaded machine."""
SETTINGS = """run.name=shots run.steps=100000 run.advanced.restarts=1000 checkpoint.every=50 evaluation.every=0
engines.kind=simulated engines.count=2 engines.advanced.restarts=1000 engines.max_model_len=512 sampling.max_tokens=128
rollout.prompts_per_batch=8 rollout.group_size=4 training.ranks=2 training.learning_rate=2e-4
cluster.advanced.trainer_hosts=2 cluster.advanced.engine_hosts=2"""
ROLES = ("engine-0", "engine-1", "trainer-0", "trainer-1")
WORKED = ("generate done", "close_batch done")


class HostsRun:
    """``streamrl train`` of the example on the first host of a laboratory, in ``folder``, which all hosts see."""

    def __init__(self, ray: RayNodes, folder: Path) -> None:
        self.ray, self.folder = ray, folder
        self.hosts = ray.lab.hosts
        self.records: list[dict[str, Any]] = []
        self.missing: list[str] = []
        """Engines and ranks that had not worked when that was asked last."""
        self._place = 0
        self.driver: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True)

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return (self.folder / "runs" / "latest").resolve()

    def train(self, *settings: str, over_hosts: bool = True) -> None:
        """Start the run. ``over_hosts`` False: on the first host, without a cluster."""
        example = ROOT / "examples" / "sort"
        paths = f"run.directory={self.folder}/runs model.path={example}/model prompts.train={example}/train.jsonl"
        sets = [*f"{paths} rewards.0.function={example}/reward.py:sorted_trace {SETTINGS}".split(), *settings]
        words = [part for one in sets for part in ("--set", one)]
        self._start("train", example / "recipe.toml", *words, over_hosts=over_hosts)

    def resume(self) -> None:
        """Go on with what there is."""
        self._start("resume", self.directory)

    def _start(self, *command: object, over_hosts: bool = True) -> None:
        path = [self.folder, ROOT / "campaigns" / "chaos" / "tap", self.ray.variables["PYTHONPATH"], ROOT]
        variables = self.ray.variables | {
            "PYTHONPATH": ":".join(map(str, path)),
            "STREAMRL_CHAOS_TAP": str(self.folder / "tap.jsonl"),
        }
        where = ("--cluster", self.ray.address) if over_hosts else ()
        line = (self.ray.python, "-m", "streamrl", *command, *where)
        with (self.folder / "output").open("ab") as output:
            self.driver = self.hosts[0].popen(
                line, variables, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    @property
    def over(self) -> bool:
        """Whether the command has ended."""
        return self.driver is None or self.driver.poll() is not None

    def said(self) -> str:
        """The last that it printed."""
        lines = (self.folder / "output").read_text(errors="replace").splitlines()
        return " | ".join(line for line in lines[-6:] if "⠀" not in line)[-600:]

    def has_said(self, text: str) -> bool:
        """Whether ``text`` is in what the command printed."""
        return text in (self.folder / "output").read_text(errors="replace")

    def read(self) -> list[dict[str, Any]]:
        """New lines of the witnesses."""
        path = self.folder / "tap.jsonl"
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._place)
            whole = file.read().rpartition(b"\n")[0]
        self._place += len(whole) + bool(whole)
        new = [json.loads(line) for line in whole.splitlines() if line]
        self.records += new
        return new

    def works_after(self, at_s: float) -> float | None:
        """When every engine had sampled and every rank had stepped again after ``at_s``; None: not within patience, or
        the command has ended."""
        first: dict[str, float] = {}
        wait_until(lambda: self._has_worked(at_s, first) or self.over, PATIENCE_S)
        self.missing = [role for role in ROLES if role not in first]
        return None if self.missing else max(first.values())

    def _has_worked(self, at_s: float, first: dict[str, float]) -> bool:
        for record in self.read():
            if record["t"] > at_s and record["kind"] in WORKED and record.get("tokens", 1):
                first.setdefault(record["role"], record["t"])
        return set(ROLES) <= set(first)

    def exit_code(self, limit_s: float) -> int | None:
        """Exit code of the command; None: it has not ended within ``limit_s``."""
        wait_until(lambda: self.over, limit_s)
        return self.driver.poll() if self.driver is not None else None

    def driver_processes(self) -> list[psutil.Process]:
        """The command, on its host."""
        return self.hosts[0].processes("-m streamrl ", f"{self.folder}/")

    def ended(self) -> None:
        """End everything of it by force."""
        for host in self.hosts:
            end(left_on(host))
        if self.driver is not None:
            self.driver.wait()

    def faults(self) -> list[str]:
        """What is wrong with the accounts of the run: by its journal, and by what ranks trained."""
        self.read()
        line = (self.ray.python, "-m", "streamrl", "show", self.directory, "--json")
        text = self.hosts[0].run(line, {"PYTHONPATH": str(ROOT)})
        summary = json.loads(text[text.index("{") :])["summary"]
        accounts = summary["accounting"]
        dropped = sum(accounts["dropped"].values())
        found = [f"control: {one}" for one in summary["violations"]]
        if accounts["issued"] != accounts["trained"] + dropped + accounts["in_flight"]:
            found.append(f"accounts do not balance: {accounts}")
        trained = trained_of(self.records, ROLES[2:])
        for identity, versions in trained.items():
            found += [f"{identity} was trained for versions {sorted(versions)}"] if len(versions) > 1 else []
        if len(trained) != accounts["trained"]:
            found.append(f"ranks trained {len(trained)} trajectories, the journal counts {accounts['trained']}")
        return found[:5]


def trained_of(records: list[dict[str, Any]], ranks: tuple[str, ...]) -> dict[str, set[int]]:
    """Versions for which each trajectory was trained, by the life of each rank that made them last."""
    trained: dict[str, set[int]] = {}
    for rank in ranks:
        made: dict[int, list[str]] = {}
        batches: dict[tuple[float, int], list[str]] = {}
        for record in sorted((one for one in records if one["role"] == rank), key=lambda one: float(one["t"])):
            if record["kind"] == "train_group":
                names = ["/".join(map(str, one[:4])) for one in record["ids"]]
                batches.setdefault((record["born"], record["batch"]), []).extend(names)
            elif record["kind"] == "close_batch done":
                version = record["version"]
                ids = batches.pop((record["born"], record["batch_id"]), [])
                made = {one: names for one, names in made.items() if one < version} | {version: ids}
        for version, name in ((version, name) for version, names in made.items() for name in names):
            trained.setdefault(name, set()).add(version)
    return trained


def left_on(host: Host) -> list[psutil.Process]:
    """Processes of runs on a host: those that are not Ray's own."""
    own = ("/ray/", "ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray.util.client", "ray::SPILL")
    lines = {process: command_of(process) for process in host.processes()}
    return [process for process, line in lines.items() if line and not any(word in line for word in own)]


def named(hosts: Iterable[Host]) -> list[str]:
    """What is left on hosts, for people."""
    return [f"{host.name}: {command_of(process)[:90]}" for host in hosts for process in left_on(host)]


def wait_until(holds: Callable[[], bool], limit_s: float) -> bool:
    """Whether it holds within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
