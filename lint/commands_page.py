"""Print docs/commands.md, the commands with their help and examples (a test compares):
``python lint/commands_page.py > docs/commands.md``."""

from __future__ import annotations

import sys

from streamrl.cli.main import COMMANDS

_HEAD = """# Commands

`streamrl COMMAND --help` prints the arguments of a command and an example.
Made by `python lint/commands_page.py`; a test compares.

| command | what it does |
|---|---|"""

_FOOT = """
`RUN` is the directory of a run; `runs/latest` is the newest one. `--json` prints JSON on stdout and nothing else there.
Commands that read a recipe take `--set SECTION.KEY=VALUE`, also as `SECTION.KEY=VALUE` and `--SECTION.KEY VALUE`.
Exit codes: 0 done or drained, 1 failed, 2 the recipe or the command line is wrong, 130 interrupted before the drain
was done."""


def page() -> str:
    """Return the page as it must stand in the repository."""
    rows = [f"| `{name}` | {text} |" for name, (_, text) in COMMANDS.items()]
    return "\n".join([_HEAD, *rows, _FOOT]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
