"""Ray on the hosts of a laboratory: a head on the first, a node on each other, with a token and ports of a range."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from campaigns.hosts.lab import Host, Lab, end

PORT = 6379
START_S = 180.0
"""Of a loaded machine: a head takes 30 s there."""


class RayNodes:
    """Ray of ``python`` on hosts of ``lab``, of which the first is the head."""

    def __init__(self, lab: Lab, python: Path) -> None:
        self.lab, self.python = lab, python
        token = lab.folder / "token"
        token.write_text(secrets.token_hex(16))
        token.chmod(0o600)
        self.variables = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_worker_niceness": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        """Of everything that speaks with this Ray."""
        self.address = f"{lab.hosts[0].address}:{PORT}"

    def start(self, hosts: Sequence[Host] = ()) -> None:
        """Start Ray on ``hosts``, or on all; the head first. Raises ``RuntimeError`` where one does not begin."""
        hosts = hosts or self.lab.hosts
        for head in hosts:
            if head is self.lab.hosts[0]:
                self._start(head)
        with ThreadPoolExecutor(max(len(hosts), 1)) as pool:
            list(pool.map(self._start, [host for host in hosts if host is not self.lab.hosts[0]]))

    def _start(self, host: Host) -> None:
        line: list[object] = [self.python.parent / "ray", "start", "--node-ip-address", host.address, "--num-cpus", 2]
        line += ["--disable-usage-stats", "--include-log-monitor=false", "--object-store-memory", 80_000_000]
        line += ["--min-worker-port", 20_000, "--max-worker-port", 20_100]
        if host is self.lab.hosts[0]:
            line += ["--head", "--port", PORT, "--include-dashboard=false", "--temp-dir", self.lab.tmp / "ray"]
        else:
            line += ["--address", self.address]
        for last in (False, False, True):
            try:
                host.run(line, self.variables, START_S)
                return
            except RuntimeError:
                end(host.processes("/ray/"))  # a start that took too long leaves what it had started
                if last:
                    raise
