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
from pathlib import Path

import msgspec

from streamrl.base.errors import UNDECODABLE
from streamrl.supervise.sweep import RunTraces, present_segments, read_traces, sweep

_POLL_S = 1.0
_LONGEST_LINE = 4096


class Session(msgspec.Struct, frozen=True, tag=True):
    """A session of the run; ``created``: seconds after boot at which its leader was made."""

    sid: int
    created: float


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Nothing is left of a session: its number may be anybody's now."""

    sid: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The supervisor ended everything itself."""


Line = Session | Ended | Done


def read_line(line: bytes) -> Line | None:
    """What one line says; None for one that says nothing."""
    try:
        return _decoder.decode(line)
    except UNDECODABLE:  # user code that was forked may have the pipe: what it writes ends no guard
        return None


_decoder: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


def main() -> int:
    """Serve until the pipe at stdin closes; its lines are ``Session``, ``Ended`` and ``Done``, as JSON.

    Arguments: the JSON of the run's ``RunTraces`` (``as_argument``), and the supervisor's pid.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    traces = msgspec.json.decode(sys.argv[1], type=RunTraces)
    parent, pending = int(sys.argv[2]), b""
    # A forked process of the user's may hold the pipe open after the supervisor died: hence the look at the parent.
    while os.getppid() == parent:
        if not select.select([sys.stdin], [], [], _POLL_S)[0]:
            continue
        received = os.read(sys.stdin.fileno(), 65_536)
        if not received:
            break
        *lines, pending = (pending + received).split(b"\n")
        pending = pending[:_LONGEST_LINE]
        for line in lines:
            match read_line(line):
                case Session(sid, created):
                    traces.sessions[sid] = created
                case Ended(sid):
                    traces.sessions.pop(sid, None)
                case Done():
                    return 0
    kept = read_traces(Path(traces.socket_directory))
    # Where nothing says which shared memory was there before the run, none is unlinked.
    traces.segments, traces.foreign = (kept.segments, kept.foreign) if kept else (set(), present_segments())
    return 1 if sweep(traces) else 0


if __name__ == "__main__":
    sys.exit(main())
