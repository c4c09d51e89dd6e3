"""What runs left that were killed together with everything that cleans up after them: found, and removed.

A run lives as long as its supervisor does. What is looked for: socket directories with the traces that a supervisor
keeps in them, processes that carry a run's marker, shared memory in those traces, half-written files in the directories
of runs that nobody holds. What cannot be judged (another user's, another container's) is said and left alone.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import psutil

from streamrl.processes.parent_death import PARENT_PID, RUN_MARKER
from streamrl.processes.run_lock import LOCK_FILE
from streamrl.processes.sweep import (
    TRACES_FILE,
    RunTraces,
    members,
    present_segments,
    process_namespace,
    read_traces,
    seconds_after_boot,
    see_segments,
    sweep,
    unused_segments,
)

_SLOW_WRITER_S = 5.0
SETTLED_S = 60.0
"""Seconds. What is younger may be of a run that is being started."""
_SOCKET_DIRECTORY = re.compile(r"streamrl-[a-z0-9_]{8}")
# Writers of a run give half-written files and directories these names, and rename them at the end.
_HALF_WRITTEN = re.compile(r"\..+\.partial|.+\.partial|step-\d+\.tmp")
_DEEPEST = 3


class Remains(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is left. ``what``: for people; ``remove`` returns why it could not be removed, or nothing."""

    what: str
    remove: Callable[[], str]
    run_directory: str = ""


class Findings(msgspec.Struct, kw_only=True):
    """``left``: what may be removed; ``alive``: runs that live; ``skipped``: what cannot be judged, and why."""

    left: list[Remains] = []
    alive: list[str] = []
    skipped: list[str] = []


def find_remains(temporary: Path, places: Iterable[Path], now: float | None = None) -> Findings:
    """Look in the directory for temporary files, among all processes of this user, and in ``places``: directories of
    runs, or directories of such. Blocking; takes about as long as reading ``/proc`` once or twice."""
    now = time.time() if now is None else now
    found = Findings()
    living: set[str] = set()
    markers: set[str] = set()
    for folder in sorted(temporary.glob("streamrl-*")):
        traces = _traces_in(folder)
        if traces is None:
            _judge_bare_directory(folder, now, found)
            continue
        markers.add(traces.marker)
        if traces.namespace != process_namespace():
            found.skipped.append(f"{folder}: its run is in another container; clean up there")
        elif owner_lives(traces.owner, traces.owner_created):
            found.alive.append(f"process {traces.owner} runs {traces.run_directory or folder}")
            living.add(os.path.realpath(traces.run_directory))
        else:
            found.left.append(_dead_run(traces))
    found.left += [_dead_run(traces) for traces in _orphans(markers)]
    for run in _run_directories(places):
        if os.path.realpath(run) not in living and not _is_locked(run):
            found.left += [_half_written(path) for path in sorted(_half_written_in(run, now))]
    return found


def remove_remains_of(run_directory: Path, temporary: Path) -> list[str]:
    """Remove what an earlier life of this run left, which nobody lives any more; what could not be removed, and why.
    Blocking."""
    ours = os.path.realpath(run_directory)
    left = [one for one in find_remains(temporary, ()).left if os.path.realpath(one.run_directory) == ours]
    return [failure for one in left if one.run_directory and (failure := one.remove())]


def remove_half_written(run_directory: Path) -> list[str]:
    """Remove what the processes of this run were writing when they were ended, all of them; what could not be removed,
    and why. Blocking."""
    return [failure for path in list(_half_written_in(run_directory, math.inf)) if (failure := _remove(path))]


def owner_lives(pid: int, created: float) -> bool:
    """Whether the process that had this pid lives; ``created``: seconds after boot."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(seconds_after_boot(process) - created) < 0.05
    except psutil.Error:
        return False


# ---- runs of which nobody is left -----------------------------------------------------------------


def _dead_run(traces: RunTraces) -> Remains:
    processes = members(traces)
    see_segments(traces, processes)
    known = traces.segments | unused_segments(traces.since, _last_sign_of_life(traces))
    traces.segments = {segment for segment in known if os.path.exists(segment)}
    name = Path(traces.run_directory).name or f"with marker {traces.marker[:8]}"
    parts = [f"run {name}:"]
    parts += [f"process {process.pid} ({_command(process)})" for process in processes]
    parts += [f"shared memory {segment}" for segment in sorted(traces.segments)]
    parts += [f"directory {traces.socket_directory}"] if traces.socket_directory else []
    return Remains(what="\n    ".join(parts), remove=lambda: _sweep(traces), run_directory=traces.run_directory)


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


def _sweep(traces: RunTraces) -> str:
    survivors = sweep(traces)
    return f"processes {survivors} survived SIGKILL; look at them with ps" if survivors else ""


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


class _Marked(msgspec.Struct):
    """Processes with one marker; ``dead``, ``alive``: how many of them say so of their supervisor."""

    traces: RunTraces
    dead: int = 0
    alive: int = 0


def _orphans(known: set[str]) -> list[RunTraces]:
    """Processes that carry a marker and whose supervisor is dead, by marker, without those of ``known`` runs.

    Some processes carry the marker and no more (a reward's are given a clean environment). One member that names a
    living supervisor, or keeps its files where a living one has its traces, saves all of them.
    """
    found: dict[str, _Marked] = {}
    for process in marked_processes():
        try:
            environment = process.environ()
            marker = environment[RUN_MARKER]
            sockets = Path(environment.get("TMPDIR", ""))
            folder = str(sockets) if _SOCKET_DIRECTORY.fullmatch(sockets.name) and _is_ours(sockets) else ""
            traces = RunTraces(marker=marker, since=process.create_time(), socket_directory=folder)
            mine = found.setdefault(marker, _Marked(traces))
            mine.traces.since = min(mine.traces.since, traces.since)
            mine.traces.socket_directory = mine.traces.socket_directory or folder
            if PARENT_PID in environment:
                lives = _lived_before(int(environment[PARENT_PID]), process)
                mine.alive, mine.dead = mine.alive + lives, mine.dead + (not lives)
            kept = _traces_in(sockets) if folder else None
            mine.alive += kept is not None and owner_lives(kept.owner, kept.owner_created)
        except (psutil.Error, OSError, ValueError, KeyError):
            continue  # it ended meanwhile, or is another user's
    orphans = [one.traces for marker, one in found.items() if marker not in known and one.dead and not one.alive]
    for traces in orphans:
        traces.foreign = present_segments(traces.since - 1)
    return orphans


def marked_processes() -> Iterator[psutil.Process]:
    """All living processes of this machine that carry a run's marker and may be looked at, but this one."""
    for process in psutil.process_iter():
        try:
            ends = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
            if not ends and process.environ().get(RUN_MARKER):
                yield process
        except psutil.Error:
            continue


def _lived_before(parent: int, child: psutil.Process) -> bool:
    """Whether ``parent`` lives and may have started ``child``: one that is younger only got the number again. Where
    that cannot be seen it counts as living."""
    try:
        process = psutil.Process(parent)
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= child.create_time() + 0.05)
    except psutil.NoSuchProcess as error:
        return bool(error.pid != parent)
    except psutil.Error:
        return True


def _judge_bare_directory(folder: Path, now: float, found: Findings) -> None:
    """A socket directory without traces: of a process that was started by hand, or of a run that never began."""
    try:
        if not _SOCKET_DIRECTORY.fullmatch(folder.name) or not _is_ours(folder):
            return
        content = list(folder.iterdir())
        settled = now - max(path.lstat().st_mtime for path in (folder, *content)) > SETTLED_S
        sockets = [path for path in content if stat.S_ISSOCK(path.lstat().st_mode)]
    except OSError:
        return
    if settled and len(sockets) == len(content) and not _is_used(folder):
        found.left.append(Remains(what=f"directory {folder}", remove=lambda: _remove(folder)))


def _is_used(folder: Path) -> bool:
    """Whether a process has a socket in ``folder``, or keeps its temporary files there."""
    try:
        if any(f" {folder}/" in line for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()):
            return True
    except OSError:
        return True
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get("TMPDIR", "") or any(str(folder) in a for a in process.cmdline()):
                return True
        except psutil.Error:
            continue
    return False


# ---- half-written files ---------------------------------------------------------------------------


def _run_directories(places: Iterable[Path]) -> Iterator[Path]:
    seen: set[str] = set()
    for place in places:
        inside = [place] if (place / "recipe.toml").is_file() else sorted(place.glob("*/"))
        for run in inside:
            real = os.path.realpath(run)
            if (run / "recipe.toml").is_file() and (run / "logs").is_dir() and real not in seen:
                seen.add(real)
                yield Path(real)


def _is_locked(run: Path) -> bool:
    try:
        descriptor = os.open(run / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False  # of a version without locks, or it never began
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _half_written_in(run: Path, now: float) -> Iterator[Path]:
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
                if now - entry.stat(follow_symlinks=False).st_mtime > SETTLED_S:
                    yield path
            elif entry.is_dir(follow_symlinks=False) and depth < _DEEPEST:
                waiting.append((path, depth + 1))


def _half_written(path: Path) -> Remains:
    return Remains(what=f"half-written {path}", remove=lambda: _remove(path))


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


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80]
    except psutil.Error:
        return "ending"
