"""S14: trainer ranks authenticate nobody, so they listen on the one interface that the recipe names."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_the_store_listens_at_the_named_address_only(free_ports: Callable[[int], int]) -> None:
    from streamrl.learning.process_group import meet_at

    before, port = listening(), free_ports(1)
    store = meet_at(f"tcp://127.0.0.1:{port}", 0, 1, timedelta(seconds=10))
    assert listening() - before == {("127.0.0.1", port)}
    store.set("hello", "hello")
    assert store.get("hello") == b"hello"


def test_gloo_listens_where_the_others_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrl.learning.process_group import INTERFACES, interface_towards, stay_on_interface

    for rendezvous in ("", f"file://{Path('/tmp/x')}", "tcp://127.0.0.1:5700", "tcp://127.0.0.2:5700"):
        for name in INTERFACES:
            monkeypatch.setenv(name, "x")
            monkeypatch.delenv(name)
        stay_on_interface(rendezvous)
        assert [os.environ[name] for name in INTERFACES] == ["lo", "lo"], rendezvous
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    stay_on_interface("tcp://127.0.0.1:5700")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0", "what the user has set stays"
    others = {
        address.address: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family.name == "AF_INET" and not address.address.startswith("127.")
    }
    assert [interface_towards(address, 9) for address in others] == list(others.values())
