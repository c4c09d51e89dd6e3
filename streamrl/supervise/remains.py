"""What an earlier life of a run left that was killed together with everything that cleans up after it.

``streamrl resume`` removes it: processes that carry the run's marker, the directory of its sockets, shared memory that
the run was seen to use, half-written files. A socket directory of another user or another container is left alone.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil

from streamrl.supervise.sweep import (
    TRACES_FILE,
    RunTraces,
    members,
    process_namespace,
    read_traces,
    seconds_after_boot,
    see_segments,
    sweep,
    unused_segments,
)

_SLOW_WRITER_S = 5.0
# Writers of a run give half-written files and directories these names, and rename them at the end.
_HALF_WRITTEN = re.compile(r"\..+\.partial|.+\.partial|step-\d+\.tmp")
_DEEPEST = 3


def remove_remains_of(run_directory: Path, temporary: Path) -> list[str]:
    """Remove what an earlier life of this run left in ``temporary``, in memory and among the processes of this machine,
    unless the supervisor of that life lives. Returns what could not be removed, and why. Blocking."""
    failures = []
    for folder in sorted(temporary.glob("streamrl-*")):
        traces = _traces_in(folder)
        if traces is None or not traces.run_directory or traces.namespace != process_namespace():
            continue
        ours = os.path.realpath(traces.run_directory) == os.path.realpath(run_directory)
        if ours and not owner_lives(traces.owner, traces.owner_created):
            failures += _sweep(traces)
    return failures


def remove_half_written(run_directory: Path) -> list[str]:
    """Remove what the processes of this run were writing when they were ended, all of them; what could not be removed,
    and why. Blocking."""
    return [failure for path in list(_half_written_in(run_directory)) if (failure := _remove(path))]


def owner_lives(pid: int, created: float) -> bool:
    """Whether the process that had this pid lives; ``created``: seconds after boot."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(seconds_after_boot(process) - created) < 0.05
    except psutil.Error:
        return False


def _sweep(traces: RunTraces) -> list[str]:
    see_segments(traces, members(traces))
    known = traces.segments | unused_segments(traces.since, _last_sign_of_life(traces))
    traces.segments = {segment for segment in known if os.path.exists(segment)}
    survivors = sweep(traces)
    return [f"processes {survivors} survived SIGKILL; look at them with ps"] if survivors else []


def _last_sign_of_life(traces: RunTraces) -> float:
    """Epoch seconds, some more than less: when the run wrote its files last."""
    folders = [Path(traces.socket_directory)] if traces.socket_directory else []
    folders += [Path(traces.run_directory), Path(traces.run_directory) / "logs"] if traces.run_directory else []
    latest = traces.since
    for folder in folders:
        for path in (folder, *folder.glob("*")):
            try:
                latest = max(latest, path.lstat().st_mtime)
            except OSError:
                continue
    return latest + _SLOW_WRITER_S


def _traces_in(folder: Path) -> RunTraces | None:
    try:
        # Another user may put anything into a directory for temporary files: only what is our own says what to kill.
        if not _is_ours(folder) or not _is_ours(folder / TRACES_FILE):
            return None
    except OSError:
        return None
    traces = read_traces(folder)
    if traces is None:
        return None
    # A directory that was moved or copied says nothing about this place.
    return traces if os.path.realpath(traces.socket_directory) == os.path.realpath(folder) else None


def _half_written_in(run: Path) -> Iterator[Path]:
    """At most ``_DEEPEST`` levels down, and never through a link."""
    waiting = [(run, 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            path = Path(entry.path)
            if _HALF_WRITTEN.fullmatch(entry.name):
                yield path
            elif entry.is_dir(follow_symlinks=False) and depth < _DEEPEST:
                waiting.append((path, depth + 1))


def _remove(path: Path) -> str:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def _is_ours(path: Path) -> bool:
    status = path.lstat()
    return status.st_uid == os.getuid() and not stat.S_ISLNK(status.st_mode)
