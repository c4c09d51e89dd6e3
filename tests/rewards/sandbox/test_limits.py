"""Code that takes too much, or does not want to end: it ends, and the sandbox goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any, NamedTuple

import psutil
import pytest
from forks.starts import own_children

from streamrl.rewards.sandbox.sandbox import ProgramEnd, Sandbox, SandboxError

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1 << 20


async def run(sandbox: Sandbox, source: str, limits: Any, stdin: bytes = b"") -> tuple[ProgramEnd, str]:
    report, output = await sandbox.run_program(source.encode(), stdin, limits)
    return report, output.decode(errors="replace")


def running() -> list[psutil.Process]:
    """What the zygotes of this process started and has not ended."""
    found = []
    for process in own_children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since the list was made
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture
def only_the_zygote(sandbox: Sandbox) -> Any:
    """Before and after the test the sandbox is as many processes as it is when it is idle."""
    idle = {process.pid for process in running()}
    yield
    assert {process.pid for process in running()} == idle


class Taker(NamedTuple):
    """``source`` prints ``TOOK`` when it got what ``more`` (limits) would allow and the defaults do not."""

    name: str
    source: str
    more: dict[str, Any]
    less: dict[str, Any] = {}


TAKERS = [
    Taker("memory", "x = bytearray(80 << 20); print('TOOK')", {"memory_bytes": 128 * MIB}, {"memory_bytes": 64 * MIB}),
    Taker("memory, mapped", "import mmap; m = mmap.mmap(-1, 400 << 20); print('TOOK')", {"memory_bytes": 1024 * MIB}),
    Taker("a huge file", "open('f', 'wb').write(bytes(3 << 20)); print('TOOK')", {"file_bytes": 4 * MIB}),
    Taker("a hole", "import os; os.truncate(open('f', 'w').name, 1 << 30); print('TOOK')", {"file_bytes": 1 << 30}),
    Taker(
        "a full disk",
        "[open(f'f{i}', 'wb').write(bytes(1 << 20)) for i in range(6)]; print('TOOK')",
        {"scratch_bytes": 16 * MIB},
    ),
    Taker("many files", "[open(f'f{i}', 'w').close() for i in range(100)]; print('TOOK')", {"scratch_files": 200}),
    Taker("many open files", "f = [open('/dev/null') for _ in range(100)]; print('TOOK')", {"open_files": 200}),
    Taker(
        "many threads",
        "import threading as t; e = t.Event()\n"
        "try: [t.Thread(target=e.wait, daemon=True).start() for _ in range(30)]; print('TOOK')\nfinally: e.set()",
        {"threads": 64, "memory_bytes": 1024 * MIB},
        {"memory_bytes": 1024 * MIB},
    ),
    Taker(
        "many processes",
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(60); os._exit(0)\nprint('TOOK')",
        {"processes": 40, "threads": 1},
        {"processes": 4, "threads": 1},
    ),
    Taker(
        "many zombies",
        "import os\nfor _ in range(60):\n    if os.fork() == 0: os._exit(0)\nprint('TOOK')",
        {"processes": 80, "threads": 1},
        {"processes": 4, "threads": 1},
    ),
    Taker(
        "deep stack",
        "import ctypes, sys; sys.setrecursionlimit(10**6); kind = ctypes.CFUNCTYPE(ctypes.c_int)\n"
        "def f(n): return kind(lambda: f(n - 1) if n else 0)()\nf(9000); print('TOOK')",
        {"stack_bytes": 200 * MIB},
    ),
]  # fmt: skip


@pytest.mark.parametrize("taker", TAKERS, ids=lambda taker: taker.name)
@pytest.mark.usefixtures("only_the_zygote")
async def test_it_gets_no_more_than_its_limit(taker: Taker, sandbox: Sandbox, limits: Any) -> None:
    _, output = await run(sandbox, taker.source, limits(**taker.less))
    assert "TOOK" not in output
    report, output = await run(sandbox, taker.source, limits(**taker.more))
    assert "TOOK" in output, report  # so that it was this limit


ENDLESS = {
    "sleeping": "import time; time.sleep(60)",
    "computing": "while True: pass",
    "catching every signal": """
import signal
for number in range(1, 65):
    try: signal.signal(number, lambda *_: None)
    except (OSError, ValueError): pass
while True: pass
""",
    "blocking every signal": "import signal\nsignal.pthread_sigmask(0, range(1, 65))\nwhile True: signal.sigwait({1})",
    "in a thread at its end": "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
    "at exit": "import atexit, time; atexit.register(time.sleep, 60)",
    "in a big number": "x = 7 ** (10 ** 9)",
    "compiling": "exec('x = ' + '+'.join(['(' * 50 + '1' + ')' * 50] * 200000))",
    "catching the end": "import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: pass",
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "killing its watcher": "import os, time\nfor n in (1, 2, 9, 17, 19):\n"
    "    try: os.kill(1, n)\n    except OSError: pass\ntime.sleep(60)",
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.usefixtures("only_the_zygote")
async def test_it_ends_with_its_time(name: str, sandbox: Sandbox, limits: Any) -> None:
    report, _ = await run(sandbox, ENDLESS[name], limits(seconds=0.15, processes=8))
    assert report.status == -signal.SIGKILL
    assert report.timed_out


@pytest.mark.usefixtures("only_the_zygote")
async def test_a_daemon_does_not_outlive_its_run(sandbox: Sandbox, limits: Any) -> None:
    source = """
import os, time
started, daemon = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(daemon, b"daemon")
        os.closerange(0, 64)
        time.sleep(7200)
    os._exit(0)
os.wait()
print(os.read(started, 10))
"""
    report, output = await run(sandbox, source, limits(processes=4))
    assert (report.status, output) == (0, "b'daemon'\n")


async def test_endless_output_is_cut(sandbox: Sandbox, limits: Any) -> None:
    report, output = await run(sandbox, "while True: print('x' * 100000)", limits())
    assert report.status != 0
    assert len(output) == limits().file_bytes


async def test_a_run_sees_nothing_of_another(sandbox: Sandbox, limits: Any) -> None:
    first = run(sandbox, "open('left', 'w').write('x'); import time; time.sleep(0.3)", limits())
    look = "import os, time; time.sleep(0.1); print(os.listdir('/tmp'), os.listdir('/dev/shm'), os.getpid())"
    (_, _), (_, beside), (_, after) = [
        *await asyncio.gather(first, run(sandbox, look, limits())),
        await run(sandbox, look, limits()),
    ]
    assert beside == after == "[] [] 2\n"


async def test_a_cancelled_run_ends_however_young_it_is(sandbox: Sandbox, limits: Any) -> None:
    idle = {process.pid for process in running()}
    for milliseconds in (*range(10), 20, 50):
        program = run(sandbox, "import time; time.sleep(7200)", limits(seconds=7200))
        task = asyncio.get_running_loop().create_task(program)
        await asyncio.sleep(milliseconds / 1000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    while {process.pid for process in running()} != idle:
        await asyncio.sleep(0.01)


async def test_the_sandbox_starts_again_after_it_was_killed(limits: Any) -> None:
    async with Sandbox() as sandbox:
        assert (await run(sandbox, "print(1)", limits()))[1] == "1\n"
        for process in running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            while True:  # until its end has been seen
                await run(sandbox, "print(2)", limits())
        assert (await run(sandbox, "print(3)", limits()))[1] == "3\n"
