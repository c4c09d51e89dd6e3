"""``streamrl watch ENDPOINT``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from streamrl.comm.telemetry import TelemetrySubscriber
from streamrl.comm.transport_keys import KEY_ROLE, KEYS_DIRECTORY, KeyRole
from streamrl.observe.stdout import StdoutReporter
from streamrl.observe.watch import follow, to_run_event, write_json

PATIENCE_S = 5.0


def watch(endpoint: str, *, as_json: bool, keys: Path | None = None) -> int:
    """Show messages until the run has finished or Ctrl-C. Any number of watchers may look at one run. ``keys``: where
    the keys of an observer are, for a run that has keys."""
    if keys is not None:
        os.environ.update({KEYS_DIRECTORY: str(keys), KEY_ROLE: KeyRole.OBSERVER.value})
    quiet = False
    with TelemetrySubscriber(endpoint) as subscriber, StdoutReporter() as report:
        try:
            for message in follow(subscriber.receive, PATIENCE_S):
                if message is None:
                    if not quiet:
                        print(f"nothing comes from {endpoint}; still waiting", file=sys.stderr, flush=True)
                    quiet = True
                    continue
                quiet = False
                if as_json:
                    write_json(message, sys.stdout)
                elif (event := to_run_event(message)) is not None:
                    report(event)
        except KeyboardInterrupt:
            pass  # leaving is what Ctrl-C asks a watcher for; the run does not notice
        lost = subscriber.lost
    if lost:
        print(f"{lost} messages were lost on the way: this reader was too slow", file=sys.stderr)
    return 0
