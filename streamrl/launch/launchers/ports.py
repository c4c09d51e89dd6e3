"""Ports of a range that are free on this host. Two runs of streamrl on one host never take the same ones."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO


def free_ports(address: str, ports: Iterable[int], count: int) -> tuple[list[int], list[IO[bytes]]]:
    """At most ``count`` ports that can be bound at ``address`` and that no other run holds, and the files whose locks
    hold them until they are closed: a process binds its port long after the run has chosen it."""
    # Of this user: files of others in a directory for temporary files cannot be locked.
    folder = Path(tempfile.gettempdir()) / f"streamrl-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found: list[int] = []
    held: list[IO[bytes]] = []
    for port in ports:
        if len(found) == count:
            break
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            lock = (folder / f"{port}.lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            found.append(port)
            held.append(lock)
    return found, held
