"""The encoded versions that a publisher still serves: links, each a delta on the version published before it, and
complete versions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from streamrl.weights.publish.server import ServedPart

MAXIMUM_LINKS = 256  # however little they changed
UNACKNOWLEDGED_LINKS = 4  # newest ones that stay however many bytes they take: engines may be fetching them


class Chain:
    """``budget_bytes``: what links may take that every engine has; the oldest go first. An engine that missed versions,
    or has loaded the checkpoint on which the first link is made, takes the links that it lacks."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._links: deque[ServedPart] = deque()
        self._bytes = 0
        self._acknowledged = -1
        self._anchors: list[ServedPart] = []
        self.newest_digest = ""

    def __iter__(self) -> Iterator[ServedPart]:
        """All that is served."""
        yield from self._links
        yield from self._anchors

    def add(self, link: ServedPart) -> None:
        """A new version, on the one before it."""
        self.newest_digest = link.manifest_digest
        self._links.append(link)
        self._bytes += link.size
        while len(self._links) > UNACKNOWLEDGED_LINKS and self._is_too_much():
            self._bytes -= self._links.popleft().size
        self._drop_acknowledged()

    def add_anchor(self, anchor: ServedPart) -> None:
        """A complete version. The next one is made on it where it is the first."""
        self.newest_digest = self.newest_digest or anchor.manifest_digest
        others = [other for other in self._anchors if other.manifest_digest != anchor.manifest_digest]
        self._anchors = [*others[-1:], anchor]

    def acknowledge(self, policy_version: int) -> None:
        """Every engine holds this version: complete older ones need not be served."""
        self._acknowledged = max(self._acknowledged, policy_version)
        self._anchors = [anchor for anchor in self._anchors if anchor.policy_version >= self._acknowledged]
        self._drop_acknowledged()

    def _is_too_much(self) -> bool:
        return self._bytes > self._budget_bytes or len(self._links) > MAXIMUM_LINKS

    def _drop_acknowledged(self) -> None:
        while self._links and self._links[0].policy_version < self._acknowledged and self._is_too_much():
            self._bytes -= self._links.popleft().size
