"""A run that makes no progress says so, with what tells who waits for whom, before it does anything about it.

The progress clock is a value that changes whenever anything gets on: a token, an outcome, a step, a push, a byte of a
checkpoint. That something is alive (answers, uses the processor) is no progress.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread

from streamrl.base.errors import RunStalled
from streamrl.base.run_events import StallSeen
from streamrl.base.whole_files import write_whole
from streamrl.supervise.watch.task_stacks import task_stacks, thread_stacks

_LOOKS = 20
"""Looks at the progress clock in the time that it may stand still."""
_LONGEST_PAUSE_S = 5.0
_MOST_NAMES = 100


class StallWatch:
    """``progress()``: any value, compared with the one before. ``waits()``: what is waited for, a line each, the most
    telling first. ``others``: has the other processes write their stacks to their logs, and returns their pids."""

    def __init__(
        self,
        directory: Path,
        *,
        stall_timeout_s: float,
        progress: Callable[[], object],
        waits: Callable[[], list[str]],
        tell: Callable[[StallSeen], Awaitable[None]],
        others: Callable[[], list[int]] = list,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self.stall_timeout_s = stall_timeout_s
        self._progress = progress
        self._waits = waits
        self._tell = tell
        self._others = others
        self._clock = clock
        self._last: object = None
        self._since_s = self._looked_s = clock()

    async def run(self) -> None:
        """Until it is cancelled. Raises ``RunStalled`` when nothing moved for ``stall_timeout_s`` seconds."""
        while True:
            self.look()
            if self.still_s >= self.stall_timeout_s:
                await self._stalled()
            await anyio.sleep(min(self.stall_timeout_s / _LOOKS, _LONGEST_PAUSE_S))

    @property
    def still_s(self) -> float:
        """Seconds since the progress clock moved."""
        return self._looked_s - self._since_s

    def look(self) -> None:
        """Look at the progress clock. Time in which nobody could look (the process stood still as a whole) counts as
        one look: what others did meanwhile is seen only at the next one."""
        now, before = self._clock(), self._looked_s
        gap_s = now - before
        if gap_s > self.stall_timeout_s / 2:
            self._since_s += gap_s
        self._looked_s = now
        found = self._progress()
        if found != self._last:
            self._last, self._since_s = found, now

    async def write(self, occasion: str) -> Path:
        """Write what is waited for and where everything stands to a file of its own, and return its path."""
        asked = self._others()
        lines = [occasion, "", "waits, the longest first:", *(f"  {line}" for line in self._waits() or ["nothing"])]
        lines += ["", f"progress clock: {self._last}", f"it has stood still for {self.still_s:.1f} s", ""]
        if asked:
            pids = ", ".join(map(str, asked))
            lines += [f"processes {pids} were asked for their stacks: they are at the end of their logs", ""]
        parts = ["\n".join(lines), "==== coroutines", task_stacks(), "==== threads", thread_stacks()]
        return await anyio.to_thread.run_sync(write_stall, self._directory, "\n".join(parts))

    async def _stalled(self) -> None:
        waits = self._waits()
        seconds = self.still_s
        occasion = f"nothing has moved for {seconds:.0f} s"
        path = await self.write(occasion)
        first = ", ".join(waits[:2]) or "nobody says what for"
        await self._tell(StallSeen(waits=tuple(waits[:_MOST_NAMES]), seconds=seconds, file=str(path)))
        raise RunStalled(
            f"{occasion} (run.advanced.stall_timeout_s): {first}; {path} tells who waits for what, with all stacks"
        )


def write_stall(directory: Path, text: str) -> Path:
    """``<time>.txt`` in ``directory``, whole or not at all. Blocking; safe in any thread."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = time.strftime("%Y%m%d-%H%M%S")
    names = (directory / f"{stem}{suffix}.txt" for suffix in ("", *(f"-{n}" for n in range(2, _MOST_NAMES))))
    path = next((name for name in names if not name.exists()), directory / f"{stem}-last.txt")
    write_whole(path, text.encode(errors="replace"))
    return path
