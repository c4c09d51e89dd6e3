"""Nothing gets out: each attempt is made in the sandbox, and without it, where it does get out.

An attempt is what the code does, and how one sees from outside that it got through. ``@NAME@`` is filled in from the
``Host``. An attempt that reads prints what it read, and has escaped when that contains what it must not see;
``ESCAPED`` printed is the code's own word that a call succeeded which must not."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from streamrl.rewards.sandbox.jail import Limits
from streamrl.rewards.sandbox.sandbox import Sandbox

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the attempts know x86-64's numbers of system calls"),
]


def _says_so(_host: Any, output: str) -> bool:
    return "ESCAPED" in output


class Attempt(NamedTuple):
    """``escaped(host, output)`` decides, from outside (left out: the code says it itself). ``control``: it does escape
    without the sandbox."""

    name: str
    source: str
    escaped: Callable[[Any, str], bool] = _says_so
    control: bool = True
    limits: dict[str, Any] = {}


def _reads_secret(host: Any, output: str) -> bool:
    return host.secret in output


def _reached(name: str) -> Callable[[Any, str], bool]:
    return lambda host, output: bool(host.contacted(name))


_SYSCALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def syscall(*arguments):
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return result, ctypes.get_errno()
def judge(result):
    # ENOSYS and EPERM are refusals; whatever else means that the kernel looked at the arguments.
    print("held" if result[0] < 0 and result[1] in (1, 38) else "ESCAPED", result)
"""


def _syscall(name: str, arguments: str, *, control: bool = True) -> Attempt:
    return Attempt(name, f"{_SYSCALL}\njudge(syscall({arguments}))", control=control)


NETWORK = [
    Attempt("tcp", "import socket; socket.create_connection(('127.0.0.1', @TCP@), 1)", _reached("tcp")),
    Attempt(
        "udp",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'out', ('127.0.0.1', @UDP@))",
        _reached("udp"),
    ),
    Attempt("unix socket", "import socket; socket.socket(socket.AF_UNIX).connect('@UNIX@')", _reached("unix")),
    Attempt(
        "abstract unix socket",
        "import socket; socket.socket(socket.AF_UNIX).connect('\\x00@ABSTRACT@')",
        _reached("abstract"),
    ),
    Attempt(
        "datagram from a socket pair",
        "import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.sendto(b'out', '\\x00d@ABSTRACT@')",
        _reached("datagram"),
    ),
    Attempt("name lookup", "import socket; print('ESCAPED', socket.getaddrinfo('localhost', 80))"),
    Attempt("listen", "import socket; s = socket.create_server(('0.0.0.0', 0)); print('ESCAPED', s)"),
    Attempt("netlink", "import socket; print('ESCAPED', socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))"),
    Attempt("vsock", "import socket; print('ESCAPED', socket.socket(40, socket.SOCK_STREAM))"),
    _syscall("socket by number", "41, 2, 1, 0"),
    Attempt(
        "32-bit system call",
        """
import ctypes, mmap
code = bytes.fromhex("53 b8 67010000 bb 02000000 b9 01000000 31 d2 cd 80 5b c3")  # socket(AF_INET, SOCK_STREAM, 0)
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
result = call()
print("ESCAPED" if result >= 0 else "held", result)
""",
        control=False,  # kernels without 32-bit programs
    ),
    _syscall("x32 system call", "0x40000000 + 39", control=False),
]

FILES = [
    Attempt("read a file", "print(open('@FILE@').read())", _reads_secret),
    Attempt("read upwards", "print(open('../../../../../../../..@FILE@').read())", _reads_secret),
    Attempt(
        "symbolic link",
        "import os; os.chdir('/tmp'); os.symlink('@FILE@', 'out-@ABSTRACT@')\n"
        "try: print(open('out-@ABSTRACT@').read())\nfinally: os.unlink('out-@ABSTRACT@')",
        _reads_secret,
    ),
    Attempt(
        "hard link",
        "import os; os.link('@FILE@', '/tmp/hard-@ABSTRACT@')\n"
        "print(open('/tmp/hard-@ABSTRACT@').read()); os.unlink('/tmp/hard-@ABSTRACT@')",
        _reads_secret,
    ),
    Attempt("write a file", "open('@FILE@', 'w').write('changed')", lambda host, _: host.file.read_text() == "changed"),
    Attempt("make a file", "open('@DIRECTORY@/new', 'w').close()", lambda host, _: (host.directory / "new").exists()),
    Attempt("delete a file", "import os; os.unlink('@FILE@')", lambda host, _: not host.file.exists()),
    Attempt("change a mode", "import os; os.chmod('@FILE@', 0)", lambda host, _: host.file.stat().st_mode & 0o777 == 0),
    Attempt("shared memory, read", "print(open('@SHARED@').read())", _reads_secret),
    Attempt("shared memory, write", "open('@SHARED@', 'w').write('x')", lambda host, _: host.shared.read_text() == "x"),
    Attempt("device of memory", "open('/dev/mem', 'rb'); print('ESCAPED')", control=False),
    Attempt("log of the kernel", "open('/dev/kmsg', 'rb'); print('ESCAPED')", control=False),
    Attempt("any disk", "import os\nfor name in os.listdir('/sys/class/block'): print('ESCAPED', name)"),
    Attempt("sysfs", "import os; print('ESCAPED', os.listdir('/sys/kernel'))"),
    Attempt("write to the standard library", "import os; open(os.__file__, 'a'); print('ESCAPED')"),
    Attempt(
        "add to the standard library",
        "import os; p = os.__file__ + '@ABSTRACT@'; open(p, 'w').close(); os.unlink(p); print('ESCAPED')",
    ),
    Attempt(
        "chroot and climb",
        "import os; os.mkdir('/tmp/c-@ABSTRACT@'); fd = os.open('/', 0)\n"
        "try: os.chroot('/tmp/c-@ABSTRACT@')\nfinally: os.rmdir('/tmp/c-@ABSTRACT@')\n"
        "os.fchdir(fd); [os.chdir('..') for _ in range(20)]; print('ESCAPED', open('.@FILE@').read())",
        control=False,  # without the sandbox it has no capability either
    ),
    Attempt(
        "inherited files",
        "import os\nfor fd in range(3, 300):\n    try: print('ESCAPED', fd, os.fstat(fd))\n    except OSError: pass",
        control=False,
    ),
    Attempt(
        "environment and arguments",
        "import os, sys; print(os.environ, sys.argv); print('ESCAPED' if os.environ else 'held')",
        control=False,
    ),
    _syscall("mount", "165, b'tmpfs', b'/tmp', b'tmpfs', 0, None", control=False),
    _syscall("open by handle", "304, -100, None, 0", control=False),
    _syscall("new root", "155, b'/tmp', b'/tmp'", control=False),
]

PROCESSES = [
    Attempt("environment of a process", "print(open('/proc/@PID@/environ').read())", _reads_secret),
    Attempt(
        "memory of a process",
        "start = int(open('/proc/@PID@/stat').read().rpartition(')')[2].split()[47])\n"
        "file = open('/proc/@PID@/mem', 'rb', 0); file.seek(start); print(file.read(100))",
        _reads_secret,
    ),
    Attempt("first process", "print('ESCAPED', open('/proc/1/status').read())"),
    Attempt(
        "list of processes",
        "import os; print('ESCAPED' if len([p for p in os.listdir('/proc') if p.isdigit()]) > 3 else 'held')",
    ),
    Attempt("ptrace", f"{_SYSCALL}\nprint('ESCAPED' if syscall(101, 16, @PID@, 0, 0)[0] == 0 else 'held')"),
    Attempt(
        "memory by process_vm_readv",
        f"{_SYSCALL}\nprint('ESCAPED' if syscall(310, @PID@, 0, 0, 0, 0, 0)[0] == 0 else 0)",
    ),
    _syscall("pidfd", "434, @PID@, 0"),
    Attempt("kill a process", "import os; os.kill(@PID@, 9)", lambda host, _: not host.victim_lives),
    Attempt(
        "stop a process by its thread", f"{_SYSCALL}\nsyscall(200, @PID@, 19)", lambda host, _: not host.victim_lives
    ),
    Attempt("kill everything", "import os; os.kill(-1, 9)", lambda host, _: not host.victim_lives, control=False),
    Attempt(
        "setuid",
        "import os\nfor call in (os.setuid, os.setgid, os.seteuid):\n"
        "    try: call(0); print('ESCAPED', call)\n    except OSError: pass",
    ),
    Attempt("another program", "import os; os.execv('/bin/echo', ['echo', 'ESCAPED'])"),
    Attempt("the interpreter", "import os, sys; os.execv(sys.executable, ['x', '-c', 'print(\"ESCAPED\")'])"),
    Attempt("fork where none is allowed", "import os\nif os.fork() == 0: print('ESCAPED')\nelse: os.wait()"),
    Attempt(
        "a clock", "import time; time.clock_settime(time.CLOCK_REALTIME, time.time()); print('ESCAPED')", control=False
    ),
    Attempt(
        "raise the own limits",
        "import resource as r\nfor n in (r.RLIMIT_NPROC, r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_FSIZE):\n"
        "    try: r.setrlimit(n, (r.RLIM_INFINITY, r.RLIM_INFINITY)); print('ESCAPED', n)\n"
        "    except (OSError, ValueError): pass",
        lambda _, output: output.count("ESCAPED") == 4,
        control=False,
    ),
    Attempt(
        "sibling in the zygote's namespace",
        f"{_SYSCALL}\nprint('ESCAPED' if syscall(56, 0x8000 | 17, 0, 0, 0, 0)[0] >= 0 else 'held')",
        limits={"processes": 4},
    ),
]

KERNEL = [
    _syscall("user namespace", "272, 0x10000000"),
    _syscall("user namespace by clone", "56, 0x10000000 | 17, 0, 0, 0, 0"),
    _syscall("clone3", "435, None, 0"),
    _syscall("setns", "308, 0, 0"),
    _syscall("io_uring", "425, 1, None"),
    _syscall("bpf", "321, 0, None, 0"),
    _syscall("perf_event_open", "298, None, 0, -1, -1, 0"),
    _syscall("keyctl", "250, 0, -3, 1"),
    _syscall("add_key", "248, b'user', b'x', b'y', 1, -3"),
    _syscall("userfaultfd", "323, 0x801"),
    _syscall("kexec_load", "246, 0, 0, None, 0", control=False),
    _syscall("load a module", "313, -1, b'', 0", control=False),
    _syscall("memfd", "319, b'x', 0"),
    _syscall("System V shared memory", "29, 0, 0, 0o1600"),
    _syscall("message queue", "240, b'x', 0o101, 0o600, None"),
    _syscall("personality", "135, 0x0040000"),
    _syscall("undo no_new_privs", "157, 38, 0, 0, 0, 0"),
    _syscall("read the filter's state", "157, 22, 2, None"),
    _syscall("quota", "179, 0, None, 0, None"),
    _syscall("swap", "167, b'/tmp/x', 0", control=False),
    _syscall("reboot", "169, 0, 0, 0, 0", control=False),
]

ATTEMPTS = [*NETWORK, *FILES, *PROCESSES, *KERNEL]

_MISTAKES = ("SyntaxError", "NameError", "AttributeError", "ImportError", "ModuleNotFoundError", "IndentationError")


async def attempt_in(sandbox: Sandbox, attempt: Attempt, host: Any, limits: Limits) -> bool:
    """Whether the attempt got through."""
    report, output = await sandbox.run_program(host.fill(attempt.source), b"", limits)
    assert not any(name in report.last_error for name in _MISTAKES), report.last_error
    return attempt.escaped(host, output.decode(errors="replace"))


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.name)
async def test_it_does_not_get_out(attempt: Attempt, sandbox: Sandbox, host: Any, limits: Any) -> None:
    assert not await attempt_in(sandbox, attempt, host, limits(**attempt.limits))
    assert host.victim_lives


@pytest.mark.long
@pytest.mark.parametrize("attempt", [a for a in ATTEMPTS if a.control], ids=lambda attempt: attempt.name)
async def test_without_the_sandbox_it_does(attempt: Attempt, no_sandbox: Sandbox, host: Any, limits: Any) -> None:
    """Else the test above could not fail."""
    assert await attempt_in(no_sandbox, attempt, host, limits(**attempt.limits))
