"""System calls for which Python 3.11 has no function, by ctypes. Flags and structures are as in the man page of each
call. Every call raises ``OSError`` with the name of the call.

``zygote``, ``jail`` and ``files`` call them in the zygote and in the processes that it forks. Imports only the standard
library: the zygote loads this file."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

# Name of a call -> its numbers on x86-64 and aarch64 (asm-generic).
_NUMBERS = {
    "clone": (56, 220),
    "pivot_root": (155, 41),
    "capset": (126, 91),
    "seccomp": (317, 277),
    "close_range": (436, 436),
    "mount_setattr": (442, 442),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
MACHINES = ("x86_64", "aarch64")

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_FD = 0x7FFFFFFF

# PyDLL keeps the interpreter lock: after a raw clone no other thread could hand the lock over.
_libc = ctypes.PyDLL(None, use_errno=True)


def machine_index() -> int | None:
    """Index of this machine in pairs (x86-64, aarch64); None: another machine, or a 32-bit interpreter."""
    machine = os.uname().machine
    return MACHINES.index(machine) if machine in MACHINES and struct.calcsize("P") == 8 else None


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    index = machine_index()
    if index is None:
        raise OSError(38, f"{name}: not known for {os.uname().machine}")
    c_arguments = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(name, int(_libc.syscall(ctypes.c_long(_NUMBERS[name][index]), *c_arguments)))


def fork_into(flags: int) -> int:
    """Fork a child into new namespaces (``CLONE_NEW*``), from a process with one thread. The interpreter does not run
    its hooks after this fork (random seeds, locks: half a millisecond); the ``os.fork`` of the code's process does."""
    return _syscall("clone", flags | 17, 0, 0, 0, 0)  # 17: SIGCHLD


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """``mount(2)``."""
    names = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    data = None if options is None else options.encode()
    _checked(f"mount {target}", _libc.mount(*names, ctypes.c_ulong(flags), data))


def unmount(target: str) -> None:
    """Detach ``target`` and everything below it."""
    _checked(f"umount {target}", _libc.umount2(os.fsencode(target), MNT_DETACH))


def pivot_root(new: str, old: str) -> None:
    """``pivot_root(2)``."""
    _syscall("pivot_root", os.fsencode(new), os.fsencode(old))


def restrict_mounts(target: str, flags: int) -> None:
    """Add ``MS_RDONLY``, ``MS_NOSUID``, ... to the mount at ``target`` and to all below it (Linux 5.12)."""
    # For these flags MOUNT_ATTR_* and MS_* have the same values.
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    _syscall("mount_setattr", _AT_FDCWD, os.fsencode(target), _AT_RECURSIVE, attributes, len(attributes))


def prctl(option: int, *values: int) -> int:
    """``prctl(2)``."""
    four = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return _checked(f"prctl {option}", int(_libc.prctl(ctypes.c_int(option), *four)))


def die_with_parent() -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends."""
    prctl(_PR_SET_PDEATHSIG, 9)


def set_dumpable(dumpable: bool) -> None:
    """Set whether processes of the same user may trace this process and open its files in /proc."""
    prctl(_PR_SET_DUMPABLE, int(dumpable))


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_no_new_privileges() -> None:
    """Forbid new privileges through executed programs, as seccomp and Landlock require."""
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give up every capability. With ``set_no_new_privileges`` the process cannot regain one, whatever its bounding
    set."""
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    _syscall("capset", header, bytes(24))


def close_all_but(open_fds: Iterable[int]) -> None:
    """Close every file descriptor but ``open_fds``."""
    first = 0
    for fd in (*sorted(set(open_fds)), _LAST_FD + 1):
        if first < fd:
            _close_range(first, fd - 1)
        first = fd + 1


def _close_range(first: int, last: int) -> None:
    try:
        _syscall("close_range", first, last, 0)
    except OSError:  # before Linux 5.9
        os.closerange(first, min(last + 1, os.sysconf("SC_OPEN_MAX")))


def set_seccomp_filter(program: bytes) -> None:
    """Install a BPF ``program`` (8 bytes an instruction) for this process and all processes that it starts."""
    instructions = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(instructions))
    _syscall("seccomp", 1, 0, header)  # SECCOMP_SET_MODE_FILTER


def landlock_version() -> int:
    """Version of Landlock's interface. Raises ``OSError`` where the kernel has none."""
    return _syscall("landlock_create_ruleset", None, 0, 1)


def landlock_ruleset(attributes: bytes) -> int:
    """File descriptor of a new rule set."""
    return _syscall("landlock_create_ruleset", attributes, len(attributes), 0)


def landlock_allow_beneath(ruleset: int, path: str, rights: int) -> None:
    """Allow ``rights`` on ``path`` and on everything below it."""
    fd = os.open(path, os.O_PATH)
    try:
        _syscall("landlock_add_rule", ruleset, 1, struct.pack("=Qi", rights, fd), 0)
    finally:
        os.close(fd)


def landlock_restrict(ruleset: int) -> None:
    """Apply the rule set to this process and all processes that it starts."""
    _syscall("landlock_restrict_self", ruleset, 0)
