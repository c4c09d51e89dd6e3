"""A seccomp filter that allows only the system calls that a Python program needs, as assembled BPF.

``jail`` assembles the filters and installs one in each jailed process; ``zygote`` installs one as a test. The filter is
an allow list: every other call (ptrace, mount, bpf, keyctl, io_uring, userfaultfd, perf_event_open, execve, unshare,
socket, memfd_create, shmget, ...) fails with ENOSYS, which the C library takes as "this kernel is older". Calls of
another architecture (x32, i386) end the process."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence


def _table(text: str) -> dict[str, list[int | None]]:
    """Read a table of calls: name, number on x86-64, number on aarch64 (asm-generic); -: aarch64 has no such call."""
    calls = [call.split() for call in text.split(",")]
    return {name: [None if number == "-" else int(number) for number in numbers] for name, *numbers in calls}


_ALWAYS = _table("""
read 0 63, write 1 64, close 3 57, fstat 5 80, poll 7 -, ppoll 271 73, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, pipe 22 -, pipe2 293 59, select 23 -, pselect6 270 72,
sched_yield 24 124, mremap 25 216, madvise 28 233, dup 32 23, dup2 33 -, dup3 292 24, pause 34 -,
nanosleep 35 101, clock_nanosleep 230 115, getitimer 36 102, setitimer 38 103, alarm 37 -, getpid 39 172,
exit 60 93, exit_group 231 94, wait4 61 260, waitid 247 95, uname 63 160, fcntl 72 25, flock 73 32, fsync 74 82,
fdatasync 75 83, ftruncate 77 46, getcwd 79 17, fchdir 81 50, getdents64 217 61, umask 95 166,
gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174,
getgid 104 176, geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getpgid 121 155,
getsid 124 156, setsid 112 157, getgroups 115 158, getresuid 118 148, getresgid 120 150, sigaltstack 131 132,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, gettid 186 178, time 201 -, futex 202 98,
sched_getaffinity 204 123, sched_getparam 143 121, sched_getscheduler 145 120, sched_get_priority_max 146 125,
sched_get_priority_min 147 126, set_tid_address 218 96, clock_gettime 228 113, clock_getres 229 114,
set_robust_list 273 99, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, timerfd_gettime 287 87, fallocate 285 47,
fadvise64 221 223, getrandom 318 278, rseq 334 293, membarrier 324 283, close_range 436 436, sendfile 40 71,
fstatfs 138 44, getcpu 309 168, sendto 44 206, recvfrom 45 207, sendmsg 46 211, recvmsg 47 212, shutdown 48 210,
getsockname 51 204, getpeername 52 205, getsockopt 55 209
""")

# Calls with a path: allowed only where a mount namespace or Landlock limits the paths.
_PATHS = _table("""
open 2 -, openat 257 56, creat 85 -, stat 4 -, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43,
access 21 -, faccessat 269 48, faccessat2 439 439, truncate 76 45, getdents 78 -, chdir 80 49, rename 82 -,
renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, unlink 87 -, unlinkat 263 35,
symlink 88 -, symlinkat 266 36, link 86 -, linkat 265 37, readlink 89 -, readlinkat 267 78
""")

# Calls with a path that Landlock does not check: allowed only where a mount namespace hides all files of the host that
# they could change.
_MODES = _table("chmod 90 -, fchmod 91 52, fchmodat 268 53, utimensat 280 88, utimes 235 -")

_PROCESSES = _table("fork 57 -, vfork 58 -")

# Numbers on x86-64 and aarch64 of the calls whose arguments the filter checks.
_CLONE = (56, 220)
_KILL = (62, 129)
_TGKILL = (234, 131)
_SOCKETPAIR = (53, 199)
_IOCTL = (16, 29)
_PRCTL = (157, 167)
_PRLIMIT = (302, 261)
_FSTATAT = (262, 79)
_AT_EMPTY_PATH = 0x1000
_CLONE_THREAD = 0x00010000
_CLONE_REFUSED = 0x7E020000 | 0x8000  # every CLONE_NEW*, and CLONE_PARENT
_AF_UNIX = 1
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_PRCTLS = (1, 2, 15, 16, 0x53564D41)  # PDEATHSIG set and get, NAME set and get, VMA names

_AUDIT_ARCH = (0xC000003E, 0xC00000B7)
_X32_BIT = 0x40000000
_LOAD = 0x20
_JEQ = 0x15
_JGE = 0x35
_JSET = 0x45
_RETURN = 0x06
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = 16
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_EPERM = 1
_ENOENT = 2
_ENOSYS = 38

_Instruction = tuple[int, int, int, int]


def assemble(machine: int, *, paths: bool, modes: bool, processes: bool, only_pid: int | None) -> bytes:
    """The filter, 8 bytes an instruction.

    ``machine``: 0 for x86-64, 1 for aarch64. ``paths``: files may be opened by path; ``modes``: modes of files may be
    changed; ``processes``: processes may be started (threads always). ``only_pid``: the one process that may be
    signalled, None: a process namespace limits the processes."""
    tables = [_ALWAYS]
    if paths:
        tables.append(_PATHS)
    if modes:
        tables.append(_MODES)
    if processes:
        tables.append(_PROCESSES)
    code: list[_Instruction] = [
        _load(_ARCHITECTURE),
        (_JEQ, 1, 0, _AUDIT_ARCH[machine]),
        _return(_KILL_PROCESS),
        _load(_NUMBER),
    ]
    if machine == 0:
        code += [(_JGE, 0, 1, _X32_BIT), _return(_KILL_PROCESS)]
    if not paths:
        # Newer C libraries call fstatat with a file descriptor and an empty path for fstat().
        by_fd = [_load(_ARGUMENTS + 8 * 3), (_JSET, 1, 0, _AT_EMPTY_PATH), _return(_ERRNO | _ENOENT), _return(_ALLOW)]
        code += _when(_FSTATAT[machine], by_fd)
    code += _when(_CLONE[machine], _clone_rule(processes))
    for numbers in (_KILL, _TGKILL):
        rule = [_return(_ALLOW)] if only_pid is None else _one_of(0, (only_pid,))
        code += _when(numbers[machine], rule)
    code += _when(_SOCKETPAIR[machine], _one_of(0, (_AF_UNIX,)))
    code += _when(_IOCTL[machine], _one_of(1, _IOCTLS))
    code += _when(_PRCTL[machine], _one_of(0, _PRCTLS))
    code += _when(_PRLIMIT[machine], _one_of(0, (0,) if only_pid is None else (0, only_pid)))
    numbers_allowed = {numbers[machine] for table in tables for numbers in table.values()}
    code += _search(_intervals(sorted(number for number in numbers_allowed if number is not None)))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _intervals(allowed: Sequence[int]) -> list[tuple[int, int]]:
    """Intervals of call numbers as (first number, action). Each ends before the next, and the last has no end."""
    intervals = [(0, _ERRNO | _ENOSYS)]
    for number in allowed:
        if intervals[-1][0] == number:  # the forbidden interval that the number before has begun is empty
            intervals.pop()
        if not intervals or intervals[-1][1] != _ALLOW:
            intervals.append((number, _ALLOW))
        intervals.append((number + 1, _ERRNO | _ENOSYS))
    return intervals


def _search(intervals: Sequence[tuple[int, int]]) -> list[_Instruction]:
    """Find the interval of a number by binary search: the kernel runs the filter for every number when it is
    installed."""
    if len(intervals) == 1:
        return [_return(intervals[0][1])]
    middle = len(intervals) // 2
    below = _search(intervals[:middle])
    above = _search(intervals[middle:])
    return [(_JGE, len(below), 0, intervals[middle][0]), *below, *above]


def _clone_rule(processes: bool) -> list[_Instruction]:
    """Forbid new namespaces; without ``processes`` forbid everything except threads."""
    rule = [_load(_ARGUMENTS), (_JSET, 0, 1, _CLONE_REFUSED), _return(_ERRNO | _EPERM)]
    if not processes:
        rule += [(_JSET, 1, 0, _CLONE_THREAD), _return(_ERRNO | _EPERM)]
    return [*rule, _return(_ALLOW)]


def _one_of(argument: int, values: Iterable[int]) -> list[_Instruction]:
    """Allow the call when the low 32 bits of the argument (the only bits that these calls read) are one of
    ``values``."""
    rule = [_load(_ARGUMENTS + 8 * argument)]
    for value in values:
        rule += [(_JEQ, 0, 1, value), _return(_ALLOW)]
    return [*rule, _return(_ERRNO | _EPERM)]


def _when(number: int, rule: Sequence[_Instruction]) -> list[_Instruction]:
    """Apply ``rule`` (which ends with a return) to the call ``number``; other calls continue after the rule."""
    return [(_JEQ, 0, len(rule), number), *rule]


def _load(offset: int) -> _Instruction:
    return (_LOAD, 0, 0, offset)


def _return(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)
