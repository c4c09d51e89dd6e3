"""``python -m streamrl.cli.submit.ray_nodes HOST:PORT COUNT SECONDS``: waits until a Ray cluster has its hosts."""

from __future__ import annotations

import logging
import signal
import sys
import time
from contextlib import redirect_stderr
from io import StringIO

POLL_S = 0.5


def await_nodes(address: str, count: int, seconds: float) -> int:
    """Print how many of ``count`` hosts are there whenever that changes. Returns how many there are at the end."""
    import ray

    began_s = time.monotonic()
    with redirect_stderr(StringIO()):
        ray.init(address=address, logging_level=logging.CRITICAL, log_to_driver=False, configure_logging=False)
    found = -1
    while found < count and time.monotonic() - began_s < seconds:
        alive = len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
        if alive != found:
            found = alive
            print(f"{found} of {count} hosts are in the cluster ({time.monotonic() - began_s:.0f} s)", flush=True)
        time.sleep(POLL_S)
    ray.shutdown()
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wanted = int(sys.argv[2])
    sys.exit(0 if await_nodes(sys.argv[1], wanted, float(sys.argv[3])) >= wanted else 1)
