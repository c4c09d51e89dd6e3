"""Ending everything that a run started, down to processes that streamrl did not start itself.

A process belongs to the run when it is in the session of one that the supervisor started (vLLM's EngineCore and
workers stay in their engine host's session, also after the host died), or when it carries the run's marker in its
environment (it made a session of its own). Neither depends on who its parent is now, so orphans are found too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time
import uuid
from pathlib import Path

import msgspec
import psutil

from streamrl.base.errors import UNDECODABLE
from streamrl.base.whole_files import write_whole
from streamrl.supervise.parent_death import RUN_MARKER

log = logging.getLogger(__name__)

_SHARED_MEMORY = Path("/dev/shm")
ENGINE_SEGMENTS = "vllm_dist_"
"""What the workers of one CPU engine share; vLLM never unlinks it (8 MB a worker)."""
# Names given by multiprocessing, torch and vLLM. A user's own segment that a reward maps must never be unlinked.
_OUR_SEGMENTS = ("psm_", "sem.mp-", "torch_", ENGINE_SEGMENTS)
_POLL_S = 0.02
_HANDED_OVER_S = 10.0


class RunTraces(msgspec.Struct, kw_only=True):
    """What identifies the processes and files of one run.

    ``sessions``: session id -> creation time of its leader (seconds after boot). ``marker``: value of
    ``STREAMRL_RUN_MARKER``. ``since``: epoch seconds at which the run began. ``segments``: shared memory seen in use;
    ``foreign``: that was there before the run, by whatever clock.
    ``owner``: the supervisor's pid, in ``namespace``, with ``owner_created`` (seconds after boot).
    """

    marker: str
    since: float
    socket_directory: str
    sessions: dict[int, float] = {}
    segments: set[str] = set()
    foreign: set[str] = set()
    run_directory: str = ""
    owner: int = msgspec.field(default_factory=os.getpid)
    owner_created: float = msgspec.field(default_factory=lambda: seconds_after_boot(psutil.Process()))
    namespace: int = msgspec.field(default_factory=lambda: process_namespace())


def traces_of_new_run(socket_directory: Path) -> RunTraces:
    """Of a run that this process begins now."""
    return RunTraces(
        marker=uuid.uuid4().hex,
        since=time.time(),
        socket_directory=str(socket_directory),
        foreign=present_segments(),
    )


TRACES_FILE = "traces.json"
"""In the socket directory: by it a run is found of which nobody is left who could clean up (``remains``)."""


_not_kept: set[str] = set()
"""Socket directories whose traces could not be written the last time: it is logged once."""


def keep_traces(traces: RunTraces) -> None:
    """Write them down where they changed. Atomic; where there is no socket directory (any more), nothing is written.

    It is for somebody else's clean-up, in case this one dies: a disk that is full ends neither a run nor its end. Then
    it is tried again at the next call.
    """
    directory = traces.socket_directory
    if not directory:
        return
    path = Path(directory) / TRACES_FILE
    content = msgspec.json.encode(traces)
    try:
        if not path.exists() or path.read_bytes() != content:
            write_whole(path, content)
        _not_kept.discard(directory)
    except FileNotFoundError:
        return  # it is being removed
    except OSError as error:
        if directory not in _not_kept:
            _not_kept.add(directory)
            log.warning(
                "%s cannot be written (%s): if all of this run is killed at once, `streamrl resume` may not find its "
                "shared memory; make room in the directory for temporary files",
                path,
                error,
            )


def as_argument(traces: RunTraces) -> str:
    """For a command line, which has room for 128 KiB: without the shared memory, which ``TRACES_FILE`` tells of."""
    return msgspec.json.encode(msgspec.structs.replace(traces, segments=set(), foreign=set())).decode()


def read_traces(directory: Path) -> RunTraces | None:
    """What was kept in a socket directory, where it can be read."""
    try:
        return msgspec.json.decode((directory / TRACES_FILE).read_bytes(), type=RunTraces)
    except (OSError, *UNDECODABLE):
        return None


def process_namespace() -> int:
    """Identity of the pid namespace: a pid means something only inside of it. 0 where there is none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def members(traces: RunTraces) -> list[psutil.Process]:
    """Living processes of the run; zombies are dead.

    A process that is ending gives its environment back long before it is gone, and a marker is then no longer seen:
    whoever waits for ends must remember whom it saw (``_remaining``).
    """
    sessions = dict(traces.sessions)  # at once: sweeps run in a thread, and sessions are added by the event loop's
    ours = {sid for sid, created in sessions.items() if not _reused(sid, created)}
    found = []
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            if (os.getsid(pid) in ours or _carries_marker(process, traces)) and _alive(process):
                found.append(process)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue  # it ended meanwhile, or belongs to another user
    return [process for process in found if process.pid != os.getpid()]


def is_resource_tracker(process: psutil.Process) -> bool:
    """Python's ``multiprocessing`` resource tracker: it unlinks shared memory once its users are gone."""
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except psutil.Error:
        return False


def sweep(traces: RunTraces, *, tracker_s: float = 2.0, deadline_s: float = 6.0) -> list[int]:
    """Kill what is left of the run, unlink its shared memory, remove its sockets. Blocking.

    Resource trackers get ``tracker_s`` to unlink what the others left. Returns the pids that still live after
    ``deadline_s`` (uninterruptible in the kernel): normally none.
    """
    deadline = time.monotonic() + deadline_s
    trackers_end = time.monotonic() + tracker_s
    seen: set[psutil.Process] = set()
    while (left := _remaining(traces, seen)) and time.monotonic() < deadline:
        others = [process for process in left if not is_resource_tracker(process)]
        if others:
            trackers_end = time.monotonic() + tracker_s
        see_segments(traces, left)
        for process in others if time.monotonic() < trackers_end else left:
            _kill(process)
        keep_traces(traces)
        time.sleep(_POLL_S)
    for segment in tuple(traces.segments):  # at once: an engine may be ended in another thread meanwhile
        Path(segment).unlink(missing_ok=True)
    if traces.socket_directory:
        remove_sockets(Path(traces.socket_directory))
    return [process.pid for process in left]


def remove_sockets(directory: Path) -> None:
    """Remove a socket directory, and last the record of whose it was: whoever removes it may be killed on the way, and
    ``streamrl resume`` then goes by the record."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != TRACES_FILE:
                path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def end_session(traces: RunTraces, sid: int, *, tracker_s: float = 2.0, deadline_s: float = 6.0) -> list[int]:
    """Kill what is left of one session of the run, whose leader has ended or is told to, and unlink the shared memory
    that nobody else of the run uses. Blocking.

    Resource trackers get ``tracker_s`` to unlink what the others left. Returns the pids that survived: normally none.
    """
    deadline, trackers_end = time.monotonic() + deadline_s, time.monotonic() + tracker_s
    while (left := [p for p in members(traces) if session_of(p) == sid]) and time.monotonic() < deadline:
        see_segments(traces, left)
        for process in left:
            if time.monotonic() > trackers_end or not is_resource_tracker(process):
                _kill(process)
        keep_traces(traces)
        time.sleep(_POLL_S)
    _unlink_unused(traces)
    return [process.pid for process in left]


def _unlink_unused(traces: RunTraces) -> None:
    """An engine may be stopped and started many times in a run: what its hosts left must not add up until the end.

    Semaphores stay: one that is handed to a process that is just being started is mapped by nobody yet.
    """
    others = members(traces)
    record_segments(traces, others)
    used = set().union(*(mapped_segments(process.pid) for process in others))
    for segment in tuple(traces.segments):  # at once, as above
        if segment not in used and Path(segment).name.startswith(ENGINE_SEGMENTS):
            Path(segment).unlink(missing_ok=True)
            traces.segments.discard(segment)


def seconds_after_boot(process: psutil.Process) -> float:
    """When it was created. Not in epoch seconds: those of one and the same process change when the clock is set.

    Raises ``psutil.Error`` when it is gone.
    """
    return float(process.create_time() - psutil.boot_time())


def session_of(process: psutil.Process) -> int:
    """Its session id; -1 when it is gone."""
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return -1


def record_segments(traces: RunTraces, processes: list[psutil.Process]) -> None:
    """Remember the shared memory that ``processes`` map: once killed with their tracker, nobody else knows of it."""
    for segment in tuple(traces.segments):  # whoever made it may have unlinked it
        if not Path(segment).exists():
            traces.segments.discard(segment)
    see_segments(traces, processes)
    keep_traces(traces)


def see_segments(traces: RunTraces, processes: list[psutil.Process]) -> None:
    """As ``record_segments``, but nothing is written: for one who kills them now, whom no disk may keep from it."""
    for process in processes:
        traces.segments |= mapped_segments(process.pid) - traces.foreign


def _remaining(traces: RunTraces, seen: set[psutil.Process]) -> list[psutil.Process]:
    """Living processes of the run, with those of ``seen`` (which is brought up to date) that have not ended yet."""
    seen.update(members(traces))
    for process in list(seen):
        try:
            ended = not process.is_running() or not _alive(process)
        except psutil.Error:
            ended = True
        if ended:
            seen.discard(process)
    return list(seen)


def _alive(process: psutil.Process) -> bool:
    """One whose first thread has ended still gives memory back in the others."""
    return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) or process.num_threads() > 1


def _reused(sid: int, created: float) -> bool:
    """Whether the session's number now belongs to a process that we did not start.

    While a session has members the kernel gives its number to nobody; a number with a younger leader is foreign.
    """
    try:
        return abs(seconds_after_boot(psutil.Process(sid)) - created) > 0.05
    except psutil.Error:
        return False


def _carries_marker(process: psutil.Process, traces: RunTraces) -> bool:
    return bool(process.environ().get(RUN_MARKER) == traces.marker)


def mapped_segments(pid: int) -> set[str]:
    """Shared memory files of this user's that process ``pid`` maps and that have names of ours."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    paths = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if f" {_SHARED_MEMORY}/" in line}
    return {str(path) for path in paths if path.name.startswith(_OUR_SEGMENTS) and _is_own(path)}


def present_segments(until: float = math.inf) -> set[str]:
    """Shared memory of this user's with names of ours that is there, made until then (epoch seconds). What is there
    when a run begins is not the run's: by the time of its making one could not tell, once the clock is set back."""
    found = (str(path) for name in _OUR_SEGMENTS for path in _SHARED_MEMORY.glob(f"{name}*"))
    return {path for path in found if _is_own(Path(path), until=until)}


def unused_segments(since: float, until: float) -> set[str]:
    """Shared memory of engines of this user's, made between ``since`` and ``until`` (epoch seconds), that no process
    maps: of engines that were killed before anybody saw what they used. A segment that was made just now may be about
    to be mapped. Other names that ours have are those of other programs, too: they may rest unmapped for long."""
    until = min(until, time.time() - _HANDED_OVER_S)
    found = {str(path) for path in _SHARED_MEMORY.glob(f"{ENGINE_SEGMENTS}*")}
    found = {path for path in found if _is_own(Path(path), since, until)}
    return found - {path for pid in psutil.pids() if found for path in mapped_segments(pid)}


def _is_own(path: Path, since: float = -math.inf, until: float = math.inf) -> bool:
    """Whether it is there and this user's, made between ``since`` and ``until`` (epoch seconds)."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and since - 1 <= status.st_ctime <= until


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return  # it ended by itself
