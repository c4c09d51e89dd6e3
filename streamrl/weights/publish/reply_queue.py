"""Which request for weights is answered next. Pure: no socket, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class ReplyQueue:
    """Requests that are not answered yet. Peers take turns, so that none waits for all that another asked.

    A request that waits already is not queued twice: asking again costs nothing.
    """

    def __init__(self) -> None:
        self._peers: OrderedDict[bytes, dict[tuple[bytes, ...], None]] = OrderedDict()

    def add(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """``frames``: the request as it came."""
        self._peers.setdefault(peer, {})[tuple(frames)] = None

    def first(self) -> tuple[bytes, tuple[bytes, ...]] | None:
        """Peer and request to be answered next; None when nobody waits."""
        for peer, requests in self._peers.items():
            return peer, next(iter(requests))
        return None

    def drop_peer(self) -> None:
        """The first peer is gone, and with it all that it asked for."""
        self._peers.popitem(last=False)

    def drop_first(self) -> None:
        """It was answered: the next peer's turn."""
        peer, requests = self._peers.popitem(last=False)
        del requests[next(iter(requests))]
        if requests:
            self._peers[peer] = requests
