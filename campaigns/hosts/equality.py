"""``hosts equality``: a recipe in deterministic mode over the hosts of a laboratory and on one of them alone. The last
checkpoints and the curves have to be the same, bit for bit."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator

from safetensors import deserialize

from campaigns.hosts.hosts_run import HostsRun, left_on, named, wait_until
from campaigns.hosts.lab import command_of
from campaigns.hosts.ray_nodes import RayNodes
from streamrl.base.line_file import read_lines

LAYOUTS = {"fsdp2": (2, 1), "fsdp4": (4, 1), "hsdp2x2": (4, 2)}
"""Trainer ranks, and groups of ranks of which each has the whole model."""
CURVE = ("reward/", "completion/", "policy/", "optim/", "async/")
TIMED = ("latency", "cost", "time", "waited")
"""Metrics that are compared begin so, and have none of the words of time."""
REWARD = (
    "def digits(completion: str) -> float:\n    return sum(map(str.isdigit, completion)) / max(len(completion), 1)\n"
)
"""What simulated engines sample is at random: this has a gradient from the first step on."""


def compare(ray: RayNodes, arguments: argparse.Namespace) -> Iterator[str]:
    """Faults of each layout of ``arguments.kinds`` (none: all). Prints a line a run."""
    for name in arguments.kinds or LAYOUTS:
        found = set()
        for over_hosts in (True, False):
            run = HostsRun(ray, arguments.out / f"{name}-{'hosts' if over_hosts else 'one'}")
            try:
                if fault := one_run(run, name, arguments.steps, over_hosts=over_hosts):
                    yield fault
                else:
                    found.add((_model(run), hashlib.sha256(repr(_curve(run)).encode()).hexdigest()[:16]))
            finally:
                run.ended()
        print(f"  {name}: model, curve {found}")
        if len(found) > 1:
            yield f"{name}: over hosts another result than on one: compare runs in {arguments.out}"


def one_run(run: HostsRun, name: str, steps: int, *, over_hosts: bool) -> str:
    """Run it to its end. Returns what went wrong."""
    ranks, replicas = LAYOUTS[name]
    reward = run.folder / "reward.py"
    reward.write_text(REWARD)
    settings = [f"run.steps={steps}", "run.deterministic=true", f"training.ranks={ranks}"]
    settings += [f"training.advanced.replicas={replicas}", f"rewards.0.function={reward}:digits"]
    began = time.monotonic()
    run.train(*settings, "training.learning_rate=1e-3", "training.advanced.threads=1", over_hosts=over_hosts)
    wait_until(lambda: bool(_steps(run)) or run.over, 240.0)
    lines = {host.name: map(command_of, host.processes("streamrl.launch ", "--index")) for host in run.hosts}
    there = [f"{host}: {' '.join(sorted(one.split()[4] for one in every))}" for host, every in lines.items()]
    if (code := run.exit_code(600.0)) != 0:
        return f"{name}, over hosts: {over_hosts}: ended with {code}: {run.said()}"
    print(f"{name}: {', '.join(there)}; {time.monotonic() - began:.0f} s", flush=True)
    if not all(step["optim/grad_norm"] for step in _steps(run)):
        return f"{name}: a step without a gradient proves nothing"
    return "" if wait_until(lambda: not any(map(left_on, run.hosts)), 3.0) else f"left: {named(run.hosts)}"


def _steps(run: HostsRun) -> list[dict[str, object]]:
    lines = read_lines(run.directory / "metrics.jsonl", dict[str, object])
    return [line for line in lines if line["kind"] == "step"]


def _curve(run: HostsRun) -> list[dict[str, object]]:
    names = {name for step in _steps(run) for name in step if name.startswith(CURVE)}
    compared = sorted(name for name in names if not any(word in name for word in TIMED))
    return [{name: step.get(name) for name in compared} for step in _steps(run)]


def _model(run: HostsRun) -> str:
    """Digest of the last checkpoint: the model as exported, master weights and optimizer of all ranks."""
    last = max((run.directory / "checkpoints").glob("step-*"))
    found = hashlib.sha256()
    for file in sorted(last.rglob("*.safetensors")):
        tensors = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        for name, tensor in sorted(tensors):
            found.update(repr((file.name, name, tensor["shape"], tensor["dtype"])).encode() + tensor["data"])
    return found.hexdigest()[:16]
