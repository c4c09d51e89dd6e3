"""``streamrl keys DIRECTORY``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from streamrl.cli.command import Argument, Command
from streamrl.remote.transport_keys import KeyRole, make_keys


class Keys(Command, frozen=True):
    """Make a pair of CURVE keys for each role, in a directory that only you may enter."""

    directory: Annotated[Path, Argument("a new directory", metavar="DIRECTORY", positional=True)]

    def run(self) -> int:
        """Make them, and say which process needs which. No key is printed."""
        make_keys(self.directory)
        roles = ", ".join(role.value for role in KeyRole)
        print(f"{self.directory}: keys of {roles}; only you may read them")
        print(f'set transport.keys = "{self.directory}" in the recipe (transport.kind = "tcp")')
        print("another host needs all *.public files and the *.secret of what it runs, in a directory of mode 700:")
        print("  engine.secret for `streamrl serve engine`, trainer.secret for `streamrl serve trainer`,")
        print("  observer.secret for `streamrl watch --keys DIRECTORY`; controller.secret stays with the run")
        return 0
