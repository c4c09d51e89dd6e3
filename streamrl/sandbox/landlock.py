"""Landlock: which files may be opened, whatever else is reachable; no TCP, no abstract sockets, no foreign signals.

Linux 5.13 and later; what later versions of the interface add is used where it is there
(https://docs.kernel.org/userspace-api/landlock.html).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from streamrl.sandbox import syscalls

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_CHAR, _MAKE_DIR, _MAKE_REG, _MAKE_SOCK, _MAKE_FIFO, _MAKE_BLOCK, _MAKE_SYM = (1 << bit for bit in range(6, 13))
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
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


def restrict(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Only what lies beneath ``readable`` can be read, and only what lies beneath ``writable`` be changed, from now on.

    Paths that do not exist are left out. Raises ``OSError`` where the kernel has no Landlock.
    """
    version = syscalls.landlock_version()
    files = (1 << 13) - 1
    files |= _REFER if version >= 2 else 0
    files |= _TRUNCATE if version >= 3 else 0
    files |= _IOCTL_DEV if version >= 5 else 0
    attributes = struct.pack("Q", files)
    attributes += struct.pack("Q", _NET_TCP) if version >= 4 else b""
    attributes += struct.pack("Q", _SCOPES) if version >= 6 else b""
    ruleset = syscalls.landlock_ruleset(attributes)
    try:
        for paths, rights in ((readable, _READ), (writable, _SCRATCH), (devices, _DEVICE)):
            for path in paths:
                if os.path.exists(path):
                    on_files = rights if os.path.isdir(path) else rights & (_DEVICE | _TRUNCATE)
                    syscalls.landlock_allow_beneath(ruleset, path, on_files & files)
        syscalls.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)
