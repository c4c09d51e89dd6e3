"""``streamrl keys``: the keys by which processes on other hosts are let in."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from streamrl.cli.command import Argument, Command
from streamrl.comm.transport_keys import KeyRole, make_keys


class Keys(Command, frozen=True):
    """Make a pair of CURVE keys for each role, in a directory that only you may enter."""

    directory: Annotated[Path, Argument("a new directory", metavar="DIRECTORY", positional=True)]

    def run(self) -> int:
        """Make the keys, and print which process needs which key. No key is printed."""
        make_keys(self.directory)
        roles = [role.value for role in KeyRole]
        return self.print(
            {"directory": str(self.directory), "roles": roles},
            f"{self.directory}: keys of {', '.join(roles)}; only you may read them",
            f'set transport.keys = "{self.directory}" in the recipe (transport.kind = "tcp")',
            "another host needs all *.public files and observer.secret, in a directory of mode 700, for",
            "  `streamrl watch --keys DIRECTORY`; the other secrets stay with the run",
        )
