"""Which process of a run is which, how it is killed, and what is left when all is over: nothing of streamrl is asked.

The runner is the *subreaper* of what it starts: a process whose parent died becomes its child, so that nothing that a
run started can leave its sight, whatever session or environment it made for itself."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

OWN_PROCESS = re.compile(r"streamrl\.launch[. ](?P<role>\w+)(?:.*--index[ =](?P<index>\d+))?")
SHARED_MEMORY = Path("/dev/shm")
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Orphans of our processes become our children. Raises ``OSError`` where the kernel cannot."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def living(excluded: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Everything that this process started and that is still there."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process not in set(excluded)]


def numbers_of_processes() -> tuple[int, int]:
    """Count the living processes that this process started, and the zombies among their children."""
    living_count = zombies = 0
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                zombies += process.ppid() != os.getpid()
            else:
                living_count += 1
        except psutil.Error:
            continue
    return living_count, zombies


def reap() -> None:
    """Take the exit codes of orphans that became ours; call it when nobody waits for a child of its own."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def labelled(supervisor_pid: int) -> dict[str, psutil.Process]:
    """Processes by a name that is equal from run to run: ``supervisor``, ``engine-0``, ``engine-0/VLLM::EngineCore``,
    ``reward-0/python``; equal ones are numbered in order of pid."""
    found: dict[str, psutil.Process] = {}
    for process in sorted(living(), key=lambda process: process.pid):
        try:
            name = base = _label(process, supervisor_pid)
        except psutil.Error:  # it ended meanwhile
            continue
        number = 1
        while name in found:
            number += 1
            name = f"{base}#{number}"
        found[name] = process
    return found


def _label(process: psutil.Process, supervisor_pid: int) -> str:
    if process.pid == supervisor_pid:
        return "supervisor"
    command = " ".join(process.cmdline())
    parent = process.parent()
    if (own := OWN_PROCESS.search(command)) and (
        parent is None or OWN_PROCESS.search(" ".join(parent.cmdline())) is None
    ):
        role, index = own["role"], own["index"] or "0"
        return role if role == "controller" else f"{role}-{index}"
    above = "orphan" if parent is None or parent.pid == os.getpid() else _label(parent, supervisor_pid)
    if "resource_tracker" in command:
        return f"{above}/resource_tracker"
    if "EngineCore" in command:
        return f"{above}/EngineCore"
    return f"{above}/{Path(command.split()[0]).name if command else process.name()}"


def describe(process: psutil.Process) -> str:
    """Pid and command line, for messages."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120] or process.name()}"
    except psutil.Error:
        return f"{process.pid} (gone)"


def log_name(pid: int) -> str:
    """``engine-0``, for example. Raises ``psutil.NoSuchProcess``."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).stem
    except OSError:
        raise psutil.NoSuchProcess(pid) from None


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> int:
    """Signal all of them; returns how many were there to be signalled."""
    sent = 0
    for process in processes:
        try:
            process.send_signal(number)
            sent += 1
        except psutil.Error:
            continue
    return sent


def wait_until_none(timeout_s: float, excluded: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """What still lives after ``timeout_s``, or nothing, as soon as nothing does."""
    deadline = time.monotonic() + timeout_s
    while (left := living(excluded)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def shared_memory() -> set[str]:
    """Names in ``/dev/shm``."""
    return {path.name for path in SHARED_MEMORY.iterdir()}


def residue(
    run_directories: Iterable[Path], temporary: Path, shared_before: set[str], *, ours: set[str] | None = None
) -> list[str]:
    """What is left of runs that are over: processes, sockets and other temporary files, half-written files, keys, and
    new shared memory that nobody maps. ``ours``: only of these names, since others are at work on this machine."""
    left = [f"process {describe(process)}" for process in wait_until_none(5.0)]
    left += [f"temporary file {path.relative_to(temporary)}" for path in temporary.rglob("*") if not path.is_dir()]
    left += [f"temporary directory {path.name}" for path in temporary.glob("streamrl-*")]
    new = (shared_memory() - shared_before) & (shared_memory() if ours is None else ours)
    left += [f"shared memory {name}" for name in sorted(new) if not _mapped(name)]
    for directory in run_directories:
        left += [f"half-written {p.relative_to(directory)}" for p in directory.rglob("*.partial") if p.exists()]
        left += [f"key {p.name}" for p in directory.glob("control.key")]
    return left


def directories_for_clean(run_directory: Path, temporary: Path) -> list[Path]:
    """Socket directories that an earlier life of the run left, when all of it was killed, and that say so: what
    ``streamrl resume`` removes."""
    found = []
    for traces in temporary.glob("streamrl-*/traces.json"):
        content = json.loads(traces.read_text())
        owner = content.get("owner")
        ours = os.path.realpath(content.get("run_directory", "")) == os.path.realpath(run_directory)
        if ours and isinstance(owner, int) and not psutil.pid_exists(owner):
            found.append(traces.parent)
    return found


def mapped_segments(pid: int) -> set[str]:
    """Names in ``/dev/shm`` that a process maps; none when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {line.rpartition(f"{SHARED_MEMORY}/")[2].removesuffix(" (deleted)") for line in lines if "/dev/shm/" in line}


def _mapped(name: str) -> bool:
    """Whether some process of this machine uses it: then it belongs to others, who are at work meanwhile."""
    return any(name in mapped_segments(int(path.name)) for path in Path("/proc").glob("[0-9]*"))
