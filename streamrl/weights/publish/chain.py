"""The encoded versions that a publisher still serves: *links*, each a delta on the version published before it, and
*anchors*, which are complete. ``publisher.py`` keeps one chain in each trainer rank's process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from streamrl.weights.publish.server import ServedPart

MAXIMUM_LINKS = 256  # limit also where the links take fewer bytes than the budget
UNACKNOWLEDGED_LINKS = 4  # newest links, kept also above the budget: engines may not have fetched them yet


class Chain:
    """Links and anchors, dropped when engines need them no longer. An engine that missed versions, or has only loaded
    the checkpoint on which the first link is made, fetches the links that it lacks.

    ``budget_bytes``: largest size of all links together, beyond the newest four; the oldest links are dropped first."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._links: deque[ServedPart] = deque()
        self._bytes = 0
        self._acknowledged = -1
        self._anchors: list[ServedPart] = []
        self.newest_digest = ""

    def __iter__(self) -> Iterator[ServedPart]:
        """Iterate over all served parts."""
        yield from self._links
        yield from self._anchors

    def add(self, link: ServedPart) -> None:
        """Add a new version, a delta on the newest one."""
        self.newest_digest = link.manifest_digest
        self._links.append(link)
        self._bytes += link.size
        while len(self._links) > UNACKNOWLEDGED_LINKS and self._is_too_much():
            self._bytes -= self._links.popleft().size
        self._drop_acknowledged()

    def add_anchor(self, anchor: ServedPart) -> None:
        """Add a complete version. An anchor that comes before any link is the version on which the first link is made.
        Besides the new anchor only the newest other one is kept."""
        self.newest_digest = self.newest_digest or anchor.manifest_digest
        earlier = [old for old in self._anchors if old.manifest_digest != anchor.manifest_digest]
        self._anchors = [*earlier[-1:], anchor]

    def acknowledge(self, policy_version: int) -> None:
        """Note that every engine holds this version, and drop older anchors."""
        self._acknowledged = max(self._acknowledged, policy_version)
        self._anchors = [anchor for anchor in self._anchors if anchor.policy_version >= self._acknowledged]
        self._drop_acknowledged()

    def _is_too_much(self) -> bool:
        return self._bytes > self._budget_bytes or len(self._links) > MAXIMUM_LINKS

    def _drop_acknowledged(self) -> None:
        while self._links and self._links[0].policy_version < self._acknowledged and self._is_too_much():
            self._bytes -= self._links.popleft().size
