"""Where ranks meet over TCP: on one named interface, because neither the store nor gloo nor NCCL authenticates anybody.

By itself torch's store listens on every interface whatever address it is given, and gloo on the one that the host's
name resolves to.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import psutil
from torch._C._distributed_c10d import Store, TCPStore

from streamrl.base.errors import StreamRLError

LOOPBACK = "127.0.0.1"
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""By which gloo and NCCL are told where to listen; what the user has set stays."""


def meet_at(rendezvous: str, rank: int, ranks: int, timeout: timedelta) -> Store:
    """The store at ``tcp://host:port``; rank 0 listens at that address only. Raises ``OSError`` and torch's errors."""
    place = urlsplit(rendezvous)
    if not place.hostname or not place.port:
        raise StreamRLError(f"the rendezvous {rendezvous!r} has no host or no port; write tcp://HOST:PORT")
    if rank:
        return TCPStore(place.hostname, place.port, ranks, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in place.hostname else socket.AF_INET
    listener = socket.create_server((place.hostname, place.port), family=family, backlog=ranks + 16)
    return TCPStore(
        place.hostname,
        place.port,
        ranks,
        is_master=True,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def stay_on_interface(rendezvous: str) -> None:
    """Let gloo and NCCL listen where ``rendezvous`` is reached, on loopback for a file or none. Before they start."""
    place = urlsplit(rendezvous)
    host, port = (place.hostname or LOOPBACK, place.port or 9) if place.scheme == "tcp" else (LOOPBACK, 9)
    name = interface_towards(host, port)
    for variable in INTERFACES:
        if name:
            os.environ.setdefault(variable, name)


def interface_towards(host: str, port: int) -> str:
    """Name of the interface by which packets leave for ``host``; empty where it cannot be known. Nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return ""
        own = probe.getsockname()[0]
    # A packet to an address of this host goes through loopback, which no other host reaches: whose address is it?
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return str(name)
    return ""
