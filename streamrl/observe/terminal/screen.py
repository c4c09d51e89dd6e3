"""stdout and stderr of a command: what they do not take is dropped, and ends nothing."""

from __future__ import annotations

import io
import logging
import os
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = logging.getLogger(__name__)


def open_screen(*, drops: bool) -> None:
    """Let ``sys.stdout`` and ``sys.stderr`` escape what their encoding lacks, for the rest of this process, and, where
    ``drops``, drop what cannot be written: a run is more than its screen, a report is not. ``/dev/null`` is opened for
    each of descriptors 0 to 2 that is closed: libuv aborts where it gets one of them for a socket."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        raw = _Screen(descriptor, "w", closefd=False)
        raw.drops = drops
        encoding = getattr(getattr(sys, name), "encoding", "utf-8")  # None where the descriptor was closed
        lines = descriptor == 2 or raw.isatty() or getattr(getattr(sys, name), "write_through", False)
        stream = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=lines)
        setattr(sys, name, stream)


class _Screen(io.FileIO):
    """A descriptor that drops what it cannot take. A reader that has gone (``| head``) is still an error."""

    drops = True
    _shown = False

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            written = super().write(data)
            if written is None:  # not blocking, and full
                select.select((), (self,), (), 1.0)
                written = super().write(data)
            if written is None:
                raise BlockingIOError(0, "nobody reads it")
            return written
        except OSError as error:
            if not self.drops or isinstance(error, BrokenPipeError):
                raise
            if self.fileno() == 1 and not self._shown:
                self._shown = True
                log.warning("stdout cannot be written (%s): lines are lost, and nothing else", error.strerror)
            return memoryview(data).nbytes
