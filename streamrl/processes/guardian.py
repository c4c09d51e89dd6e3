"""The guardian: a tiny process that ends the run's processes when the supervisor dies without doing so itself.

Every child of the supervisor asks the kernel to die with it, but grandchildren (vLLM's EngineCore and workers) can only
ask once they have imported enough, seconds after they started. The guardian closes that gap: it reads from a pipe
which sessions belong to the run, and when the pipe closes without a ``done`` it sweeps them.
"""

from __future__ import annotations

import os
import select
import signal
import sys

import msgspec

from streamrl.errors import UNDECODABLE
from streamrl.processes.sweep import RunTraces, sweep

_POLL_S = 1.0
_LONGEST_LINE = 4096
_LONGEST_TRACES = 64 << 20


class Session(msgspec.Struct, frozen=True, tag=True):
    """A session of the run; ``created``: seconds after boot at which its leader was made."""

    sid: int
    created: float


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Nothing is left of a session: its number may be anybody's now."""

    sid: int


class Guarded(msgspec.Struct, frozen=True, tag=True):
    """The first line: whose processes they are, and the sessions so far."""

    traces: RunTraces


class Done(msgspec.Struct, frozen=True, tag=True):
    """The supervisor ended everything itself."""


Line = Session | Ended | Done | Guarded


def read_line(line: bytes) -> Line | None:
    """What one line says; None for one that says nothing."""
    try:
        return _decoder.decode(line)
    except UNDECODABLE:  # user code that was forked may have the pipe: what it writes ends no guard
        return None


_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def main() -> int:
    """Serve until the pipe at stdin closes; its lines are JSON, the first one ``Guarded``.

    Arguments: the run's socket directory, which says in lists of processes whose guardian it is, and the supervisor's
    pid.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    traces: RunTraces | None = None
    parent, pending = int(sys.argv[2]), b""
    # A forked process of the user's may hold the pipe open after the supervisor died: hence the look at the parent.
    while os.getppid() == parent:
        if not select.select([sys.stdin], [], [], _POLL_S)[0]:
            continue
        received = os.read(sys.stdin.fileno(), 65_536)
        if not received:
            break
        *lines, pending = (pending + received).split(b"\n")
        pending = pending[: _LONGEST_LINE if traces else _LONGEST_TRACES]
        for line in lines:
            match said := read_line(line):
                case Guarded() if traces is None:
                    traces = said.traces
                case Session(sid, created) if traces is not None:
                    traces.sessions[sid] = created
                case Ended(sid) if traces is not None:
                    traces.sessions.pop(sid, None)
                case Done():
                    return 0
    return 1 if traces is not None and sweep(traces) else 0


if __name__ == "__main__":
    sys.exit(main())
