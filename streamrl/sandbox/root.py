"""The file tree that the code sees: the interpreter's library (read-only), a few devices, and a /tmp of its own.

    /                      read-only
    /dev/{null,zero,full,random,urandom}
    /<the standard library, where it is on the host>     without site-packages
    /tmp                   a tmpfs for each run; /dev/shm is there too

There is no /proc, no /sys, no program, no other library.
"""

from __future__ import annotations

import contextlib
import os

from streamrl.sandbox import syscalls as sc

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SCRATCH = "/tmp"
_STAGE = "/tmp"  # where the host's tree is covered while ours is built; only in this process's mount namespace
_OLD = "/old"
_NEW = "/new"
_THIRD_PARTY = ("site-packages", "dist-packages")


def build(library: str) -> None:
    """Make ``/new`` (what the code will see) and ``/proc`` (the host's) all that this process sees of files.

    ``library``: directory of the standard library. Needs a mount namespace of its own, and the right to mount in it.
    """
    sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
    sc.mount("tmpfs", _STAGE, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "size=1m,mode=755")
    for name in (_OLD, _NEW, "/proc"):
        os.mkdir(_STAGE + name)
    sc.pivot_root(_STAGE, _STAGE + _OLD)
    os.chdir("/")
    sc.mount("tmpfs", _NEW, "tmpfs", sc.MS_NOSUID, "size=1m,mode=755")
    _bind_directory(library)
    for name in _THIRD_PARTY:
        if os.path.isdir(f"{_NEW}{library}/{name}"):
            sc.mount("tmpfs", f"{_NEW}{library}/{name}", "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "size=4k,mode=755")
    os.makedirs(_NEW + SCRATCH, exist_ok=True)
    os.makedirs(f"{_NEW}/dev", exist_ok=True)
    for device in DEVICES:
        _bind_device(device)
    os.symlink(SCRATCH, f"{_NEW}/dev/shm")
    _make_read_only(_NEW)
    # To write the user mapping of each run; the code does not see it.
    sc.mount(f"{_OLD}/proc", "/proc", None, sc.MS_BIND | sc.MS_REC)
    sc.unmount(_OLD)


def enter(scratch_bytes: int, scratch_files: int) -> None:
    """Make ``/new`` the root, with an empty /tmp. For a mount namespace of its own, below that of ``build``."""
    # A mount that was inherited is locked and cannot become the root; a bind of it can.
    sc.mount(_NEW, _NEW, None, sc.MS_BIND | sc.MS_REC)
    options = f"size={scratch_bytes},nr_inodes={scratch_files},mode=700"
    sc.mount("tmpfs", _NEW + SCRATCH, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC, options)
    os.chdir(_NEW)
    sc.pivot_root(".", ".")
    sc.unmount(".")
    os.chdir("/")


def map_user(inside: int, outside_user: int, outside_group: int) -> None:
    """Write the maps of the user namespace that this process is the first of."""
    with contextlib.suppress(FileNotFoundError):  # before Linux 3.19
        _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{inside} {outside_user} 1")
    _write("/proc/self/gid_map", f"{inside} {outside_group} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _bind_directory(path: str) -> None:
    os.makedirs(_NEW + path, exist_ok=True)
    # With what is mounted below it: a user namespace may not uncover that.
    sc.mount(_OLD + path, _NEW + path, None, sc.MS_BIND | sc.MS_REC)


def _bind_device(path: str) -> None:
    if not os.path.exists(_OLD + path):
        return
    os.close(os.open(_NEW + path, os.O_CREAT | os.O_WRONLY, 0o644))
    sc.mount(_OLD + path, _NEW + path, None, sc.MS_BIND)


def _make_read_only(path: str) -> None:
    try:
        sc.restrict_mounts(path, sc.MS_RDONLY | sc.MS_NOSUID)
        return
    except OSError as error:
        if error.errno != 38:  # ENOSYS: before Linux 5.12
            raise
    with open("/old/proc/self/mountinfo") as file:
        points = [line.split()[4] for line in file]
    for point in sorted(p for p in points if p == path or p.startswith(path + "/")):
        kept = os.statvfs(point).f_flag & (sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
        flags = sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | kept
        sc.mount(None, point, None, flags)
