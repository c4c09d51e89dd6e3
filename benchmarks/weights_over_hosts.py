"""A version of weights to several hosts over one trainer link, by relays and without them: seconds until each host has
it, checked, and bytes that left the trainer.

``python benchmarks/weights_over_hosts.py [--hosts 1 2 4 8] [--mbit 100] [--parameters 2e7] [--kill] [--json]``

As root, on Linux with iproute2: each host is a network namespace behind a link of ``--mbit`` both ways, made and
removed here. A receiver is the fetch and the relay of an engine's host. *Hop*: one host, without relays. ``--kill``:
half-way the relay of the second host of the chain is killed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from streamrl.base.messages import WeightAnnouncement, announcement_of
from streamrl.comm.transport_keys import OPEN_TO_ALL
from streamrl.engines.push.relay_tree import RelayPlace, RelayTree
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.pull.fetch import fetch_version
from streamrl.weights.pull.replica import CheckpointReplica
from streamrl.weights.relay.relay import Relay

SWITCH, PORT = "relay-switch", 5700


def address(place: int) -> str:
    """The trainer's is that of place 0."""
    return f"10.78.0.{place + 1}"


def ip(*arguments: str, inside: str = SWITCH) -> str:
    return subprocess.run(
        ["ip", "netns", "exec", inside, *arguments], check=True, capture_output=True, text=True
    ).stdout


@contextmanager
def network(hosts: int, mbit: float) -> Iterator[None]:
    """Namespaces ``relay-0`` (the trainer) to ``relay-HOSTS``, behind links of ``mbit``."""
    names = [f"relay-{place}" for place in range(hosts + 1)]
    try:
        for name in (SWITCH, *names):
            subprocess.run(["ip", "netns", "add", name], check=True)
        ip("ip", "link", "add", "br0", "type", "bridge")
        ip("ip", "link", "set", "br0", "up")
        for place, name in enumerate(names):
            ip("ip", "link", "add", f"v{place}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("ip", "link", "set", f"v{place}", "master", "br0", "up")
            ip("ip", "addr", "add", f"{address(place)}/24", "dev", "eth0", inside=name)
            for device in ("lo", "eth0"):
                ip("ip", "link", "set", device, "up", inside=name)
            shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "256k", "latency", "50ms")
            ip("tc", "qdisc", "add", "dev", "eth0", *shape, inside=name)
            ip("tc", "qdisc", "add", "dev", f"v{place}", *shape)
        yield
    finally:
        for name in (*names, SWITCH):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def publish(directory: Path, parameters: int) -> None:
    bits = {"w": np.random.default_rng(0).integers(0, 1 << 16, parameters, dtype=np.uint16)}
    shard = ShardSpec("w", "bfloat16", (parameters,), 0, parameters)
    publisher = WeightPublisher(f"tcp://{address(0)}:{PORT}", run_id="hosts", rank=0, shards=[shard])
    publisher.start()
    announced = announcement_of(0, [publisher.publish(0, bits)])
    (directory / "announced.new").write_bytes(msgspec.msgpack.encode(announced))
    (directory / "announced.new").rename(directory / "announced")
    wait_for(directory / "end")
    publisher.close()


def receive(directory: Path, place: int, hosts: int, *, relays: bool) -> None:
    places = {f"engine-{k}": RelayPlace(f"host-{k}", f"tcp://{address(k)}:{PORT}") for k in range(1, hosts + 1)}
    name = f"engine-{place}"
    wait_for(directory / "announced")
    announced = msgspec.msgpack.decode((directory / "announced").read_bytes(), type=WeightAnnouncement)
    with ExitStack() as stack:
        if relays:
            relay = stack.enter_context(Relay(places[name].endpoint, f"ipc://{directory}/{name}"))
        (directory / f"ready-{place}").touch()
        wait_for(directory / "go")
        began = time.monotonic()
        if relays:
            announced = relay.through(RelayTree(lambda: places).routed(announced, name, places))
        fetched = fetch_version(announced)
        staged = CheckpointReplica().stage(fetched)
        assert staged.state_hash == announced.state_hash
        (directory / f"took-{place}").write_text(str(time.monotonic() - began))
        wait_for(directory / "end")


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def measure(hosts: int, mbit: float, parameters: int, *, relays: bool, kill: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="relay-") as made, network(hosts, mbit), ExitStack() as stack:
        directory = Path(made)

        def start(place: int) -> subprocess.Popen[bytes]:
            options = ["--place", str(place), "--directory", made, "--hosts", str(hosts)]
            options += ["--parameters", str(parameters), *(["--relays"] if relays else [])]
            inside = ["ip", "netns", "exec", f"relay-{place}", sys.executable, __file__, *options]
            process = subprocess.Popen(inside, env=os.environ | {OPEN_TO_ALL: "none"})
            stack.callback(process.wait)
            return process

        processes = [start(place) for place in range(hosts + 1)]
        stack.callback((directory / "end").touch)
        waited = [directory / f"ready-{place}" for place in range(1, hosts + 1)]
        for path in waited:
            wait_for(path)
        before = sent(0)
        (directory / "go").touch()
        if kill:
            time.sleep(parameters * 16 / mbit / 1e6 / 2)
            processes[2].kill()
        left = [place for place in range(1, hosts + 1) if not kill or place != 2]
        for place in left:
            wait_for(directory / f"took-{place}")
        took = [float((directory / f"took-{place}").read_text() or "nan") for place in left]
        copies = (sent(0) - before) / (2 * parameters)
        return {"hosts": hosts, "relays": relays, "killed": kill, "seconds": max(took), "copies": copies, "took": took}


def sent(place: int) -> int:
    """Bytes that left the host."""
    device = ip("cat", "/proc/net/dev", inside=f"relay-{place}").partition("eth0:")[2]
    return int(device.split()[8])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--parameters", type=float, default=2e7)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--json", action="store_true")
    for hidden in ("--directory", "--place"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--relays", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    parameters = int(options.parameters)
    if options.directory:
        directory, place = Path(options.directory), int(options.place)
        if not place:
            publish(directory, parameters)
        else:
            receive(directory, place, options.hosts[0], relays=options.relays)
        return
    hop = measure(1, options.mbit, parameters, relays=False, kill=False)
    found = [hop]
    for hosts, relays in [(hosts, relays) for hosts in options.hosts for relays in (False, True)]:
        found.append(
            measure(hosts, options.mbit, parameters, relays=relays, kill=options.kill and relays and hosts > 1)
        )
    for one in found:
        one["hops"] = one["seconds"] / hop["seconds"]
        print(
            json.dumps(one)
            if options.json
            else f"{one['hosts']} hosts, {'relays' if one['relays'] else 'no relays'}{', one killed' * one['killed']}: "
            f"{one['seconds']:.2f} s, {one['hops']:.2f} hops; {one['copies']:.2f} copies left the trainer",
            flush=True,
        )


if __name__ == "__main__":
    main()
