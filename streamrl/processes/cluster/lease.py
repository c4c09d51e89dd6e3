"""The lease of a daemon: ``python -m streamrl.processes.cluster.lease SECONDS SOCKETS DAEMON``.

A daemon starts it as a process on its host. It kills the daemon and all processes of the run on this host when it has
read nothing from stdin for ``SECONDS``, or when the daemon has ended. It is a separate process, since a daemon that was
stopped (SIGSTOP) or hangs would not notice the end of its lease."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from signal import SIGINT, SIGKILL
from time import monotonic

from streamrl.processes.local_launcher import end_marked_processes

FIRST_S = 180.0
"""How long the first renewal may take: meanwhile daemons start on other hosts, and no process runs on this host."""
SWEEP_S = 5.0
"""How long ended processes may take to be gone."""


def main() -> None:
    """Wait for renewals, then kill. Exits when everything is gone."""
    lease_s = float(sys.argv[1])
    sockets = Path(sys.argv[2])
    daemon = int(sys.argv[3])
    signal.signal(SIGINT, signal.SIG_IGN)
    deadline = monotonic() + max(lease_s, FIRST_S)
    while (remaining_s := deadline - monotonic()) > 0:
        if select.select([0], [], [], remaining_s)[0]:
            if not os.read(0, 65_536):
                break  # the daemon has ended
            deadline = monotonic() + lease_s
    else:
        sys.stderr.write(f"the run did not reach this host for {lease_s:g} s: its processes end\n")
        sys.stderr.flush()
    if os.getppid() == daemon:
        with suppress(ProcessLookupError):
            os.kill(daemon, SIGKILL)
    # Children of the daemon die with it. Processes that they started and that outlive them have the run's marker.
    end_marked_processes(sockets, SWEEP_S)


if __name__ == "__main__":
    main()
