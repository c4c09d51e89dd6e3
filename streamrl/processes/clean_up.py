"""Clean-up after a run: sockets and processes of a run that was killed with its supervisor, and half-written files.

``launch.pipeline`` calls it in the process of the command, before a run is resumed and after a run has ended."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from streamrl.base.errors import StreamRLError
from streamrl.processes.local_launcher import end_marked_processes
from streamrl.recipe.topology import Role, read_topology

# Writers of a run give half-written files and directories these names, and rename them at the end.
_HALF_WRITTEN = re.compile(r"\..+\.partial|.+\.partial|step-\d+\.tmp")
_DEEPEST = 3


def remove_killed_life(run_directory: Path) -> list[str]:
    """Remove the sockets, the shared memory and the processes of an earlier life of this run, which was killed together
    with its supervisor. Processes that user code started may still live. No process may run this run now.

    Blocking. Returns a line for each failure."""
    try:
        steps = read_topology(run_directory).endpoint(Role.CONTROLLER.value, "steps")
    except (OSError, StreamRLError, KeyError):
        return []
    sockets = Path(steps.removeprefix("ipc://")).parent
    alive = end_marked_processes(sockets, 5.0)
    if not alive:
        return []
    return [f"processes {alive} survived SIGKILL; look at them with ps"]


def remove_half_written(run_directory: Path) -> list[str]:
    """Remove the files that processes of this run were writing when they ended. No process may live now. Blocking.
    Returns a line for each failure."""
    failures = [_remove(path) for path in list(_half_written_in(run_directory))]
    return [failure for failure in failures if failure]


def _half_written_in(run: Path) -> Iterator[Path]:
    """Half-written files and directories at most ``_DEEPEST`` levels down; links are not followed."""
    waiting = [(run, 0)]
    while waiting:
        folder, depth = waiting.pop()
        with suppress(OSError):
            for entry in list(os.scandir(folder)):
                if _HALF_WRITTEN.fullmatch(entry.name):
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=False) and depth < _DEEPEST:
                    waiting.append((Path(entry.path), depth + 1))


def _remove(path: Path) -> str:
    """Remove ``path``. Returns the error as text, or an empty text."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""
