"""Functions that tell which hosts can reach an address, and whether a port is one. No name is looked up. The rules of
the recipe, the guard of the ZeroMQ sockets, the client of the judge and commands that take a port use them."""

from __future__ import annotations

from ipaddress import ip_address

_LARGEST_PORT = 65535
WILDCARDS = frozenset({"", "*", "0.0.0.0", "::", "0"})
"""Addresses that mean every interface of the host."""


def wrong_port(port: str) -> str:
    """Return what is wrong with a port to be bound or reached, as text; empty for a number from 0 to 65535. The system
    takes a larger one without the bits above: 99999 is 34463."""
    if port.isascii() and port.isdigit() and int(port) <= _LARGEST_PORT:
        return ""
    return f'"{port}" is no port: write a number up to {_LARGEST_PORT}'


def bare_host(host: str) -> str:
    """Strip the brackets of an IPv6 address."""
    return host.removeprefix("[").removesuffix("]")


def at_port(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in bare_host(host) and not host.startswith("[") else f"{host}:{port}"


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
