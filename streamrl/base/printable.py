"""Untrusted text (of models, rewards, other hosts) for terminals and logs, and the logging set-up of each process. An
escape sequence can rewrite a terminal, and a line break can forge a line of a log: here both are escaped."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import TextIO

LONGEST_RECORD = 64 << 10
"""Limit of the characters of one record in a log; the number of further characters is logged instead of them."""

_SHOWN_AS_THEY_ARE = frozenset("\n\t")
# C0, DEL and C1 control characters; line and paragraph separators; marks that change the direction of writing.
_CODES = [*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
_ESCAPED = {code: ascii(chr(code))[1:-1] for code in _CODES if chr(code) not in _SHOWN_AS_THEY_ARE}
_ESCAPED_IN_JSON = {code: f"\\u{code:04x}" for code in _ESCAPED}


def printable(text: str) -> str:
    """Escape control characters and lone surrogates (as ``\\x1b``); line breaks and tabs stay."""
    return text.translate(_ESCAPED).encode("utf-8", "backslashreplace").decode()


def printable_json(text: str) -> str:
    """Escape control characters of JSON so that it stays JSON of the same value (``\\u009b``)."""
    return text.translate(_ESCAPED_IN_JSON)


def one_line(text: str) -> str:
    """Escape ``text`` as ``printable`` does, and its line breaks and tabs, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


class PrintableFormatter(logging.Formatter):
    """Formats records without control characters and with a bounded length. Further lines of a record are indented, so
    that none looks like another record."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if len(text) > LONGEST_RECORD:
            text = f"{text[:LONGEST_RECORD]} ... ({len(text) - LONGEST_RECORD} more characters)"
        return printable(text).replace("\n", "\n  ")


class _AboveProgress(logging.StreamHandler[TextIO]):
    """Writes to ``stream``, on a terminal to the present ``sys.stderr``, which rich replaces to print above its
    progress line."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream.isatty():
            self.stream = sys.stderr
        super().emit(record)


_LAYOUT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to(stream: TextIO, level: int, layout: str = _LAYOUT) -> None:
    """Log the records of this process from ``level`` on to ``stream``, unless logging was configured before."""
    handler = _AboveProgress(stream)
    handler.setFormatter(PrintableFormatter(layout))
    handler.setLevel(level)  # a logger of a lower level writes to other files
    logging.basicConfig(level=level, handlers=[handler])


@contextmanager
def also_log_to(path: Path) -> Iterator[None]:
    """Append the records of this process to ``path``, too, within the block. The first record makes the file."""
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(PrintableFormatter(_LAYOUT))
    getLogger().addHandler(handler)
    try:
        yield
    finally:
        getLogger().removeHandler(handler)
        handler.close()
