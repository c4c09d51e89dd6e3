"""Who is answered next, and when a slow link would have carried the answer. Pure: no socket, no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_BITS = 8.0


class SlowLink:
    """A link of ``megabits`` million bits a second (0: without limit) that carries one frame after another.

    A frame arrives when its last bit has passed, and an idle link saves nothing up: a token bucket that holds nothing,
    so that ``n`` bytes never take less than ``8 n / bandwidth``, whatever their pieces.
    """

    def __init__(self, megabits: float) -> None:
        self._bytes_per_second = megabits * 1e6 / _BITS
        self._free_at = float("-inf")
        self._began_at: float | None = None

    def seconds_until_carried(self, now: float, size: int) -> float:
        """How long from ``now`` (seconds of a monotonic clock) until the next frame, of ``size`` bytes, is through."""
        if not self._bytes_per_second:
            return 0.0
        if self._began_at is None:
            self._began_at = max(now, self._free_at)
        return self._began_at + size / self._bytes_per_second - now

    def carried(self, size: int, *, more: bool) -> None:
        """The next frame is through. With ``more`` waiting, the one after it began where it ended, however late its
        end was noticed."""
        if not self._bytes_per_second:
            return
        if self._began_at is not None:
            self._free_at = self._began_at + size / self._bytes_per_second
        self._began_at = self._free_at if more else None

    def refused(self) -> None:
        """The next frame cannot be sent: it took none of the link's time."""
        self._began_at = None


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
