"""The memory of this process: what ``/proc`` shows of it, by which a supervisor finds its own, and large pages, which
forks share at less cost. Linux only."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_NAME = 15
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_NO_FILE = 0xFFFFFFFF
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_shown_variables: list[ctypes.Array[ctypes.c_char]] = []  # the kernel reads this memory while the process lives


class _MemoryMap(ctypes.Structure):
    """``struct prctl_mm_map`` of Linux."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                "start_code",
                "end_code",
                "start_data",
                "end_data",
                "start_brk",
                "brk",
                "start_stack",
                "arg_start",
                "arg_end",
                "env_start",
                "env_end",
                "auxv",
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def show_process(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Have ``/proc/PID/cmdline`` and ``environ`` show these. Raises ``OSError`` where the kernel does not allow it, or
    ``arguments`` are longer than those that the interpreter was started with.

    The arguments are written where the kernel put the first ones: that is where ``setproctitle``, which vLLM uses, will
    write as well."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    # Numbers of fields as in proc(5), of which the third is the first behind the name.
    address = {name: int(fields[number - 3]) for name, number in _FIELDS.items()}
    line = b"".join(os.fsencode(argument) + b"\0" for argument in arguments)
    room = _room_for_arguments()
    if len(line) > room:
        raise OSError(f"{len(line)} bytes of arguments do not fit into the {room} of the fork server")
    ctypes.memset(address["arg_start"], 0, room)
    ctypes.memmove(address["arg_start"], line, len(line))
    environment = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
    memory = ctypes.create_string_buffer(environment)
    env_start = ctypes.addressof(memory)
    memory_map = _MemoryMap(
        **address,
        brk=_libc.sbrk(0),
        arg_end=address["arg_start"] + len(line),
        env_start=env_start,
        env_end=env_start + len(environment),
        auxv=0,
        auxv_size=0,
        exe_fd=_NO_FILE,
    )
    size = ctypes.c_ulong(ctypes.sizeof(memory_map))
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(memory_map), size, 0) != 0:
        raise OSError(ctypes.get_errno(), "the arguments of a process cannot be set")
    _shown_variables[:] = [memory]
    _libc.prctl(_PR_SET_NAME, os.path.basename(arguments[0]).encode()[:15], 0, 0, 0)


_FIELDS = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "arg_start": 48,
}
_first_room: list[int] = []


def _room_for_arguments() -> int:
    """Bytes of the arguments that the interpreter was started with."""
    if not _first_room:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        _first_room.append(int(fields[49 - 3]) - int(fields[48 - 3]))
    return _first_room[0]


_MADV_COLLAPSE = 25
_LARGE_PAGE = 2 << 20


def use_large_pages() -> None:
    """Have the kernel put the memory of this process into pages of 2 MiB, where it can (Linux 6.1). A fork copies an
    entry for each page: of a process with vLLM it takes 15 ms then, and 45 without."""
    _libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, name = [*line.split(maxsplit=5), ""][:6]
        if "w" not in access or name.strip() not in ("", "[heap]"):
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        for page in range(-(-start // _LARGE_PAGE) * _LARGE_PAGE, end - _LARGE_PAGE + 1, _LARGE_PAGE):
            _libc.madvise(page, _LARGE_PAGE, _MADV_COLLAPSE)
