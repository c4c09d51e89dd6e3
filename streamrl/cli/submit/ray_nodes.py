"""``python -m streamrl.cli.submit.ray_nodes HOST:PORT COUNT SECONDS``: waits until a Ray cluster has its hosts.

``submit.cluster_host`` starts it on the first host, before the run. It is a process of its own, since it imports
Ray."""

from __future__ import annotations

import logging
import signal
import sys
import time
from contextlib import redirect_stderr
from io import StringIO

POLL_S = 0.5


def await_nodes(address: str, count: int, seconds: float) -> int:
    """Wait until the cluster at ``address`` has ``count`` hosts, and print each change of their number. Returns the
    number at the end, which is smaller after ``seconds``."""
    import ray

    began_s = time.monotonic()
    with redirect_stderr(StringIO()):
        ray.init(address=address, logging_level=logging.CRITICAL, log_to_driver=False, configure_logging=False)
    present = -1
    while present < count and time.monotonic() - began_s < seconds:
        alive = len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
        if alive != present:
            present = alive
            print(f"{present} of {count} hosts are in the cluster ({time.monotonic() - began_s:.0f} s)", flush=True)
        time.sleep(POLL_S)
    ray.shutdown()
    return present


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    count = int(sys.argv[2])
    sys.exit(0 if await_nodes(sys.argv[1], count, float(sys.argv[3])) >= count else 1)
