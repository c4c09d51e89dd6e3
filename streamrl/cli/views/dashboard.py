"""``streamrl dashboard``: the page of runs, in a browser. The command's own process is the web server."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from streamrl.base.errors import InputError, StreamRLError
from streamrl.base.host_addresses import wrong_port
from streamrl.base.types import Texts
from streamrl.cli.command import Argument, Command

RUNS = "runs"
PORT = 7788


def require_server() -> None:
    """Raise ``StreamRLError`` where the packages of the page are not installed."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise StreamRLError(f"the page needs {' and '.join(missing)}: pip install 'streamrl[dashboard]'")


class Dashboard(Command, frozen=True, kw_only=True):
    """Serve a page about runs to browsers of this machine: their curves, every trajectory on its engine, what was
    waited for, samples. It only reads files of runs, which may go on meanwhile, have ended, or begin later."""

    runs: Annotated[
        Texts, Argument("runs, or directories of runs (default: runs)", metavar="RUN", positional=True)
    ] = ()
    port: Annotated[int, Argument(f"on 127.0.0.1 (default {PORT}; 0: any free one)", metavar="N")] = PORT

    def run(self) -> int:
        """Serve until Ctrl-C. Raises ``StreamRLError`` for what is no run, or a port in use."""
        if problem := wrong_port(str(self.port)):
            raise InputError(f"--port: {problem}")
        require_server()
        from streamrl.observe.dashboard.server import serve  # only here: the packages may be absent

        serve([Path(name) for name in self.runs or (RUNS,)], self.port, self._ready)
        return 0

    def _ready(self, address: str) -> None:
        self.print({"address": address}, f"the page is at {address} until Ctrl-C")
        sys.stdout.flush()
