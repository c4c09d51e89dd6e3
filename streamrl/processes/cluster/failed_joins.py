"""Hosts that failed to join a run: what was said about them, and when each is tried again. ``cluster_launcher`` keeps
them in the supervisor's process while a host is missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from logging import getLogger
from time import monotonic

from msgspec import Struct

from streamrl.base.errors import StreamRLError

log = getLogger(__name__)

FIRST_PAUSE_S = 4.0
LONGEST_PAUSE_S = 300.0
"""Pauses before a host that could not join is tried again: each failure doubles the pause."""


class FailedJoin(Struct, frozen=True):
    """The last failure of a host. ``pause_s``: pause that began with it; ``retry_s``: time of the next try."""

    text: str
    pause_s: float
    retry_s: float


class FailedJoins:
    """The last failure of each host, by name."""

    def __init__(self) -> None:
        self.by_host: dict[str, FailedJoin] = {}

    def forget_others(self, hosts: Collection[str]) -> None:
        """Forget the failures of all but ``hosts``: a host that was away meanwhile may have been mended."""
        self.by_host = {name: failed for name, failed in self.by_host.items() if name in hosts}

    def may_try(self, host: str) -> bool:
        """Return whether the pause of ``host`` is over."""
        return host not in self.by_host or self.by_host[host].retry_s <= monotonic()

    @contextmanager
    def joining(self, host: str) -> Iterator[None]:
        """Log an error of the body, which starts a daemon on ``host``: once, and again when it changes."""
        try:
            yield
        except (StreamRLError, OSError) as error:
            text = str(error)
            pause_s = FIRST_PAUSE_S
            if (earlier := self.by_host.get(host)) is not None:
                pause_s = min(2.0 * earlier.pause_s, LONGEST_PAUSE_S)
            if earlier is None or earlier.text != text:
                log.warning("no host has joined: %s", text)
            self.by_host[host] = FailedJoin(text, pause_s, monotonic() + pause_s)
        else:
            self.by_host.pop(host, None)
