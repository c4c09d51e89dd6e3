"""Functions that tell which hosts can reach an address. No name is looked up. The rules of the recipe, the guard of the
ZeroMQ sockets and the client of the judge use them."""

from __future__ import annotations

from ipaddress import ip_address

WILDCARDS = frozenset({"", "*", "0.0.0.0", "::", "0"})
"""Addresses that mean every interface of the host."""


def bare_host(host: str) -> str:
    """Strip the brackets of an IPv6 address."""
    return host.removeprefix("[").removesuffix("]")


def host_of(endpoint: str) -> str:
    """Host of ``tcp://HOST:PORT``, without brackets; empty for any other endpoint."""
    if not endpoint.startswith("tcp://"):
        return ""
    # When libzmq connects, a source address may stand before a semicolon, and the host after it.
    address = endpoint.removeprefix("tcp://").rpartition(";")[2]
    return bare_host(address.rpartition(":")[0])


def is_wildcard(host: str) -> bool:
    """Return whether binding ``host`` listens on every interface."""
    return bare_host(host) in WILDCARDS


def is_loopback(host: str) -> bool:
    """Return whether only this host reaches ``host``. False for every name but ``localhost``, since a name may mean any
    address."""
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
