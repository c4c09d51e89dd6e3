"""A version of weights to several hosts over one trainer link, by relays and without them: seconds until each host has
it, checked, and copies that left the trainer. As root (``campaigns/hosts/lab.py``); a receiver is what an engine's host
does, its relay and its fetch.

``python benchmarks/weights_over_hosts.py [--hosts 1 2 4 8] [--mbit 100] [--parameters 2e7] [--kill]``

*Hop*: one host, without relays. ``--mbit``: of each host's link, either way. ``--kill``: half-way the second host of
the chain dies."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from campaigns.hosts.lab import laboratory
from streamrl.base.messages import WeightAnnouncement, announcement_of
from streamrl.comm.transport_keys import OPEN_TO_ALL
from streamrl.engines.push.relay_tree import RelayPlace, RelayTree
from streamrl.weights.manifest import ShardSpec
from streamrl.weights.publish.publisher import WeightPublisher
from streamrl.weights.pull.fetch import fetch_version
from streamrl.weights.pull.replica import CheckpointReplica
from streamrl.weights.relay.relay import Relay

PORT, SUBNET = 5700, "10.78.0"


def published(endpoint: str, parameters: int) -> tuple[WeightPublisher, WeightAnnouncement]:
    bits = {"w": np.random.default_rng(0).integers(0, 1 << 16, parameters, dtype=np.uint16)}
    shard = ShardSpec("w", "bfloat16", (parameters,), 0, parameters)
    publisher = WeightPublisher(endpoint, run_id="hosts", rank=0, shards=[shard])
    publisher.start()
    return publisher, announcement_of(0, [publisher.publish(0, bits)])


def publish(directory: Path, address: str, parameters: int) -> None:
    publisher, announced = published(f"tcp://{address}:{PORT}", parameters)
    (directory / "announced.new").write_bytes(msgspec.msgpack.encode(announced))
    (directory / "announced.new").rename(directory / "announced")
    wait_for(directory / "end")
    publisher.close()


def receive(directory: Path, place: int, hosts: int, relays: bool) -> None:
    places = {f"host-{k}": RelayPlace(f"host-{k}", f"tcp://{SUBNET}.{k + 1}:{PORT}") for k in range(1, hosts + 1)}
    name = f"host-{place}"
    publisher, small = published(f"ipc://{directory}/{name}-warm", 1 << 22)
    CheckpointReplica().stage(fetch_version(small))  # code is loaded once
    publisher.close()
    wait_for(directory / "announced")
    announced = msgspec.msgpack.decode((directory / "announced").read_bytes(), type=WeightAnnouncement)
    with ExitStack() as stack:
        relay = stack.enter_context(Relay(places[name].endpoint, f"ipc://{directory}/{name}")) if relays else None
        (directory / f"ready-{place}").touch()
        wait_for(directory / "go")
        began = time.monotonic()
        if relay is not None:
            announced = relay.through(RelayTree(lambda: places).with_relays(announced, name, places))
        staged = CheckpointReplica().stage(fetch_version(announced))
        assert staged.state_hash == announced.state_hash
        (directory / f"took-{place}.new").write_text(str(time.monotonic() - began))
        (directory / f"took-{place}.new").rename(directory / f"took-{place}")
        wait_for(directory / "end")


def wait_for(*paths: Path, processes: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    while not all(path.exists() for path in paths):
        if any(process.poll() is not None for process in processes):
            raise SystemExit("a process of a host has ended: its error is above")
        time.sleep(0.02)


def measure(hosts: int, mbit: float, parameters: int, *, relays: bool, kill: bool = False) -> tuple[float, float]:
    """Seconds until the last host that lives has the version, and copies that the trainer's link carried."""
    shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "256k", "latency", "50ms")
    with (
        tempfile.TemporaryDirectory() as made,
        laboratory(f"wr{os.getpid() % 100000}", count=hosts + 1, subnet=SUBNET) as lab,
    ):
        processes: list[subprocess.Popen[bytes]] = []
        directory, living = Path(made), [place for place in range(1, hosts + 1) if not kill or place != 2]
        for place, host in enumerate(lab.hosts):
            host.run(["tc", "qdisc", "add", "dev", "eth0", *shape])
            subprocess.run(
                ["ip", "netns", "exec", lab.bridge, "tc", "qdisc", "add", "dev", host.port, *shape], check=True
            )
            process = host.popen(
                [sys.executable, __file__, "--role", made, place, hosts, parameters, int(relays)], {OPEN_TO_ALL: "none"}
            )
            processes.append(process)
        wait_for(*(directory / f"ready-{place}" for place in range(1, hosts + 1)), processes=processes)

        def sent() -> int:
            return int(lab.hosts[0].run(["cat", "/proc/net/dev"]).partition("eth0:")[2].split()[8])

        before = sent()
        (directory / "go").touch()
        if kill:
            time.sleep(parameters * 16 / mbit / 1e6 / 2)
            processes.pop(2)
            lab.hosts.pop(2).kill()
        wait_for(*(directory / f"took-{place}" for place in living), processes=processes)
        took = max(float((directory / f"took-{place}").read_text()) for place in living)
        return took, (sent() - before) / (2 * parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--parameters", type=float, default=2e7)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--role", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        directory, place, hosts, parameters, relays = Path(options.role[0]), *map(int, options.role[1:])
        if place:
            receive(directory, place, hosts, bool(relays))
        else:
            publish(directory, f"{SUBNET}.1", parameters)
        return
    hop, _ = measure(1, options.mbit, int(options.parameters), relays=False)
    print(f"a hop: {hop:.2f} s", flush=True)
    for hosts, relays in [(hosts, relays) for hosts in options.hosts for relays in (False, True)]:
        kill = options.kill and relays and hosts > 1
        took, copies = measure(hosts, options.mbit, int(options.parameters), relays=relays, kill=kill)
        print(f"{hosts} hosts, relays {relays}: {took:.2f} s, {took / hop:.2f} hops, {copies:.2f} copies", flush=True)


if __name__ == "__main__":
    main()
