"""The files that the code can reach: a separate file tree, and Landlock's rules about it. Only the standard library.

    /                      read-only
    /dev/{null,zero,full,random,urandom}
    /<the standard library, where it is on the host>     without site-packages
    /tmp                   a tmpfs for each run, also reachable as /dev/shm

The tree has no /proc, no /sys, no program and no other library. Landlock (Linux 5.13 and later) allows reading only
beneath the library and writing only beneath /tmp, even where more files are reachable, and forbids TCP, abstract
sockets and signals to other processes (https://docs.kernel.org/userspace-api/landlock.html). The zygote calls ``build``
and ``map_user``; each watcher calls ``map_user`` and ``enter``; the code's process calls ``restrict`` before the code
runs."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from streamrl.rewards.sandbox import syscalls as sc

DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
SCRATCH = "/tmp"
_BUILD_ROOT = "/tmp"  # the new tree is built here, over the host's /tmp, in this process's mount namespace only
_OLD = "/old"
_NEW = "/new"
_THIRD_PARTY = ("site-packages", "dist-packages")

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_CHAR, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = (1 << bit for bit in range(6, 13))
_REFER = 1 << 13
_TRUNCATE = 1 << 14
_IOCTL_DEV = 1 << 15
_NET_TCP = 3  # bind and connect
_SCOPES = 3  # abstract unix sockets, signals

_READ = _READ_FILE | _READ_DIR
_SCRATCH = (
    _READ
    | _WRITE_FILE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _MAKE_FIFO
    | _MAKE_SYM
    | _REFER
    | _TRUNCATE
)
_DEVICE = _READ_FILE | _WRITE_FILE


def build(library: str) -> None:
    """Reduce the files of this process to ``/new`` (the tree that the code will see) and ``/proc`` (the host's).
    ``library``: directory of the standard library. The process needs its own mount namespace, and the right to mount in
    it."""
    sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
    sc.mount("tmpfs", _BUILD_ROOT, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "size=1m,mode=755")
    for name in (_OLD, _NEW, "/proc"):
        os.mkdir(_BUILD_ROOT + name)
    sc.pivot_root(_BUILD_ROOT, _BUILD_ROOT + _OLD)
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
    # /proc is needed to write the user mapping of each run; the code does not see it.
    sc.mount(f"{_OLD}/proc", "/proc", None, sc.MS_BIND | sc.MS_REC)
    sc.unmount(_OLD)


def enter(scratch_bytes: int, scratch_files: int) -> None:
    """Make ``/new`` the root, with an empty /tmp. To be called in a new mount namespace below the one of ``build``."""
    # An inherited mount is locked and cannot become the root; a bind mount of it can.
    sc.mount(_NEW, _NEW, None, sc.MS_BIND | sc.MS_REC)
    options = f"size={scratch_bytes},nr_inodes={scratch_files},mode=700"
    sc.mount("tmpfs", _NEW + SCRATCH, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC, options)
    os.chdir(_NEW)
    sc.pivot_root(".", ".")
    sc.unmount(".")
    os.chdir("/")


def map_user(inside: int, outside_user: int, outside_group: int) -> None:
    """Write the maps of the user namespace whose first process this is."""
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{inside} {outside_user} 1")
    _write("/proc/self/gid_map", f"{inside} {outside_group} 1")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _bind_directory(path: str) -> None:
    os.makedirs(_NEW + path, exist_ok=True)
    # MS_REC also binds the mounts below ``path``: a user namespace may not uncover them.
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
    for point in sorted(point for point in points if point == path or point.startswith(path + "/")):
        current = os.statvfs(point).f_flag & (sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)
        flags = sc.MS_REMOUNT | sc.MS_BIND | sc.MS_RDONLY | sc.MS_NOSUID | current
        sc.mount(None, point, None, flags)


def restrict(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Restrict this process from now on to reading beneath ``readable`` and to changing files beneath ``writable``.
    Paths that do not exist are skipped. Raises ``OSError`` where the kernel has no Landlock."""
    version = sc.landlock_version()
    handled_rights = (1 << 13) - 1
    if version >= 2:
        handled_rights |= _REFER
    if version >= 3:
        handled_rights |= _TRUNCATE
    if version >= 5:
        handled_rights |= _IOCTL_DEV
    attributes = struct.pack("Q", handled_rights)
    if version >= 4:
        attributes += struct.pack("Q", _NET_TCP)
    if version >= 6:
        attributes += struct.pack("Q", _SCOPES)
    ruleset = sc.landlock_ruleset(attributes)
    try:
        for paths, rights in ((readable, _READ), (writable, _SCRATCH), (devices, _DEVICE)):
            for path in paths:
                if os.path.exists(path):
                    # Rights on directories are not valid for a file.
                    valid_rights = rights if os.path.isdir(path) else rights & (_DEVICE | _TRUNCATE)
                    sc.landlock_allow_beneath(ruleset, path, valid_rights & handled_rights)
        sc.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)
