"""Removing what a run leaves: of a run that was killed whole, and what its processes were writing when they ended."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from streamrl.base.errors import StreamRLError
from streamrl.processes.local import end_marked_processes
from streamrl.recipe.topology import Role, read_topology

# Writers of a run give half-written files and directories these names, and rename them at the end.
_HALF_WRITTEN = re.compile(r"\..+\.partial|.+\.partial|step-\d+\.tmp")
_DEEPEST = 3


def remove_killed_life(run_directory: Path) -> list[str]:
    """Remove what an earlier life of this run left that was killed together with its supervisor: its sockets, its
    shared memory, and processes that were not tied to it (what user code had started). Nobody may run it now.

    Blocking. Returns what could not be removed, and why."""
    try:
        steps = read_topology(run_directory).endpoint(Role.CONTROLLER.value, "steps")
    except (OSError, StreamRLError, KeyError):
        return []
    sockets = Path(steps.removeprefix("ipc://")).parent
    alive = end_marked_processes(sockets, 5.0)
    return [f"processes {alive} survived SIGKILL; look at them with ps"] if alive else []


def remove_half_written(run_directory: Path) -> list[str]:
    """Remove what the processes of this run were writing when they were ended, all of them. Blocking. Returns what
    could not be removed, and why."""
    return [failure for path in list(_half_written_in(run_directory)) if (failure := _remove(path))]


def _half_written_in(run: Path) -> Iterator[Path]:
    """Find half-written files at most ``_DEEPEST`` levels down, and never through a link."""
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
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""
