"""stdout and stderr of a process: the text of models, recipes and other hosts cannot command the terminal, and output
that cannot be written is dropped and ends nothing. ``cli/main.py`` calls ``open_screen`` for each command,
``processes/run_role.py`` for each process of a run; commands print tables by ``console.open_console``."""

from __future__ import annotations

import io
import logging
import os
import select
import sys
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

from streamrl.base.printable import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = logging.getLogger(__name__)


def open_screen(*, drops: bool, escapes: bool) -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` by streams that escape characters which their encoding lacks.

    ``drops``: whether output that cannot be written is dropped, as a run must go on without its screen; else an error
    is raised, as for a command whose output is its result. ``escapes``: whether control characters are escaped, too, as
    for a command, which shows text from elsewhere; in logs, libraries draw their progress with them. ``/dev/null`` is
    opened for each of the descriptors 0 to 2 that is closed, because libuv aborts where a socket gets one of these
    numbers."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # ``open`` takes the lowest free number
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        raw = _Screen(descriptor, "w", closefd=False)
        raw.drops = drops
        encoding = getattr(getattr(sys, name), "encoding", "utf-8")  # the stream is None if it was closed
        lines = descriptor == 2 or raw.isatty() or getattr(getattr(sys, name), "write_through", False)
        kind = EscapedText if escapes else io.TextIOWrapper
        stream = kind(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=lines)
        setattr(sys, name, stream)


class EscapedText(io.TextIOWrapper):
    """Text stream without control characters but line breaks and tabs. ``styled``: a stream to the same descriptor
    that takes the sequences of rich, on a terminal; else the stream itself."""

    @cached_property  # a stream closes its descriptor when it is deleted
    def styled(self) -> TextIO:
        if not self.isatty():
            return self
        return io.TextIOWrapper(self.buffer, self.encoding, "backslashreplace", write_through=True)

    def write(self, text: str, /) -> int:
        return super().write(printable(text))


class _Screen(io.FileIO):
    """A descriptor that drops data which it cannot write. A reader that has ended (``| head``) is still an error."""

    drops = True
    _warned = False

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            written = super().write(data)
            if written is None:  # the descriptor does not block, and is full
                select.select((), (self,), (), 1.0)
                written = super().write(data)
            if written is None:
                raise BlockingIOError(0, "nobody reads it")
            return written
        except OSError as error:
            if not self.drops or isinstance(error, BrokenPipeError):
                raise
            if self.fileno() == 1 and not self._warned:
                self._warned = True
                log.warning("stdout cannot be written (%s): lines are lost, and nothing else", error.strerror)
            return memoryview(data).nbytes
