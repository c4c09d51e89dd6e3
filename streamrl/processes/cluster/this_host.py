"""Addresses, free ports and limits of this host. A daemon calls it when it begins. No torch, vLLM or Ray."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address, ip_network
from pathlib import Path
from socket import AF_INET, AF_INET6
from typing import IO

import psutil

from streamrl.base.run_process import private_directory

MEMORY_MONITOR = "RAY_memory_monitor_refresh_ms"
"""Variable of Ray; 0: Ray ends no process where the memory of a host is nearly full."""
OPEN_FILES = 65_536
"""Open files that a process of a run may need."""


def free_ports(address: str, ports: Iterable[int], count: int) -> tuple[list[int], list[IO[bytes]]]:
    """At most ``count`` ports that can be bound at ``address`` and that no other run has locked, and the open files
    whose locks reserve them: a process binds its port long after the run has chosen it. Two runs of a user on one host
    never get the same ports."""
    # A folder of this user: files of other users in the directory for temporary files cannot be locked.
    folder = private_directory(Path(tempfile.gettempdir()) / f"streamrl-ports-{os.geteuid()}")
    reserved: list[int] = []
    locks: list[IO[bytes]] = []
    for port in ports:
        if len(reserved) == count:
            break
        with socket.socket(AF_INET6 if ":" in address else AF_INET) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            lock = (folder / f"{port}.lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            reserved.append(port)
            locks.append(lock)
    return reserved, locks


def address_on(interface: str) -> str:
    """This host's first address of an interface (eth1; an IPv4 address where it has one) or in a network (10.1.0.0/16,
    fd00::/8); empty where it has none."""
    for family in (AF_INET, AF_INET6):
        for name, addresses in psutil.net_if_addrs().items():
            for address in (entry.address for entry in addresses if entry.family == family):
                if "%" in address:  # of one link only: no other host would know of which one
                    continue
                if name == interface or ("/" in interface and ip_address(address) in ip_network(interface, False)):
                    return str(address)
    return ""


def raise_file_limit() -> None:
    """Let this process and those that it starts open ``OPEN_FILES`` files, or as many as this host allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
