"""What the runner's own witnesses wrote: the tap in the processes and the ledger of the reward function."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Witness:
    """Follows files of JSON lines that grow. ``records``: all lines so far, in the order in which they were read."""

    def __init__(self, *paths: Path) -> None:
        self._places = dict.fromkeys(paths, 0)
        self.records: list[Record] = []

    def read(self) -> list[Record]:
        """Lines that were not there before."""
        new: list[Record] = []
        for path, place in self._places.items():
            if not path.exists() or path.stat().st_size == place:
                continue
            with path.open("rb") as file:
                file.seek(place)
                complete = file.read().rpartition(b"\n")[0]
            self._places[path] = place + len(complete) + bool(complete)
            new += [json.loads(line) for line in complete.splitlines() if line]
        self.records += new
        return new

    def wait_for(
        self, wanted: Callable[[Record], bool], timeout_s: float, give_up: Callable[[], bool]
    ) -> Record | None:
        """The first new line that is ``wanted``; None when ``timeout_s`` passes first, or ``give_up`` says so."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for record in self.read():
                if wanted(record):
                    return record
            if give_up():
                return None
            time.sleep(0.003)
        return None
