"""Rules about which hosts can reach an address. Pure: no name is looked up."""

from __future__ import annotations

from ipaddress import ip_address

WILDCARDS = frozenset({"", "*", "0.0.0.0", "::", "0"})
"""Every interface of the host."""


def bare_host(host: str) -> str:
    """Strip the brackets of an IPv6 address."""
    return host.removeprefix("[").removesuffix("]")


def host_of(endpoint: str) -> str:
    """Host of ``tcp://HOST:PORT``, without brackets; empty for any other endpoint."""
    if not endpoint.startswith("tcp://"):
        return ""
    # libzmq takes a source address in front of a semicolon when it connects; the host is what comes after it.
    return bare_host(endpoint.removeprefix("tcp://").rpartition(";")[2].rpartition(":")[0])


def is_wildcard(host: str) -> bool:
    """Return whether binding ``host`` listens on every interface."""
    return bare_host(host) in WILDCARDS


def is_loopback(host: str) -> bool:
    """Return whether only this host reaches ``host``. A name other than ``localhost`` could be anything, so it is
    not."""
    bare = bare_host(host)
    if bare == "localhost":
        return True
    try:
        return ip_address(bare).is_loopback
    except ValueError:
        return False


def is_public(host: str) -> bool:
    """Return whether ``host`` is an address that the whole internet may route to; False for names."""
    try:
        return ip_address(bare_host(host)).is_global
    except ValueError:
        return False
