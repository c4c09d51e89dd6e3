"""Which engine gets a request: the least loaded one, near its siblings (as ``engines.routing`` routes)."""

from __future__ import annotations

from streamrl.engines.routing import SIBLING_SLACK


class LeastLoaded:
    """Open requests by engine, and engines by their number of open requests: every operation takes constant time, but
    ``leave_out`` and ``take_in``."""

    def __init__(self, engines: int) -> None:
        self._open = [0] * engines
        # Dictionaries, not sets: what was used longest ago is the first, and a run repeats exactly.
        self._by_load: list[dict[int, None]] = [dict.fromkeys(range(engines))]
        self._least = 0
        self._group = -1
        self._sibling = 0
        self._out: set[int] = set()

    def enter(self, group: int) -> int:
        """The engine that gets a request of ``group``."""
        if len(self._open) == 1:
            return 0
        least = self._least
        chosen = self._sibling
        if group != self._group or self._open[chosen] > least + SIBLING_SLACK or chosen in self._out:
            chosen = next(iter(self._by_load[least]))
            self._group, self._sibling = group, chosen
        self._move(chosen, 1)
        return chosen

    def enter_at(self, engine: int) -> None:
        """A request moved to ``engine``."""
        self._move(engine, 1)

    def leave(self, engine: int) -> None:
        """A request of ``engine`` ended, or was taken off."""
        if len(self._open) > 1:
            self._move(engine, -1)

    def leave_out(self, engine: int) -> None:
        """Send ``engine`` nothing more until ``take_in``; another one must be left."""
        self._out.add(engine)
        del self._by_load[self._open[engine]][engine]
        self._least = next(load for load, engines in enumerate(self._by_load) if engines)

    def take_in(self, engine: int) -> None:
        """Send ``engine`` requests again."""
        self._out.discard(engine)
        self._by_load[self._open[engine]][engine] = None
        self._least = min(self._least, self._open[engine])

    def _move(self, engine: int, change: int) -> None:
        load = self._open[engine]
        new = self._open[engine] = load + change
        if engine in self._out:
            return
        by_load = self._by_load
        del by_load[load][engine]
        if new == len(by_load):
            by_load.append({})
        by_load[new][engine] = None
        if new < self._least or (load == self._least and not by_load[load]):
            self._least = new
