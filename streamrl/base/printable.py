"""Text from elsewhere (models, rewards, other hosts) on a terminal and in logs: it shows, and commands nothing. An
escape sequence can rewrite what a terminal shows, and a line break can forge a line of a log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

LONGEST_RECORD = 64 << 10
"""Characters of one record in a log; what comes after is counted."""

_SHOWN_AS_THEY_ARE = frozenset("\n\t")
# C0, DEL and C1 control characters; line and paragraph separators; marks that turn the direction of what follows.
_CODES = [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_ESCAPED = {code: ascii(chr(code))[1:-1] for code in _CODES if chr(code) not in _SHOWN_AS_THEY_ARE}


def printable(text: str) -> str:
    """``text`` with control characters as ``\\x1b``; line breaks and tabs stay. Lone surrogates are escaped, too."""
    return text.translate(_ESCAPED).encode("utf-8", "backslashreplace").decode()


def one_line(text: str) -> str:
    """``printable`` on one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


class PrintableFormatter(logging.Formatter):
    """Records without control characters, of a bounded length, whose further lines are indented: none looks like a
    record of its own."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) > LONGEST_RECORD:
            text = f"{text[:LONGEST_RECORD]} ... ({len(text) - LONGEST_RECORD} more characters)"
        return printable(text).replace("\n", "\n  ")


class _AboveProgress(logging.StreamHandler[TextIO]):
    """Writes to ``stream``; on a terminal to what stands for it now: rich prints above the progress line it draws."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream.isatty():
            self.stream = sys.stderr
        super().emit(record)


_LAYOUT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to(stream: TextIO, level: int, layout: str = _LAYOUT) -> None:
    """Send the records of this process from ``level`` on to ``stream``, unless somebody has seen to them already."""
    handler = _AboveProgress(stream)
    handler.setFormatter(PrintableFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])


@contextmanager
def also_log_to(path: Path) -> Iterator[None]:
    """Append the records of this process to ``path``, too, which is made with the first of them."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(PrintableFormatter(_LAYOUT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
