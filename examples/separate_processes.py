"""Engine and trainer as processes of their own over tcp, as on several hosts: here all on one.

    python examples/separate_processes.py examples/sort/recipe.toml --port 5800 --set run.steps=5

It runs what a person would type in three terminals (the engine's on another host, too, with ``transport.host`` the
controller's and ``transport.keys`` a directory that ``streamrl keys`` made, in every command):

    streamrl train RECIPE --set transport.kind=tcp --set transport.engines=external --set transport.training=external
    streamrl serve engine  RECIPE --index 0   (with the same --set)
    streamrl serve trainer RECIPE --index 0   (with the same --set)

The order does not matter: the process that starts first waits. When the run ends, the other two end by themselves."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

STREAMRL = [sys.executable, "-m", "streamrl"]


def run_apart(recipe: Path, port: int, overrides: list[str]) -> int:
    """Start the three commands and wait for them. Returns the first exit code that is not 0, or 0."""
    settings = ["transport.kind=tcp", f"transport.port={port}"]
    settings += ["transport.engines=external", "transport.training=external", *overrides]
    flags = [part for setting in settings for part in ("--set", setting)]
    commands = [
        [*STREAMRL, "serve", "engine", str(recipe), "--index", "0", *flags],
        [*STREAMRL, "serve", "trainer", str(recipe), "--index", "0", *flags],
        [*STREAMRL, "train", str(recipe), *flags],
    ]
    processes = [subprocess.Popen(command) for command in commands]
    return next((code for code in [process.wait() for process in reversed(processes)] if code), 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--port", type=int, default=5800)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()
    sys.exit(run_apart(arguments.recipe, arguments.port, arguments.overrides))
