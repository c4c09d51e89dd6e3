"""The rich console of the commands that print tables, opened in the process of the command. Its text may come from
models, recipes and names of folders, so neither control characters nor markup of that text reach the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from streamrl.base.printable import printable

WIDTH_OF_FILES = 150
"""Columns of a table that is written to a file or a pipe."""


class PrintableConsole(Console):
    """A console that escapes control characters of all text; those of rich's own styles and movements stay."""

    def render_str(self, text: str, **options: Any) -> Text:  # cells of tables, before their width is measured
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text))


def open_console(stream: TextIO | None = None, **options: Any) -> PrintableConsole:
    """Return a console on ``stream`` (default: stdout), without markup and highlighting. ``options``: further arguments
    of ``rich.console.Console``."""
    if stream is None:
        stream = sys.stdout
    return PrintableConsole(file=getattr(stream, "styled", stream), markup=False, highlight=False, **options)


def wide_console() -> PrintableConsole:
    """Return a console on stdout for tables: as wide as the terminal, else ``WIDTH_OF_FILES``."""
    width = None
    if not sys.stdout.isatty():
        width = WIDTH_OF_FILES
    return open_console(width=width)
