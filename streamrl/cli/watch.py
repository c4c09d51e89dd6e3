"""``streamrl watch``: the events of a running run. The command's own process subscribes to the metrics socket of the
run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from msgspec import json

from streamrl.base.errors import InputError
from streamrl.base.printable import printable_json
from streamrl.cli.command import Argument, Command
from streamrl.comm.transport_keys import KEY_ROLE, KEYS_DIRECTORY, KeyRole
from streamrl.comm.zmq_sockets import has_ipc_listener, transport_of
from streamrl.observe.telemetry import TelemetrySubscriber, to_run_event
from streamrl.observe.terminal.stdout import StdoutReporter
from streamrl.recipe.rules.load_recipe import load_recipe
from streamrl.recipe.topology import metrics_endpoint, read_topology

PATIENCE_S = 5.0


class Watch(Command, frozen=True):
    """Follow a running run through its metrics socket. Any number of watchers may look at one run."""

    where: Annotated[
        str,
        Argument(
            "the run's directory, or where it publishes: tcp://HOST:PORT or ipc://PATH",
            metavar="RUN|ENDPOINT",
            positional=True,
        ),
    ]
    keys: Annotated[Path | None, Argument("keys of an observer, where the run has keys", metavar="DIRECTORY")] = None

    def run(self) -> int:
        """Watch until the run has ended or Ctrl-C; 1 where the run ended without a final message."""
        return _watch(self.endpoint(), as_json=self.json)

    def endpoint(self) -> str:
        """Return the endpoint of the run, and put the keys into the variables of this process. Raises ``StreamRLError``
        for a place that is no run and no endpoint."""
        where = self.where
        if "://" not in where and not Path(where).is_dir():
            raise InputError(
                f"{where} is neither the directory of a run nor an endpoint: write runs/latest, tcp://HOST:PORT or "
                "ipc://PATH"
            )
        if self.keys is not None:
            os.environ.update({KEYS_DIRECTORY: str(self.keys), KEY_ROLE: KeyRole.OBSERVER.value})
        if Path(where).is_dir():
            return endpoint_of(Path(where))
        transport_of(where)
        return where


def _watch(endpoint: str, *, as_json: bool) -> int:
    quiet = False
    with TelemetrySubscriber(endpoint) as subscriber, StdoutReporter() as report:
        try:
            while True:
                message = subscriber.receive(PATIENCE_S)
                if message is None:
                    # A TCP endpoint may be unreachable for a while.
                    if endpoint.startswith("ipc://") and not has_ipc_listener(endpoint):
                        print(f"the run has ended: no process listens at {endpoint}", file=sys.stderr)
                        return 1
                    if not quiet:
                        print(f"nothing comes from {endpoint}; still waiting", file=sys.stderr, flush=True)
                    quiet = True
                    continue
                quiet = False
                if as_json:
                    print(printable_json(json.encode(message).decode()), flush=True)
                elif (event := to_run_event(message)) is not None:
                    report(event)
                if message.topic == "run" and message.fields.get("state") == "finished":
                    break
        except KeyboardInterrupt:
            pass  # Ctrl-C ends the watcher, without an effect on the run
        lost = subscriber.lost
    if lost:
        print(f"{lost} messages were lost on the way: this reader was too slow", file=sys.stderr)
    return 0


def endpoint_of(run_directory: Path) -> str:
    """Return the endpoint of the metrics of a run. Raises ``StreamRLError`` for a directory without a run."""
    topology = read_topology(run_directory)
    return metrics_endpoint(load_recipe(run_directory / "recipe.toml"), topology)
